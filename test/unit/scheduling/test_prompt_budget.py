"""Tests how many prompt tokens a step gets, over tables of prices made by hand."""

from __future__ import annotations

import math
import random

import pytest

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import DECODE, MIXED, GraphKey
from sglang.srt.lookahead.prompt_budget import (
    MAX_EXCESS,
    MIN_PROMPT_TOKENS,
    NO_DECODES,
    PRICE_MARGIN,
    ROW_TILE,
    SHARE_OF_OTHERS,
    PromptBudget,
)
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk, StepShape, no_graphs

LARGEST = 8192
HEAD = Curve((1, 128, 1024), (0.4, 0.45, 1.6))
MANY = Curve((1280, 2048, 4096, 8192), (26.0, 41.0, 80.0, 158.0))
KEYS = GraphKeys(GraphSupport.RAGGED_Q, 128, 1, 1024)


def staircase_ms(key: GraphKey) -> float:
    """It falls in places, and prompts cost more than decodes."""
    more = {MIXED: 0.5, DECODE: 0.0}[key.tag] + (key.num_reqs > 8) * 0.2
    return 5.6 + key.num_tokens / 50 + more + 2.0 * (key.num_tokens == 448)


GPU = PriceTable(
    KEYS.find_shape,
    {key: staircase_ms(key) for key in KEYS.all},
    MANY,
    HEAD,
    kv_ms=5e-5,
    row_kv_ms=1e-6,
    prompt_kv_ms=Curve((128, 512, 2048), (4.2e-4, 4.6e-4, 1.8e-3)),
)
CPU = PriceTable(
    no_graphs,
    {},
    Curve((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128), tuple(range(3, 14))),
    Curve((1, 64), (0.1, 1.0)),
    kv_ms=1e-4,
    row_kv_ms=1e-5,
    prompt_kv_ms=Curve((8, 64), (8e-5, 6.4e-4)),
)
DEARER_FOR_LESS = PriceTable(
    no_graphs, {}, Curve((1, 256, 512, 1024), (9.0, 20.0, 12.0, 30.0)), HEAD
)
TABLES = {"gpu": GPU, "cpu": CPU, "dearer for less": DEARER_FOR_LESS}


def bounded(prices: PriceTable, max_ms: float) -> PromptBudget:
    """A budget that has seen no step yet, so that prices are taken as they are."""
    return PromptBudget(LARGEST, prices, max_ms * PRICE_MARGIN)


class Step:
    """The oracle: a step that is priced as a whole."""

    def __init__(self, prices: PriceTable, decodes: StepShape) -> None:
        self.prices, self.decodes = prices, decodes
        self.prompts: list[tuple[int, int, int]] = []

    @property
    def num_rows(self) -> int:
        return self.decodes.num_rows + sum(count + ahead for _, count, ahead in self.prompts)

    def ms_with(self, *more: int) -> float:
        prompts = [*self.prompts, *([more] if more else [])]
        whole = self.decodes._replace(
            num_reqs=self.decodes.num_reqs + len(prompts),
            widest=10_000,
            num_rows=self.decodes.num_rows + sum(count + ahead for _, count, ahead in prompts),
            num_read=self.decodes.num_read + sum(1 + ahead for _, _, ahead in prompts),
            prompts=tuple(PromptChunk(start, count + ahead) for start, count, ahead in prompts),
        )
        return self.prices.price_ms(whole)


def draw_decodes(rng: random.Random) -> StepShape:
    num_reqs, width = rng.choice([1, 3, 8, 64, 120]), rng.choice([1, 1, 3, 15])
    kv_tokens = num_reqs * rng.choice([10, 1000, 5000])
    return StepShape(num_reqs, 1, num_reqs * width, num_reqs * width, kv_tokens, width * kv_tokens)


@pytest.mark.parametrize("name", TABLES)
def test_of_what_the_bound_allows_a_step_gets_the_most_or_ends_with_a_tile(name: str) -> None:
    """Against trying all sizes, prompt by prompt, as the step fills. Without decodes the first
    prompt has no bound, and further ones come along up to a share of it."""
    prices, num_bounded, num_whole = TABLES[name], 0, 0
    rng = random.Random(name)
    for number in range(45):
        max_ms = rng.choice([0.1, 6.0, 8.0, 11.0, 15.0, 25.0, 40.0, 90.0])
        decodes = NO_DECODES if number % 8 == 0 else draw_decodes(rng)
        allowance = bounded(prices, max_ms).open(decodes, True)
        step, num_taken = Step(prices, decodes), 0
        decodes_ms = step.ms_with()
        others_ms = SHARE_OF_OTHERS * max_ms
        if decodes.num_reqs:
            others_ms = decodes_ms + SHARE_OF_OTHERS * max(max_ms - decodes_ms, 0.0)
        else:
            max_ms = math.inf
        assert allowance.price_ms is None, "no prompt yet"
        for _ in range(rng.choice([1, 2, 4])):
            position, ahead = rng.choice([0, 0, 700, 30_000, 100_000]), rng.choice([0, 0, 7])
            num_left = rng.choice([1, 60, 300, 900, 2500])
            most = min(num_left, LARGEST - num_taken)
            comes_along = num_taken > 0 and rng.random() < 0.5
            own_ms = others_ms if comes_along else max_ms
            allowed = [n for n in range(1, most + 1) if step.ms_with(position, n, ahead) <= own_ms]
            best = max(allowed, default=0)
            room = allowance.room_for(position, num_left, ahead, comes_along)
            assert allowance.room_for(position, num_left, ahead, comes_along) == room
            least = min(most, MIN_PROMPT_TOKENS - num_taken)
            assert least <= room <= most
            if room > max(least, 0):
                assert room in allowed
                assert room <= best
                if room < best:
                    check_rounding(step, room, best, ahead)
                num_bounded += best < most
                num_whole += room < best
            if room > 0:
                allowance.take(position, room, ahead)
                step.prompts.append((position, room, ahead))
                num_taken += room
                assert allowance.price_ms == pytest.approx(step.ms_with())
            assert allowance.num_taken == num_taken
    assert num_bounded > 3
    assert num_whole > 3 or name != "gpu"


