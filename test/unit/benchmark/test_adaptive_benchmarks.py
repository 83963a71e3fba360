"""The benchmarks of adaptive steps, on work that changes and on steady loads: their work, what
counts, and the summaries and tables."""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark import adaptive_ways
from benchmark.adaptive_ways import (
    ADAPTIVE,
    HOT,
    KINDS,
    PLAIN,
    PREDICTABLE,
    UNPREDICTABLE,
    WAYS,
    Texts,
    configured_ways,
    engine_ways,
)
from benchmark.goals import is_steady
from benchmark.measure import adaptive_stationary, adaptive_steps
from benchmark.measure.adaptive_stationary import Laps, Load, SteadyLoads, laps_of, lengths_around
from benchmark.measure.adaptive_steps import Phase, batches, phases_of
from benchmark.paired import MIN_PROMPTS, Paired
from benchmark.report.speculation_tables import adaptive_stationary as table_of
from sglang.srt.server_args import ServerArgs

PROMPT_TOKENS = 6
ONE_BATCH = "--phase-tokens=960"  # for 8 requests


@pytest.fixture(autouse=True)
def made_up_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of held-out code: prompts that all differ, none of which random prompts are."""

    def draw(
        path: Path, num_prompts: int, num_tokens: int, seed: int
    ) -> tuple[list[list[int]], dict[str, Any]]:
        return [[-1 - seed, *[-i] * (num_tokens - 1)] for i in range(num_prompts)], {}

    monkeypatch.setattr(adaptive_ways, "held_out_prompts", draw)


class FakeEngine:
    """Answers each request after a moment; switches once per batch or request. Of three drafts two
    are right."""

    def __init__(self) -> None:
        self.num_answers = self.num_running = self.most_running = 0
        self.batch_sizes: list[int] = []

    def generate(self, input_ids: Sequence[list[int]], sampling_params: Any) -> list[Any]:
        self.num_answers += 1
        self.batch_sizes.append(len(input_ids))
        meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 20}
        return [{"meta_info": meta}] * len(input_ids)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> dict[str, Any]:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        await asyncio.sleep(0.01)
        self.num_running -= 1
        self.num_answers += 1
        meta = {"finish_reason": {"type": "length"}}
        return {"output_ids": [7] * sampling_params["max_new_tokens"], "meta_info": meta}

    async def async_abort_request(self, *, abort_all: bool) -> int:
        return self.num_running

    def get_server_info(self) -> dict[str, Any]:
        switches = {"0": self.num_answers, "3": 1}
        state = {"speculative_num_steps": 3, "speculative_tier_switches": switches}
        return {"internal_states": [state]}


# ---------------------------------------------------------------- work that changes


def walk(*words: str) -> argparse.Namespace:
    return adaptive_steps.parse([f"--prompt-tokens={PROMPT_TOKENS}", *words])


def work_of(phase: Phase, number: int, *words: str) -> list[adaptive_steps.Batch]:
    arguments = walk(*words)
    return batches(adaptive_steps.texts_of(arguments, "demo"), phase, number, arguments)


@pytest.mark.parametrize("tokens", [1536, 480])
@pytest.mark.parametrize("new_tokens", [128, 50])
def test_phases_emit_the_same_number_of_tokens(tokens: int, new_tokens: int) -> None:
    phases = phases_of(walk().walk)
    assert phases[3].name == "4: 8 unpredictable"
    assert len({phase.name for phase in phases}) == 12
    for phase in phases:
        found = work_of(phase, 1, f"--phase-tokens={tokens}", f"--new-tokens={new_tokens}")
        assert all(len(prompts) == phase.requests for prompts, _ in found)
        lengths = [params["max_new_tokens"] for _, params in found]
        assert max(lengths) <= new_tokens
        assert sum(lengths) * phase.requests == tokens
        assert all(params["ignore_eos"] for _, params in found)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_get_the_same_prompts_and_each_round_and_phase_others(kind: str) -> None:
    first = Phase(2, 8, kind)
    assert work_of(first, 1, ONE_BATCH) == work_of(first, 1, ONE_BATCH)
    found = [work_of(first, number, ONE_BATCH) for number in range(1, 6)]
    found.append(work_of(Phase(4, 8, kind), 1, ONE_BATCH))
    prompts = [[tuple(each) for batch, _ in work for each in batch] for work in found]
    assert len(set(map(tuple, prompts))) == 6
    assert all(len(set(each)) == 8 for each in prompts)


def test_what_is_unpredictable_is_random_and_sampled_hot_with_a_seed() -> None:
    [(code, greedy)] = work_of(Phase(2, 8, PREDICTABLE), 1, ONE_BATCH)
    [(noise, hot)] = work_of(Phase(3, 8, UNPREDICTABLE), 1, ONE_BATCH)
    [(_, later)] = work_of(Phase(3, 8, UNPREDICTABLE), 2, ONE_BATCH)
    assert all(min(prompt) < 0 for prompt in code)
    assert all(min(prompt) >= 0 for prompt in noise)
    assert (greedy["temperature"], hot["temperature"]) == (0, HOT)
    assert "sampling_seed" not in greedy
    assert later["sampling_seed"] != hot["sampling_seed"]


def test_a_row_has_the_speed_of_each_round_and_what_each_phase_did() -> None:
    arguments = walk("--walk", "1", "4", "--phase-tokens=64", "--new-tokens=32")
    phases = phases_of([1, 4])
    engines = {name: FakeEngine() for name in (PLAIN, "fixed 3")}
    texts = adaptive_steps.texts_of(arguments, "demo")
    run = adaptive_steps.make_run(engines, texts, arguments)  # type: ignore[arg-type]
    paired = Paired(run, phases, [], [*engines], 2)
    paired.round(0)
    assert [engine.batch_sizes for engine in engines.values()] == [[4], [4]], "a short warm-up"
    for number in (1, 2):
        paired.round(number)
    assert paired.is_settled
    for row in adaptive_steps.rows_of(paired, phases, 64):
        assert len(row["tok_s"]) == 2
        assert all(speed > 0 for speed in row["tok_s"])
        assert [each["phase"] for each in row["phases"]] == [phase.name for phase in phases]
        assert [each["switches"] for each in row["phases"]] == [[2, 2], [2, 2], [1, 1], [1, 1]]
        assert all(each["steps_at_end"] == [3, 3] for each in row["phases"])
        assert all(each["accept_length"] == 3.0 for each in row["phases"])


def test_ratios_are_medians_of_rounds_beside_the_best_fixed_way() -> None:
    """The best one is that of the best median; a round that was slow for all changes nothing."""
    speeds = {
        PLAIN: [100, 50, 100],
        "fixed 1": [110, 55, 110],
        "fixed 3": [125, 60, 120],
        "fixed 7": [90, 1000, 90],
        "auto": [150, 75, 126],
    }
    rows = [{"way": way, "tok_s": tok_s} for way, tok_s in speeds.items()]
    summary = adaptive_steps.summarize(rows)
    interval = summary.pop("intervals").pop("auto")
    assert interval["ratios"] == [1.2, 1.25, 1.05]
    assert interval["low"] < 1.16 < interval["high"]
    medians = {PLAIN: 1.0, "fixed 1": 1.1, "fixed 3": 1.2, "fixed 7": 0.9, "auto": 1.5}
    assert summary == {
        "best_fixed": "fixed 3",
        "over_best_fixed": {"auto": 1.2},
        "over_fixed_3": {"auto": 1.2},
        "over_no_drafts": medians,
    }


# ---------------------------------------------------------------- steady loads


def steady(engines: dict[str, FakeEngine], *words: str) -> SteadyLoads:
    arguments = adaptive_stationary.parse([f"--prompt-tokens={PROMPT_TOKENS}", *words])
    return SteadyLoads(engines, Texts(arguments, "demo", 16), arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lap_s", "laps"), [(0.1, Laps(15, 21)), (1.5, Laps(1, 2)), (2.5, Laps(1, 1))]
)
def test_laps_last_as_long_as_asked(lap_s: float, laps: Laps) -> None:
    assert laps_of(lap_s, lead_s=1.5, steady_s=2.04) == laps


def test_rounds_count_only_what_comes_after_the_first_laps() -> None:
    """Those of ways that do not adapt are one lap."""
    engines = {name: FakeEngine() for name in (PLAIN, "fixed 3", "auto")}
    load = Load(1, UNPREDICTABLE)
    made = steady(engines, "--lead-s=0", "--steady-s=0")
    paired = Paired(made.run, [load], [], [*engines], 2, made.choose)
    paired.round(0)
    assert made.laps == {load: Laps(1, 1)}
    before = {name: engine.num_answers for name, engine in engines.items()}
    made.laps[load] = Laps(2, 3)
    paired.round(1)
    answers = {name: engine.num_answers - before[name] for name, engine in engines.items()}
    leads = {PLAIN: 1, "fixed 3": 1, "auto": 2}
    assert answers == {name: (lead + 3) * MIN_PROMPTS for name, lead in leads.items()}
    found = paired.figures(load)[PLAIN]
    assert len(found["tok_s"]) == 1
    assert abs(found["switches"][0] - 3 * MIN_PROMPTS) <= 1, "those of the laps that count"
    assert found["steps_at_end"] == [3]


def test_fixed_numbers_that_are_slow_in_round_0_are_left_out() -> None:
    speeds = {PLAIN: 10.0, "fixed 1": 80.0, "fixed 3": 100.0, "fixed 7": 90.0, "auto": 10.0}
    warm = {name: {"tok_s": speed, "seconds": 50 / speed} for name, speed in speeds.items()}
    made = steady({}, "--lead-s=1", "--steady-s=2")
    assert made.choose(Load(8, PREDICTABLE), warm) == [PLAIN, "fixed 3", "fixed 7", "auto"]
    assert made.laps[Load(8, PREDICTABLE)] == Laps(2, 4), "by the fastest"


def test_a_load_keeps_its_number_of_requests() -> None:
    engine = FakeEngine()
    made = steady({PLAIN: engine}, "--concurrency", "5")
    assert (made.run(Load(5, PREDICTABLE), PLAIN, 1)["tok_s"] or 0) > 0
    assert engine.most_running == 5


@pytest.mark.parametrize("count", [4, 33])
def test_lengths_lie_evenly_around_the_mean(count: int) -> None:
    lengths = lengths_around(128, count, random.Random(0))
    assert sum(lengths) == pytest.approx(128 * count, abs=count / 2)
    assert 96 <= min(lengths) <= max(lengths) <= 160
    assert len(set(lengths)) == count


def figures_of(tok_s: list[float], switches: int = 0) -> dict[str, list[Any]]:
    same: dict[str, Any] = {"seconds": 2.0, "switches": switches, "steps_at_end": 1}
    return {"tok_s": tok_s, **{name: [value] * len(tok_s) for name, value in same.items()}}


FOUND = {
    PLAIN: figures_of([100, 50, 100]),
    "fixed 1": figures_of([120, 60, 110]),
    "fixed 3": figures_of([110, 900, 100]),
    "auto": figures_of([118.8, 59.4, 110], switches=1),
    "EMA, conservative": figures_of([114, 57, 96], switches=3),
}


def test_the_table_has_each_adaptive_way_beside_plain_and_the_best_fixed_number() -> None:
    """The best is that of the best median; a round that was slow for all changes no ratio."""
    summary = adaptive_stationary.summarize(FOUND)
    assert summary["best_fixed"] == "fixed 1"
    text = table_of([{"rounds": 3, "rows": [{**Load(8, PREDICTABLE)._asdict(), **summary}]}])
    assert (
        "| 8 predictable | auto | 110 | 110 (fixed 1) | 0.990 | 1.188 | 1.100 | 0.50 | yes |"
        in (text)
    )
    assert "EMA, conservative | 96 | 110 (fixed 1) | 0.950 | 1.140 | 0.960 | 1.50 | **no** |" in (
        text
    )
    assert text.count("\n| ") == 3, "a line under the head, and two ways"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("over_best_fixed", 0.9899),
        ("over_plain", 0.9899),
        ("lowest_over_plain", 0.9699),
    ],
)
def test_each_figure_that_is_not_as_asked_is_a_miss(key: str, value: float) -> None:
    asked = {"over_best_fixed": 0.99, "over_plain": 0.99, "lowest_over_plain": 0.97}
    assert is_steady(asked)
    assert not is_steady({**asked, key: value})


# ---------------------------------------------------------------- ways


def test_ways_are_flags_that_exist_and_auto_measures_prices() -> None:
    known = WAYS | configured_ways("slots.json")
    for flags in known.values():
        ServerArgs(model_path="x", **flags)
    ways = engine_ways(known)
    assert {name for name, way in ways.items() if way.measures_prices} == {
        "auto",
        "throughput, configured",
    }
    assert len(ADAPTIVE) == 3
    assert configured_ways(None) == {}


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
        adaptive_stationary.parse(words)
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit):
        adaptive_steps.parse(["--ways", *(name for name in WAYS if name != "fixed 3")])
    assert "is what the others are compared with" in capsys.readouterr().err
