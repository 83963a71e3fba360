"""Plans how many drafts requests get, and which of them are verified, for a drafter of any kind.

All requests that are drafted for in a step get chains of the same number of drafts, from 0 on:
their tier. A policy chooses it one step before the drafts are verified. Trees of a head are all of
one shape, whose depth is the only tier; those that need no head have any number of nodes, and that
is their tier. `TileSpec` may then cut the step to the drafts that pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget, Planner, StepPlan, StepRecord
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.matched_drafts import class_of
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.tile_spec import TileSpec
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch

ALIKE = Kind()


class LeftOutRows:
    """Keeps whose tokens the drafter's model is not fed: by a request's choice, or since it rests;
    `modelless` names a drafter beside it that needs no model."""

    def __init__(self, modelless: str | None = None) -> None:
        self._modelless = modelless
        self._off = set[int]()  # rows of requests that take no drafts
        self._without_model = set[int]()  # and of those that take none of the model
        self._behind = set[int]()  # rows of requests whose last tokens were left out
        self._lacking = set[int]()  # and of those whose earlier ones were

    def lacks_tokens(self, rows: Sequence[int]) -> bool:
        """Tells whether tokens of a request were left out since it got its row."""
        return not (self._behind.isdisjoint(rows) and self._lacking.isdisjoint(rows))

    def admit(self, new: NewRow) -> None:
        """Forgets the request that had the row before."""
        for rows in (self._off, self._without_model, self._behind, self._lacking):
            rows.discard(new.row)
        choice = new.params.speculative
        if choice.is_off:
            self._off.add(new.row)
        elif choice.drafter is not None and choice.drafter == self._modelless:
            self._without_model.add(new.row)

    def planned(self, plan: StepPlan, rows: Sequence[int], rests: bool) -> StepPlan:
        """Returns the plan of a step of these rows with what it leaves out, and notes it."""
        if rests:
            self._behind.update(set(rows) - self._off - self._without_model)
            return replace(plan, left_out=list(range(len(rows))))
        fed = self._behind.intersection(rows)
        self._behind -= fed
        self._lacking |= fed
        return replace(
            plan,
            left_out=_places(rows, self._off),
            without_model=_places(rows, self._without_model),
            fed_again=sorted(fed),
        )


class DraftPlanner(Planner):
    """Plans by a policy of drafts, for one entry per row of the page table.

    Attributes:
        tile_spec: cuts steps to the drafts that pay; None: all are verified.

    Args:
        left_out: the tokens that the drafter's model was not fed; None: it must be fed all.
    """

    def __init__(
        self,
        options: RoundOptions,
        num_rows: int,
        policy: LengthPolicy,
        tile_spec: TileSpec | None = None,
        left_out: LeftOutRows | None = None,
    ) -> None:
        self.policy = policy
        self.tile_spec = tile_spec
        self._left_out = left_out
        self._options, self._step_width = options, options.step_width
        self._most_drafts = [0] * num_rows  # that each request takes per step
        self._num_pending_drafts = dict[int, int]()  # by row of the page table
        # The step that drafts were proposed in last: `Budget.settled`, and how many requests were
        # to be drafted for.
        self._last_choice = policy.settled, 0
        self._match_lens: Sequence[int] = [0] * num_rows  # by row, of the last step read

    def step_width(self, params: SamplingParams) -> StepWidth:
        """See `Planner`. Who takes fewer drafts than others has room for as many draft steps."""
        return PLAIN_WIDTH if params.speculative.is_off else self._step_width

    def admit(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            self._num_pending_drafts[new.row] = 0
            choice, most = new.params.speculative, self._options.max_drafts
            self._most_drafts[new.row] = (
                0 if choice.is_off else min(most, choice.max_drafts or most)
            )
            if self._left_out is not None:
                self._left_out.admit(new)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """See `Planner`; lens are of the matches that drafts follow. The step verifies what the one
        before it proposed, and the policy chooses what is proposed after it."""
        # A request has no drafts while it feeds its prompt.
        num_drafts = list(map(self._num_pending_drafts.__getitem__, batch.rows))
        plan = plan_of_drafts(batch, num_drafts, self._options.max_confirmed)
        (draft_length, num_drafted_for), next_length = self._last_choice, 0
        if self.tile_spec is not None:
            is_probe = max(num_drafts) > self._options.num_drafts(draft_length)
            plan = self.tile_spec.cut(batch, plan, is_probe)
        budget = self._budget(batch, lens or self._match_lens)
        if budget is None:
            self._last_choice = draft_length, 0
        else:
            next_length = budget.limit - 1
            self._last_choice = budget.settled, batch.emits.count(True)
        next_drafts = self._next_drafts(batch, plan.max_accepted, next_length)
        self._num_pending_drafts.update(zip(batch.rows, next_drafts, strict=True))
        # A step of chunks alone has no decodes, which are what the head delays.
        is_idle = max(num_drafts) == max(next_drafts) == 0
        rests = is_idle and budget is not None and budget.rests
        of_trees = self.policy.reads_matches and self._options.has_trees and not plan.is_plain
        plan = replace(
            plan,
            draft_length=draft_length,
            num_drafted_for=num_drafted_for if batch.num_prompts < len(batch.rows) else None,
            next_drafts=next_drafts,
            wants_paths=plan.wants_paths or of_trees,
        )
        return plan if self._left_out is None else self._left_out.planned(plan, batch.rows, rests)

    def _budget(self, batch: ScheduleBatch, match_lens: Sequence[int]) -> Budget | None:
        """Asks the policy, which hears of steps that emit for a request which takes drafts,
        whatever tiers there are.

        Requests are counted by kind: their next step is taken to have the same. Of the match after
        a prompt nothing is known yet. Those that take no drafts have no kind."""
        takes, split = self._most_drafts.__getitem__, batch.num_prompts
        groups = [*compress(batch.rows[:split], batch.emits)], batch.rows[split:]
        new, old = [list(filter(takes, rows)) for rows in groups]
        if not new and not old:
            return None
        matches = Counter({0: len(old)})
        if self.policy.reads_matches:
            matches = Counter([class_of(match_lens[row]) for row in old])
        k, plain = 1 + self._options.num_steps, EmittingRequest(None, 1, False)
        emitting = Counter({EmittingRequest(Kind(), k, pending=0): len(new)})
        for match, count in matches.items():
            emitting[EmittingRequest(Kind(match=match), k)] = count
        emitting[plain] = len(groups[1]) - len(old)
        emitting[plain._replace(pending=0)] = len(groups[0]) - len(new)
        is_fed = self._left_out is None or not self._left_out.lacks_tokens(new + old)
        return self.policy.choose(UpcomingStep.of(batch, +emitting, is_fed=is_fed))

    def _next_drafts(self, batch: ScheduleBatch, max_accepted: int, tier: int) -> list[int]:
        """Drafts that each request of a step is given for its next one."""
        if tier == 0:
            return [0] * len(batch.rows)
        num_slots, num_drafts = self._options.num_draft_slots(tier), self._options.num_drafts(tier)
        counts = drafts_of_requests(batch, max_accepted, num_slots, num_drafts)
        mosts = list(map(self._most_drafts.__getitem__, batch.rows))
        return counts if min(mosts) >= num_drafts else list(map(min, counts, mosts))

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """See `Planner`. Copies were made before the step ran, so nothing is waited for."""
        rows, kinds = record.rows, [ALIKE] * len(record.rows)
        if self.policy.reads_matches and record.plan.num_drafted_for is not None:
            assert record.lens is not None, "The drafter has matches."
            self._match_lens = lens = record.lens.read()[0].tolist()
            kinds = [Kind(match=class_of(lens[row])) for row in rows]
        num_drafts: Sequence[int] = result.num_drafts or [0] * len(rows)
        num_accepted = result.accept_lens
        if self.tile_spec is not None:
            num_drafts = record.plan.num_drafts
            num_accepted = self.tile_spec.observe(record, result)
        outcome = StepOutcome(
            plan=record.plan,
            rows=rows,
            num_tried=[1 + count for count in num_drafts],
            num_accepted=num_accepted,
            num_tokens=sum(result.accept_lens),
            num_fed=result.num_drafts,
            kinds=kinds,
            paths=result.paths,
        )
        self.policy.observe(outcome)


def _places(rows: Sequence[int], chosen: set[int]) -> Sequence[int]:
    return [place for place, row in enumerate(rows) if row in chosen] if chosen else ()


def drafts_of_requests(
    batch: ScheduleBatch, max_accepted: int, num_steps: int, num_drafts: int
) -> list[int]:
    """R counts of drafts (`StepPlan.next_drafts`): as many of each request that drafts, else 0.

    A request drafts if the step emits tokens of it and it has slots for all draft steps, however
    many rows the step keeps. All others are left out, such as prompts that are read in chunks and
    requests without look-ahead, so nothing of theirs is read or written, and no column past a
    row's end, which has no slots.

    Args:
        max_accepted: see `StepPlan`.
        num_steps: slots that draft steps need.
    """
    slots = zip(batch.emits, batch.num_prompt_tokens, batch.max_q_lens, strict=True)
    return [
        num_drafts if emits and (num_prompt or max_accepted) + num_steps <= reserved else 0
        for emits, num_prompt, reserved in slots
    ]


def plan_of_drafts(
    batch: ScheduleBatch, num_drafts: Sequence[int], max_confirmed: int | None = None
) -> StepPlan:
    """The plan of a step in which prompts are fed, and every other request feeds its certain token
    and its drafts, of which the host knows how many there are. It is plain where there are none.

    Args:
        num_drafts: R counts, 0 where a prompt is fed.
        max_confirmed: see `DrafterNeeds`.
    """
    most = max(num_drafts)
    if most == 0:
        return StepPlan(counts=StepCounts.plain(batch), num_drafts=num_drafts)
    accepted = most if max_confirmed is None else min(most, max_confirmed)
    emits, q_lens = list(map(int, batch.emits)), [1 + count for count in num_drafts]
    num_read, split = q_lens.copy(), batch.num_prompts
    q_lens[:split], num_read[:split] = batch.num_prompt_tokens[:split], emits[:split]
    return StepPlan(
        counts=StepCounts(q_lens, num_read, emits, [True] * len(emits)),
        max_pending=1 + most,
        max_accepted=1 + accepted,
        num_drafts=num_drafts,
    )
