"""Times rounds while they serve, and compares them with their prices."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from sglang.srt.speculative.drafter import RowPlan
from sglang.srt.speculative.prompt_mix import round_of
from sglang.srt.speculative.round_prices import MeasuredRounds
from sglang.srt.step.price_table import PromptChunk
from sglang.srt.step.step_clock import StepClock
from sglang.srt.step.worker import ScheduleBatch


class _Expected(NamedTuple):
    """A round that was launched: the drafts of each request, its rows, those of prompts counted,
    and what it should cost."""

    num_drafts: int
    num_rows: int
    price_ms: float


class RoundTimes:
    """Tells `MeasuredRounds.excess` what rounds take.

    Args:
        clock: of the worker's steps, of which each is expected before it begins.
        packs_in_graphs: packed steps have prices of graphs; if not, they are not compared.
    """

    def __init__(self, rounds: MeasuredRounds, clock: StepClock, packs_in_graphs: bool) -> None:
        self._rounds = rounds
        self._clock = clock
        self._packs_in_graphs = packs_in_graphs
        self._expected = deque[_Expected | None]()  # of steps that have not ended; None: no round

    def expect(self, batch: ScheduleBatch, plan: RowPlan, num_drafts: int) -> None:
        """A step that is about to be launched, whose requests have `num_drafts` drafts at most. It
        is no round with a price if no request decodes, or if another number is drafted for the next
        one; nor if the step returns what prices know nothing of."""
        is_round = 0 in batch.num_prompt_tokens and max(plan.next_drafts) == num_drafts
        is_round &= plan.counts.packed is None or self._packs_in_graphs
        scores_prompts = batch.logprobs is not None and bool(batch.logprobs.prompt_rows)
        is_round &= not scores_prompts and not batch.hidden_rows and batch.constraint is None
        self._expected.append(self._round(batch, plan, num_drafts) if is_round else None)

    def _round(self, batch: ScheduleBatch, plan: RowPlan, num_drafts: int) -> _Expected:
        case, rounds = round_of(batch), self._rounds
        num_prompt = sum(batch.num_prompt_tokens)
        num_verified = plan.counts.num_rows - num_prompt
        cost = rounds.cost(case.num_reqs, num_drafts, num_verified, case.prompt_rows)
        lens = zip(batch.kv_lens_before, batch.num_prompt_tokens, strict=True)
        chunks = [PromptChunk(kv_len, num_prompt) for kv_len, num_prompt in lens if num_prompt]
        fed = [rounds.target] if plan.rests else [rounds.target, rounds.head.extend]
        prompts_ms = sum(prices.prompt_ms(chunk) for prices in fed for chunk in chunks)
        price_ms = cost.at(case.kv_tokens) + prompts_ms
        if rounds.can_rest and num_drafts == 0 and not plan.rests:
            price_ms += rounds.feed_ms(case.upcoming)
        return _Expected(num_drafts, num_verified + case.prompt_rows, price_ms)

    def compare(self) -> None:
        """Hears of the steps that have ended."""
        for took_ms in self._clock.ended():
            expected = self._expected.popleft()
            if expected is not None:
                self._rounds.excess.observe(*expected, took_ms)
