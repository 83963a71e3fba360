"""Logs what a start does while it takes its time."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)

LONG_S = 1.0


@contextmanager
def start_phase(what: str) -> Iterator[None]:
    """Logs what goes on now, and at its end how long that took, if it was long.

    Args:
        what: as in "Loading the weights".
    """
    logger.info("%s.", what)
    start_s = time.monotonic()
    yield
    if (took_s := time.monotonic() - start_s) >= LONG_S:
        logger.info("%s took %.1f s.", what, took_s)
