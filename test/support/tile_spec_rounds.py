"""Rounds whose prices are given, and steps that verify any number of drafts."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import torch

from sglang.srt.lookahead.contract import StepRecord
from sglang.srt.lookahead.cut import TileSpec
from sglang.srt.speculative import rounds
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable, no_graphs
from sglang.srt.step.worker import HostResult

FLAT = Curve((1,), (1e-9,))
MAX_STEPS = 7


def prices_of(sizes: Sequence[int], costs_ms: Sequence[float]) -> PriceTable:
    """Makes prices of steps by rows; logits and KV cost nothing."""
    curve = Curve(tuple(sizes), tuple(costs_ms))
    return PriceTable(no_graphs, {}, curve, Curve((1, 1 << 20), (0.0, 0.0)))


FREE_ROWS = prices_of((1, 1024), (1.0, 1.0))
DEAR_ROWS = prices_of((1, 1024), (1.0, 1024.0))
FREE_PASS = PassPrices(Curve((1, 1024), (0.0, 0.0)))
FREE_DRAFTS = DraftPrices(
    prices_of((1, 1024), (1e-9, 1e-9)),
    dict.fromkeys(range(1, MAX_STEPS), FREE_PASS),
)


@contextmanager
def free_drafts() -> Iterator[None]:
    """While this lasts the head's steps cost nothing, and nobody measures them."""

    def measure(runner: Any, max_requests: int, max_width: int, shapes: Any) -> DraftPrices:
        return replace(FREE_DRAFTS, passes=dict.fromkeys(shapes, FREE_PASS))

    with mock.patch.object(rounds, "measure_draft_prices", measure):
        yield


class RandomBudgets:
    """Any number of drafts of each step is verified, often none or all; with `scramble` as a
    listener any of them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._seed, self._generators = seed, dict[int, torch.Generator]()
        self.outcomes = Counter[tuple[int, int]]()  # drafts that requests had, and how many right

    def num_verified(self, num_drafts: Sequence[int]) -> int:
        most = sum(num_drafts)
        return self._random.choice([0, most, *(self._random.randint(0, most) for _ in range(4))])

    def scramble(self, step: ComputedStep) -> None:
        """Fills what the device divides rows by with values that have nothing to do with the
        drafts; often they are 0 or 1, or no number."""
        confidence = step.state.confidence
        assert confidence is not None
        generator = self._generators.setdefault(
            id(step.state), torch.Generator().manual_seed(self._seed)
        )
        values = torch.rand(confidence.shape, generator=generator)
        told = torch.where(values > 0.95, torch.nan, (2 * values - 0.5).clamp(0, 1))
        confidence.copy_(told)

    @contextmanager
    def chosen(self) -> Iterator[None]:
        """While this lasts."""
        observe = TileSpec.observe

        def noted(tile_spec: TileSpec, record: StepRecord, result: HostResult) -> list[int]:
            found = observe(tile_spec, record, result)
            pairs = zip(record.plan.num_drafts, found, strict=True)
            self.outcomes.update((count, taken - 1) for count, taken in pairs if count)
            return found

        with (
            free_drafts(),
            mock.patch.object(
                TileSpec,
                "num_verified",
                lambda _, table, counts, num_decodes: self.num_verified(counts),
            ),
            mock.patch.object(TileSpec, "observe", noted),
        ):
            yield
