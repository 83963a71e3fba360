"""Decides when a drafter's model is left out of steps, since no request gets drafts, and when it is
fed again."""

from __future__ import annotations

REST_AFTER = 16  # steps in a row without drafts
# Steps that the head is fed before it drafts again: after so little context few drafts are right.
CONTEXT_STEPS = 24


class RestRule:
    """Skips the head after REST_AFTER draft-free steps; a request whose tokens it missed gets
    drafts only after CONTEXT_STEPS catch-up steps.

    Attributes:
        rests: whether the model is left out of the step at hand.
    """

    def __init__(self) -> None:
        self.rests = False
        self._num_idle = 0
        self._num_fed = CONTEXT_STEPS

    def renew(self) -> None:
        """Most requests are new: drafts may follow at once, and the model is then fed the ends of
        their prompts."""
        self._num_fed = CONTEXT_STEPS

    def num_steps_to_feed(self, is_fed: bool) -> int:
        """Steps before there can be drafts. `is_fed`: the model has KV of all of the requests'
        tokens."""
        return 0 if is_fed else max(0, CONTEXT_STEPS - self._num_fed)

    def step(self, wants_drafts: bool, is_fed: bool) -> bool:
        """A step begins; whether the requests can be given drafts after it, if they are to be."""
        can_draft = self.num_steps_to_feed(is_fed) == 0
        self._num_idle = 0 if wants_drafts else self._num_idle + 1
        self.rests = self._num_idle >= REST_AFTER
        self._num_fed = 0 if self.rests else self._num_fed + 1
        return can_draft
