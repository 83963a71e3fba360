"""Aborts and pauses that come from another thread while an Engine answers."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from sglang.srt.entrypoints.engine import Engine

MAX_WAIT_S = 0.2  # between two of them
ABORTED = "aborted "  # rids of requests that may be aborted begin so


def rid_of(seed: int, place: int) -> str:
    """The rid of a body; one of eight may be aborted."""
    chance = random.Random(f"{seed} {place}").random()
    return f"{ABORTED if chance < 1 / 8 else ''}{seed} {place}"


class Interruptions:
    """Aborts requests whose rids `rid_of` made so, and pauses generation, until a call ends.

    Args:
        seen: counts pauses.
    """

    def __init__(self, engine: Engine, seen: Counter[str]) -> None:
        self._engine, self._seen = engine, seen

    @contextmanager
    def of(self, seed: int) -> Iterator[None]:
        """Lasts as long as the block; then it raises what a call of the thread has raised."""
        is_over, draw = threading.Event(), random.Random(seed)

        def work() -> None:
            while not is_over.wait(draw.random() * MAX_WAIT_S):
                self._interrupt(draw)

        with ThreadPoolExecutor(1) as threads:
            interrupting = threads.submit(work)
            try:
                yield
            finally:
                is_over.set()
        interrupting.result()

    def _interrupt(self, draw: random.Random) -> None:
        if draw.random() < 0.5:
            self._engine.abort_request(ABORTED, prefix=True)
            return
        self._engine.pause_generation(draw.choice(("retract", "in_place")))
        self._engine.continue_generation()
        self._seen["pauses"] += 1
