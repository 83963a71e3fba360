"""Plans on the host for a drafter of any kind: how many drafts requests get, and which of them are
verified.

All requests that are drafted for in a step get chains of the same number of drafts, from 0 on:
their tier. It is chosen by a `TierPolicy` one step before the drafts are verified. Trees of a head
are all of one shape, whose depth is the only tier; those that need no head have any number of
nodes, and that is their tier. `TileSpec` may then cut the step to the drafts that pay.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from sglang.srt.lookahead.contract import Planner, StepPlan, StepRecord
from sglang.srt.lookahead.prompt_mix import PromptMix
from sglang.srt.lookahead.round_prices import MeasuredRounds, RoundPrices, UpcomingRound
from sglang.srt.lookahead.stretches import Stretches
from sglang.srt.lookahead.tier_policy import (
    RoundOutcome,
    TierParts,
    same_size,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.draft_steps import drafts_of_requests
from sglang.srt.speculative.drafter import DrafterParts, plan_of_drafts
from sglang.srt.speculative.left_out import LeftOutRows
from sglang.srt.speculative.round_options import RoundOptions
from sglang.srt.speculative.tile_spec.budget import CutRounds, RoundTables, TileSpec
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


class RoundPlanner(Planner):
    """Plans the steps of a drafter of chains or trees, and learns from their results.

    Attributes:
        policy: chooses how many drafts requests get.
        tile_spec: cuts steps to the drafts that pay; None: all are verified.

    Args:
        prices: of rounds; None where nothing goes by them.
        left_out: the tokens that the drafter's model was not fed; None: it is fed all.
    """

    def __init__(
        self,
        options: RoundOptions,
        parts: DrafterParts,
        prices: MeasuredRounds | None,
        left_out: LeftOutRows | None = None,
    ) -> None:
        self.tile_spec: TileSpec | None = None
        policy_prices: RoundPrices | None = prices
        packs_in_graphs = parts.runners.target.config.capabilities.reads_q_starts
        if options.tile_spec_cache is not None:
            assert prices is not None, "Rows go by prices, and none were measured."
            tables = RoundTables(prices, packs_in_graphs)
            fixed = options.tile_spec_drafts
            self.tile_spec = TileSpec(tables, fixed, options.has_trees)
            policy_prices = CutRounds(prices, self.tile_spec)
        keys = parts.runners.target.graph_keys
        graph_size = same_size if keys is None else keys.decode_size
        self._left_out = left_out
        feed_ms = prices.feed_ms if prices is not None and left_out is not None else None
        tier_parts = TierParts(options.tier_options, policy_prices, graph_size, feed_ms)
        self.policy = options.policy(tier_parts)
        self._options, self._step_width = options, options.step_width
        num_rows = parts.runners.memory.table.num_rows
        self._num_pending_drafts = [0] * num_rows  # of each row of the page table
        self._prompts = PromptMix(parts.runners.max_prompt_rows)
        self._stretches = Stretches(num_rows) if options.policy.reads_lengths else None
        # The round that drafts were proposed for last: `TierPolicy.settled`, and how many requests
        # were to be drafted for.
        self._next_round = self.policy.settled, 0
        self._reads_matches = options.policy.reads_matches
        self._match_lens: Sequence[int] = [0] * num_rows  # by row, of the last step read

    def step_width(self, params: SamplingParams) -> StepWidth:
        """See `Planner`; the same whatever the parameters are."""
        return self._step_width

    def admit(self, new_rows: list[NewRow]) -> None:
        """See `Planner`."""
        for new in new_rows:
            self._num_pending_drafts[new.row] = 0
            if self._left_out is not None:
                self._left_out.admit(new.row)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        """Plans what a step feeds, and how many drafts are proposed after it
        (`StepPlan.next_drafts`); lens are of the matches that drafts follow."""
        num_drafts = [
            0 if num_prompt else self._num_pending_drafts[row]
            for row, num_prompt in zip(batch.rows, batch.num_prompt_tokens, strict=True)
        ]
        has_decodes = 0 in batch.num_prompt_tokens
        if has_decodes:
            num_prompts = len(batch.rows) - batch.num_prompt_tokens.count(0)
            self._prompts.observe(num_prompts, sum(batch.num_prompt_tokens), not all(batch.emits))
        tier, num_drafted_for = self._next_round
        plan = plan_of_drafts(batch, num_drafts, self._options.max_confirmed)
        if self.tile_spec is not None:
            is_probe = max(num_drafts) > self._options.num_drafts(tier)
            plan = self.tile_spec.cut(batch, plan, is_probe)
        next_drafts = self._next_drafts(batch, plan.max_accepted, lens)
        for row, count in zip(batch.rows, next_drafts, strict=True):
            self._num_pending_drafts[row] = count
        is_idle = max(num_drafts) == max(next_drafts) == 0
        # A step of chunks alone has no decodes, which are what the head delays.
        left_out = self._left_out
        can_rest = left_out is not None and is_idle and any(batch.emits)
        rests = can_rest and self.policy.rests
        of_trees = self._reads_matches and self._options.has_trees and not plan.is_plain
        plan = replace(
            plan,
            tier=tier,
            num_drafted_for=num_drafted_for if has_decodes else None,
            next_drafts=next_drafts,
            rests=rests,
            fed_again=() if left_out is None else left_out.plan(batch.rows, rests),
            wants_paths=plan.wants_paths or of_trees,
        )
        return plan

    def observe(self, record: StepRecord, result: HostResult) -> None:
        """Tells the policy of each request that verified drafts how many were confirmed."""
        if self.tile_spec is not None:
            verified = self.tile_spec.observe(record, result)
            counts = record.plan.num_drafts
        else:
            counts = result.num_drafts
            verified = [
                (count, taken - 1)
                for count, taken in zip(counts, result.accept_lens, strict=False)
                if count
            ]
        if self._stretches is not None:
            self._learn_stretches(self._stretches, record.rows, counts, verified, result)
        plan = record.plan
        if plan.num_drafted_for is not None:
            self._prompts.hear(sum(result.accept_lens))
            matched = self._matched(record, result) if self._reads_matches else ()
            self.policy.observe(RoundOutcome(plan.tier, plan.num_drafted_for, verified, matched))

    def _matched(
        self, record: StepRecord, result: HostResult
    ) -> list[tuple[int, int, Collection[int]]]:
        """See `RoundOutcome.matched`. The lengths were copied before the step ran, so nothing is
        waited for."""
        assert record.lens is not None, "The drafter has matches."
        self._match_lens = lens = record.lens.read()[0].tolist()
        fed = enumerate(zip(record.rows, result.num_drafts, strict=False))
        return [
            (lens[row], count, right_places(result, index)) for index, (row, count) in fed if count
        ]

    @staticmethod
    def _learn_stretches(
        stretches: Stretches,
        rows: Sequence[int],
        num_drafts: Sequence[int],
        verified: list[tuple[int, int]],
        result: HostResult,
    ) -> None:
        """Tells how many drafts of each request were right; `verified` are those that had any."""
        counts, found = [*num_drafts] or [0] * len(rows), iter(verified)
        right = [next(found)[1] if count else 0 for count in counts]
        stretches.observe(rows, counts, right, [*result.num_drafts] or counts)

    def _next_drafts(
        self, batch: ScheduleBatch, max_accepted: int, match_lens: Sequence[int] | None
    ) -> list[int]:
        """Drafts that each request of a step is given for its next one."""
        tier, options = self._next_tier(batch, match_lens), self._options
        if tier == 0:
            return [0] * len(batch.rows)
        num_slots, num_drafts = options.num_draft_slots(tier), options.num_drafts(tier)
        return drafts_of_requests(batch, max_accepted, num_slots, num_drafts)

    def _next_tier(self, batch: ScheduleBatch, match_lens: Sequence[int] | None) -> int:
        """Drafts that requests get for their next step, which is taken to have the requests that
        emit in this one, and as many prompts per new token as there were lately; 0 if no request
        emits, whatever tiers there are."""
        lens = zip(batch.kv_lens_before, batch.num_prompt_tokens, batch.emits, strict=True)
        emitting = [kv_len + num_prompt for kv_len, num_prompt, emits in lens if emits]
        num_reqs, kv_tokens = len(emitting), sum(emitting)
        if num_reqs == 0:
            self._next_round = self.policy.settled, 0
            return 0
        of_pace = partial(self._prompts.upcoming, num_reqs, kv_tokens)
        upcoming = UpcomingRound(num_reqs, kv_tokens, of_pace=of_pace)
        rows = [row for row, emits in zip(batch.rows, batch.emits, strict=True) if emits]
        if self._left_out is not None:
            upcoming = upcoming._replace(is_fed=not self._left_out.lacks_tokens(rows))
        if self._stretches is not None:
            fed = zip(batch.num_prompt_tokens, batch.emits, strict=True)
            num_new = sum(emits and num_prompt > 0 for num_prompt, emits in fed)
            is_renewed = 2 * num_new >= num_reqs
            if is_renewed:
                self._stretches.renew()
            upcoming = upcoming._replace(lengths=self._stretches.lengths, is_renewed=is_renewed)
        if self._reads_matches:  # of a prompt nothing is known yet
            known, prompts = match_lens or self._match_lens, batch.num_prompt_tokens
            pairs = zip(batch.rows, prompts, batch.emits, strict=True)
            found = [0 if num_prompt else known[row] for row, num_prompt, emits in pairs if emits]
            upcoming = upcoming._replace(match_lens=found)
        tier = self.policy.choose(upcoming)
        self._next_round = self.policy.settled, num_reqs
        return tier


def right_places(result: HostResult, index: int) -> Collection[int]:
    """Returns the places of the drafts of a request that were right: of a tree its nodes but the
    root, counted from 0."""
    num_right = result.accept_lens[index] - 1
    if not result.paths:
        return range(num_right)
    return [node - 1 for node in result.paths[index][1 : 1 + num_right]]
