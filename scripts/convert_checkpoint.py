"""Converts a folder with pickled weights (*.bin, *.pt) to safetensors, which is all that is served.

    python scripts/convert_checkpoint.py SOURCE TARGET

TARGET must not exist. It gets the tensors, under their names and in their types, and config.json.
A pickle can hold code, so the files are read in a process of its own that can neither open a socket
nor start a program, by torch's reader of weights only. Whatever is not a plain table of tensors is
refused, and then nothing is written.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
COPIED = ("config.json", "generation_config.json")
WITH_NETWORK = "--with-network"

# Of Linux: prctl(2), seccomp(2), and the numbers of socket, connect, execve, execveat and
# io_uring_setup.
SET_SECCOMP, SET_NO_NEW_PRIVILEGES, FILTER_MODE = 22, 38, 2
FORBIDDEN = {
    "x86_64": (0xC000003E, (41, 42, 59, 322, 425)),
    "aarch64": (0xC00000B7, (198, 203, 221, 281, 425)),
}
LOAD, IF_EQUAL, IF_AT_LEAST, RETURN = 0x20, 0x15, 0x35, 0x06
NUMBER_AT, ARCHITECTURE_AT, OTHER_ABI = 0, 4, 0x40000000
ALLOW, FAIL_WITH_EPERM = 0x7FFF0000, 0x00050001


class Refusal(Exception):
    """Why a folder is not converted, in one line."""


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_uint16),
        ("if_true", ctypes.c_uint8),
        ("if_false", ctypes.c_uint8),
        ("value", ctypes.c_uint32),
    )


class _Program(ctypes.Structure):
    _fields_ = (
        ("length", ctypes.c_uint16),
        ("instructions", ctypes.POINTER(_Instruction)),
    )


def forbid_sockets_and_programs() -> None:
    """From here on this process can open no socket and start no program.

    Raises:
        OSError: where that cannot be had.
    """
    if sys.platform != "linux" or platform.machine() not in FORBIDDEN:
        raise OSError("it is done on Linux for x86_64 and aarch64 alone")
    architecture, numbers = FORBIDDEN[platform.machine()]
    checks = [(IF_AT_LEAST, OTHER_ABI), *((IF_EQUAL, number) for number in numbers)]
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, FAIL_WITH_EPERM),
        (LOAD, 0, 0, NUMBER_AT),
        *((code, len(checks) - index, 0, value) for index, (code, value) in enumerate(checks)),
        (RETURN, 0, 0, ALLOW),
        (RETURN, 0, 0, FAIL_WITH_EPERM),
    ]
    program = _Program(len(lines), (_Instruction * len(lines))(*lines))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for call in (
        (SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0),
        (SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0),
    ):
        if prctl(*call):
            error = ctypes.get_errno()
            raise OSError(error, os.strerror(error))


def weight_files(source: Path) -> list[Path]:
    """The files that hold the weights of a folder.

    Raises:
        Refusal: if there are none, or it cannot be told which.
    """
    if not source.is_dir():
        raise Refusal(f"{source} is not a directory")
    # Beside pytorch_model*.bin, safetensors of other names are something else, such as an adapter.
    is_pickled = any(source.glob("pytorch_model*.bin"))
    if any(source.glob("model*.safetensors" if is_pickled else "*.safetensors")):
        raise Refusal(f"{source} has *.safetensors, and can be served as it is")
    found = sorted(file for file in source.iterdir() if file.suffix in SUFFIXES)
    named = [file for file in found if file.name.startswith("pytorch_model")]
    files = named or found
    if not files:
        raise Refusal(f"{source} has no file that ends in one of {', '.join(SUFFIXES)}")
    if not named and len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise Refusal(f"{source} has {names}; leave those that hold the model's weights")
    for file in files:
        if not file.is_file():
            raise Refusal(f"{file} is no regular file")
    return files


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, each in memory of its own.

    Raises:
        Refusal: if it holds anything else.
    """
    import torch

    try:
        values: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch names no types; its text recommends what is unsafe
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {asked.group(1)}" if asked else type(error).__name__
        raise Refusal(f"{file} is no file of weights alone ({reason})") from error
    if not isinstance(values, dict) or not values:
        raise Refusal(f"{file} holds no table of tensors, but a {type(values).__name__}")
    weights = {}
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise Refusal(f"{file} holds a {type(value).__name__} under {name!r}, no tensor")
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise Refusal(f"{file} holds {name!r} in a form that safetensors does not have")
        weights[name] = value.detach().contiguous().clone()
    return weights


