"""Which prompts share the rounds of requests that decode: their rows take room that drafts might
have had for nothing."""

from __future__ import annotations

from sglang.srt.speculative.round_prices import UpcomingRound
from sglang.srt.step.worker import ScheduleBatch

ROW_GRAIN = 32  # rows of prompts are rounded up to so many, so that there are few prices to compute
MEMORY_STEPS, MEMORY_PROMPTS = 64, 16  # steps that are remembered, and of these with prompts
LEAST_SHARE = 0.02  # below, steps with prompts are left out


def round_of(batch: ScheduleBatch) -> UpcomingRound:
    """What the requests of a step that decode do, beside its prompts."""
    lens = zip(batch.kv_len_upper_bounds, batch.max_q_lens, batch.num_prompt_tokens, strict=True)
    decodes = [bound - reserved for bound, reserved, num_prompt in lens if not num_prompt]
    prompt_rows = -(-sum(batch.num_prompt_tokens) // ROW_GRAIN) * ROW_GRAIN
    return UpcomingRound(len(decodes), sum(decodes), float(prompt_rows > 0), prompt_rows)


class PromptMix:
    """How often prompts share the steps in which requests decode, and of how many rows they are,
    by the last of these steps."""

    def __init__(self) -> None:
        self._share = self._rows = 0.0
        self._num_steps = self._num_prompts = 0

    def observe(self, prompt_rows: int) -> None:
        """Hears of a step in which requests decode."""
        self._num_steps = min(self._num_steps + 1, MEMORY_STEPS)
        self._share += ((prompt_rows > 0) - self._share) / self._num_steps
        if prompt_rows:
            self._num_prompts = min(self._num_prompts + 1, MEMORY_PROMPTS)
            self._rows += (prompt_rows - self._rows) / self._num_prompts

    def upcoming(self, num_reqs: int, kv_tokens: int) -> UpcomingRound:
        """A round of these requests."""
        if self._share < LEAST_SHARE:
            return UpcomingRound(num_reqs, kv_tokens)
        rows = max(1, round(self._rows / ROW_GRAIN)) * ROW_GRAIN
        return UpcomingRound(num_reqs, kv_tokens, self._share, rows)
