"""Adaptive steps in a server: the rule of `adaptive_spec_params.py` as a tier policy, and what each
tier owns."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.lookahead.round_prices import UpcomingRound
from sglang.srt.lookahead.tier_options import TierOptions
from sglang.srt.lookahead.tier_policy import RoundOutcome, TierParts
from sglang.srt.speculative.adaptive_spec_params import AdaptiveSpeculativeParams
from sglang.srt.speculative.round_options import SpecRuntimeState as SpecRuntimeState


class AdaptiveController:
    """The tier policy of `--speculative-adaptive-strategy ema`.

    Before each draft it asks for the steps of the batch's slot, and after each verification it
    tells the slot's average. A round keeps the tier that it was drafted with: a new one counts from
    the next draft on.
    """

    needs_prices = reads_lengths = reads_matches = may_rest = rests = False

    @staticmethod
    def tiers(options: TierOptions) -> tuple[int, ...]:
        assert options.adaptive is not None, "Slots are read before a policy is made."
        return options.adaptive.candidate_steps

    def __init__(self, parts: TierParts) -> None:
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

    def choose(self, upcoming: UpcomingRound) -> int:
        return self.activate_step_by_batch(upcoming.num_reqs)

    def observe(self, outcome: RoundOutcome) -> None:
        correct = [num_correct for _, num_correct in outcome.verified]
        if outcome.tier == 0:
            correct = [0] * outcome.num_reqs
        self.on_verify_complete(correct, outcome.num_reqs, outcome.tier)
