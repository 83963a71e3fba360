"""The pure parts of the benchmark of TileSpec: its ways, their pairs, and prices that are kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark.measure.tile_spec import (
    DEFAULT_WAYS,
    PLAIN,
    STATIC,
    SWEPT,
    TILED,
    WAYS,
    pairs_of,
    parse,
    profiling_s,
    row_times,
)
from sglang.srt.layers.forward_batch import RAGGED, GraphKey
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.tile_spec.profiler import (
    FILE_NAME,
    Kept,
    KeptDrafts,
    KeptTable,
    Profile,
    write_profile,
)
from sglang.srt.step.price_table import FREE, Curve, DraftPrices, PriceTable, no_graphs


def write_prices(folder: Path) -> None:
    """As a server keeps them; of two graphs of 64 rows the one of fewer requests is cheaper."""
    graphs = {GraphKey(RAGGED, 8, 4, 32): 5.25}
    graphs |= {GraphKey(RAGGED, n, 4, 64): cost for n, cost in ((16, 5.5), (32, 6.0))}
    eager = Curve((1, 64, 96, 128), (5.0, 50.0, 8.0, 8.5))
    prices = PriceTable(no_graphs, graphs, eager, FREE, measured_s=12.0)
    head = KeptDrafts.of(DraftPrices(prices, {2: eager}, measured_s=3.25))
    profile = Profile(Kept({}, KeptTable.of(prices)), Kept({}, head))
    write_profile(folder / FILE_NAME, profile)


def test_every_way_is_a_set_of_flags_that_there_are() -> None:
    for name, flags in WAYS.items():
        ServerArgs(model_path="demo", **flags)
        assert flags.get("tile_spec", False) == (name in TILED or name in SWEPT)
    assert len(STATIC) == 7
    assert {*DEFAULT_WAYS} <= {*WAYS}
    assert parse([]).ways == DEFAULT_WAYS
    assert not parse([]).without_calibration
    assert parse(["--ways", PLAIN, "static 7"]).ways == [PLAIN, "static 7"]
    with pytest.raises(SystemExit):
        parse(["--ways", "static 8"])


def test_tile_spec_stands_beside_every_way_without_it() -> None:
    swept = next(iter(SWEPT))
    tiled = "TileSpec, static 3"
    names = [PLAIN, "static 3", tiled, swept]
    assert pairs_of(names) == [(tiled, PLAIN), (tiled, "static 3"), (tiled, swept)]
    assert pairs_of([PLAIN, swept]) == []


def test_times_of_rows_come_from_the_prices_that_a_server_keeps(tmp_path: Path) -> None:
    assert row_times(tmp_path) == {}
    write_prices(tmp_path / "model")
    found = row_times(tmp_path)
    assert found["graphs_ms"] == [[32, 5.25], [64, 5.5]]
    assert found["segments"] == [[1, 64], [96, 128]]


def test_seconds_of_measuring_are_those_of_target_and_head(tmp_path: Path) -> None:
    assert profiling_s(tmp_path) == {}
    write_prices(tmp_path / "model")
    found = profiling_s(tmp_path)
    assert found["measured"] == 15.25
    assert 0 < found["from_cache"] < 5
