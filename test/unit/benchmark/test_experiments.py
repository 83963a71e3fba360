"""The table of experiments: what its ways are, which Engines they need, and that one runs."""

from __future__ import annotations

import asyncio
import gc
import json
import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import pytest

from benchmark import ways as ways_module
from benchmark.experiments import (
    DRAFTED,
    EXPERIMENTS,
    MTP_WAYS,
    NGRAM,
    NGRAM_TEXTS,
    ONE_ASKS,
    PLAIN,
    beside_own_kind,
    beside_replay_and_plain,
    repeated,
    tiled_beside_others,
)
from benchmark.measure.experiment import main, parse
from benchmark.replay import ERROR_RATE, MODULE
from benchmark.stream_ways import ROUTES, server_command
from benchmark.ways import Asked, start_engines
from sglang.srt.entrypoints.children import CHILD_MODULES
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_way_is_flags_and_parameters_that_there_are(name: str) -> None:
    experiment = EXPERIMENTS[name]
    for way in experiment.ways.values():
        ServerArgs(model_path="demo", **way.flags)
        for text in experiment.texts.values():
            SamplingParams(**{"mtp_enabled": False, **text.params, **way.params, **way.of_one})
    arguments = parse([name])
    assert {*arguments.ways} <= {*experiment.ways}
    pairs = experiment.pairs(arguments.ways)
    assert pairs
    assert {way for pair in pairs for way in pair} <= {*arguments.ways}
    assert {*experiment.asked} <= {*experiment.ways}
    assert arguments.out.name == f"{name}.json"


def test_a_shape_of_drafts_is_a_way_where_there_is_a_drafter(
    capsys: pytest.CaptureFixture[str],
) -> None:
    way = EXPERIMENTS["speculation"].way("4x5x8")
    flags = ServerArgs(model_path="x", **way.flags)
    assert way.is_drafted
    assert (flags.speculative_eagle_topk, flags.speculative_num_steps) == (4, 5)
    assert flags.speculative_num_draft_tokens == 8
    for words in (["mtp", "--ways", PLAIN, "4x5x8"], ["speculation", "--ways", PLAIN, "4x5"]):
        with pytest.raises(SystemExit):
            parse(words)
        assert "There is no '4x5" in capsys.readouterr().err


def test_replay_has_drafts_errors_and_a_process_of_its_own(started: list[FakeEngine]) -> None:
    experiment = EXPERIMENTS["replay"]
    ways = {name: experiment.way(name) for name in ("replay 3", "replay 7:0.2", PLAIN, NGRAM)}
    assert [way.replay_errors for way in ways.values()] == [0.0, 0.2, None, None]
    assert [way.flags.get("speculative_num_draft_tokens") for way in ways.values()] == [
        4,
        8,
        None,
        4,
    ]
    with ExitStack() as stack:
        start_engines(stack, ways, {}, {})
        assert [engine.flags["replayed"] for engine in started] == ["0.0", "0.2", None, None]
    assert CHILD_MODULES["scheduler"] != MODULE
    pairs = beside_replay_and_plain(["replay 3", DRAFTED, PLAIN])
    assert pairs == [(DRAFTED, "replay 3"), ("replay 3", PLAIN), (DRAFTED, PLAIN)]


def test_tile_spec_stands_beside_every_way_without_it() -> None:
    tiled = "TileSpec, static 3"
    assert tiled_beside_others([PLAIN, "static 3", tiled]) == [(tiled, PLAIN), (tiled, "static 3")]
    assert tiled_beside_others([PLAIN, "static 3"]) == []
    assert beside_own_kind(["sampled", "sampled, logprobs"]) == [("sampled, logprobs", "sampled")]


class FakeEngine:
    """An Engine that is only started."""

    def __init__(self, flags: dict[str, Any]) -> None:
        self.flags = flags
        self.salts: list[Any] = []
        self.params: list[Any] = []

    async def async_generate(self, **given: Any) -> Any:
        self.salts.append(given.get("cache_salt"))
        self.params.append(given["sampling_params"])
        await asyncio.sleep(0)
        return {"meta_info": {}}

    def shutdown(self) -> None:
        self.flags = {}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[FakeEngine]]:
    """The Engines that are started; each knows the share of replayed drafts that are spoilt."""
    made: list[FakeEngine] = []

    def start(flags: dict[str, Any], **more: Any) -> FakeEngine:
        replayed = os.environ.get(ERROR_RATE)
        assert (replayed is not None) == (CHILD_MODULES["scheduler"] == MODULE)
        made.append(FakeEngine({**flags, **more, "replayed": replayed}))
        return made[-1]

    monkeypatch.setattr(ways_module, "start_engine", start)
    yield made
    assert not any(engine.flags for engine in made), "all are shut down"


