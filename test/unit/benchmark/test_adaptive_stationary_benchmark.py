"""The pure parts of the benchmark of steady loads: work, laps, summary, table."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest

from benchmark.adaptive_ways import HOT, KINDS, PLAIN, PREDICTABLE, UNPREDICTABLE, configured_ways
from benchmark.goals import is_steady
from benchmark.measure import adaptive_stationary
from benchmark.measure.adaptive_stationary import (
    LEAST_LENGTH,
    MIN_PROMPTS,
    Found,
    Laps,
    Load,
    Rounds,
    Work,
    laps_of,
    lengths_around,
    parse,
    summarize,
    ways_to_measure,
)
from benchmark.report.speculation_tables import adaptive_stationary as table_of
from sglang.srt.server_args import ServerArgs

PROMPT_TOKENS = 6
ANSWER_S = 0.01


@pytest.fixture(autouse=True)
def made_up_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of held-out code: prompts that all differ, none of which random prompts are."""

    def draw(
        path: Path, num_prompts: int, num_tokens: int, seed: int
    ) -> tuple[list[list[int]], dict[str, Any]]:
        return [[-1 - seed, *[-i] * (num_tokens - 1)] for i in range(num_prompts)], {}

    monkeypatch.setattr(adaptive_stationary, "held_out_prompts", draw)


def work(*words: str) -> Work:
    return Work(parse([f"--prompt-tokens={PROMPT_TOKENS}", *words]), "demo")


# ---------------------------------------------------------------- work and laps


@pytest.mark.parametrize("kind", KINDS)
def test_a_lap_has_a_prompt_per_request_and_other_ones_in_each_round(kind: str) -> None:
    options = ("--concurrency", "1", "8", "--new-tokens=9")
    made = work(*options)
    assert made.lap(Load(8, kind), 1) == work(*options).lap(Load(8, kind), 1)
    for requests in (1, 8):
        laps = [made.lap(Load(requests, kind), number) for number in range(4)]
        assert len({json.dumps(lap.prompts) for lap in laps}) == 4
        for prompts, params, lengths in laps:
            assert len(lengths) == len(prompts)
            assert len(prompts) == max(MIN_PROMPTS, requests)
            assert all(len(prompt) == PROMPT_TOKENS for prompt in prompts)
            assert params["max_new_tokens"] == 9
            assert params["ignore_eos"]
            assert all(min(prompt) < 0 for prompt in prompts) == (kind == PREDICTABLE)
            assert params["temperature"] == (0 if kind == PREDICTABLE else HOT)


class FakeEngine:
    """Answers each request after ANSWER_S, and switches once for each."""

    def __init__(self) -> None:
        self.num_answers = self.num_running = self.most_running = 0

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> dict[str, Any]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(ANSWER_S)
        self.num_running -= 1
        self.num_answers += 1
        meta = {"finish_reason": {"type": "length"}}
        return {"output_ids": [7] * sampling_params["max_new_tokens"], "meta_info": meta}

    async def async_abort_request(self, *, abort_all: bool) -> int:
        assert abort_all
        return self.num_running

    def get_server_info(self) -> dict[str, Any]:
        state = {
            "speculative_num_steps": 3,
            "speculative_tier_switches": {"0": self.num_answers, "3": 1},
        }
        return {"internal_states": [state]}


@pytest.mark.parametrize(
    ("lap_s", "laps"), [(0.1, Laps(15, 21)), (1.5, Laps(1, 2)), (2.5, Laps(1, 1))]
)
def test_laps_last_as_long_as_asked(lap_s: float, laps: Laps) -> None:
    assert laps_of(lap_s, lead_s=1.5, steady_s=2.04) == laps


def test_rounds_count_only_what_comes_after_the_first_laps() -> None:
    engines = {name: FakeEngine() for name in (PLAIN, "fixed 3", "throughput")}
    load = Load(1, UNPREDICTABLE)
    rounds = Rounds(engines, work("--concurrency", "1"), [load], 0, 0)  # type: ignore[arg-type]
    rounds.run(0)
    assert all(not found.tok_s for found in rounds.found[load].values()), "it warms up"
    assert rounds.laps[load] == Laps(1, 1)
    before = {name: engine.num_answers for name, engine in engines.items()}
    rounds.laps[load] = Laps(2, 3)
    rounds.run(1)
    answers = {name: engine.num_answers - before[name] for name, engine in engines.items()}
    assert answers == {
        name: (lead + 3) * MIN_PROMPTS
        for name, lead in ((PLAIN, 1), ("fixed 3", 1), ("throughput", 2))
    }
    found = rounds.found[load][PLAIN]
    assert len(found.tok_s) == 1
    assert abs(found.switches[0] - 3 * MIN_PROMPTS) <= 1, "those of the laps that count"
    assert found.steps_at_end == [3]
    [row] = rounds.rows()
    assert (row["requests"], row["kind"], row["lead"], row["counted"]) == (1, UNPREDICTABLE, 2, 3)


