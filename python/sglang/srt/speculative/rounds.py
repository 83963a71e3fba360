"""Makes the planner of a drafter of chains or trees, and measures what it goes by."""

from __future__ import annotations

import logging
from functools import partial

from sglang.srt.lookahead.cut import TileSpec
from sglang.srt.lookahead.draft_planner import DraftPlanner, LeftOutRows
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices
from sglang.srt.model_executor.price_measurement import measure_draft_prices
from sglang.srt.speculative.drafter import DrafterParts
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.tile_spec.profiler import TileSpecProfiler, cliffs, folder_of

logger = logging.getLogger(__name__)


def measured_rounds(parts: DrafterParts, may_rest: bool = False) -> MeasuredRoundPrices | None:
    """Returns prices of rounds, of which those of the drafter's model are measured here or taken
    from the cache; None where nothing goes by them. The model rests if it may and can."""
    rounds: RoundOptions = parts.options.rounds
    if not rounds.needs_prices or parts.prices is None:
        return None
    head, num_rows = parts.runners.runners[1], parts.runners.memory.table.num_rows
    width = 1 + rounds.num_steps
    measure = partial(measure_draft_prices, head, num_rows, width, tuple(head.config.draft_steps))
    if rounds.tile_spec_cache is None:
        prices = measure()
    else:
        ends = cliffs(parts.prices) or "no number of"
        logger.info("--tile-spec: steps take far longer after %s rows.", ends)
        folder = folder_of(rounds.tile_spec_cache, parts.runners.target)
        prices = TileSpecProfiler(folder, head, parts.runners.target).head(measure)
    return MeasuredRoundPrices(
        parts.prices,
        prices,
        tree=rounds.tree,
        max_requests=num_rows,
        can_rest=may_rest and head.config.may_rest,
        num_free=1 if rounds.block_size is None else 0,
    )


def needs_of_rounds(rounds: RoundOptions) -> DrafterNeeds:
    """Returns what follows for a drafter of chains or trees."""
    rows = 1 + rounds.max_drafts
    return DrafterNeeds(
        max_drafts=rounds.max_drafts,
        max_rows=rows,
        num_steps=rounds.initial,
        tiers=tuple(rounds.states),
        extra_slots=rounds.step_width.decode_rows - rows,
        has_trees=rounds.has_trees,
        topk=1 if rounds.tree is None else rounds.tree.topk,
        max_confirmed=rounds.max_confirmed,
        max_masks=None if rounds.tile_spec_cache is None else 0,
        needs_prices=rounds.needs_prices,
        price_cache=rounds.tile_spec_cache,
        rounds={rounds.num_drafts(tier): each.batch_sizes for tier, each in rounds.states.items()},
    )


def planner_of_rounds(
    options: RoundOptions, parts: DrafterParts, prices: MeasuredRoundPrices | None
) -> DraftPlanner:
    """Makes the planner of a drafter whose options have rounds; prices as `measured_rounds` gave
    them."""
    target = parts.runners.target
    tile_spec: TileSpec | None = None
    if options.tile_spec_cache is not None:
        assert prices is not None, "Rows go by prices, and none were measured."
        packs_in_graphs = target.config.capabilities.reads_q_starts
        tile_spec = TileSpec(prices, packs_in_graphs, options.tile_spec_drafts)
    policy = options.policy(
        PolicyParts(
            options=options,
            max_prompt_rows=parts.runners.max_prompt_rows,
            rounds=tile_spec or prices,
            graph_size=int if target.graph_keys is None else target.graph_keys.decode_size,
            feed_ms=None if prices is None or not prices.can_rest else prices.feed_ms,
        )
    )
    may_rest = all(runner.config.may_rest for runner in parts.runners.runners[1:])
    left_out = LeftOutRows(parts.modelless) if may_rest else None
    return DraftPlanner(options, policy, tile_spec, left_out)
