"""Tensors of a model directory's safetensors files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.model_config import ModelPathError
from sglang.srt.model_files import weight_names, why_no_weights
from sglang.srt.plain_files import NOT_REGULAR, open_regular

READ_BYTES = 1 << 24


class StoredWeight(NamedTuple):
    """A tensor of a checkpoint, and the file that it is in."""

    name: str
    tensor: torch.Tensor
    file: Path


def read_directory(path: Path, in_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint; see `stored_weights`."""
    return ((weight.name, weight.tensor) for weight in stored_weights(path, in_memory))


def stored_weights(path: Path, in_memory: bool = False) -> Iterator[StoredWeight]:
    """Every tensor of a checkpoint, one file after the other; see `read_file`.

    A tensor that several shards hold is taken from the one that the index names. One that is not
    there is taken from the last that holds it, as transformers does.
    """
    files, shards = _weight_files(path)
    given: set[str] = set()
    elsewhere: dict[str, Path] = {}
    for file in files:
        for name, tensor in read_file(file, in_memory):
            if shards.get(name, file.name) != file.name:
                elsewhere[name] = file
                continue
            given.add(name)
            yield StoredWeight(name, tensor, file)
    left = {name: file for name, file in elsewhere.items() if name not in given}
    for file in sorted(set(left.values())):
        for name, tensor in read_file(file, in_memory):
            if left.get(name) == file:
                yield StoredWeight(name, tensor, file)


def read_file(file: Path, in_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a safetensors file, by name; they may be views of the file.

    Args:
        in_memory: reads the file as a whole before anything is taken from it. Otherwise the file is
            mapped, and the process ends if somebody makes it shorter meanwhile.

    Raises:
        ModelPathError: if the file is missing or broken or no regular one, or if it changes while
            it is read into memory.
    """
    try:
        _check_regular(file)
        with (
            _copy_in_memory(file) if in_memory else nullcontext(file) as place,
            safe_open(place, framework="pt") as weights,
        ):
            for name in weights.keys():  # noqa: SIM118 (safe_open is no mapping)
                yield name, weights.get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise ModelPathError(f"{file} is not a readable safetensors file: {error}.") from None


def _check_regular(file: Path) -> None:
    """Raises OSError for what is there and would block or never end, such as a pipe."""
    if os.path.lexists(file) and not os.path.isfile(file):
        raise OSError(NOT_REGULAR)


@contextmanager
def _copy_in_memory(file: Path) -> Iterator[Path]:
    """A path to a copy in memory, which no other code can change.

    Raises:
        OSError: if the file cannot be read, or changed meanwhile.
    """
    with (
        open(os.memfd_create("weights"), "w+b", buffering=0) as copy,
        open_regular(file) as source,
    ):
        before = os.fstat(source.fileno())
        num_left = before.st_size
        while num_left and (data := source.read(min(num_left, READ_BYTES))):
            num_left -= len(data)
            while data:
                data = data[copy.write(data) :]
        after = os.fstat(source.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError("it changed while it was read")
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str]]:
    """The files of a directory that hold its model, and for each tensor that an index names the
    name of its file; see `weight_names`.

    Raises:
        ModelPathError: if there are none, or the index is none.
    """
    present = [file.name for file in path.iterdir() if file.exists()]
    names, shards = weight_names(path, present)
    if not names:
        raise ModelPathError(
            f"{path} has no *.safetensors file with the model's weights;"
            f" {why_no_weights(present)}, or use --load-format dummy."
        )
    return [path / name for name in names], shards
