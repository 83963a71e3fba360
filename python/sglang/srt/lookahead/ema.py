"""Chooses how many tokens a head drafts, by how many of its drafts were right lately. No torch, no
clock.

Each range of batch sizes is a slot (`adaptive_config`) with steps and a moving average of its own.
A round is one verification of a batch's drafts. One of the slot's own steps is counted:

    ema = (1 - ema_alpha) * ema + ema_alpha * (mean of correct drafts per request)

The token that the model gives after correct drafts is not one of them. A slot decides after
`warmup_batches` rounds and `update_interval` more, and then each `update_interval` rounds, by
`next_steps`. Without drafts there is nothing to average, so `ema` stays; such rounds are counted.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from sglang.srt.lookahead.adaptive_config import (
    AdaptiveConfig,
    AdaptiveSlot,
    read_adaptive_config,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SlotState:
    """The state that a slot has reached.

    Attributes:
        steps: of its rounds from now on, one of its candidates.
        ema: correct drafts of a request in a round, lately; 0 while `has_drafted` is False.
        num_rounds: rounds counted, also those without drafts.
        has_drafted: whether its rounds ever had drafts.
    """

    steps: int
    ema: float
    num_rounds: int = 0
    has_drafted: bool


def first_state(slot: AdaptiveSlot, initial_steps: int) -> SlotState:
    """The state before the first round. Initial steps that are no candidate give way to the middle
    one, of two the higher: from there it is least far to any other, and it drafts if any does."""
    candidates = slot.candidate_steps
    is_candidate = initial_steps in candidates
    steps = initial_steps if is_candidate else candidates[len(candidates) // 2]
    return SlotState(steps=steps, ema=max(0.0, steps - 1.0), has_drafted=steps > 0)


def state_after_round(state: SlotState, slot: AdaptiveSlot, mean_correct: float) -> SlotState:
    """
    Args:
        state: before the round, which had its steps.
        mean_correct: correct drafts per request; means nothing if the steps are 0.
    """
    ema = state.ema
    if state.steps > 0:
        ema = (1 - slot.ema_alpha) * ema + slot.ema_alpha * mean_correct
    num_rounds = state.num_rounds + 1
    counted = replace(state, ema=ema, num_rounds=num_rounds)
    num_warm = num_rounds - slot.warmup_batches
    if num_warm <= 0 or num_warm % slot.update_interval:
        return counted
    steps = next_steps(slot, state.steps, ema)
    if steps > 0 and not state.has_drafted:
        return replace(counted, steps=steps, ema=steps - 1.0, has_drafted=True)
    return replace(counted, steps=steps)


def next_steps(slot: AdaptiveSlot, steps: int, ema: float) -> int:
    """The decision: fewer steps if few drafts are right, else more if nearly all are.

    From 0 it goes to the least steps that draft, if there are any, to look how drafts do now.

    Args:
        steps: those that `ema` is of, one of the slot's candidates.
        ema: correct drafts of a request in a round.
    """
    candidates = slot.candidate_steps
    if steps == 0:
        return _fewest_drafting(slot)
    start = candidates.index(steps)
    index = start
    while index > 0 and ema <= _drop_threshold(candidates[index - 1]) + slot.down_hysteresis:
        index -= 1
    if index == start:
        last = len(candidates) - 1
        while index < last and ema > candidates[index] - 0.5 + slot.up_hysteresis:
            index += 1
    target = candidates[index]
    return target if target > steps else _capped(slot, target, ema)


def _drop_threshold(lower: int) -> float:
    """Correct drafts up to which `lower` steps, the next fewer ones, do."""
    return lower - 0.5 if lower > 0 else 0.5


def _capped(slot: AdaptiveSlot, target: int, ema: float) -> int:
    """The most steps up to `target` that the ceiling allows, or else the fewest candidate.

    If all steps that draft are above the ceiling and 0 is a candidate, drafting ends; the next
    decision looks again.
    """
    if slot.ceiling_coeff <= 0:
        return target
    ceiling = max(1, math.ceil(ema * slot.ceiling_coeff))
    allowed = [steps for steps in slot.candidate_steps if steps <= min(ceiling, target)]
    return allowed[-1] if allowed else slot.candidate_steps[0]


def _fewest_drafting(slot: AdaptiveSlot) -> int:
    """The least steps above 0; 0 where there are no others."""
    return next((steps for steps in slot.candidate_steps if steps > 0), 0)


class AdaptiveSpeculativeParams:
    """The steps of every slot, and what they learn from rounds.

    Attributes:
        config: what the file says.
        candidate_steps: those of all slots, ascending, each once.
    """

    def __init__(
        self,
        initial_steps: int,
        cfg_path: str | None = None,
        *,
        config: AdaptiveConfig | None = None,
    ) -> None:
        """
        Args:
            initial_steps: of each slot that has them among its candidates, see `first_state`. They
                become no candidate of others.
            cfg_path: a preset or a file, see `read_adaptive_config`; None for the default.
            config: what has been read already, instead of a path.

        Raises:
            AdaptiveConfigError: a ValueError, for a file that cannot be used.
        """
        self.config = read_adaptive_config(cfg_path) if config is None else config
        self.candidate_steps = self.config.candidate_steps
        self._states = [first_state(slot, initial_steps) for slot in self.config.slots]

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Steps of the next round of a batch of this size; 0 means a plain step."""
        return self.state_for_batch(batch_size).steps

    def state_for_batch(self, batch_size: int) -> SlotState:
        return self._states[self.config.slot_index(batch_size)]

    def on_verify_complete(
        self,
        num_correct_drafts_per_req: Sequence[int],
        batch_size: int,
        *,
        steps: int | None = None,
    ) -> bool:
        """Counts a round that has been verified. Ignores a round without requests, and one that was
        launched before its slot changed its steps.

        Args:
            num_correct_drafts_per_req: correct drafts of each request, without the model's own
                token. Pass zeros for a round without drafts: a slot at 0 steps counts rounds until
                it drafts again.
            batch_size: the size that `get_steps_for_batch` was given. It may exceed the number of
                requests, since graphs pad batches.
            steps: the steps that the round was drafted with; None: those of its slot now.

        Returns:
            True if the slot has changed its steps.
        """
        index = self.config.slot_index(batch_size)
        before = self._states[index]
        if not num_correct_drafts_per_req or steps not in (None, before.steps):
            return False
        mean = sum(num_correct_drafts_per_req) / len(num_correct_drafts_per_req)
        after = state_after_round(before, self.config.slots[index], mean)
        self._states[index] = after
        return after.steps != before.steps
