"""Times rounds while they serve, and compares them with their prices."""

from __future__ import annotations

from sglang.srt.lookahead.contract import ExpectedRound, StepPlan, StepRecord
from sglang.srt.speculative.prompt_mix import round_of
from sglang.srt.speculative.round_prices import MeasuredRounds
from sglang.srt.step.price_table import PromptChunk
from sglang.srt.step.worker import ScheduleBatch


class RoundTimes:
    """Tells `MeasuredRounds.excess` what rounds take.

    Args:
        packs_in_graphs: packed steps have prices of graphs; if not, they are not compared.
    """

    def __init__(self, rounds: MeasuredRounds, packs_in_graphs: bool) -> None:
        self._rounds = rounds
        self._packs_in_graphs = packs_in_graphs
        self._last: StepRecord | None = None  # its drafts may not be made yet when it is read

    def expected(self, batch: ScheduleBatch, plan: StepPlan) -> ExpectedRound | None:
        """Prices a step that is about to be launched. It is no round with a price if no request
        decodes, or if another number is drafted for the next one; nor if the step returns what
        prices know nothing of."""
        num_drafts = max(plan.num_drafts)
        is_round = 0 in batch.num_prompt_tokens and max(plan.next_drafts) == num_drafts
        is_round &= plan.counts.packed is None or self._packs_in_graphs
        scores_prompts = batch.logprobs is not None and bool(batch.logprobs.prompt_rows)
        is_round &= not scores_prompts and not batch.hidden_rows and batch.constraint is None
        return self._round(batch, plan, num_drafts) if is_round else None

    def _round(self, batch: ScheduleBatch, plan: StepPlan, num_drafts: int) -> ExpectedRound:
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
        return ExpectedRound(num_drafts, num_verified + case.prompt_rows, price_ms)

    def compare(self, record: StepRecord) -> None:
        """Hears of a step that has been read: that the one before it has ended is sure."""
        last, self._last = self._last, record
        if last is None or last.time is None or last.plan.expected is None:
            return
        took_ms = last.time.took_ms()
        if took_ms is not None:
            self._rounds.excess.observe(*last.plan.expected, took_ms)
