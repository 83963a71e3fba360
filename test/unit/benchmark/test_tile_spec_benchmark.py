"""The pure parts of the benchmark of TileSpec: its ways, its summary, its table and its plot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from benchmark.measure.tile_spec import (
    DEFAULT_WAYS,
    PLAIN,
    STATIC,
    SWEPT,
    TILED,
    WAYS,
    Rounds,
    parse,
    print_result,
    profiling_s,
    row_times,
    summarize,
)
from benchmark.score_counts import ScoreCounts
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

SPEEDS = {
    PLAIN: [100.0, 110.0, 120.0],
    "static 1": [130.0, 130.0, 130.0],
    "static 3": [120.0, 143.0, 150.0],
    "TileSpec, static 3": [132.0, 130.0, 165.0],
}


def write_prices(folder: Path) -> None:
    """As a server keeps them; of two graphs of 64 rows the one of fewer requests is cheaper."""
    graphs = {GraphKey(RAGGED, 8, 4, 32): 5.25}
    graphs |= {GraphKey(RAGGED, n, 4, 64): cost for n, cost in ((16, 5.5), (32, 6.0))}
    eager = Curve((1, 64, 96, 128), (5.0, 50.0, 8.0, 8.5))
    prices = PriceTable(no_graphs, graphs, eager, FREE, measured_s=12.0)
    head = KeptDrafts.of(DraftPrices(prices, {2: eager}, measured_s=3.25))
    profile = Profile(Kept({}, KeptTable.of(prices)), Kept({}, head))
    write_profile(folder / FILE_NAME, profile)


def result_of(tmp_path: Path) -> dict[str, Any]:
    write_prices(tmp_path / "model")
    return {
        "machine": {"cpu": "c", "cores": 2},
        "rows": [{"requests": load, "tok_s": SPEEDS, **summarize(SPEEDS)} for load in (1, 64)],
        "row_times": row_times(tmp_path),
    }


def counted() -> dict[str, Any]:
    """Of drafts that are confirmed more often than their scores say; some bins have none."""
    counts, chooser = ScoreCounts(), np.random.default_rng(0)
    scores = chooser.random(1000) * 0.8
    counts.add(scores, chooser.random(1000) < scores**0.5)
    return counts.result()


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


def test_tile_spec_stands_beside_the_best_static_number_the_same_and_no_drafts() -> None:
    found = summarize(SPEEDS)
    assert found["best_static"] == "static 3"
    figures = found["tile_spec"]["TileSpec, static 3"]
    assert figures["over_best_static"] == figures["over_the_same"] == pytest.approx(1.1)
    assert figures["over_plain"] == pytest.approx(1.32)
    assert figures["lowest_over_plain"] == pytest.approx(1.1818, abs=1e-4)
    alone = summarize({"TileSpec, adaptive": [1.0]})
    nothing = {"best_static": None, "best_swept": None}
    assert alone == nothing | {"tile_spec": {"TileSpec, adaptive": {}}}
    swept = summarize({"TileSpec, static 3": [2.0], "swept 3:1": [1.0], "swept 5:2": [4.0]})
    assert swept["best_swept"] == "swept 5:2"
    assert swept["tile_spec"]["TileSpec, static 3"]["over_best_swept"] == 0.5


def test_verified_drafts_are_those_of_each_run() -> None:
    class FakeEngine:
        """Verifies 6 drafts per step of one request at once, 1 of more; none at other times."""

        num_running = 0

        async def async_generate(self, **_: Any) -> Any:
            self.num_running += 1
            await asyncio.sleep(0)
            drafts = 6 if self.num_running == 1 else 1
            await asyncio.sleep(0)
            self.num_running -= 1
            info = {"spec_num_proposed_drafts": 10 * drafts, "spec_verify_ct": 10}
            info["spec_num_correct_drafts"] = 20
            return {"output_ids": [1] * 30, "meta_info": {"finish_reason": None, **info}}

        async def async_abort_request(self, *, abort_all: bool) -> int:
            return 0

    rounds = Rounds(
        {"static 1": cast(Any, FakeEngine())}, [[1]] * 8, [1, 8], {"max_new_tokens": 30}
    )
    for number in range(3):
        rounds.run(number)
    found = {row["requests"]: row["verified_drafts"] for row in rounds.rows()}
    assert found == {1: {"static 1": [6.0, 6.0]}, 8: {"static 1": [1.0, 1.0]}}
    assert all(row["tokens_per_step"] == {"static 1": [3.0, 3.0]} for row in rounds.rows())


def test_times_of_rows_come_from_the_prices_that_a_server_keeps(tmp_path: Path) -> None:
    assert row_times(tmp_path) == {}
    found = result_of(tmp_path)["row_times"]
    assert found["graphs_ms"] == [[32, 5.25], [64, 5.5]]
    assert found["segments"] == [[1, 64], [96, 128]]


def test_seconds_of_measuring_are_those_of_target_and_head(tmp_path: Path) -> None:
    assert profiling_s(tmp_path) == {}
    write_prices(tmp_path / "model")
    found = profiling_s(tmp_path)
    assert found["measured"] == 15.25
    assert 0 < found["from_cache"] < 5


def test_the_ratios_are_printed_and_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_result(result_of(tmp_path))
    assert "ok    64 at once, TileSpec, static 3: over_best_static 1.100" in capsys.readouterr().out
    print_result({})
    assert "No round" in capsys.readouterr().out
