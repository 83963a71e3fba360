"""Plans how many drafts requests get, and which of them are verified, for a drafter of any kind.

All requests that are drafted for in a step get chains of the same number of drafts, from 0 on:
their tier. A policy chooses it one step before the drafts are verified. Trees of a head are all of
one shape, whose depth is the only tier; those that need no head have any number of nodes, and that
is their tier. `TileSpec` may then cut the step to the drafts that pay.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import compress

from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget, Planner, StepPlan, StepRecord
from sglang.srt.lookahead.cut import TileSpec
from sglang.srt.lookahead.length_policy import LengthPolicy
from sglang.srt.lookahead.matched_drafts import KINDS, class_of
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.step_sizes import PLAIN_WIDTH, StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch

PLAIN = EmittingRequest(None, 1, is_adjustable=False)
PLAIN_NEW = EmittingRequest(None, 1, is_adjustable=False, pending=0)


class LeftOutRows:
    """Keeps whose tokens the drafter's model is not fed: by a request's choice, or since it rests;
    `modelless` names a drafter beside it that needs no model."""

    def __init__(self, modelless: str | None = None) -> None:
        self._modelless = modelless
        # Rows of requests that take no drafts, and of those that take none of the model.
        self._off, self._without_model = set[int](), set[int]()
        # Rows of requests of which tokens were left out, and of those whose last ones were.
        self._lacking, self._behind = set[int](), set[int]()

    def lacks_tokens(self, rows: Sequence[int]) -> bool:
        """Tells whether tokens of a request were left out since it got its row."""
        return not self._lacking.isdisjoint(rows)

    def admit(self, new: NewRow) -> None:
        """Forgets the request that had the row before."""
        for rows in (self._off, self._without_model, self._behind, self._lacking):
            rows.discard(new.row)
        choice = new.params.speculative
        if choice.is_off:
            self._off.add(new.row)
        elif choice.drafter is not None and choice.drafter == self._modelless:
            self._without_model.add(new.row)

    def of_step(self, rows: Sequence[int], rests: bool) -> tuple[Sequence[int], ...]:
        """Returns `left_out`, `without_model` and `fed_again` of the plan of a step, and notes what
        it leaves out."""
        if rests:
            unfed = set(rows) - self._off - self._without_model
            self._behind |= unfed
            self._lacking |= unfed
            return list(range(len(rows))), (), ()
        fed = self._behind.intersection(rows) if self._behind else set()
        self._behind -= fed
        return _places(rows, self._off), _places(rows, self._without_model), sorted(fed)


class DraftPlanner(Planner):
    """Plans by a policy of drafts, for one entry per row of the page table. `tile_spec` cuts steps
    to the drafts that pay, else all are verified; without `left_out` the drafter's model must be
    fed all tokens."""

    def __init__(
        self,
        options: RoundOptions,
        policy: LengthPolicy,
        tile_spec: TileSpec | None = None,
        left_out: LeftOutRows | None = None,
    ) -> None:
        self.policy = policy
        self.tile_spec = tile_spec
        self._left_out = left_out
        self._options, self._step_width = options, options.step_width
        self._old = [EmittingRequest(kind, 1 + options.num_steps) for kind in KINDS]
        self._new = self._old[0]._replace(pending=0)
        self._limits = dict[int, int]()  # of rows whose requests take fewer drafts than others
        self._num_pending_drafts = dict[int, int]()  # by row of the page table
        self._num_drafted_for = 0  # requests in the last step

    def step_width(self, params: SamplingParams) -> StepWidth:
        """See `Planner`. Who takes fewer drafts than others has room for as many draft steps."""
        return PLAIN_WIDTH if params.speculative.is_off else self._step_width

    def admit(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            self._num_pending_drafts[new.row] = 0
            self._limits.pop(new.row, None)
            choice, most = new.params.speculative, self._options.max_drafts
            limit = 0 if choice.is_off else choice.max_drafts or most
            if limit < most:
                self._limits[new.row] = limit
            if self._left_out is not None:
                self._left_out.admit(new)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """See `Planner`; lens are of the matches that drafts follow. The step verifies what the one
        before it proposed, and the policy chooses what is proposed after it."""
        # A request has no drafts while it feeds its prompt.
        num_drafts = list(map(self._num_pending_drafts.__getitem__, batch.rows))
        most, options, draft_length = max(num_drafts), self._options, self.policy.settled
        num_drafted_for, self._num_drafted_for = self._num_drafted_for, 0
        counts, wants_scores = StepCounts.of_drafts(batch, num_drafts), False
        if self.tile_spec is not None and most:
            cut_counts, wants_scores = self.tile_spec.cut(batch, counts, num_drafts)
            if most <= options.num_drafts(draft_length):  # a probe tries all, whatever their worth
                counts = cut_counts
        budget = self._budget(batch, lens or ())
        max_accepted = 1 + min(most, options.max_confirmed or most)
        next_drafts = self._next_drafts(batch, max_accepted, budget.limit - 1)
        self._num_pending_drafts.update(zip(batch.rows, next_drafts, strict=True))
        left_out: tuple[Sequence[int], ...] = (), (), ()
        if self._left_out is not None:
            # A step of chunks alone has no decodes, which are what the head delays.
            rests = budget.rests and most == max(next_drafts) == 0
            left_out = self._left_out.of_step(batch.rows, rests)
        asks_paths = wants_scores or (self.policy.reads_matches and most > 0)
        return StepPlan(
            counts=counts,
            max_pending=1 + most,
            max_accepted=max_accepted,
            wants_paths=asks_paths and options.has_trees,
            wants_scores=wants_scores,
            draft_length=draft_length,
            num_drafts=num_drafts,
            next_drafts=next_drafts,
            left_out=left_out[0],
            without_model=left_out[1],
            fed_again=left_out[2],
            num_drafted_for=num_drafted_for if batch.num_prompts < len(batch.rows) else None,
        )

    def _budget(self, batch: ScheduleBatch, match_lens: Sequence[int]) -> Budget:
        """Asks the policy, which hears of steps that emit for a request which takes drafts. These
        are counted by kind, which their next step is taken to have too: nothing is known of the
        match after a prompt, and requests that take no drafts have no kind."""
        split, limits = batch.num_prompts, self._limits
        groups = list(compress(batch.rows[:split], batch.emits)), batch.rows[split:]
        new, old = groups
        if limits:
            new, old = [[row for row in rows if limits.get(row, 1)] for rows in groups]
        if not new and not old:
            return Budget(1)
        self._num_drafted_for = batch.emits.count(True)
        matches = {0: len(old)}
        if self.policy.reads_matches:
            matches = Counter([class_of(match_lens[row]) for row in old])
        emitting = {self._new: len(new)}
        emitting |= {self._old[match]: count for match, count in matches.items()}
        emitting |= {PLAIN: len(groups[1]) - len(old), PLAIN_NEW: len(groups[0]) - len(new)}
        is_fed = self._left_out is None or not self._left_out.lacks_tokens(new + old)
        return self.policy.choose(UpcomingStep.of(batch, emitting, is_fed=is_fed))

    def _next_drafts(self, batch: ScheduleBatch, max_accepted: int, tier: int) -> list[int]:
        """Returns how many drafts each request of a step is given for its next one."""
        if tier == 0:
            return [0] * len(batch.rows)
        num_slots, num_drafts = self._options.num_draft_slots(tier), self._options.num_drafts(tier)
        counts = drafts_of_requests(batch, max_accepted, num_slots, num_drafts)
        if self._limits:
            mosts = (self._limits.get(row, num_drafts) for row in batch.rows)
            counts = list(map(min, counts, mosts))
        return counts

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """See `Planner`. Copies were made before the step ran, so nothing is waited for."""
        rows, kinds = record.rows, list[Kind]()
        if self.policy.reads_matches and record.plan.num_drafted_for is not None:
            assert record.lens is not None, "The drafter has matches."
            lens = record.lens.read()[0].tolist()
            kinds = [KINDS[class_of(lens[row])] for row in rows]
        num_drafts: Sequence[int] = result.num_drafts or [0] * len(rows)
        num_accepted = result.accept_lens
        if self.tile_spec is not None:
            num_drafts = record.plan.num_drafts
            num_accepted = self.tile_spec.observe(record, result)
        outcome = StepOutcome(
            record=record,
            result=result,
            num_tried=[1 + count for count in num_drafts],
            num_accepted=num_accepted,
            kinds=kinds,
        )
        self.policy.observe(outcome)


def _places(rows: Sequence[int], chosen: set[int]) -> Sequence[int]:
    return [place for place, row in enumerate(rows) if row in chosen] if chosen else ()


def drafts_of_requests(
    batch: ScheduleBatch, max_accepted: int, num_steps: int, num_drafts: int
) -> list[int]:
    """Returns `StepPlan.next_drafts`: as many of each request that drafts, else 0. A request drafts
    if the step emits tokens of it, and it has the `num_steps` slots of draft steps however many
    rows the step keeps. Of others, such as prompts that are read in chunks, nothing is read or
    written, nor past a row's end, which has no slots."""
    split, least, slots = batch.num_prompts, max_accepted + num_steps, batch.max_q_lens
    prompts = zip(batch.emits[:split], batch.num_prompt_tokens, slots, strict=False)
    counts = [num_drafts * (emits and fed + num_steps <= most) for emits, fed, most in prompts]
    return counts + [num_drafts * (reserved >= least) for reserved in slots[split:]]


def plan_of_drafts(
    batch: ScheduleBatch, num_drafts: Sequence[int], max_confirmed: int | None = None
) -> StepPlan:
    """Plans a step with these drafts; max_confirmed: see `DrafterNeeds`."""
    most = max(num_drafts)
    return StepPlan(
        counts=StepCounts.of_drafts(batch, num_drafts),
        max_pending=1 + most,
        max_accepted=1 + min(most, max_confirmed or most),
        num_drafts=num_drafts,
    )
