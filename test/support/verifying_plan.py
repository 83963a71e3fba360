"""Plans steps for drafters of tests whose requests all have room for equally many drafts."""

from __future__ import annotations

from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.worker import ScheduleBatch


def verifying_plan(batch: ScheduleBatch, max_drafts: int, max_accepted: int) -> StepPlan:
    """Plans a step in which prompts are fed, and every other request feeds its certain token and
    has room for `max_drafts` drafts, of which max_accepted - 1 may be confirmed; less if it has
    fewer slots, as requests without look-ahead have. Without room for drafts it forgets those that
    are pending, as no plain step does."""
    slots = list(zip(batch.num_prompt_tokens, batch.max_q_lens, strict=True))
    if all(num_prompt or reserved == 1 for num_prompt, reserved in slots):
        return StepPlan(counts=StepCounts.plain(batch))
    q_lens = [num_prompt or min(1 + max_drafts, reserved) for num_prompt, reserved in slots]
    emits = [int(flag) for flag in batch.emits]
    fed = zip(batch.num_prompt_tokens, q_lens, emits, strict=True)
    num_read = [flag if num_prompt else q_len for num_prompt, q_len, flag in fed]
    counts = StepCounts(q_lens, num_read, emits, [True] * len(emits))
    return StepPlan(counts=counts, max_pending=1 + max_drafts, max_accepted=max_accepted)
