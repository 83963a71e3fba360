"""Python's garbage collector in a process that must not pause, and memory that goes back."""

from __future__ import annotations

import atexit
import ctypes
import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_out_of_collections() -> None:
    """Exempts all objects that exist now from collections: those of torch are so many that looking
    at them holds up steps. A process calls it once, after start-up; cycles among these objects are
    freed when it ends, since libraries report what is left then."""
    gc.collect()
    gc.freeze()
    atexit.register(gc.unfreeze)


@contextmanager
def no_collections() -> Iterator[None]:
    """Collects once before the block and never in it."""
    gc.collect()
    with paused_collections():
        yield


@contextmanager
def paused_collections() -> Iterator[None]:
    """Collects nothing in the block: for code that makes very many objects that all live on, which
    collections would look at again and again. Several threads may be in such a block at a time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def return_freed_memory() -> None:
    """Gives the system back what C libraries have freed in this process, where it can be asked to:
    glibc keeps it for the threads that had it, so that each may keep the most it ever had."""
    library = ctypes.CDLL(None)
    try:
        library.malloc_trim(0)
    except AttributeError:  # another C library
        return
