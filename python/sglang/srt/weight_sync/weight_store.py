"""The weights of a running model: replaced in place, or put aside while others need the memory."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

import safetensors.torch
import torch
from safetensors import SafetensorError

from sglang.srt.mem_cache.memory_pool import hand_back_unused
from sglang.srt.model_config import ModelConfig, ModelPathError, resolve_model_path
from sglang.srt.model_loader.loader import WeightMismatch, WeightPlaces, check_finite
from sglang.srt.model_loader.weight_copies import have_equal_values
from sglang.srt.model_loader.weight_files import read_directory, read_file
from sglang.srt.models.model import Model

COPY_BYTES = 1 << 24

StagedWeights = dict[str, torch.Tensor]
"""Checkpoint name to a CPU tensor with shape and dtype of its place, checked and owned."""


class WeightUpdateError(ValueError):
    """Weights that cannot be taken; one line that says why and what to do."""


class WeightStore:
    """Reads new weights, puts them in place, and gives their memory back for a while.

    `from_*` may run anywhere, beside a step too: they look at names, shapes and types of the model
    only. `apply`, `release` and `restore` want no step in flight. Whatever raises has changed
    nothing of the model.

    Attributes:
        is_released: the weights have no memory; no step may run.
        num_updates: how often weights have been replaced.
        after_update: called whenever they have been, by whoever computes something of them.

    Raises:
        WeightUpdateError: by every method, for sources that do not fit, and for calls that do not
            fit the state.
    """

    def __init__(self, model: Model, config: ModelConfig) -> None:
        self._places = WeightPlaces(model, config)
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

    def from_directory(self, path: str) -> StagedWeights:
        """A complete checkpoint: a local directory with *.safetensors, or another name that
        --model-path takes.

        One file after the other is read into memory: at its peak this takes the bytes of the
        largest file beside what is staged.
        """
        try:
            directory = resolve_model_path(path, "model_path")
        except ModelPathError as error:
            raise WeightUpdateError(str(error)) from None
        staged = self._stage(str(directory), read_directory(directory, in_memory=True))
        try:
            self._places.check_complete(staged.keys())
        except WeightMismatch as error:
            raise WeightUpdateError(
                f"{directory} {error.problem}; send a part of the weights as a file or as tensors."
            ) from None
        return staged | self._places.values_of_missing(staged)

    def from_file(self, path: str) -> StagedWeights:
        """Some of the weights: a safetensors file.

        It is read into memory: at its peak this takes the bytes of the file beside what is staged.
        """
        if not os.path.isfile(path):
            raise WeightUpdateError(f"{path!r} is not a file; give a local safetensors file.")
        return self._stage(path, read_file(Path(path), in_memory=True))

    def from_safetensors(self, data: bytes) -> StagedWeights:
        """Some of the weights: what a safetensors file holds."""
        try:
            tensors = safetensors.torch.load(data)
        except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
            raise WeightUpdateError(
                f"The data cannot be read as safetensors: {first_line(error)}; send"
                " what `safetensors.torch.save` returns."
            ) from None
        return self._stage("The data", _taken_from(tensors))

    def from_tensors(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Some of the weights, from any device.

        The tensors are read to their end even if one does not fit, since whoever sends them waits
        until all are taken.
        """
        iterator = iter(tensors)
        try:
            return self._stage("The source", iterator)
        except WeightUpdateError:
            with suppress(WeightUpdateError):  # the first reason is the one to tell
                for _ in iterator:
                    pass
            raise

    def apply(self, staged: StagedWeights) -> None:
        """Copies staged weights into place; addresses stay.

        Of weights that share memory one may be staged alone: for both if it is the one that
        `names` has, and else only with the values that serve.
        """
        if self.is_released:
            raise WeightUpdateError(
                "The memory of the weights is released; take it again before they are updated."
            )
        serving = {other: self._places[other] for other in self._places.shared.values()}
        self._check_shared("The update", serving | staged)
        self.num_updates += 1
        with torch.no_grad():
            for name in staged.keys() - self._places.shared.keys():
                self._places[name].copy_(staged[name])
            for tell in self.after_update:
                tell()

    def names(self) -> list[str]:
        """The model's names of all weights."""
        return self._places.names

    def value_of(self, name: str) -> torch.Tensor | None:
        """Returns the tensor that serves under a checkpoint's name, in place; None if there is no
        such weight. Not to be read while the memory is released."""
        return self._places.find(name)

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

    def _stage(self, source: str, tensors: Iterable[tuple[str, torch.Tensor]]) -> StagedWeights:
        """Copies of all tensors that have a place.

        Raises:
            WeightUpdateError: that begins with `source`.
        """
        staged: StagedWeights = {}
        try:
            for name, tensor in tensors:
                place = self._places.place_of(name, tensor.shape)
                if place is None:
                    continue
                own_name = self._places.own_name(name)
                if own_name in staged:
                    raise WeightUpdateError(f"{source} has weight {name!r} twice; send it once.")
                self._places.check_values(name, tensor)
                staged[own_name] = torch.empty(place.shape, dtype=place.dtype)
                staged[own_name].copy_(tensor.detach())
                check_finite(name, staged[own_name])
        except WeightMismatch as error:
            raise WeightUpdateError(f"{source} {error.problem}; {error.remedy}.") from None
        except (ModelPathError, OSError) as error:
            raise WeightUpdateError(first_line(error)) from None
        if not staged:
            raise WeightUpdateError(f"{source} has no weight of this model; send one at least.")
        self._check_shared(source, staged)
        for name, other in self._places.shared.items():
            if {name, other} <= staged.keys():
                staged[name] = staged[other]  # equal: the host needs one of them
        return staged

    def _check_shared(self, source: str, weights: Mapping[str, torch.Tensor]) -> None:
        """
        Raises:
            WeightUpdateError: if weights that have one memory in this model come with two values.
        """
        for name, other in self._places.shared.items():
            if not {name, other} <= weights.keys():
                continue
            if not have_equal_values(weights[name], weights[other], weights[name].dtype):
                raise WeightUpdateError(
                    f"{source} has {name} with other values than {other}, but this model has one"
                    " memory for both (tie_word_embeddings, and it was loaded without another"
                    f" {name}); send both alike, in one call or session (begin_weight_update), or"
                    " start the server with a folder whose files hold both."
                )


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


def first_line(error: Exception) -> str:
    """Returns an error's message, short enough for one line; torch's errors come with C++
    frames."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:300].rstrip(".;")


def _taken_from(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Each tensor, which ends in `tensors` when it is handed out: no second copy of everything."""
    while tensors:
        yield tensors.popitem()


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """[num_bytes] uint8 over a storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