def test_fixed_numbers_that_are_slow_on_a_load_are_not_measured_there() -> None:
    speeds = {PLAIN: 10.0, "fixed 1": 100.0, "fixed 3": 84.0, "fixed 7": 86.0, "throughput": 20.0}
    warm = {name: found_of([speed]) for name, speed in speeds.items()}
    assert ways_to_measure(warm) == [PLAIN, "fixed 1", "fixed 7", "throughput"]


@pytest.mark.parametrize(("mean", "count"), [(128, 96), (128, 5), (4, 4)])
def test_lengths_are_even_around_their_mean(mean: int, count: int) -> None:
    found = lengths_around(mean, count, random.Random(1))
    assert abs(sum(found) - mean * count) <= count / 2
    assert mean * LEAST_LENGTH <= min(found) < mean < max(found) <= mean * (2 - LEAST_LENGTH)
    assert found != sorted(found)


def test_a_load_keeps_its_number_of_requests() -> None:
    engine = FakeEngine()
    load = Load(5, PREDICTABLE)
    found = Found()
    lap = work("--concurrency", "5").lap(load, 1)
    adaptive_stationary.run_load(engine, lap, load, Laps(1, 2), found)  # type: ignore[arg-type]
    assert engine.most_running == 5
    assert found.tok_s[0] > 0


# ---------------------------------------------------------------- summary and table


def found_of(tok_s: list[float], switches: int = 0) -> Found:
    count = len(tok_s)
    return Found(tok_s, [2.0] * count, [switches] * count, [1] * count)


FOUND = {
    PLAIN: found_of([100, 50, 100]),
    "fixed 1": found_of([120, 60, 110]),
    "fixed 3": found_of([110, 900, 100]),
    "throughput": found_of([118.8, 59.4, 110], switches=1),
    "EMA, conservative": found_of([114, 57, 96], switches=3),
}


def test_ways_are_beside_plain_and_the_fixed_number_of_the_best_median() -> None:
    """A round that was slow for all changes no ratio."""
    summary = summarize(FOUND)
    assert summary["best_fixed"] == "fixed 1"
    ways = {way["way"]: way for way in summary["ways"]}
    assert [name for name in ways if ways[name]["is_adaptive"]] == [
        "throughput",
        "EMA, conservative",
    ]
    found = ways["throughput"]
    assert (found["over_best_fixed"], found["over_plain"]) == (0.99, 1.188)
    assert found["lowest_over_plain"] == 1.1
    assert found["switches_per_s"] == 0.5
    assert ways["EMA, conservative"]["lowest_over_plain"] == 0.96
    assert ways["fixed 1"]["over_best_fixed"] == 1.0
    assert is_steady(ways["throughput"])
    assert not is_steady(ways["EMA, conservative"])


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("over_best_fixed", 0.9899),
        ("over_plain", 0.9899),
        ("lowest_over_plain", 0.9699),
        ("switches_per_s", 1.0),
    ],
)
def test_each_figure_that_is_not_as_asked_is_a_miss(key: str, value: float) -> None:
    asked = {
        "over_best_fixed": 0.99,
        "over_plain": 0.99,
        "lowest_over_plain": 0.97,
        "switches_per_s": 0.99,
    }
    assert is_steady(asked)
    assert not is_steady({**asked, key: value})


def test_the_table_of_a_way_has_a_row_per_load() -> None:
    rows = [{**Load(8, PREDICTABLE)._asdict(), "lead": 1, "counted": 2, **summarize(FOUND)}]
    more = [{**Load(32, UNPREDICTABLE)._asdict(), "lead": 1, "counted": 1, **summarize(FOUND)}]
    results = [
        {"commit": "a", "rounds": 5, "rows": rows},
        {"commit": "b", "rounds": 3, "rows": more},
    ]
    text, of_ema = table_of(results, "throughput"), table_of(results, "EMA, conservative")
    assert (
        "| 8 predictable | throughput | 110 | 110 (fixed 1) | 0.990 | 1.188 | 1.100 | 0.50 | yes |"
    ) in text
    assert (
        "| 32 unpredictable | EMA, conservative | 96 | 110 (fixed 1) | 0.950 | 1.140 | 0.960 | 1.50"
        " | **no** |"
    ) in of_ema
    assert "Commit b, 3 rounds in turn:" in text
    for found in (text, of_ema):
        assert found.count("\n| ") == 6, "a head and a line under it, and one way, of each result"


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ways", "fixed 1", "auto"], "are compared with"),
        (["--ways", PLAIN, "auto"], "are compared with"),
        (["--ways", PLAIN, "fixed 7"], "none of EMA"),
        (["--ways", PLAIN, "fixed 7", "EMA, configured"], "EMA, configured: needs --config"),
    ],
)
def test_ways_that_cannot_be_compared_are_refused(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse(words)
    assert message in capsys.readouterr().err


def test_ways_of_a_configuration_are_flags_that_exist() -> None:
    assert set(configured_ways("slots.json")) == set(adaptive_stationary.CONFIGURED)
    assert configured_ways(None) == {}
    for flags in configured_ways("slots.json").values():
        assert ServerArgs(model_path="x", **flags).speculative_adaptive_config == "slots.json"
