"""Replaces the weights of a running model in place, and moves them out of the way while another
process needs the memory."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from typing import Protocol

import torch

from sglang.srt.mem_cache.memory_pool import hand_back_unused
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_loader.held_formats import remark_on_weights
from sglang.srt.model_loader.loader import WeightPlaces
from sglang.srt.models.model import Model
from sglang.srt.weight_sync.weight_reader import (
    TARGET,
    StagedWeights,
    WeightReader,
    WeightUpdateError,
    check_shared,
    first_line,
)

COPY_BYTES = 1 << 24


class WeightStore:
    """Replaces a model's weights in place, and releases and restores their memory.

    Call `apply`, `release` and `restore` only while no step is in flight. If one of them raises,
    the model is unchanged.

    Attributes:
        places: where each weight belongs.
        remark: says in the start-up summary how weights are held, if some have 8 bits.
        reader: reads new weights of this model.
        is_released: the weights have no memory; no step may run.
        num_updates: how often weights have been replaced.
        after_update: called whenever they have been, by whoever computes something of them.

    Raises:
        WeightUpdateError: by every method, for calls that do not fit the state.
    """

    def __init__(self, model: Model, config: ModelConfig) -> None:
        self.places = WeightPlaces(model, config)
        self.reader = WeightReader({TARGET: self.places})
        self.remark = remark_on_weights(model, config)
        # Tied parameters share one. Buffers, such as the rotary table, stay.
        storages = {
            parameter.untyped_storage().data_ptr(): parameter.untyped_storage()
            for parameter in model.parameters()
        }
        self._storages = list(storages.values())
        self._num_bytes = [storage.nbytes() for storage in self._storages]
        self._copy: _Copy | None = None
        self.num_updates = 0
        self.after_update: list[Callable[[], None]] = []

    @property
    def is_released(self) -> bool:
        return self._copy is not None

    def check(self, staged: StagedWeights) -> None:
        """Returns if `apply` may take these weights."""
        if self.is_released:
            raise WeightUpdateError(
                "The memory of the weights is released; take it again before they are updated."
            )
        serving = {other: self.places[other] for other in self.places.shared.values()}
        parts = {name: self.places.part_of(name, tensor) for name, tensor in staged.items()}
        check_shared("The update", self.places, serving | parts)

    def apply(self, staged: StagedWeights) -> None:
        """Copies staged weights into place; addresses stay.

        Of weights that share memory one may be staged alone: for both if it is the one that
        `names` has, and else only with the values that serve. Those that another model lends stay.
        """
        self.check(staged)
        self.num_updates += 1
        with torch.no_grad():
            for name in staged.keys() - self.places.shared.keys() - self.places.lent.keys():
                self.places[name].copy_(self.places.part_of(name, staged[name]))
            for tell in self.after_update:
                tell()

    def names(self) -> list[str]:
        """The model's names of all weights."""
        return self.places.names

    def value_of(self, name: str) -> torch.Tensor | None:
        """Returns the values that serve under a checkpoint's name, see `WeightPlaces.value_of`;
        None if there is no such weight. Not to be read while the memory is released."""
        return self.places.value_of(name)

    def release(self) -> None:
        """Gives the memory of the weights back. The values are kept: those of an accelerator in
        host memory, those of a CPU in a file without a name (in TMPDIR), which is gone when this
        process ends, however it ends."""
        if self.is_released:
            raise WeightUpdateError("The memory of the weights is released already.")
        if not all(storage.resizable() for storage in self._storages):
            raise WeightUpdateError(
                "The weights are shared with numpy or other processes and cannot be released;"
                " restart the server."
            )
        contents = [_bytes_of(storage) for storage in self._storages]
        copy_type = _FileCopy if self._device.type == "cpu" else _HostCopy
        try:
            self._copy = copy_type(contents)
        except (OSError, RuntimeError) as error:
            raise WeightUpdateError(
                f"The weights cannot be put aside: {first_line(error)}; make room in host memory,"
                " or for a CPU in TMPDIR."
            ) from None
        self._free()

    def restore(self) -> None:
        """Takes the memory again, with the values that it had; other addresses may hold them."""
        if self._copy is None:
            raise WeightUpdateError("The memory of the weights is not released.")
        try:
            for storage, num_bytes in zip(self._storages, self._num_bytes, strict=True):
                storage.resize_(num_bytes)
            self._copy.write_to([_bytes_of(storage) for storage in self._storages])
        except (OSError, RuntimeError) as error:
            self._free()
            raise WeightUpdateError(
                f"The weights cannot be restored: {first_line(error)}; they stay released: free"
                " memory and try again."
            ) from None
        self._copy.delete()
        self._copy = None

    @property
    def _device(self) -> torch.device:
        return self._storages[0].device

    def _free(self) -> None:
        for storage in self._storages:
            storage.resize_(0)
        hand_back_unused(self._device)


class _Copy(Protocol):
    """The place of the bytes of released weights."""

    def write_to(self, contents: list[torch.Tensor]) -> None:
        """Fills tensors with the shapes of those that were kept."""

    def delete(self) -> None: ...


class _HostCopy:
    """In host memory.

    Args:
        contents: [num_bytes] uint8 each, on any device.
    """

    def __init__(self, contents: list[torch.Tensor]) -> None:
        self._kept = [content.to("cpu", copy=True) for content in contents]

    def write_to(self, contents: list[torch.Tensor]) -> None:
        for content, kept in zip(contents, self._kept, strict=True):
            content.copy_(kept)

    def delete(self) -> None:
        self._kept.clear()


class _FileCopy:
    """In a file that has no name, so that nothing is left of it when the process is killed.

    Args:
        contents: [num_bytes] uint8 each, on the CPU.
    """

    def __init__(self, contents: list[torch.Tensor]) -> None:
        self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (open until `delete`)
        try:
            for chunk, buffer, left in _chunks(contents):
                buffer.copy_(chunk)
                while left:
                    left = left[self._file.write(left) :]
        except (OSError, RuntimeError):
            self.delete()
            raise

    def write_to(self, contents: list[torch.Tensor]) -> None:
        self._file.seek(0)
        for chunk, buffer, left in _chunks(contents):
            while left:
                num_bytes = self._file.readinto(left)
                if not num_bytes:
                    raise OSError("their file in TMPDIR is too short")
                left = left[num_bytes:]
            chunk.copy_(buffer)

    def delete(self) -> None:
        self._file.close()


def _chunks(
    contents: list[torch.Tensor],
) -> Iterator[tuple[torch.Tensor, torch.Tensor, memoryview]]:
    """The contents piece by piece, each with a buffer of its size, as a tensor and as bytes. Files
    use the buffer: a storage whose bytes Python has seen cannot be resized any more."""
    room = bytearray(COPY_BYTES)
    buffer = torch.frombuffer(room, dtype=torch.uint8)
    for content in contents:
        for chunk in content.split(COPY_BYTES):
            yield chunk, buffer[: len(chunk)], memoryview(room)[: len(chunk)]


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[num_bytes] uint8 over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
