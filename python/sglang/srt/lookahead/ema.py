"""Chooses how many tokens a head drafts, by how many of its drafts were right lately.

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

from sglang.srt.lookahead.adaptive_config import AdaptiveConfig, AdaptiveSlot, read_adaptive_config
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep


class SlotState:
    """The state that a slot has reached. Initial steps that are no candidate give way to the middle
    one, of two the higher: from there it is least far to any other, and it drafts if any does."""

    def __init__(self, slot: AdaptiveSlot, initial_steps: int) -> None:
        candidates = slot.candidate_steps
        is_candidate = initial_steps in candidates
        self.slot = slot
        self.steps = initial_steps if is_candidate else candidates[len(candidates) // 2]
        # Correct drafts of a request in a round, lately; at first all but one of the first steps.
        self.ema = max(0.0, (self.steps or next_steps(slot, 0, 0.0)) - 1.0)
        self.num_rounds = 0  # also those without drafts

    def count(self, mean_correct: float) -> None:
        """Counts a round of `steps`; correct drafts per request mean nothing if these are 0."""
        slot = self.slot
        if self.steps > 0:
            self.ema = (1 - slot.ema_alpha) * self.ema + slot.ema_alpha * mean_correct
        self.num_rounds += 1
        num_warm = self.num_rounds - slot.warmup_batches
        if num_warm > 0 and num_warm % slot.update_interval == 0:
            self.steps = next_steps(slot, self.steps, self.ema)


def next_steps(slot: AdaptiveSlot, steps: int, ema: float) -> int:
    """The decision: fewer steps if few drafts are right, else more if nearly all are.

    From 0 it goes to the least steps that draft, if there are any, to look how drafts do now. Steps
    that do not rise are bounded by a ceiling; if it allows none, they are the fewest candidate.
    `ema` are correct drafts of a request in a round of `steps`, one of the slot's candidates.
    """
    candidates = slot.candidate_steps
    if steps == 0:
        return next((steps for steps in candidates if steps > 0), 0)
    start, up, down = candidates.index(steps), slot.up_hysteresis, slot.down_hysteresis
    index = sum(ema > max(fewer - 0.5, 0.5) + down for fewer in candidates[:start])
    if index == start:
        index += sum(ema > each - 0.5 + up for each in candidates[start:-1])
    if index > start or slot.ceiling_coeff <= 0:
        return candidates[index]
    ceiling = max(1, math.ceil(ema * slot.ceiling_coeff))
    return max((each for each in candidates[: index + 1] if each <= ceiling), default=candidates[0])


class AdaptiveSpeculativeParams:
    """The steps of every slot, and what they learn from rounds; a path as for
    `read_adaptive_config`, or a configuration that has been read."""

    def __init__(self, initial_steps: int, cfg_path: str | AdaptiveConfig | None = None) -> None:
        if not isinstance(cfg_path, AdaptiveConfig):
            cfg_path = read_adaptive_config(cfg_path)
        self._config, self.candidate_steps = cfg_path, cfg_path.candidate_steps
        slots = cfg_path.slots.items()
        self._states = {key: SlotState(slot, initial_steps) for key, slot in slots}

    def get_steps_for_batch(self, batch_size: int) -> int:
        """Steps of the next round of a batch of this size; 0 means a plain step."""
        return self.state_for_batch(batch_size).steps

    def state_for_batch(self, batch_size: int) -> SlotState:
        return self._states[self._config.key(batch_size)]

    def on_verify_complete(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int, steps: int | None = None
    ) -> bool:
        """Counts a round that has been verified. Ignores a round without requests, and one that was
        launched before its slot changed its steps. True if it changes them now.

        Args:
            num_correct_drafts_per_req: without the model's own token; zeros for a round without
                drafts: a slot at 0 steps counts rounds until it drafts again.
            batch_size: given to `get_steps_for_batch`; graphs may pad the batch to it.
            steps: the steps that the round was drafted with; None: those of its slot now.
        """
        state = self.state_for_batch(batch_size)
        before = state.steps
        if num_correct_drafts_per_req and steps in (None, before):
            state.count(sum(num_correct_drafts_per_req) / len(num_correct_drafts_per_req))
        return state.steps != before


class AdaptiveController(AdaptiveSpeculativeParams, LengthPolicy):
    """The tier policy of `--speculative-adaptive-strategy ema`, by the sizes to which batches are
    padded. A round keeps the tier that it was drafted with: a new one counts from the next draft
    on."""

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        assert options.adaptive is not None, "Slots are read before a policy is made."
        return options.adaptive.candidate_steps

    def __init__(self, parts: PolicyParts) -> None:
        super().__init__(parts.options.initial, parts.options.adaptive)
        self._graph_size = parts.graph_size
        self.activate_step_by_batch(1)

    def state_for_batch(self, batch_size: int) -> SlotState:
        return super().state_for_batch(self._graph_size(batch_size))

    def activate_step_by_batch(self, batch_size: int) -> int:
        """Returns the tier of the next round of a batch."""
        self.settled = self.get_steps_for_batch(batch_size)
        return self.settled

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(1 + self.activate_step_by_batch(upcoming.num_reqs))

    def observe(self, outcome: StepOutcome) -> None:
        plan = outcome.record.plan
        steps, num_reqs = plan.draft_length, plan.num_drafted_for
        if num_reqs:
            # Who takes fewer drafts says nothing of so many, and who takes none of any.
            counts = zip(outcome.num_tried, outcome.num_accepted, strict=True)
            correct = [accepted - 1 for tried, accepted in counts if tried > steps]
            self.on_verify_complete(correct, num_reqs, steps)
