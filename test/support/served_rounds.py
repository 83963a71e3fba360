"""A simulated server with a head: requests come with prompts and end, steps take longer than their
prices, and a `DraftPlanner` says how many drafts there are."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray

from sglang.srt.device_copies import HostCopy
from sglang.srt.layers.attention.triton_backend import TritonBackend
from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.lookahead.draft_planner import LeftOutRows
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative import rounds as speculative_rounds
from sglang.srt.speculative.drafter import DrafterParts
from sglang.srt.speculative.rounds import planner_of_rounds
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable, no_graphs
from sglang.srt.step.worker import BatchRequest, HostResult, NewRow, ScheduleBatch
from tile_spec_decode import Text

# Milliseconds of an 8B model's steps on an H200 by rows, as they were measured at a start.
STEP_MS = {
    1: 4.1, 64: 4.6, 128: 5.2, 192: 6.0, 256: 6.6, 288: 7.9, 320: 8.0, 384: 9.8, 448: 14.2,
    512: 11.2, 640: 14.8, 704: 17.5, 832: 20.3, 1024: 22.5, 1280: 27.2, 2048: 43.7, 8192: 176.0,
}  # fmt: skip
READ_MS = {1: 0.34, 64: 0.41, 128: 0.47, 256: 0.66, 512: 1.27, 1024: 2.42}
EXTEND_MS = {1: 0.2, 128: 0.24, 512: 0.33, 1024: 0.5, 8192: 4.0}
DRAFT_MS, FIRST_DRAFT_MS = 0.26, 0.12
MAX_DRAFTS = 7


def curve(points: dict[int, float]) -> Curve:
    return Curve(tuple(points), tuple(points.values()))


def rounds(can_rest: bool = False) -> MeasuredRoundPrices:
    """Prices of rounds; KV costs nothing."""
    target = PriceTable(no_graphs, {}, curve(STEP_MS), curve(READ_MS), spread=0.004)
    first = Curve((1, 4096), (FIRST_DRAFT_MS,) * 2)
    draft_ms = {n: Curve((1, 4096), (n * DRAFT_MS,) * 2) for n in range(1, MAX_DRAFTS)}
    passes = {n: PassPrices(each) for n, each in draft_ms.items()}
    extend = PriceTable(no_graphs, {}, curve(EXTEND_MS), first)
    return MeasuredRoundPrices(target, DraftPrices(extend, passes), can_rest=can_rest)


@dataclass(frozen=True)
class Load:
    """Clients that send their next prompt when their answer is there.

    Attributes:
        excess: share by which steps of 512 rows or more take longer than their prices; smaller ones
            as much less.
        plain_gain: share by which steps without drafts take less than that.
        loss_of: shares by which rounds of so many drafts take longer than that.
    """

    num_clients: int
    prompt_tokens: int = 128
    new_tokens: int = 128
    excess: float = 0.1
    plain_gain: float = 0.0
    loss_of: Mapping[int, float] = field(default_factory=dict)


class SomeLeftOut(LeftOutRows):
    """Some tokens of every request were left out."""

    def lacks_tokens(self, rows: Sequence[int]) -> bool:
        return True


def parts_of(num_rows: int) -> DrafterParts:
    """Stands in for what `planner_of_rounds` looks at."""
    config = SimpleNamespace(capabilities=TritonBackend.capabilities())
    target = SimpleNamespace(graph_keys=None, config=config)
    memory = SimpleNamespace(table=SimpleNamespace(num_rows=num_rows))
    runners: Any = SimpleNamespace(
        target=target, memory=memory, max_prompt_rows=8192, runners=[target]
    )
    return DrafterParts(None, runners, cast(Any, None))


class ServedRounds:
    """A closed loop of clients, in which requests end and come one by one. Of several texts each
    request is of one, any.

    Attributes:
        planner: what is tested.
        tiers: how many steps drafted so many for each request.
        num_verified: drafts, in all.
        num_rests: steps that the head was left out of.

    Args:
        can_rest: the head can be left out of steps.
    """

    def __init__(
        self,
        load: Load,
        text: Text | Sequence[Text],
        options: RoundOptions,
        can_rest: bool = False,
    ) -> None:
        self._load = load
        self.change_text(text)
        self._kinds = [number % len(self._texts) for number in range(load.num_clients)]
        self._luck, self._rng = random.Random(3), np.random.default_rng(3)
        self._true, self._without_head = rounds(), rounds(can_rest=True)
        count = load.num_clients
        self._confidence = torch.full((count, MAX_DRAFTS), 0.7)
        left_out = SomeLeftOut if can_rest else LeftOutRows
        with mock.patch.object(speculative_rounds, "LeftOutRows", left_out):
            self.planner = planner_of_rounds(options, parts_of(count), rounds(can_rest))
        self.planner.admit([new_row(row, load.new_tokens) for row in range(count)])
        self._left = [1 + self._luck.randrange(load.new_tokens) for _ in range(count)]
        self._prompts = [load.prompt_tokens] * count
        self._num_drafts = [0] * count
        # Steps until the client of a row sends its next request, and one; 0: a request runs.
        self._steps_away = [0] * count
        self.tiers = Counter[int]()
        self.num_verified = self.num_rests = 0
        self._unread = deque[HostResult]()

    def change_text(self, text: Text | Sequence[Text]) -> None:
        """Changes the texts of what comes from now on: each is one of as many texts as before."""
        self._texts = [text] if isinstance(text, Text) else text

    def rate(self, num_steps: int, num_before: int) -> float:
        """Tokens per millisecond, after some steps. Each step is planned before the last is
        read."""
        num_tokens, ms, unread = 0, 0.0, self._unread
        for number in range(-num_before, num_steps):
            took_ms, result, num_given = self._step()
            if result is not None:
                unread.append(result)
            if len(unread) > (result is not None):
                self._observe(unread.popleft())
            if number >= 0:
                num_tokens += num_given
                ms += took_ms
        return num_tokens / ms

    def _observe(self, result: HostResult) -> None:
        assert isinstance(result.record, StepRecord)
        self.planner.observe(result.record, result)

    def _step(self) -> tuple[float, HostResult | None, int]:
        """Runs one step and returns what it took, what is read of it, and how many tokens it gave:
        a request has none beyond its end, and is still in the step behind its last one, which was
        launched before, unless its end was sure. Its client's next request comes when all of that
        has been read. Nothing is read where there was nothing to launch."""
        self._let_in()
        rows = [row for row, steps in enumerate(self._steps_away) if not steps]
        if not rows:
            return 0.0, None, 0
        rows.sort(key=lambda row: self._prompts[row] == 0)  # as the scheduler orders them
        prompts = [self._prompts[row] for row in rows]
        told = self._told()
        self._confidence.copy_(torch.from_numpy(told))
        plan = self.planner.plan(batch_of(prompts, rows=rows))
        fed = self._fed(plan, prompts, [self._num_drafts[row] for row in rows], told[rows])
        right = [
            self._num_right(chances[:count]) for chances, count in zip(told[rows], fed, strict=True)
        ]
        took_ms = self._true_ms(plan, prompts, sum(fed))
        self.tiers[max(plan.next_drafts)] += 1
        self.num_verified += sum(fed)
        taken = [1 + count for count in right]
        num_given = 0
        for row, num_drafts, count in zip(rows, plan.next_drafts, taken, strict=True):
            self._prompts[row], self._num_drafts[row] = 0, num_drafts
            num_given += max(0, min(count, self._left[row]))
            is_sure_to_end = self._left[row] <= 1
            self._left[row] -= count
            self._steps_away[row] = 2 * is_sure_to_end
        drafts = fed if any(fed) else []
        record = StepRecord(
            rows=rows,
            plan=plan,
            lens=HostCopy([torch.zeros(len(self._left), dtype=torch.int64)]),
            scores=HostCopy([self._confidence.clone()]) if plan.wants_scores else None,
        )
        result = HostResult([[]] * len(fed), taken, taken, num_drafts=drafts, record=record)
        return took_ms, result, num_given

    def _let_in(self) -> None:
        """Clients whose answer has been read send their next request."""
        for row, steps in enumerate(self._steps_away):
            self._steps_away[row] = max(0, steps - 1)
            if steps == 1:
                self._left[row] = self._load.new_tokens
                self._prompts[row], self._num_drafts[row] = self._load.prompt_tokens, 0
                self._kinds[row] = self._luck.randrange(len(self._texts))
                self.planner.admit([new_row(row, self._load.new_tokens)])

    def _told(self) -> NDArray[np.float64]:
        """[clients, MAX_DRAFTS]; how probable each draft is, given those before it."""
        by_kind = [text.confidences(self._rng, len(self._left)) for text in self._texts]
        return np.stack([by_kind[kind][row] for row, kind in enumerate(self._kinds)])

    def _fed(
        self,
        plan: StepPlan,
        prompts: Sequence[int],
        num_drafts: Sequence[int],
        told: NDArray[np.float64],
    ) -> list[int]:
        """Drafts of each request that are verified: of a packed step the likeliest."""
        most = [0 if prompt else n for prompt, n in zip(prompts, num_drafts, strict=True)]
        packed = plan.counts.packed
        if packed is None:
            return most
        num_decodes = prompts.count(0)
        count = packed.num_rows - sum(prompts) - num_decodes
        has_draft = np.arange(MAX_DRAFTS) < np.array(most)[:, None]
        values = np.where(has_draft, np.cumprod(told, axis=1), -1.0)
        kept = np.argsort(-values, axis=None, kind="stable")[:count]
        fed: list[int] = np.bincount(kept // MAX_DRAFTS, minlength=len(most)).tolist()
        return fed

    def _num_right(self, chances: NDArray[np.float64]) -> int:
        return next(
            (place for place, chance in enumerate(chances) if self._luck.random() >= chance),
            len(chances),
        )

    def _true_ms(self, plan: StepPlan, prompts: Sequence[int], num_fed: int) -> float:
        """Returns the time of this very step by what was measured, and more the wider it is."""
        num_decodes, prompt_rows = prompts.count(0), sum(prompts)
        num_reqs = max(num_decodes, 1)
        drafted = max(plan.next_drafts)
        self.num_rests += plan.rests
        prices = self._without_head if plan.rests else self._true
        cost = prices.cost(num_reqs, drafted, num_decodes + num_fed, prompt_rows, 0)
        num_rows = num_decodes + num_fed + prompt_rows
        took_ms = cost.rows_ms * (1 + self._load.excess * min(1.0, num_rows / 512))
        is_plain = drafted == num_fed == 0
        loss = self._load.loss_of.get(drafted, 0.0) - self._load.plain_gain * is_plain
        return took_ms * (1 + loss)


def new_row(row: int, num_new: int = 128) -> NewRow:
    params = SamplingParams(max_new_tokens=num_new)
    return NewRow(row, 0, np.zeros(1, np.int32), params, 0)


def batch_of(
    prompts: Sequence[int], emits: bool = True, rows: Sequence[int] | None = None
) -> ScheduleBatch:
    """A step of requests that feed so many tokens of their prompts, or decode; in these rows, or
    the first ones."""
    places = range(len(prompts)) if rows is None else rows
    return ScheduleBatch(
        [
            BatchRequest(row, num_prompt or 2 * MAX_DRAFTS, num_prompt, emits)
            for row, num_prompt in zip(places, prompts, strict=True)
        ]
    )
