"""Prices of steps: what they are made of, and how they are measured."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from sglang.srt.device_copies import HostCopy
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import MIXED
from sglang.srt.model_executor.cuda_graph_runner import GraphKeys
from sglang.srt.mtp.price_measurement import PriceMeter, rows_of, timed_passes
from sglang.srt.mtp.price_table import Curve, PriceTable, StepShape, no_graphs
from utils import MTP_MAX_ROWS, Setup, make_runner

NOTHING = Curve((1,), (0.0,))
KEYS = GraphKeys(GraphSupport.RAGGED_Q, 128, 15, 1024)
FALLING_MS = {key: 14.9 if key.num_tokens == 448 else key.num_tokens / 40 + 1 for key in KEYS.all}
GRAPHS = PriceTable(KEYS.find_shape, FALLING_MS, Curve((1280, 2560), (40.0, 70.0)), NOTHING)


def graph_price(num_reqs: int, widest: int, num_rows: int) -> float:
    return GRAPHS.price_ms(StepShape(num_reqs, widest, num_rows, 0))


@pytest.mark.parametrize(
    ("num_rows", "padded_to"),
    [(129, 160), (161, 192), (257, 288), (300, 320), (385, 448), (448, 448), (449, 512)],
)
def test_a_step_costs_what_the_graph_costs_that_it_is_padded_to(
    num_rows: int, padded_to: int
) -> None:
    expected = 14.9 if padded_to == 448 else padded_to / 40 + 1
    assert graph_price(128, 4, num_rows) == expected


def test_more_rows_cost_less_where_that_was_measured() -> None:
    assert graph_price(128, 4, 512) < graph_price(128, 4, 440)


def test_plain_decoding_has_graphs_of_its_own() -> None:
    assert graph_price(121, 1, 121) == 128 / 40 + 1
    assert graph_price(121, 2, 122) == 160 / 40 + 1


def test_steps_beyond_all_graphs_have_a_price_too() -> None:
    assert graph_price(2, 2000, 2001) == pytest.approx(40 + 30 * 721 / 1280)
    assert graph_price(2, 9000, 9001) > 200


def test_kv_is_paid_by_what_is_read_and_by_rows_that_see_it() -> None:
    table = PriceTable(no_graphs, {}, Curve((1,), (2.0,)), NOTHING, kv_ms=1e-3, row_kv_ms=1e-4)
    assert table.price_ms(StepShape(1, 1, 1, 1, 1000, 3000)) == pytest.approx(2.0 + 1.0 + 0.3)


def test_a_curve_is_linear_between_sizes_and_beyond_the_last() -> None:
    curve = Curve((10, 20, 40), (1.0, 3.0, 4.0))
    for size, cost in ((1, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (40, 4.0), (80, 6.0)):
        assert curve.at(size) == pytest.approx(cost)
    assert Curve((4,), (2.0,)).at(8) == pytest.approx(4.0)
    assert Curve((1, 4), (3.0, 2.0)).at(8) == pytest.approx(2.0), "never less for more"


@pytest.mark.parametrize("support", [GraphSupport.RAGGED_Q, GraphSupport.UNIFORM_Q])
@pytest.mark.parametrize("max_requests", [1, 8, 20, 64, 128])
@pytest.mark.parametrize("width", [1, 15])
def test_every_graph_is_timed_by_a_step_that_replays_it(
    support: GraphSupport, max_requests: int, width: int
) -> None:
    keys = GraphKeys(support, max_requests, width, 1024)
    for key in keys.all:
        q_lens = rows_of(key)
        assert sum(q_lens) == key.num_tokens
        assert min(q_lens) >= 1
        found = keys.find(q_lens)
        if found != key:  # a prompt fits into a smaller graph with as many rows, always
            assert key.tag == MIXED
            assert found is not None
            assert found.num_tokens == key.num_tokens
            most = min(key.num_reqs, key.num_tokens - key.width)
            assert keys.find([key.num_tokens - most + 1, *[1] * (most - 1)]) == found


def test_passes_over_all_sizes_end_with_the_budget() -> None:
    now = 0.0
    runs: list[int] = []

    def once_ms(launch: object) -> float:
        nonlocal now
        size = launches[int(launch())]  # type: ignore[operator]
        runs.append(size)
        now += size * 1e-3
        return float(size)

    launches = {size: size for size in (1, 10, 100, 1000)}
    makers = {size: (lambda size=size: size) for size in launches}
    times = timed_passes(makers, 0.3, once_ms, lambda: now)  # type: ignore[arg-type]
    assert runs == [1, 10, 100, 1000], "the last one alone took all the time"
    assert times == {size: [float(size)] for size in launches}
    now = 0.0
    runs.clear()
    times = timed_passes(makers, 0.15, once_ms, lambda: now)  # type: ignore[arg-type]
    assert runs == [1, 10, 100]
    now = 0.0
    runs.clear()
    makers.pop(1000)
    assert timed_passes(makers, 1.0, once_ms, lambda: now) == {  # type: ignore[arg-type]
        size: [float(size)] * 3 for size in (1, 10, 100)
    }
    assert runs == [1, 10, 100] * 4


def test_on_a_cpu_rows_reads_and_kv_are_measured_in_little_time(small_model: Path) -> None:
    setup = Setup(max_running_requests=4)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS, device="cpu")
    start = time.perf_counter()
    table = PriceMeter(runner, 4, MTP_MAX_ROWS).measure()
    assert time.perf_counter() - start < 10
    assert table.find(4, 1, 4) is None
    assert table.eager.sizes[:4] == (1, 2, 4, 8)
    assert table.eager.sizes[-1] <= 4 * MTP_MAX_ROWS
    assert min(table.eager.costs_ms) > 0
    assert min(table.kv_ms, table.row_kv_ms, table.spread) >= 0
    assert not runner.req_to_token_pool.req_to_token.any(), "no request's rows are left written"


def test_where_launches_return_at_once_the_device_is_timed_not_the_host(small_model: Path) -> None:
    """Copies end 5 ms apart, whenever they were asked for."""
    runner = make_runner(small_model, Setup(), 128, MTP_MAX_ROWS, device="cpu")
    now = 0.0
    meter = PriceMeter(runner, 4, MTP_MAX_ROWS, clock=lambda: now)
    meter._is_cpu = False

    class Late(HostCopy):
        def __init__(self) -> None:
            super().__init__([torch.zeros(1)])

        def wait(self) -> None:
            nonlocal now
            now += 0.005

    assert meter._times_ms(Late, 3) == pytest.approx([5.0, 5.0, 5.0])
