"""A simulated decode of an 8B model on an H100, with chains of drafts: steps of more rows cost
more, and a device divides rows by what the head says of each draft."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from policy_steps import drafted, drafting_step
from sglang.srt.device_copies import HostCopy
from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.lookahead.cut import TileSpec
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LoadAwareDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices, StepCase
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable, no_graphs
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.worker import BatchRequest, HostResult, ScheduleBatch

# Milliseconds of a step by rows: all products, which were measured up to 576 rows, and 0.6 more.
STEP_MS = {
    1: 6.2, 64: 6.4, 128: 6.7, 192: 7.3, 256: 7.9, 264: 8.5, 288: 9.8, 320: 9.0, 384: 10.4,
    416: 12.1, 448: 15.5, 480: 12.8, 512: 13.0, 576: 14.4, 768: 18.6, 1024: 24.4,
}  # fmt: skip
DRAFT_MS = 0.22  # of a draft step
EXTEND_SHARE = 0.06  # what the head over the same rows takes, of a step
MAX_DRAFTS = 7
NO_MS = Curve((1, 4096), (0.0, 0.0))


def rounds() -> MeasuredRoundPrices:
    """Prices of rounds; KV costs nothing."""
    rows, costs = tuple(STEP_MS), tuple(STEP_MS.values())
    target = PriceTable(no_graphs, {}, Curve(rows, costs), NO_MS, spread=0.004)
    extend = Curve(rows, tuple(EXTEND_SHARE * cost for cost in costs))
    draft_ms = {n: Curve((1, 4096), (n * DRAFT_MS,) * 2) for n in range(1, MAX_DRAFTS)}
    passes = {n: PassPrices(each) for n, each in draft_ms.items()}
    return MeasuredRoundPrices(
        target, DraftPrices(PriceTable(no_graphs, {}, extend, NO_MS), passes)
    )


ROUNDS = rounds()


@dataclass(frozen=True)
class Text:
    """Describes what the head says of drafts, and how often they are right.

    Attributes:
        easy_share: of places at which it is sure.
        easy, hard: what it says on average there, and elsewhere.
        power: drafts are right with what it says to this power.
    """

    easy_share: float
    easy: float = 0.97
    hard: float = 0.35
    power: float = 1.0

    def confidences(self, rng: np.random.Generator, num_reqs: int) -> np.ndarray:
        """[num_reqs, MAX_DRAFTS]; most places of a chain are alike."""
        kind = rng.random((num_reqs, 1)) < self.easy_share
        other = rng.random((num_reqs, MAX_DRAFTS)) < 0.15
        sure = np.where(kind ^ other, self.easy, self.hard)
        return np.clip(sure + rng.normal(0, 0.04, sure.shape), 0.01, 0.999)

    def best_static_rate(self, num_reqs: int) -> float:
        """Tokens per millisecond with the best number of drafts, which may be none, always."""
        told = self.confidences(np.random.default_rng(0), 20_000) ** self.power
        lengths = 1 + np.concatenate(([0.0], told.cumprod(1).cumsum(1).mean(0)))
        upcoming = StepCase(num_reqs)
        return max(
            num_reqs * length / ROUNDS.round_ms(upcoming, tier)
            for tier, length in enumerate(lengths.tolist())
        )


class Decode:
    """Requests that all decode, with `TileSpec` over tiers by load."""

    def __init__(self, num_reqs: int, text: Text) -> None:
        self._rng = np.random.default_rng(7)
        self._num_reqs, self._text = num_reqs, text
        self._confidence = torch.full((num_reqs, MAX_DRAFTS), 0.7)
        self._tile_spec = TileSpec(ROUNDS)
        prices = self._tile_spec
        options = RoundOptions(MAX_DRAFTS)
        parts = PolicyParts(options=options, rounds=prices)
        self._policy = LoadAwareDrafts(parts)

    def rate(self, num_rounds: int, num_before: int = 100) -> float:
        """Tokens per millisecond after some rounds."""
        unread = deque[tuple[StepRecord, HostResult, int]]()
        num_tokens, ms = 0, 0.0
        upcoming = drafting_step(self._num_reqs, MAX_DRAFTS)
        budget = self._policy.choose(upcoming)
        for number in range(-num_before, num_rounds):
            told = self._text.confidences(self._rng, self._num_reqs)
            self._confidence.copy_(torch.from_numpy(told))
            tier, settled = budget.limit - 1, self._policy.settled
            record, fed = self._fed(told, tier)
            right = self._rng.random(told.shape) < told**self._text.power
            taken = [1 + int(right[i, :count].cumprod().sum()) for i, count in enumerate(fed)]
            result = HostResult([[]] * len(taken), taken, taken, num_drafts=fed if tier else [])
            unread.append((record, result, settled))
            budget = self._policy.choose(upcoming)
            if number >= 0:
                num_tokens += sum(taken)
                ms += round_ms(self._num_reqs, tier, sum(fed), budget.limit - 1)
            if len(unread) > 1:
                self._read(*unread.popleft())
        return num_tokens / ms

    def _fed(self, told: np.ndarray, tier: int) -> tuple[StepRecord, list[int]]:
        """A step, and the drafts of each request that it verifies: the likeliest, as many as
        `TileSpec` says."""
        counts = [tier] * self._num_reqs
        batch = batch_of(counts)
        plan = cut_plan(self._tile_spec, batch, counts)
        values = np.cumprod(told[:, :tier], axis=1)
        kept = np.argsort(-values, axis=None, kind="stable")[: plan.counts.num_rows - len(counts)]
        fed = np.bincount(kept // max(tier, 1), minlength=self._num_reqs).tolist()
        return record_of(batch, plan, self._confidence), fed

    def _read(self, record: StepRecord, result: HostResult, settled: int) -> None:
        right = [count - 1 for count in self._tile_spec.observe(record, result)]
        drafts = record.plan.num_drafts
        self._policy.observe(drafted(settled, self._num_reqs, drafts, right, result.num_drafts))


def cut_plan(tile_spec: TileSpec, batch: ScheduleBatch, num_drafts: Sequence[int]) -> StepPlan:
    """Plans a step that feeds so many drafts of each request, with the rows that pay."""
    counts, wants_scores = StepCounts.of_drafts(batch, num_drafts), False
    if any(num_drafts):
        counts, wants_scores = tile_spec.cut(batch, counts, num_drafts)
    return StepPlan(counts=counts, num_drafts=num_drafts, wants_scores=wants_scores)


def record_of(batch: ScheduleBatch, plan: StepPlan, confidence: torch.Tensor) -> StepRecord:
    """The record of a step before which the device had these confidences."""
    scores = HostCopy([confidence.clone()]) if plan.wants_scores else None
    return StepRecord(rows=batch.rows, plan=plan, scores=scores)


def round_ms(num_reqs: int, tier: int, num_fed: int, next_tier: int) -> float:
    """Returns the time of a round that verifies so many drafts, of chains of `tier`, and drafts for
    the next."""
    verifying = ROUNDS.cost(num_reqs, tier, num_reqs + num_fed, 0, 0).rows_ms
    drafting = [ROUNDS.cost(num_reqs, each, num_reqs, 0, 0).rows_ms for each in (tier, next_tier)]
    return verifying - drafting[0] + drafting[1]


def batch_of(counts: Sequence[int], num_prompts: int = 0) -> ScheduleBatch:
    """Prompts of 10 tokens, then requests with so many drafts each."""
    num_slots = 2 * MAX_DRAFTS
    prompts = [BatchRequest(row, 10, 10, kv_len_before=40) for row in range(num_prompts)]
    decodes = [
        BatchRequest(num_prompts + i, num_slots, kv_len_before=50 - num_slots)
        for i in range(len(counts))
    ]
    return ScheduleBatch(prompts + decodes)
