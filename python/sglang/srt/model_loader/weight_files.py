"""Tensors of a model directory's safetensors files."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from sglang.srt.model_config import ModelPathError

READ_BYTES = 1 << 24
PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def read_directory(path: Path, in_memory: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a checkpoint, one file after the other; see `read_file`."""
    for file in _weight_files(path):
        yield from read_file(file, in_memory)


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
        raise OSError("it is no regular file")


@contextmanager
def _copy_in_memory(file: Path) -> Iterator[Path]:
    """A path to a copy in memory, which nobody else can change.

    Raises:
        OSError: if the file cannot be read, or changed meanwhile.
    """
    with (
        open(os.memfd_create("weights"), "w+b", buffering=0) as copy,
        open(file, "rb", buffering=0, opener=_open_at_once) as source,
    ):
        before = os.fstat(source.fileno())
        if not stat.S_ISREG(before.st_mode):
            raise OSError("it is no regular file")
        num_left = before.st_size
        while num_left and (data := source.read(min(num_left, READ_BYTES))):
            num_left -= len(data)
            while data:
                data = data[copy.write(data) :]
        after = os.fstat(source.fileno())
        if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise OSError("it changed while it was read")
        yield Path(f"/proc/self/fd/{copy.fileno()}")


def _open_at_once(path: str, flags: int) -> int:
    """Opens without waiting for the other end of what has become a pipe since it was checked."""
    return os.open(path, flags | os.O_NONBLOCK)


def _weight_files(path: Path) -> list[Path]:
    """The files of the index, if there is one, else every *.safetensors."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        try:
            _check_regular(index)
            names = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            # Only names inside the directory: an index must not reach other files.
            files = sorted({path / Path(name).name for name in names})
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ModelPathError(f"{index} is not a safetensors index.") from None
    else:
        files = sorted(path.glob("*.safetensors"))
    if not files:
        pickled = [file.name for file in path.iterdir() if file.suffix in PICKLED]
        remedy = "convert the weights"
        if pickled:
            remedy = (
                f"{min(pickled)} is not read, since such files can hold code: convert the folder"
                " with scripts/convert_checkpoint.py"
            )
        raise ModelPathError(
            f"{path} has no *.safetensors file; {remedy}, or use --load-format dummy."
        )
    return files
