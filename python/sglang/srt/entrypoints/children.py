"""Child processes, which import what they need while their configuration is still being checked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import msgspec

from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.server_args import ServerArgs

CHILD_MODULES: Mapping[str, str] = {
    "scheduler": "sglang.srt.processes.scheduler_process",
    "detokenizer": "sglang.srt.processes.detokenizer_process",
}
RANK_MODULE = "sglang.srt.processes.rank_process"

# OpenMP threads sleep when there is nothing to do: spinning ones of two busy processes on few cores
# slow each other down by an order of magnitude. They spin first for about 0.2 ms (5,000 pauses),
# long enough to be awake for the next operation of a step.
CHILD_ENVIRON = {
    "OMP_WAIT_POLICY": "PASSIVE",
    "GOMP_SPINCOUNT": "5000",
    "KMP_BLOCKTIME": "0",
    "TOKENIZERS_PARALLELISM": "false",
    # Ranks do without the multicast of NVLink.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
}

NO_MORE: Mapping[str, str] = {}


class Place(NamedTuple):
    """The process of a child.

    Attributes:
        module: what `python -m` runs.
        gpu_id: of `child_environ`.
        rank: of `ChildConfig`.
    """

    module: str
    gpu_id: int
    rank: int = 0


def places_of(args: ServerArgs) -> dict[str, Place]:
    """Returns the children of a server by role. Ranks come first: when one ends, that ends the
    scheduler, which has rank 0, too."""
    first = args.base_gpu_id
    ranks = {
        f"rank {rank}": Place(RANK_MODULE, 0 if args.device == "cpu" else first + rank, rank)
        for rank in range(1, args.tp_size)
    }
    return ranks | {role: Place(module, first) for role, module in CHILD_MODULES.items()}


class Child:
    """A process that waits for one line on its standard input, and ends with the end of that.

    Args:
        module: what `python -m` runs.
        gpu_id: of `child_environ`.

    Attributes:
        beats: where it beats (`ProcessWatch`): the reading end, and the number that the writing end
            has in the child.

    Raises:
        LaunchError: of `child_environ`.
    """

    def __init__(self, module: str, gpu_id: int = 0) -> None:
        environ = child_environ(gpu_id)
        reading, writing = os.pipe()
        try:
            # A process group of its own: Ctrl-C in a terminal reaches the parent alone.
            self.process = subprocess.Popen(
                [sys.executable, "-m", module],
                stdin=subprocess.PIPE,
                env=environ,
                process_group=0,
                pass_fds=(writing,),
            )
        except BaseException:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.beats = reading, writing

    def tell(self, line: bytes) -> None:
        """Writes the line. The pipe stays open: its end tells the child that this process is gone.

        Raises:
            BrokenPipeError: if the child has ended.
        """
        pipe = self.process.stdin
        assert pipe is not None
        try:
            pipe.write(line + b"\n")
            pipe.flush()
        except BrokenPipeError:
            with suppress(BrokenPipeError):  # of what is still in the buffer
                pipe.close()
            raise


@contextmanager
def started_children(places: Mapping[str, Place]) -> Iterator[dict[str, Child]]:
    """Starts the children of a server, and kills those that still run after the block. Yields no
    children if one cannot be started: the caller then starts them itself and gets the error."""
    children: dict[str, Child] = {}
    try:
        try:
            for role, place in places.items():
                children[role] = Child(place.module, place.gpu_id)
        except (LaunchError, OSError):
            _end(children)
            children = {}
        yield children
    finally:
        _end(children)


def _end(children: Mapping[str, Child]) -> None:
    for child in children.values():
        child.process.kill()
        child.process.wait()


def start_child(
    module: str, fields: object, environ: Mapping[str, str] = NO_MORE
) -> subprocess.Popen[bytes]:
    """Starts a module in a process group of its own, and writes a line to its standard input, which
    stays open: its end tells the process that this one is gone.

    Args:
        fields: what the line has, as JSON.
        environ: what the process's environment has beside that of children.
    """
    process = subprocess.Popen(
        [sys.executable, "-m", module],
        stdin=subprocess.PIPE,
        env={**child_environ(), **environ},
        process_group=0,
    )
    pipe = process.stdin
    assert pipe is not None
    with suppress(BrokenPipeError):  # it has ended, which the caller will notice
        pipe.write(msgspec.json.encode(fields) + b"\n")
        pipe.flush()
    return process


def child_environ(gpu_id: int = 0) -> dict[str, str]:
    """Makes the environment of children: they find this package as this process did.

    Args:
        gpu_id: the only GPU that they see, of those that this process sees; 0: they see them all,
            and take the first.

    Raises:
        LaunchError: if CUDA_VISIBLE_DEVICES has fewer.
    """
    package_root = str(Path(__file__).resolve().parents[3])
    paths = [package_root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    environ = {**os.environ, **CHILD_ENVIRON, "PYTHONPATH": os.pathsep.join(paths)}
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if gpu_id == 0 or visible == "":  # no GPU is to be seen
        return environ
    names = [str(gpu_id)] if visible is None else visible.split(",")[gpu_id:]
    if not names:
        raise LaunchError(
            f"--base-gpu-id and --tp-size ask for GPU {gpu_id} of those that CUDA_VISIBLE_DEVICES"
            f" names, from 0: it is {visible!r}."
        )
    return {**environ, "CUDA_VISIBLE_DEVICES": names[0]}