def write_safetensors(files: Sequence[Path], folder: Path) -> None:
    """One safetensors file for each, one after the other.

    Raises:
        Refusal: if a file holds more than weights, or two hold the same one.
    """
    from safetensors.torch import save_file

    seen: set[str] = set()
    for number, file in enumerate(files, 1):
        weights = read_weights(file)
        twice = seen & weights.keys()
        if twice:
            raise Refusal(f"{file} holds {min(twice)!r} once more")
        seen |= weights.keys()
        parts = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        save_file(weights, folder / f"model{parts}.safetensors", metadata={"format": "pt"})


def copy_config(source: Path, folder: Path) -> None:
    """
    Raises:
        Refusal: if config.json is missing, or is no JSON object.
    """
    for name in COPIED:
        try:
            text = (source / name).read_text(encoding="utf-8")
            if not isinstance(json.loads(text), dict):
                raise ValueError("it holds no object")
        except FileNotFoundError:
            if name == COPIED[0]:
                raise Refusal(f"{source} has no {name}") from None
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise Refusal(f"{source / name} cannot be read as JSON: {error}") from None
        (folder / name).write_text(text, encoding="utf-8")


def convert(source: Path, target: Path, with_network: bool = False) -> None:
    """Writes `target` as a whole or not at all.

    Raises:
        Refusal: if that cannot be done.
    """
    if os.path.lexists(target):
        raise Refusal(f"{target} exists; name a folder that does not")
    files = weight_files(source)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        copy_config(source, folder)
        flags = [WITH_NETWORK] if with_network else []
        paths = [str(path.resolve()) for path in (folder, *files)]
        command = [sys.executable, "-I", str(Path(__file__).resolve()), "--read", *flags, *paths]
        child = subprocess.run(command, stderr=subprocess.PIPE, text=True, check=False)
        if child.returncode:
            lines = child.stderr.strip().splitlines()
            raise Refusal(lines[-1] if lines else f"reading ended with {child.returncode}")
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def read_in_this_process(arguments: Sequence[str]) -> None:
    """The process that reads: a folder to write to, then files."""
    import safetensors.torch  # noqa: F401  # before sockets and programs are forbidden

    try:
        forbid_sockets_and_programs()
    except OSError as error:
        if WITH_NETWORK not in arguments:
            raise Refusal(
                f"the process that reads cannot be kept from the network ({error}); with"
                f" {WITH_NETWORK} it reads all the same, still weights only"
            ) from None
    folder, *files = (Path(each) for each in arguments if each != WITH_NETWORK)
    write_safetensors(files, folder)


def main(arguments: Sequence[str]) -> str | None:
    """What went wrong, or None."""
    try:
        if arguments[:1] == ["--read"]:
            read_in_this_process(arguments[1:])
            return None
        parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
        parser.add_argument("source", type=Path, help="folder with *.bin or *.pt and config.json")
        parser.add_argument("target", type=Path, help="folder to be made")
        parser.add_argument(
            WITH_NETWORK,
            action="store_true",
            help="go on where the process that reads cannot be kept from the network",
        )
        given = parser.parse_args(arguments)
        convert(given.source, given.target, given.with_network)
    except Refusal as refusal:
        return str(refusal)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
