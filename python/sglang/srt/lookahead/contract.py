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
from typing import NamedTuple, Protocol

from sglang.srt.device_copies import HostCopy
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.forward_inputs import NO_TOKEN
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


class Stakes(NamedTuple):
    """A length policy's bet on a step.

    Attributes:
        owed_ms: the step's price beyond the plain one, as far as it is not paid yet.
        token_ms: worth of a token.
    """

    owed_ms: float
    token_ms: float


@dataclass(frozen=True, slots=True)
class Budget:
    """The look-ahead that a length policy grants a step.

    Attributes:
        limit: the most tokens that an adjustable request may predict; 1 at least. One token is the
            step's own, all others are masks or drafts.
        num_rows: of a step that may be packed, the rows that it has room for, those of prompts
            among them; None: as many as its requests could feed, so that there is nothing to
            divide.
        stakes: comes back with the outcome; None: the policy needs none.
        settled: drafts of steps as they come; this step may try others. For people and metrics.
        rests: if it proposes no drafts, the drafter's model may be left out of the step: no request
            gets any for some time.
    """

    limit: int
    num_rows: int | None = None
    stakes: Stakes | None = None
    settled: int = 0
    rests: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """The rows that a step of R requests feeds and reads, as far as the host knows.

    Attributes:
        counts: rows, of each request the most.
        max_pending: pending rows of any request that the target may confirm, the certain token's
            counted, at most.
        max_accepted: tokens that any request may be given, at most.
        lookahead_token: fed by rows after the pending tokens.
        wants_probs: the drafter looks at `ComputedStep.probs`.
        wants_paths: of trees, results carry the confirmed paths (`GenerationBatchResult.paths`).
        wants_scores: the record gets a copy of `Confidence.drafts` from before the step.
        accepts_unconfirmed: the drafter says how many tokens unverified requests are given
            (`Drafter.num_unconfirmed`); False: no such requests.
        draft_length: chosen by a length policy: drafts of a request one after the other, or tokens
            that it predicts from masks; results carry it.
        num_drafts: R counts of drafts that requests have, fed or not, where the host knows them.
        next_drafts: R counts of drafts that `propose` gives, likewise; empty: not known.
        left_out: places among the R requests of those that the drafter is not fed, ascending: for
            it they are not there, and no drafts follow.
        without_model: likewise, of others that its models alone are not fed.
        fed_again: rows of the page table whose last tokens were left out so, and which the models
            are fed again from this step on.
        budget: granted by a length policy; None: it was not asked.
        num_drafted_for: requests that the step's drafts were to be proposed for, `draft_length` of
            each; None where no request decodes, or nothing is drafted in rounds.
    """

    counts: StepCounts
    max_pending: int = 1
    max_accepted: int = 1
    lookahead_token: int = NO_TOKEN
    wants_probs: bool = False
    wants_paths: bool = False
    wants_scores: bool = False
    accepts_unconfirmed: bool = False
    draft_length: int = 0
    num_drafts: Sequence[int] = ()
    next_drafts: Sequence[int] = ()
    left_out: Sequence[int] = ()
    without_model: Sequence[int] = ()
    fed_again: Sequence[int] = ()
    budget: Budget | None = None
    num_drafted_for: int | None = None

    @property
    def is_plain(self) -> bool:
        """Tells whether no request looks ahead."""
        return self.counts.is_plain

    @property
    def rests(self) -> bool:
        """Tells whether the drafter's models are left out of the whole step."""
        return len(self.left_out) == len(self.counts.q_lens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """A launched step, for those on the host who learn from its result.

    Attributes:
        rows: R rows of the page table.
        lens: `Drafter.lens` from before the step.
        scores: `Confidence.drafts` from before the step, if `StepPlan.wants_scores`.
        notes: taken by debugging while the step was launched.
    """

    rows: Sequence[int]
    plan: StepPlan
    lens: HostCopy | None = None
    scores: HostCopy | None = None
    notes: list[object] = field(default_factory=list)


class Planner(Protocol):
    """Decides on the host how far requests look ahead, by default not at all. Looks at no device
    and reads no clock."""

    def step_width(self, params: SamplingParams) -> StepWidth:
        """Rows that a request with these parameters needs per step."""
        return PLAIN_WIDTH

    def admit(self, new_rows: list[NewRow]) -> None:
        """Requests that have just got a row, before the first step with them is planned."""
        return

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """Plans what the next step feeds and reads. The step before has not been read yet.

        Args:
            lens: `Drafter.lens` of all rows, from before this step, or on a GPU from before the
                step before; None: there are none.
        """
        return StepPlan(counts=StepCounts.plain(batch))

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """Learns from a step that has been read. Called for each step, in the order of launches."""
        return


class PlainPlanner(Planner):
    """Each request feeds its prompt or its pending token, and is given one."""
