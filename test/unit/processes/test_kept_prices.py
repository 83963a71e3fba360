"""Prices of steps are measured once, and again where they are not those of this GPU now."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import GraphKey
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.processes.kept_prices import kept_or_measured
from sglang.srt.step.price_table import Curve, PriceTable
from utils import Setup, make_execution, make_random_model

DAMAGED = [b"", b"{}", b'{"measured_with": {}, "prices": 1}', b"\xff", b'{"a":' * 100_000]
CURVE = Curve((1, 2048), (0.5, 30.25))


class Meter(PriceMeter):
    """A GPU whose graphs take a millisecond for each row, times `slowness`."""

    def __init__(self, runner: Any, slowness: float = 1.0) -> None:
        self._runner, self._slowness = runner, slowness
        self.num_measured = 0

    def graph_ms(self, key: GraphKey, repeats: int) -> float:
        return self._slowness * key.num_tokens

    def measure(self) -> PriceTable:
        self.num_measured += 1
        keys = self._runner.graph_keys
        costs = {key: self._slowness * key.num_tokens for key in keys.all}
        return PriceTable(keys.find_shape, costs, CURVE, CURVE, 1e-6, 0.0, CURVE, 0.01)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Any:
    model = make_random_model("llama", tmp_path_factory.mktemp("models") / "some", 0)
    return SimpleNamespace(
        config=replace(make_execution(model, Setup()), max_decode_rows=2),
        graph_keys=GraphKeys(GraphSupport.RAGGED_Q, 8, 2, 64),
        model=SimpleNamespace(hidden_width=0),
        ranks=None,
    )


def start(folder: Path, runner: Any, slowness: float = 1.0) -> tuple[int, dict[Any, float]]:
    """Measurements of a start, and the prices that it goes by."""
    meter = Meter(runner, slowness)
    prices = kept_or_measured(folder, runner, meter)
    return meter.num_measured, dict(prices.graphs_ms)


def test_a_second_start_measures_nothing(tmp_path: Path, runner: Any) -> None:
    assert start(tmp_path, runner)[0] == 1
    num_measured, prices = start(tmp_path, runner, 1.05)  # times vary by so much
    assert num_measured == 0
    assert prices == start(tmp_path, runner)[1]


def test_servers_of_other_users_may_read_what_is_kept(tmp_path: Path, runner: Any) -> None:
    """As compiled kernels: an image's folder is made by root."""
    (tmp_path / "other").touch()
    start(tmp_path / "prices", runner)
    [path] = (tmp_path / "prices").iterdir()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode


def test_prices_that_were_disturbed_are_replaced(tmp_path: Path, runner: Any) -> None:
    start(tmp_path, runner, 1.25)
    num_measured, prices = start(tmp_path, runner)
    assert num_measured == 1
    assert all(cost == key.num_tokens for key, cost in prices.items())
    assert start(tmp_path, runner) == (0, prices)


def test_a_start_that_is_disturbed_has_the_prices_of_one_that_was_not(
    tmp_path: Path, runner: Any
) -> None:
    assert start(tmp_path, runner, 1.8) != start(tmp_path, runner)
    assert start(tmp_path, runner, 1.8) == start(tmp_path, runner)


def test_other_flags_have_prices_of_their_own(tmp_path: Path, runner: Any) -> None:
    other = SimpleNamespace(
        config=replace(runner.config, max_running_requests=5),
        graph_keys=runner.graph_keys,
        model=runner.model,
        ranks=None,
    )
    assert [start(tmp_path, each)[0] for each in (runner, other, runner, other)] == [1, 1, 0, 0]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_file_is_replaced(tmp_path: Path, runner: Any, content: bytes) -> None:
    start(tmp_path, runner)
    [path] = tmp_path.iterdir()
    path.write_bytes(content)
    assert start(tmp_path, runner)[0] == 1
    assert start(tmp_path, runner)[0] == 0


def test_where_nothing_can_be_kept_prices_are_measured(tmp_path: Path, runner: Any) -> None:
    (tmp_path / "file").write_text("")
    assert start(tmp_path / "file" / "prices", runner)[0] == 1
