"""Checks what rounds cost: of chains and trees, and beside prompts."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from served_rounds import rounds
from sglang.srt.layers.forward_batch import MIXED, GraphKey
from sglang.srt.lookahead.cut import TileSpec
from sglang.srt.lookahead.round_prices import MAX_COSTS, MeasuredRoundPrices, StepCase
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, PriceTable, no_graphs

SHAPES = [TreeShape(4, 1, 4), TreeShape(4, 3, 10), TreeShape(2, 5, 7), TreeShape(4, 5, 3)]


def line(per_row: float) -> Curve:
    return Curve((1, 1000), (per_row, 1000 * per_row))


@pytest.mark.parametrize("shape", [None, *SHAPES], ids=str)
def test_a_round_costs_the_rows_verified_the_pass_over_paths_and_the_drafting(
    shape: TreeShape | None,
) -> None:
    """Rows, logits, each token of KV and each row that sees one have prices of their own. A chain's
    first draft is of the pass over rows, further ones of a pass that was measured with as many, or
    with the next larger number: requests may ask for any. A tree is drafted in one pass. The head
    is not fed rows of requests that take no drafts."""
    target = PriceTable(no_graphs, {}, line(1.0), line(2.0), 3, 4)
    extend = PriceTable(no_graphs, {}, line(0.1), line(50.0), 0.3, 0.4)
    passes: dict[Any, PassPrices] = {n: PassPrices(line(5.0 * n), 0.6 * n) for n in (1, 4)}
    if shape is not None:
        passes[shape] = PassPrices(line(7.0), 0.7)
    rounds = MeasuredRoundPrices(target, DraftPrices(extend, passes), tree=shape)
    numbers = range(6) if shape is None else (shape.num_drafts,)
    for num_reqs, num_drafts, num_cut, prompt_rows, num_plain in itertools.product(
        (1, 3, 8), numbers, (0, 1), (0, 32), (0, 2)
    ):
        num_all = num_reqs + num_plain
        rows = num_all + num_reqs * num_drafts - num_cut * (num_drafts > 0)
        paths = rows - num_plain if shape is None else num_reqs * (1 + shape.max_confirmed)
        rows_ms = 1.0 * (rows + prompt_rows) + 2.0 * (rows + (prompt_rows > 0))
        rows_ms += 0.1 * (paths + prompt_rows)
        kv_ms = 3 + 4 * rows / num_all + 0.3 + 0.4 * paths / num_reqs
        if shape is not None:
            rows_ms, kv_ms = rows_ms + 7.0 * num_reqs, kv_ms + 0.7
        elif num_drafts:
            num_steps = (0, 1, 4, 4, 4)[num_drafts - 1]
            rows_ms += 50.0 * num_reqs + 5.0 * num_steps * num_reqs
            kv_ms += 0.6 * num_steps
        cost = rounds.cost(num_all, num_drafts, rows, prompt_rows, num_plain)
        assert (cost.rows_ms, cost.kv_ms) == (pytest.approx(rows_ms), pytest.approx(kv_ms))
        if (num_cut, prompt_rows) == (0, 0):
            whole_ms = rounds.round_ms(StepCase(num_all, 40, num_plain=num_plain), num_drafts)
            assert whole_ms == pytest.approx(rows_ms + 40 * kv_ms)
    table = TileSpec(rounds, packs_in_graphs=False).table(StepCase(3), numbers[-1])
    assert table.rows[-1] == 3 * (1 + numbers[-1])
    whole = rounds.cost(3, numbers[-1], table.rows[-1], 0, 0)
    assert table.costs_ms[-1] == pytest.approx(whole.rows_ms)


def test_a_round_beside_prompts_costs_what_it_adds_to_them() -> None:
    """In steps so wide that each row costs the same, prompts change nothing."""
    prices = rounds()
    alone = StepCase(512)
    beside = alone._replace(prompts=((1.0, 1024),))
    for tier in (1, 3, 7):
        assert prices.round_ms(beside, tier) == pytest.approx(prices.round_ms(alone, tier), rel=0.1)
    few = StepCase(8)
    mixed = few._replace(prompts=((0.75, 0), (0.25, 512)))
    sure = few._replace(prompts=((1.0, 512),))
    expected = 0.75 * prices.round_ms(few, 3) + 0.25 * prices.round_ms(sure, 3)
    assert prices.round_ms(mixed, 3) == pytest.approx(expected)
    table = TileSpec(prices, packs_in_graphs=True).table(StepCase(8), 3, 512)
    assert table.costs_ms[-1] == pytest.approx(prices.round_ms(sure, 3))
    grows = [prices.round_ms(each, 7) - prices.round_ms(each, 1) for each in (few, sure)]
    assert grows[1] > grows[0] + 0.5, "beside prompts rows are not free"


def test_a_full_server_has_no_room_for_one_more_prompt() -> None:
    """It comes when another request has ended, so the step replays a graph of as many requests;
    without one it would seem to cost the same whatever is drafted."""
    most, key = 32, GraphKey(MIXED, 32, 8, 512)

    def find(num_reqs: int, widest: int, num_rows: int) -> GraphKey | None:
        return key if num_reqs <= most and num_rows <= key.num_tokens else None

    eager, head = Curve((1, 4096), (99.0, 99.0)), rounds().head
    target = replace(rounds().target, find=find, graphs_ms={key: 10.0}, eager=eager)
    prices = MeasuredRoundPrices(target, head, max_requests=most)
    beside = StepCase(most, 0, ((1.0, 64),))
    for num_drafts in (0, 1, 7):
        assert prices.cost(most, num_drafts, most * (1 + num_drafts), 64, 0).rows_ms < 99.0
        assert prices.round_ms(beside, num_drafts) < 20.0
        last_bucket = TileSpec(prices).table(beside, max(1, num_drafts), 64)
        assert last_bucket.costs_ms[-1] < 20.0
    without_bound = MeasuredRoundPrices(target, head)
    assert without_bound.cost(most, 1, 2 * most, 64, 0).rows_ms > 99.0, "what this is about"


def test_prices_that_are_remembered_are_bounded() -> None:
    """Prompts are of any number of rows."""
    prices = rounds()
    for number in range(2 * MAX_COSTS):
        prices.round_ms(StepCase(8, 0, ((1.0, number),)), 3)
    assert prices.cost.cache_info().currsize <= MAX_COSTS
