"""Faults in the processes of a server, from outside: each process imports `sitecustomize` when it
starts, and this puts a fault into one function of one of them. Only the standard library.

A fault happens at the first call while the file NAME.armed exists in the folder; the file
NAME.struck says that it has.
"""

from __future__ import annotations

import errno
import functools
import importlib.abc
import importlib.machinery
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

FOREVER_S = 10_000.0
SLOW_S = 1.5


def _raise(error: BaseException) -> None:
    raise error


def _jump_clock() -> None:
    """The time of day goes back by a day, later forth by a year."""
    real, start_s = time.time, time.monotonic()
    time.time = lambda: real() + (-86_400 if time.monotonic() - start_s < 0.2 else 3e7)


def _fill_memory() -> None:
    import torch  # the process has it

    raise torch.OutOfMemoryError("injected: out of memory")


ACTIONS: dict[str, Callable[[], None]] = {
    "error": lambda: _raise(RuntimeError("injected")),
    "no memory": lambda: _raise(MemoryError("injected")),
    "no GPU memory": _fill_memory,
    "full disk": lambda: _raise(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
    "broken pipe": lambda: _raise(BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hang": lambda: time.sleep(FOREVER_S),
    "slow": lambda: time.sleep(SLOW_S),
    "clock": _jump_clock,
}


class Injected:
    """A fault that can be armed.

    Args:
        folder: must be in PYTHONPATH; it has one `sitecustomize` for all faults.
        process: part of the command line of the process.
        place: MODULE:CLASS.METHOD or MODULE:FUNCTION.
    """

    def __init__(
        self, folder: Path, process: str, place: str, action: str, name: str = "fault"
    ) -> None:
        self._path = folder / name
        here = str(Path(__file__).parent)
        lines = ["import sys", f"sys.path.append({here!r})", "import injected_faults"]
        lines += [f"sys.path.remove({here!r})"]
        lines += [
            f"injected_faults.install({str(self._path)!r}, {process!r}, {place!r}, {action!r})"
        ]
        with (folder / "sitecustomize.py").open("a") as file:
            file.write("\n".join(lines) + "\n")

    def arm(self) -> None:
        """Lets it happen at the next call."""
        self._path.with_suffix(".armed").touch()

    @property
    def has_struck(self) -> bool:
        return self._path.with_suffix(".struck").exists()


def install(path: str, process: str, place: str, action: str) -> None:
    """Puts a fault into its module when that is imported, in processes of that command line."""
    if process in " ".join(sys.orig_argv):
        module, _, name = place.partition(":")
        act = ACTIONS[action]
        sys.meta_path.insert(0, _Finder(module, lambda found: _wrap(found, name, path, act)))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as Python does, and changes it once it has run."""

    def __init__(self, module: str, change: Callable[[ModuleType], None]) -> None:
        self._module = module
        self._change = change

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if name != self._module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        assert spec is not None
        assert spec.loader is not None
        run, change = spec.loader.exec_module, self._change

        def exec_module(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _wrap(module: ModuleType, name: str, path: str, act: Callable[[], None]) -> None:
    *holders, last = name.split(".")
    holder: Any = functools.reduce(getattr, holders, module)
    function = getattr(holder, last)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if os.path.exists(f"{path}.armed"):
            os.replace(f"{path}.armed", f"{path}.struck")
            act()
        return function(*args, **kwargs)

    setattr(holder, last, wrapped)
