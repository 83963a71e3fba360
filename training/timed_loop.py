"""Training for a given time: when it ends, what it shows and what it stores of its course."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tqdm import tqdm

NOTE_EVERY_STEPS = 20
NUM_LOSSES, NUM_PROBES = 60, 10  # that are stored


class TimedLoop:
    """Counts and curves of a training that lasts `minutes`.

    Attributes:
        compile_seconds: before the first step.
        steps, tokens: counted by the one who trains.
        seconds: since the first step.
        loss_curve: (seconds, step, loss and what else is noted).
        probe_curve: (seconds, step, what the probe gave).
    """

    def __init__(self, minutes: float, probe_name: str, compile_seconds: float) -> None:
        self.compile_seconds = compile_seconds
        self.steps = self.tokens = 0
        self.seconds = 0.0
        self.loss_curve: list[tuple[float, ...]] = []
        self.probe_curve: list[tuple[float, int, Any]] = []
        self._budget_s = minutes * 60.0
        self._probe_name = probe_name
        self._bar = tqdm(total=int(60 * minutes), unit="s", desc="training", mininterval=2.0)

    def progress(self) -> Iterator[float]:
        """The share of the time that is used, before each step, until all of it is."""
        budget = self._budget_s
        start = time.perf_counter()
        while self.seconds < budget:
            yield self.seconds / budget
            self.seconds = time.perf_counter() - start
            self._bar.update(int(min(self.seconds, budget)) - self._bar.n)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds = time.perf_counter() - start
        self._bar.close()

    def note(self, values: dict[str, torch.Tensor], probe: Callable[[], Any]) -> None:
        """Every 20th step: shows values of the last one, the loss first, and stores about sixty of
        them, and ten times what `probe` gives.

        Raises:
            RuntimeError: if the loss is not finite.
        """
        if self.steps % NOTE_EVERY_STEPS:
            return
        numbers = {name: float(value) for name, value in values.items()}
        shown = {name: f"{number:.3f}" for name, number in numbers.items()}
        shown["tokens_per_s"] = f"{self.tokens / max(self.seconds, 1e-9):,.0f}"
        self._bar.set_postfix(shown, refresh=False)
        if not math.isfinite(numbers["loss"]):
            raise RuntimeError(
                f"Loss {numbers['loss']} at step {self.steps}: lower --muon-lr or --adam-lr."
            )
        place = (round(self.seconds, 1), self.steps)
        if self.seconds >= self._budget_s * len(self.loss_curve) / NUM_LOSSES:
            self.loss_curve.append((*place, *(round(number, 4) for number in numbers.values())))
        if self.seconds >= self._budget_s * (len(self.probe_curve) + 1) / NUM_PROBES:
            found = probe()
            self.probe_curve.append((*place, found))
            tqdm.write(f"{place[0]:.0f} s, step {self.steps}: {self._probe_name} {found}")
