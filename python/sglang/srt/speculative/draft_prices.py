"""Prices of the rounds of a drafter with a model of its own."""

from __future__ import annotations

from functools import partial

from sglang.srt.lookahead.round_prices import MeasuredRounds
from sglang.srt.model_executor.draft_price_measurement import measure_draft_prices
from sglang.srt.speculative.drafter import DrafterParts
from sglang.srt.speculative.round_options import RoundOptions
from sglang.srt.speculative.tile_spec.profiler import TileSpecProfiler


def measured_rounds(parts: DrafterParts) -> MeasuredRounds | None:
    """Prices of rounds, of which those of the drafter's model are measured here or taken from the
    cache; the drafter's options have `rounds`. None where nothing goes by them."""
    rounds: RoundOptions = parts.options.rounds
    target_prices = parts.prices
    if not rounds.needs_prices or target_prices is None:
        return None
    head, num_rows = parts.runners.runners[1], parts.runners.memory.table.num_rows
    width = 1 + rounds.num_steps
    measure = partial(measure_draft_prices, head, num_rows, width, tuple(head.config.draft_steps))
    if rounds.tile_spec_cache is None:
        prices = measure()
    else:
        profiler = TileSpecProfiler(rounds.tile_spec_cache, parts.runners.target)
        prices = profiler.head(head, target_prices, measure)
    return MeasuredRounds(
        target_prices,
        prices,
        tree=rounds.tree,
        max_requests=num_rows,
        can_rest=head.config.may_rest,
    )
