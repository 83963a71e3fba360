"""The contract of look-ahead: a planner decides on the host, a worker executes, and the planner
learns.

    plan = planner.plan(batch, lens)     # before the step before is read
    result = worker: executes (batch, plan)
    planner.observe(record, result)      # when the step is read

A plan is plain data: numbers, so that it can be sent to another process. All that the host wants to
learn of a step travels with it as one record, and comes back with its result: a planner keeps
nothing of steps that have not been read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang.srt.device_copies import HostCopy
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.forward_inputs import NO_TOKEN
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


@dataclass(frozen=True, slots=True)
class Budget:
    """The look-ahead that a length policy grants a step."""

    # The most tokens that an adjustable request may predict, the step's own one among them.
    limit: int
    # Rows that a packed step has room for, also for prompts; None: for all that may be fed.
    num_rows: int | None = None
    # The drafter's model may be left out of a step without drafts: none come for some time.
    rests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows that a step of R requests feeds and reads, as far as the host knows."""

    counts: StepCounts  # rows, of each request the most
    max_pending: int = 1  # rows of any request that may be confirmed, the certain token's counted
    max_accepted: int = 1  # tokens that any request may be given
    lookahead_token: int = NO_TOKEN  # fed by rows after the pending tokens
    wants_probs: bool = False  # the drafter looks at `ComputedStep.probs`
    wants_paths: bool = False  # results carry confirmed paths (`GenerationBatchResult.paths`)
    wants_scores: bool = False  # the record copies `Confidence.drafts` from before the step
    # Chosen by a length policy, carried by results: drafts of a request one after the other, or
    # tokens that it predicts from masks, 0 if no policy was asked.
    draft_length: int = 0
    num_drafts: Sequence[int] = ()  # R counts that requests have, fed or not, if the host knows
    next_drafts: Sequence[int] = ()  # R counts that `propose` gives; empty: not known
    # Ascending places among the R requests: those that are not there for the drafter and get no
    # drafts, and others that its models alone are not fed.
    left_out: Sequence[int] = ()
    without_model: Sequence[int] = ()
    fed_again: Sequence[int] = ()  # rows of the table that models are fed anew from this step on
    # Requests that drafts of this step were to be proposed for, `draft_length` of each; None where
    # no request decodes, or nothing is drafted in rounds.
    num_drafted_for: int | None = None

    @property
    def rests(self) -> bool:
        """Tells whether the drafter's models are left out of the whole step."""
        return len(self.left_out) == len(self.counts.q_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A launched step, for those on the host who learn from its result."""

    rows: Sequence[int]  # R rows of the page table
    plan: StepPlan
    lens: HostCopy | None = None  # `Drafter.lens` from before the step
    scores: HostCopy | None = None  # `Confidence.drafts`, likewise, if `StepPlan.wants_scores`
    notes: list[object] = field(default_factory=list)  # of debugging, while it was launched


class Planner:
    """Decides on the host how far requests look ahead, by default not at all: each feeds its prompt
    or its pending token, and is given one. Looks at no device and reads no clock."""

    def step_width(self, params: SamplingParams) -> StepWidth:
        """Rows that a request with these parameters needs per step."""
        return PLAIN_WIDTH

    def admit(self, new_rows: list[NewRow]) -> None:
        """Hears of requests that just got a row, before the first step with them is planned."""

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """Plans what the next step feeds and reads. The step before has not been read yet.

        Args:
            lens: `Drafter.lens` of all rows, from before this step, or on a GPU from before the
                step before; None: there are none.
        """
        return StepPlan(counts=StepCounts.plain(batch))

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """Learns from a step that has been read. Called for each step, in the order of launches."""
