"""Plans steps of any drafter: what requests can feed, a policy that chooses, and what follows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Protocol, TypeVar

from sglang.srt.lookahead.contract import Budget, Planner, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch

T = TypeVar("T")


class PlannedRows(Protocol[T]):
    """Keeps for each row of the page table what the host knows of its look-ahead, and turns what a
    policy grants into plans. `T` is what it knows of a step before that."""

    def step_width(self, params: SamplingParams) -> StepWidth:
        """See `Planner`."""

    def admit(self, new_rows: list[NewRow]) -> None:
        """See `Planner`."""

    def begin(
        self, batch: ScheduleBatch, lens: Sequence[int] | None
    ) -> tuple[T, UpcomingStep | None]:
        """Returns what is known of a step before a policy chooses, and what it hears; None: it has
        nothing to choose. Arguments as for `Planner.plan`."""

    def plan(self, batch: ScheduleBatch, begun: T, budget: Budget | None) -> StepPlan:
        """Plans the step; a budget of None: the policy was not asked."""

    def outcome(self, record: StepRecord, result: HostResult) -> StepOutcome:
        """Returns what the policy learns of a step. Called for each step, in order."""


class LookaheadPlanner(Planner, Generic[T]):
    """Plans steps for masks or drafts by one policy, and lets it learn.

    Attributes:
        rows: keeps what is known of each request.
        policy: chooses how far requests look ahead.
    """

    def __init__(self, rows: PlannedRows[T], policy: LengthPolicy) -> None:
        self.rows = rows
        self.policy = policy

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self.rows.step_width(params)

    def admit(self, new_rows: list[NewRow]) -> None:
        self.rows.admit(new_rows)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        begun, upcoming = self.rows.begin(batch, lens)
        budget = None if upcoming is None else self.policy.choose(upcoming)
        return self.rows.plan(batch, begun, budget)

    def observe(self, record: StepRecord, result: HostResult) -> None:
        self.policy.observe(self.rows.outcome(record, result))
