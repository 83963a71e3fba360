"""Prices of steps: what they are made of."""

from __future__ import annotations

from itertools import pairwise

import pytest

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk, StepShape, no_graphs

NOTHING = Curve((1,), (0.0,))
KEYS = GraphKeys(GraphSupport.RAGGED_Q, 128, 15, 1024)
FALLING_MS = {key: 14.9 if key.num_tokens == 448 else key.num_tokens / 40 + 1 for key in KEYS.all}
GRAPHS = PriceTable(KEYS.find_shape, FALLING_MS, Curve((1280, 2560), (40.0, 70.0)), NOTHING)


@pytest.mark.parametrize(
    ("num_reqs", "widest", "num_rows", "expected"),
    [
        *((128, 4, rows, size / 40 + 1) for rows, size in [(129, 160), (161, 192), (449, 512)]),
        (128, 4, 385, 14.9),  # 448 rows were measured to cost more than 512
        (128, 4, 448, 14.9),
        (121, 1, 121, 128 / 40 + 1),  # plain decoding has graphs of its own
        (121, 2, 122, 160 / 40 + 1),
        (2, 2000, 2001, 40 + 30 * 721 / 1280),  # beyond all graphs
        (2, 9000, 9001, 70 + 30 * 6441 / 1280),
    ],
)
def test_a_step_costs_what_the_graph_costs_that_it_is_padded_to(
    num_reqs: int, widest: int, num_rows: int, expected: float
) -> None:
    found = GRAPHS.price_ms(StepShape(num_reqs, widest, num_rows, 0))
    assert found == pytest.approx(expected)


def test_kv_is_paid_by_what_is_read_and_by_rows_that_see_it_and_prompts_by_chunks() -> None:
    kv_ms, rows = Curve((100, 200, 400), (1e-3, 1e-3, 2e-3)), Curve((1,), (2.0,))
    table = PriceTable(no_graphs, {}, rows, Curve((1,), (0.5,)), 1e-2, 1e-4, kv_ms)
    shape = StepShape(1, 1, 1, 1, 1000, 3000)
    assert table.price_ms(shape) == pytest.approx(2.0 + 0.5 + 10.0 + 0.3)
    few, many = PromptChunk(5000, 3), PromptChunk(1000, 300)
    # A row sees what is before it and itself.
    more_ms = sum(range(5001, 5004)) / 3 * 1e-3 + 2 * sum(range(1001, 1301)) / 300 * 1.5e-3
    shape = shape._replace(prompts=(few, many, many))
    assert table.price_ms(shape) == pytest.approx(12.8 + more_ms)


def test_between_the_sizes_of_a_table_prices_are_constant_or_linear() -> None:
    sizes = [*GRAPHS.by_rows]
    assert sizes == sorted({*sizes})
    assert {16, 128, 1024, 1280, 2560} <= {*sizes}
    for below, size in pairwise(sizes):
        for num_rows in range(below + 1, size):
            step_ms = [GRAPHS.rows_ms(9, 10_000, rows) for rows in (below + 1, num_rows, size)]
            share = (num_rows - below - 1) / (size - below - 1)
            assert step_ms[1] == pytest.approx(step_ms[0] + share * (step_ms[2] - step_ms[0]))


def test_a_curve_is_linear_between_sizes_and_beyond_the_last() -> None:
    curve = Curve((10, 20, 40), (1.0, 3.0, 4.0))
    for size, cost in ((1, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (40, 4.0), (80, 6.0)):
        assert curve.at(size) == pytest.approx(cost)
    assert Curve((4,), (2.0,)).at(8) == pytest.approx(4.0)
    assert Curve((1, 4), (3.0, 2.0)).at(8) == pytest.approx(2.0), "never less for more"
