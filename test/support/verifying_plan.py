"""Plans steps for drafters of tests whose requests all have room for equally many drafts."""

from __future__ import annotations

from dataclasses import replace

from sglang.srt.speculative.drafter import RowPlan, plan_of_drafts
from sglang.srt.step.worker import ScheduleBatch


def verifying_plan(batch: ScheduleBatch, max_drafts: int, max_accepted: int) -> RowPlan:
    """Plans a step in which prompts are fed, and every other request feeds its certain token and
    has room for `max_drafts` drafts, of which max_accepted - 1 may be confirmed; less if it has
    fewer slots, as requests without look-ahead have."""
    slots = list(zip(batch.num_prompt_tokens, batch.max_q_lens, strict=True))
    room = [0 if num_prompt else min(max_drafts, reserved - 1) for num_prompt, reserved in slots]
    plan = plan_of_drafts(batch, room)
    if all(num_prompt or reserved == 1 for num_prompt, reserved in slots):
        return plan
    return replace(plan, max_pending=1 + max_drafts, max_accepted=max_accepted)