def check_rounding(step: Step, room: int, best: int, num_lookahead: int) -> None:
    """Checks that fewer tokens than allowed are fed only to fill tiles, or the graph before."""
    num_rows, gap = step.num_rows + num_lookahead, best - room
    if gap < ROW_TILE and (num_rows + room) % ROW_TILE == 0:
        return
    sizes = [*step.prices.by_rows]
    assert num_rows + room in sizes
    assert num_rows + best < sizes[sizes.index(num_rows + room) + 1]


def test_a_smaller_graph_is_filled_where_attention_leaves_the_next_one_nearly_empty() -> None:
    """Checks that 256 tokens in 17.7 ms are chosen over 299 in 29 ms: they are more per
    millisecond."""
    small, large = (GraphKey(MIXED, 9, 1, rows) for rows in (256, 512))

    def find(num_reqs: int, widest: int, num_rows: int) -> GraphKey:
        return small if num_rows <= 256 else large

    costs_ms, kv_ms = {small: 10.0, large: 20.0}, Curve((1, 512), (1e-6, 512e-6))
    nothing = Curve((1,), (0.0,))
    prices = PriceTable(find, costs_ms, Curve((1024,), (99.0,)), nothing, prompt_kv_ms=kv_ms)
    for max_ms, expected in ((29.0, 256), (32.5, 400), (31.9, 256), (17.0, 232)):
        allowance = bounded(prices, max_ms).open(StepShape(1, 1, 0, 0), True)
        assert allowance.room_for(30_000, 400) == expected, max_ms


@pytest.mark.parametrize("slowness", [0.8, 1.0, 1.3, 1.9])
def test_steps_that_take_longer_than_their_price_keep_the_bound_too(slowness: float) -> None:
    """A device of which the clock falls after a while."""
    budget, rng, took = PromptBudget(LARGEST, GPU, 40.0), random.Random(0), list[float]()
    position = 0
    for factor in [*[1.0] * 20, *[slowness] * 60, *[1.0] * 40]:
        allowance = budget.open(StepShape(64, 1, 64, 64, 64 * 200, 64 * 200), True)
        count = allowance.room_for(position, 1 << 20)
        allowance.take(position, count)
        assert allowance.price_ms is not None
        took.append(allowance.price_ms * factor * rng.uniform(0.9, 1.0))
        budget.observe(allowance.price_ms, took[-1])
        position += count
    assert max(took[:20]) <= 40.0
    assert max(took[23:]) <= 1.2 * 40.0, "Only the first slow steps may take longer."
    assert sum(took[60:80]) / 20 >= 0.8 * 40.0, "Slow steps are not made shorter than need be."
    assert sum(took[110:]) / 10 >= 0.8 * 40.0, "It is forgotten once the clock has recovered."


def test_one_step_that_met_a_disturbance_does_not_starve_prompts() -> None:
    budget = PromptBudget(LARGEST, GPU, 40.0)
    budget.observe(30.0, 3000.0)
    allowance = budget.open(StepShape(64, 1, 64, 64), True)
    allowance.take(0, allowance.room_for(0, LARGEST))
    assert (allowance.price_ms or 0.0) >= 0.8 * 40.0 / MAX_EXCESS


def test_without_a_bound_or_prices_steps_get_the_largest_chunk_and_have_no_price() -> None:
    busy = StepShape(64, 1, 960, 960, 10**6, 10**7)
    for budget in (PromptBudget(777, GPU, 0.0), PromptBudget(777, None, 40.0)):
        for decodes in (busy, NO_DECODES):
            allowance = budget.open(decodes, True)
            allowance.take(10**6, allowance.room_for(10**6, 10**6))
            assert (allowance.num_taken, allowance.price_ms) == (777, None)
    assert PromptBudget(777, GPU, 40.0).open(busy, True).room_for(10**6, 10**6) == MIN_PROMPT_TOKENS