def test_ways_share_an_engine_if_its_flags_are_the_same(started: list[FakeEngine]) -> None:
    with ExitStack() as stack:
        engines = start_engines(stack, MTP_WAYS, {"a": 1}, {})
        assert len(started) == 1
        assert {*engines} == {*MTP_WAYS}
        assert started[0].flags == {"a": 1, "mtp_load_aware_k": True, "replayed": None}


def test_what_measures_prices_starts_alone_and_first(started: list[FakeEngine]) -> None:
    names = (PLAIN, "static 3", "TileSpec, load-aware 7", "TileSpec, static 3")
    ways = {name: EXPERIMENTS["tile_spec"].ways[name] for name in names}
    with ExitStack() as stack:
        engines = start_engines(stack, ways, {}, {"speculative_algorithm": "EAGLE3"})
        by_load, fixed = (cast(Any, engines[name]).flags for name in names[2:])
        assert [engine.flags for engine in started[:2]] == [by_load, fixed]
        assert by_load["tile_spec_cache_dir"] != fixed["tile_spec_cache_dir"]
        assert "speculative_algorithm" not in cast(Any, engines[PLAIN]).flags


def test_each_request_of_new_text_has_a_salt_of_its_own() -> None:
    engine = FakeEngine({})
    asked = Asked(cast(Any, engine), {}, NGRAM_TEXTS["repeats"].is_new)
    for _ in range(3):
        asyncio.run(asked.async_generate(input_ids=[1], sampling_params={}))
    assert engine.salts == ["0", "1", "2"]
    assert repeated([0, *range(10, 19)]) == [0, *[10, 11] * 4]


def test_one_request_at_a_time_asks_for_more() -> None:
    engine, params = FakeEngine({}), EXPERIMENTS["deterministic_requests"].ways[ONE_ASKS].of_one
    asked = Asked(cast(Any, engine), {}, of_one=params)

    async def laps() -> None:
        for _ in range(2):
            requests = (asked.async_generate(input_ids=[1], sampling_params={}) for _ in range(3))
            await asyncio.gather(*requests)

    asyncio.run(laps())
    assert engine.params == [params, {}, {}] * 2


def test_a_server_has_the_flags_of_an_engine() -> None:
    flags = {"model_path": "m", "attention_backend": None, "disable_radix_cache": True}
    words = server_command(flags)[1:]
    assert words == ["-m", "sglang.launch_server", "--model-path", "m", "--disable-radix-cache"]
    for make_body, _ in ROUTES.values():
        assert "stream" not in make_body([1], {"max_new_tokens": 3})


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("name", "ways"),
    [
        ("replay", ["replay 3", "2x3x6"]),
        ("http", ["Engine", "/generate"]),
        ("adaptive_steps", ["fixed 3", "EMA, conservative"]),
    ],
)
def test_an_experiment_of_the_bundled_model_gives_its_ratios(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, ways: list[str]
) -> None:
    out = tmp_path / "found.json"
    argv = [name, "--model-path", "demo", "--device", "cpu", "--rounds", "1", "--out", str(out)]
    argv += ["--concurrency", "2", "--prompt-tokens", "16", "--new-tokens", "12"]
    argv += ["--phase-tokens", "24", "--ways", *ways]
    try:
        main(argv)
    finally:
        gc.unfreeze()  # what was exempted from collections of garbage
    result = json.loads(out.read_text(encoding="utf-8"))
    row = result["rows"][-1]
    pair = f"{ways[1]} / {ways[0]}"
    assert row["load"] == (["all"] if name == "adaptive_steps" else [2, "code", 1])
    assert len(row["ratios"][pair]["ratios"]) == 1
    assert min(min(each["tok_s"]) for each in row["ways"].values()) > 0
    assert pair in capsys.readouterr().out
    if name == "replay":
        [replayed], [found] = (row["ways"][way]["tokens_per_step"] for way in ways)
        assert replayed > found > 1.5
