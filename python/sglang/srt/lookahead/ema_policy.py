"""The rule of `ema.py` as a policy."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.ema import AdaptiveSpeculativeParams
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.round_options import LengthOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep


class AdaptiveController:
    """The tier policy of `--speculative-adaptive-strategy ema`.

    Before each draft it asks for the steps of the batch's slot, and after each verification it
    tells the slot's average. A round keeps the tier that it was drafted with: a new one counts from
    the next draft on.
    """

    needs_prices = reads_matches = may_rest = False

    @staticmethod
    def tiers(options: LengthOptions) -> tuple[int, ...]:
        assert options.adaptive is not None, "Slots are read before a policy is made."
        return options.adaptive.candidate_steps

    def __init__(self, parts: PolicyParts) -> None:
        options = parts.options
        self.params = AdaptiveSpeculativeParams(options.initial, config=options.adaptive)
        self._graph_size = parts.graph_size
        self.settled = self.activate_step_by_batch(1)

    def activate_step_by_batch(self, batch_size: int) -> int:
        """The tier of the next round of a batch: that of the size they are padded to."""
        self.settled = self.params.get_steps_for_batch(self._graph_size(batch_size))
        return self.settled

    def on_verify_complete(
        self, num_correct_drafts_per_req: Sequence[int], batch_size: int, steps: int
    ) -> None:
        """Hears a round that was drafted with `steps` steps."""
        size = self._graph_size(batch_size)
        self.params.on_verify_complete(num_correct_drafts_per_req, size, steps=steps)

    def choose(self, upcoming: UpcomingStep) -> Budget:
        steps = self.activate_step_by_batch(upcoming.num_reqs)
        return Budget(1 + steps, settled=steps)

    def observe(self, outcome: StepOutcome) -> None:
        steps, num_reqs = outcome.plan.draft_length, outcome.plan.num_drafted_for
        if num_reqs is None:
            return
        correct = [0] * num_reqs
        if steps > 0:
            # Who takes fewer drafts says nothing of so many, and who takes none of any.
            counts = zip(outcome.num_tried, outcome.num_accepted, strict=True)
            correct = [accepted - 1 for tried, accepted in counts if tried > steps]
        self.on_verify_complete(correct, num_reqs, steps)
