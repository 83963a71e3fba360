"""Python's garbage collector in a process that must not pause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def keep_out_of_collections() -> None:
    """Whatever there is stays: collections need not go over it, which holds up steps once torch is
    loaded. For whoever owns the process, once, after start-up: what is part of a cycle now is never
    freed."""
    gc.collect()
    gc.freeze()


@contextmanager
def no_collections() -> Iterator[None]:
    """One before the block, none in it."""
    gc.collect()
    with paused_collections():
        yield


@contextmanager
def paused_collections() -> Iterator[None]:
    """None in the block, which makes very many objects that all live on: collections would go over
    them again and again. Threads may be in it at the same time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
