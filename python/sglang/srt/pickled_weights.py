"""Converts a folder with pickled weights (*.bin, *.pt) to safetensors, which is all that is served.

A pickle can hold code, so the files are read in a process of its own: with a limit of memory, with
no socket and no other program, by torch's reader of weights only. Whatever is not a plain table of
tensors is refused, and then nothing is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang.srt.framed_process import MIB, bare_environ
from sglang.srt.model_config import ModelPathError
from sglang.srt.model_files import CONFIG, PICKLE_ENDINGS, is_small_file, weight_names
from sglang.srt.plain_files import UnreadableFileError, open_regular, read_json
from sglang.srt.system_call_filter import forbid_sockets_and_programs

if TYPE_CHECKING:
    import torch

WITH_NETWORK = "--with-network"
# What reading and writing may need for each byte of the largest file, and beside that. Tensors may
# share memory in a pickle, and do not in safetensors.
MEMORY_PER_BYTE = 4
MORE_MEMORY_MIB = 1024
# A disk and a processor of a notebook do more in a second.
MIN_BYTES_PER_S = 10_000_000
MORE_SECONDS = 300


class PickledWeightsError(ModelPathError):
    """Why a folder is not converted, in one line."""


def weight_files(source: Path) -> list[Path]:
    """Finds the files that hold the weights of a folder.

    Raises:
        PickledWeightsError: if there are none, or it cannot be told which.
    """
    if not source.is_dir():
        raise PickledWeightsError(f"{source} is not a directory")
    found = sorted(file for file in source.iterdir() if file.suffix in PICKLE_ENDINGS)
    if weight_names(source, [file.name for file in source.iterdir()])[0]:
        raise PickledWeightsError(f"{source} has *.safetensors, and can be served as it is")
    named = [file for file in found if file.name.startswith("pytorch_model")]
    files = named or found
    if not files:
        endings = ", ".join(PICKLE_ENDINGS)
        raise PickledWeightsError(f"{source} has no file that ends in one of {endings}")
    if not named and len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise PickledWeightsError(
            f"{source} has {names}; leave those that hold the model's weights"
        )
    for file in files:
        if not file.is_file():
            raise PickledWeightsError(f"{file} is no regular file")
    return files


def read_weights(file: Path) -> dict[str, torch.Tensor]:
    """Reads the tensors of a file, each in memory of its own.

    Raises:
        PickledWeightsError: if it holds anything else, or more than there is memory for.
    """
    import torch

    try:
        values: Any = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch names no types; its text recommends what is unsafe
        asked = re.search(r"GLOBAL (\S+)", str(error))
        reason = f"it asks for {asked.group(1)}" if asked else type(error).__name__
        raise PickledWeightsError(f"{file} is no file of weights alone ({reason})") from error
    if not isinstance(values, dict) or not values:
        raise PickledWeightsError(
            f"{file} holds no table of tensors, but a {type(values).__name__}"
        )
    weights = {}
    for name, value in values.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise PickledWeightsError(
                f"{file} holds a {type(value).__name__} under {name!r}, no tensor"
            )
        if value.layout != torch.strided or value.is_quantized or value.is_meta:
            raise PickledWeightsError(
                f"{file} holds {name!r} in a form that safetensors does not have"
            )
        try:
            weights[name] = value.detach().contiguous().clone()
        except (MemoryError, RuntimeError):  # the second is what torch's allocator raises
            raise PickledWeightsError(
                f"{file} needs more memory for {name!r} than a file of its size may"
            ) from None
    return weights


def write_safetensors(files: Sequence[Path], folder: Path) -> None:
    """Writes one safetensors file for each, one after the other.

    Raises:
        PickledWeightsError: if a file holds more than weights, or two hold the same one.
    """
    from safetensors.torch import save_file

    seen: set[str] = set()
    for number, file in enumerate(files, 1):
        weights = read_weights(file)
        twice = seen & weights.keys()
        if twice:
            raise PickledWeightsError(f"{file} holds {min(twice)!r} once more")
        seen |= weights.keys()
        parts = f"-{number:05}-of-{len(files):05}" if len(files) > 1 else ""
        save_file(weights, folder / f"model{parts}.safetensors", metadata={"format": "pt"})


def copy_small_files(source: Path, folder: Path) -> None:
    """Copies the config, and a tokenizer if there is one.

    Raises:
        PickledWeightsError: if config.json is missing, or is no JSON object.
        OSError: if a file cannot be read or written.
    """
    try:
        read_json(source / CONFIG, dict)
    except UnreadableFileError as error:
        raise PickledWeightsError(str(error)) from None
    for file in source.iterdir():
        if is_small_file(file.name) and not file.name.endswith(".index.json"):
            with open_regular(file) as original, (folder / file.name).open("wb") as copy:
                shutil.copyfileobj(original, copy)


def convert(source: Path, target: Path, with_network: bool = False) -> None:
    """Writes `target` as a whole or not at all.

    Raises:
        PickledWeightsError: if that cannot be done.
        OSError: if files cannot be read or written.
    """
    check_is_new(target)
    files = weight_files(source)
    with whole_folder(target) as folder:
        copy_small_files(source, folder)
        _read_in_a_child(files, folder, with_network)


def check_is_new(target: Path) -> None:
    """
    Raises:
        PickledWeightsError: if there is something already.
    """
    if os.path.lexists(target):
        raise PickledWeightsError(f"{target} exists; name a folder that does not")


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Gives a folder to be filled, which becomes `target` if nothing is raised.

    Raises:
        PickledWeightsError: if `target` exists.
        OSError: if it cannot be written.
    """
    check_is_new(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        yield folder
        for file in folder.iterdir():
            with file.open("rb") as written:
                os.fsync(written.fileno())
        folder.chmod(0o755)
        folder.rename(target)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def converted(source: Path) -> Path:
    """Gives the folder with the same in safetensors, in a cache that is filled on first use.

    Raises:
        PickledWeightsError: if that cannot be done; the text names the remedy.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"))
    target = cache / "sglang-adaptive" / "converted" / _key(source)
    try:
        if not target.is_dir():
            convert(source, target)
    except (PickledWeightsError, OSError) as error:
        if target.is_dir():  # another server has made it meanwhile
            return target
        if isinstance(error, OSError):
            raise PickledWeightsError(
                f"{source} is not converted to safetensors: {error}. Set XDG_CACHE_HOME to a folder"
                " with room that can be written, or name one made by sglang convert-checkpoint."
            ) from None
        raise
    return target


def _key(source: Path) -> str:
    """Names a folder's content: other files, or files written anew, give another name."""
    files = [file for file in sorted(source.iterdir()) if file.is_file()]
    states = [(file.name, file.resolve(), file.stat()) for file in files]
    parts = [[name, str(real), stat.st_size, stat.st_mtime_ns] for name, real, stat in states]
    text = json.dumps([str(source.resolve()), parts])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _read_in_a_child(files: Sequence[Path], folder: Path, with_network: bool) -> None:
    flags = [WITH_NETWORK] if with_network else []
    paths = [os.path.abspath(path) for path in (folder, *files)]
    num_bytes = sum(file.stat().st_size for file in files)
    try:
        child = subprocess.run(
            [sys.executable, "-P", "-m", "sglang.srt.pickled_weights", *flags, *paths],
            env={**bare_environ(), "OMP_NUM_THREADS": "1"},  # threads reserve memory
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            timeout=MORE_SECONDS + num_bytes / MIN_BYTES_PER_S,
        )
    except subprocess.TimeoutExpired as error:
        raise PickledWeightsError(f"reading took longer than {error.timeout:.0f} s") from None
    if child.returncode:
        lines = child.stderr.strip().splitlines()
        raise PickledWeightsError(lines[-1] if lines else f"reading ended with {child.returncode}")


def _limit_memory(files: Sequence[Path]) -> None:
    """Limits the memory that this process may add, and the files that it may write."""
    if sys.platform != "linux":
        return
    size = max(file.stat().st_size for file in files)
    added = MEMORY_PER_BYTE * size + MORE_MEMORY_MIB * MIB
    with open("/proc/self/statm", encoding="ascii") as file:
        present = int(file.read().split()[0]) * resource.getpagesize()
    for kind, value in (
        (resource.RLIMIT_AS, present + added),
        (resource.RLIMIT_FSIZE, added),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (limit, limit))


def read_in_this_process(folder: Path, files: Sequence[Path], with_network: bool) -> None:
    """Writes what files hold into a folder; from here on this process has no network.

    Raises:
        PickledWeightsError: if it cannot be kept from the network, and is to be; or for what
            `write_safetensors` refuses.
    """
    try:
        forbid_sockets_and_programs()
    except OSError as error:
        if not with_network:
            raise PickledWeightsError(
                f"the process that reads cannot be kept from the network ({error}); with"
                f" {WITH_NETWORK} sglang convert-checkpoint reads all the same, still weights"
                " only"
            ) from None
    write_safetensors(files, folder)


def main(arguments: Sequence[str]) -> str | None:
    """Converts files into the folder named first; returns what went wrong, or None."""
    import safetensors.torch  # noqa: F401  # before programs are forbidden and memory is limited

    folder, *files = (Path(each) for each in arguments if each != WITH_NETWORK)
    try:
        _limit_memory(files)
        read_in_this_process(folder, files, WITH_NETWORK in arguments)
    except PickledWeightsError as error:
        return str(error)
    return None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
