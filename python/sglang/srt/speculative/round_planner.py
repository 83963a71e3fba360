"""What a drafter plans on the host, whatever it drafts with: how many drafts requests get, and
which of them are verified.

All requests that are drafted for in a step get chains of the same number of drafts, from 0 on:
their tier. It is chosen by a `TierPolicy` one step before the drafts are verified. Trees of a head
are all of one shape, whose depth is the only tier; those that need no head have any number of
nodes, and that is their tier. `TileSpec` may then cut the step to the drafts that pay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

from sglang.srt.model_executor.draft_tree_passes import DraftShape, TreeShape
from sglang.srt.registry import ATTENTION_BACKENDS, TIER_POLICIES
from sglang.srt.speculative.adaptive_config import AdaptiveConfig
from sglang.srt.speculative.adaptive_runtime_state import (
    ALL_BATCH_SIZES,
    SpecRuntimeState,
    runtime_states,
)
from sglang.srt.speculative.draft_steps import drafts_of_requests
from sglang.srt.speculative.drafter import DrafterNeeds, DrafterParts, RowPlan, plan_of_drafts
from sglang.srt.speculative.prompt_mix import PromptMix
from sglang.srt.speculative.request_ends import RequestEnds
from sglang.srt.speculative.request_mix import RequestMix
from sglang.srt.speculative.round_prices import MeasuredRounds, RoundPrices, UpcomingRound
from sglang.srt.speculative.round_times import RoundTimes
from sglang.srt.speculative.tier_policy import (
    RoundOutcome,
    TierOptions,
    TierParts,
    TierPolicy,
    same_size,
)
from sglang.srt.speculative.tile_spec.budget import CutRounds, RoundTables, TileSpec
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch, StepWidth


@dataclass(frozen=True, slots=True)
class RoundOptions:
    """How many tokens are drafted and verified.

    Attributes:
        num_steps: drafts of a chain or of a tree without draft steps, or one behind the other in a
            `tree`, at most; at least 1.
        tier_policy: a name in `TIER_POLICIES` (registry.py).
        initial_steps: drafts of a chain before a policy knows anything; None: all.
        adaptive: which numbers of drafts batches of each size may have; None: any.
        tile_spec_cache: steps are cut to the rows that pay (`TileSpec`); the folder where prices
            are kept. None: all drafts are verified.
        num_free: drafts of a chain that need no draft step of a model: the first one of a head,
            which comes from its pass over the target's rows.
        tile_spec_drafts: for benchmarks, drafts of a request that `TileSpec` has verified on
            average, whatever they are worth; None: those that pay.
        tree: all requests are given trees of this shape, whose depth is num_steps; None: chains, or
            `trees_of_any_size`.
        trees_of_any_size: drafts are trees that need no draft steps. Each has its nodes in such an
            order that any first ones are a tree, and a tier is how many of them there are.
    """

    num_steps: int
    tier_policy: str = "fixed"
    initial_steps: int | None = None
    adaptive: AdaptiveConfig | None = None
    tile_spec_cache: Path | None = None
    num_free: int = 1
    tile_spec_drafts: float | None = None
    tree: TreeShape | None = None
    trees_of_any_size: bool = False

    def __post_init__(self) -> None:
        assert not self.trees_of_any_size or not self.draft_steps, "Such trees need no draft steps."
        if self.tree is None:
            return
        assert self.tree.depth == self.num_steps, "A tree is as deep as there are steps."
        assert self.tier_policy == "fixed", "Trees are all of one shape."

    @property
    def tier_options(self) -> TierOptions:
        initial = self.num_steps if self.initial_steps is None else self.initial_steps
        return TierOptions(self.num_steps, initial, self.adaptive, self.trees_of_any_size)

    @property
    def has_trees(self) -> bool:
        """Whether drafts are trees."""
        return self.tree is not None or self.trees_of_any_size

    @property
    def policy(self) -> type[TierPolicy]:
        """Chooses how long chains are."""
        kind: type[TierPolicy] = TIER_POLICIES.load(self.tier_policy)
        return kind

    @property
    def needs_prices(self) -> bool:
        """Whether anything goes by prices of rounds."""
        return self.policy.needs_prices or self.tile_spec_cache is not None

    @property
    def states(self) -> dict[int, SpecRuntimeState]:
        """Of all tiers."""
        tiers = self.policy.tiers(self.tier_options)
        return runtime_states(tiers, self.adaptive, self.num_free)

    @property
    def draft_steps(self) -> dict[DraftShape, tuple[range, ...]]:
        """How many draft steps may follow a step of the target, or which tree, and for batches of
        which sizes (`ExecutionConfig.draft_steps`)."""
        if self.tree is not None:
            return {self.tree: ALL_BATCH_SIZES}
        states = self.states.values()
        return {each.num_draft_steps: each.batch_sizes for each in states if each.num_draft_steps}

    @property
    def max_drafts(self) -> int:
        """Drafts of a request in a step."""
        return self.num_steps if self.tree is None else self.tree.num_drafts

    @property
    def max_confirmed(self) -> int | None:
        """See `DrafterNeeds`."""
        return None if self.tree is None else self.tree.max_confirmed

    def num_drafts(self, tier: int) -> int:
        """Drafts of a request at a tier."""
        return tier if self.tree is None else self.tree.num_drafts

    def num_draft_slots(self, tier: int) -> int:
        """Slots that the draft steps of a tier need behind the rows kept."""
        return max(0, tier - self.num_free) if self.tree is None else self.tree.num_slots

    @property
    def step_width(self) -> StepWidth:
        """Slots of a request in a step, whatever its parameters are: for the rows that verify, and
        for draft steps behind all of them that may be kept."""
        rows, further = 1 + self.max_drafts, self.num_draft_slots(self.num_steps)
        kept = rows if self.max_confirmed is None else 1 + self.max_confirmed
        slots = max(rows, kept + further)
        return StepWidth(decode_rows=slots, lookahead_rows=further, max_kept=kept)

    @property
    def needs(self) -> DrafterNeeds:
        """What follows for a drafter of chains or trees."""
        rows = 1 + self.max_drafts
        return DrafterNeeds(
            max_drafts=self.max_drafts,
            max_rows=rows,
            num_steps=self.tier_options.initial,
            tiers=tuple(self.states),
            extra_slots=self.step_width.decode_rows - rows,
            has_trees=self.has_trees,
            topk=1 if self.tree is None else self.tree.topk,
            max_confirmed=self.max_confirmed,
            max_masks=None if self.tile_spec_cache is None else 0,
            needs_prices=self.needs_prices,
            times_steps=self.needs_prices,
            price_cache=self.tile_spec_cache,
            rounds={self.num_drafts(tier): each.batch_sizes for tier, each in self.states.items()},
        )


class RoundPlanner:
    """Plans the steps of a drafter of chains or trees, and learns from their results.

    Attributes:
        policy: chooses how many drafts requests get.
        tile_spec: cuts steps to the drafts that pay; None: all are verified.
        states: of all tiers.

    Args:
        prices: of rounds; None where nothing goes by them.
        lacks_tokens: whether the drafter's model, which can be left out of steps, was not fed all
            tokens of requests with these rows; None: it is fed all.
    """

    def __init__(
        self,
        options: RoundOptions,
        parts: DrafterParts,
        prices: MeasuredRounds | None,
        lacks_tokens: Callable[[Sequence[int]], bool] | None = None,
    ) -> None:
        self.tile_spec: TileSpec | None = None
        self._times: RoundTimes | None = None
        policy_prices: RoundPrices | None = prices
        packs_in_graphs = _packs_in_graphs(parts)
        if prices is not None and parts.clock is not None:
            self._times = RoundTimes(prices, parts.clock, packs_in_graphs)
        if options.tile_spec_cache is not None:
            assert prices is not None, "Rows go by prices, and nobody has measured any."
            confidence = parts.state.confidence
            assert confidence is not None, "Rows are divided by them (DrafterNeeds.max_masks)."
            tables = RoundTables(prices, packs_in_graphs)
            fixed = options.tile_spec_drafts
            self.tile_spec = TileSpec(tables, confidence.drafts, fixed, options.has_trees)
            policy_prices = CutRounds(prices, self.tile_spec)
        keys = parts.runners.target.graph_keys
        graph_size = same_size if keys is None else keys.decode_size
        self._lacks_tokens = lacks_tokens
        feed_ms = prices.feed_ms if prices is not None and lacks_tokens is not None else None
        is_timed = self._times is not None
        tier_parts = TierParts(options.tier_options, policy_prices, graph_size, feed_ms, is_timed)
        self.policy = options.policy(tier_parts)
        self.states: Mapping[int, SpecRuntimeState] = options.states
        self._options = options
        num_rows = parts.runners.memory.table.num_rows
        self._num_pending_drafts = [0] * num_rows  # of each row of the page table
        self._prompts = PromptMix(parts.runners.max_prompt_rows)
        self._requests = RequestMix(num_rows) if options.policy.reads_lengths else None
        self._next_round = _Round(self.policy.settled, 0)
        self._launched = deque[_Launched]()  # steps that have not been read
        self._ends = RequestEnds(num_rows)
        self._num_late = 0  # steps that are launched before the one before them is read

    def admit(self, new_rows: list[NewRow]) -> None:
        """See `Drafter`."""
        for new in new_rows:
            self._num_pending_drafts[new.row] = 0
            self._ends.admit(new.row, new.params.max_new_tokens)
            if self._requests is not None:
                self._requests.admit(new.row)

    def plan(self, batch: ScheduleBatch) -> RowPlan:
        """What a step feeds, and how many drafts are proposed behind it
        (`RowPlan.next_drafts`)."""
        num_drafts = [
            0 if num_prompt else self._num_pending_drafts[row]
            for row, num_prompt in zip(batch.rows, batch.num_prompt_tokens, strict=True)
        ]
        has_decodes = 0 in batch.num_prompt_tokens
        if has_decodes:
            num_prompts = len(batch.rows) - batch.num_prompt_tokens.count(0)
            self._prompts.observe(num_prompts, sum(batch.num_prompt_tokens), not all(batch.emits))
        decoding = self._next_round if has_decodes else None
        self._launched.append(_Launched(decoding, batch.rows, num_drafts))
        plan = plan_of_drafts(batch, num_drafts, self._options.max_confirmed)
        plan = replace(plan, tier=self._next_round.tier)
        if self.tile_spec is not None:
            is_probe = max(num_drafts) > self._options.num_drafts(self._next_round.tier)
            plan = self.tile_spec.cut(batch, num_drafts, plan, is_probe)
        next_drafts = self._next_drafts(batch, plan.max_accepted)
        for row, count in zip(batch.rows, next_drafts, strict=True):
            self._num_pending_drafts[row] = count
        is_idle = max(num_drafts) == max(next_drafts) == 0
        # A step of chunks alone has no decodes, which are what the head delays.
        can_rest = self._lacks_tokens is not None and is_idle and any(batch.emits)
        rests = can_rest and self.policy.rests
        plan = replace(plan, next_drafts=next_drafts, rests=rests)
        if self._times is not None:
            self._times.expect(batch, plan, max(num_drafts))
        return plan

    def observe(self, result: HostResult) -> None:
        """Tells the policy of each request that verified drafts how many were confirmed."""
        launched = self._launched.popleft()
        if self._launched:  # else there may have been nothing to launch
            self._num_late = len(self._launched)
        num_tokens = self._ends.observe(launched.rows, result.accept_lens)
        if self._times is not None:
            self._times.compare()
        if self.tile_spec is not None:
            verified = self.tile_spec.observe(result)
            counts = launched.num_drafts
        else:
            counts = result.num_drafts
            verified = [
                (count, taken - 1)
                for count, taken in zip(counts, result.accept_lens, strict=False)
                if count
            ]
        if self._requests is not None:
            self._hear_requests(launched.rows, counts, verified, result)
        if launched.round is not None:
            self._prompts.hear(num_tokens)
            self.policy.observe(RoundOutcome(*launched.round, verified))

    def _hear_requests(
        self,
        rows: list[int],
        num_drafts: Sequence[int],
        verified: list[tuple[int, int]],
        result: HostResult,
    ) -> None:
        """Tells what each request of a step was given; `verified` are those that had drafts."""
        assert self._requests is not None
        counts, found = [*num_drafts] or [0] * len(rows), iter(verified)
        right = [next(found)[1] if count else 0 for count in counts]
        fed = [*result.num_drafts] or counts
        self._requests.observe(rows, counts, right, result.accept_lens, fed)

    def _next_drafts(self, batch: ScheduleBatch, max_accepted: int) -> list[int]:
        """Drafts that each request of a step is given for its next one."""
        tier, options = self._next_tier(batch), self._options
        if tier == 0:
            return [0] * len(batch.rows)
        num_slots, num_drafts = options.num_draft_slots(tier), options.num_drafts(tier)
        return drafts_of_requests(batch, max_accepted, num_slots, num_drafts)

    def _next_tier(self, batch: ScheduleBatch) -> int:
        """Drafts that requests get for their next step, which is taken to have the requests that
        emit in this one, and as many prompts per new token as there were lately; 0 if nobody emits,
        whatever tiers there are."""
        bounds, slots = batch.kv_len_upper_bounds, batch.max_q_lens
        lens = zip(bounds, slots, batch.num_prompt_tokens, batch.emits, strict=True)
        emitting = [bound - most + num_prompt for bound, most, num_prompt, emits in lens if emits]
        num_reqs, kv_tokens = len(emitting), sum(emitting)
        if num_reqs == 0:
            self._next_round = _Round(self.policy.settled, 0)
            return 0
        of_pace = partial(self._prompts.upcoming, num_reqs, kv_tokens)
        upcoming = UpcomingRound(num_reqs, kv_tokens, of_pace=of_pace)
        rows = [row for row, emits in zip(batch.rows, batch.emits, strict=True) if emits]
        if self._lacks_tokens is not None:
            upcoming = upcoming._replace(is_fed=not self._lacks_tokens(rows))
        if self._requests is not None:
            lengths = partial(
                self._requests.lengths,
                rows,
                num_new=self._ends.tokens_of_rounds,
                num_late=self._num_late,
            )
            upcoming = upcoming._replace(lengths=lengths)
        tier = self.policy.choose(upcoming)
        self._next_round = _Round(self.policy.settled, len(emitting))
        return tier


class _Round(NamedTuple):
    """What was drafted for.

    Attributes:
        tier: see `TierPolicy.settled`.
        num_reqs: requests that were to be drafted for.
    """

    tier: int
    num_reqs: int


class _Launched(NamedTuple):
    """A step that has not been read.

    Attributes:
        round: None where nobody decodes.
        rows: R rows of the page table.
        num_drafts: R counts of drafts that its requests had.
    """

    round: _Round | None
    rows: list[int]
    num_drafts: list[int]


def _packs_in_graphs(parts: DrafterParts) -> bool:
    """Whether packed steps replay graphs."""
    backend = ATTENTION_BACKENDS.load(parts.runners.target.config.attention_backend)
    reads_q_starts: bool = backend.capabilities().reads_q_starts
    return reads_q_starts
