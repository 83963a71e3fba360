"""The experiments of adaptive steps: their work, what counts, and the tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest

from benchmark.experiments import (
    ADAPTIVE,
    ADAPTIVE_WAYS,
    EXPERIMENTS,
    KINDS_OF_TEXT,
    PLAIN,
    adaptive_beside_others,
    noise,
)
from benchmark.measure.experiment import Load, loads_of, telling_steps
from benchmark.paired import Interval, Paired, batches, over_all
from benchmark.report.speculation_tables import adaptive_stationary, adaptive_steps

STEPS = EXPERIMENTS["adaptive_steps"]
PROMPTS = [[number] * 6 for number in range(96)]


class FakeEngine:
    """Switches once per batch. Of three drafts two are right."""

    def __init__(self) -> None:
        self.batches: list[tuple[list[list[int]], int]] = []

    def generate(self, input_ids: list[list[int]], sampling_params: Any) -> list[Any]:
        self.batches.append((input_ids, sampling_params["max_new_tokens"]))
        meta = {"spec_verify_ct": 10, "spec_num_correct_drafts": 20}
        return [{"meta_info": meta}] * len(input_ids)

    def get_server_info(self) -> dict[str, Any]:
        switches = {"0": len(self.batches), "3": 1}
        state = {"speculative_num_steps": 3, "speculative_tier_switches": switches}
        return {"internal_states": [state]}


def test_the_walk_visits_each_load_with_both_kinds_of_text_and_comes_back() -> None:
    loads = loads_of(STEPS, STEPS.requests)
    assert len({*loads}) == 12
    assert loads[:3] == [Load(1, "predictable"), Load(1, "unpredictable"), Load(8, "predictable")]
    assert loads[-1] == Load(1, "unpredictable", visit=2)


@pytest.mark.parametrize("new_tokens", [128, 50])
@pytest.mark.parametrize("requests", STEPS.requests)
def test_each_load_of_a_walk_has_as_many_tokens(requests: int, new_tokens: int) -> None:
    engine = FakeEngine()
    run = batches({"way": engine}, {"way": {"max_new_tokens": new_tokens}}, PROMPTS, 1536)
    figures = run(requests, "way", 1)
    assert all(len(prompts) == requests for prompts, _ in engine.batches)
    assert max(count for _, count in engine.batches) <= new_tokens
    num_tokens = sum(requests * count for _, count in engine.batches)
    assert 0.97 * 1536 < num_tokens <= 1536
    used = [prompt for prompts, _ in engine.batches for prompt in prompts]
    assert len({*map(tuple, used)}) == min(len(used), len(PROMPTS)), "other ones in each batch"
    assert figures["accept_length"] == 3.0
    engine.batches.clear()
    run(requests, "way", 0)
    assert len(engine.batches) == 1, "round 0 warms up"


def test_figures_tell_switches_of_a_run_and_the_steps_at_its_end() -> None:
    engines = {name: FakeEngine() for name in (PLAIN, "auto")}
    params = {name: {"max_new_tokens": 8} for name in engines}
    work = batches(engines, params, PROMPTS, 16)
    run = telling_steps(
        lambda load, way, number: work(load.requests, way, number), cast(Any, engines)
    )
    paired = Paired(run, [Load(1, "predictable")], [], [*engines], 2)
    for number in range(3):
        paired.round(number)
    assert paired.is_settled
    [row] = paired.rows()
    for found in row["ways"].values():
        assert found["steps_at_end"] == [3, 3]
        assert len(found["tok_s"]) == 2
        for speed, rate in zip(found["tok_s"], found["switches_per_s"], strict=True):
            assert rate * 16 <= 2.1 * speed, "two batches are two switches"
            assert rate > 0


def test_what_is_unpredictable_is_random_and_sampled_hot_with_a_seed() -> None:
    code, other = KINDS_OF_TEXT["predictable"], KINDS_OF_TEXT["unpredictable"]
    assert code.prompt([5, 6]) == [5, 6]
    assert code.params["temperature"] == 0
    assert other.params["temperature"] > 1
    assert "sampling_seed" in other.params
    assert noise([5, 6, 7]) == noise([5, 6, 7]) != noise([5, 6, 8])
    assert len(noise([5] * 20)) == 20


def test_ways_measure_prices_only_where_no_configuration_is_given() -> None:
    assert {name for name, way in ADAPTIVE_WAYS.items() if way.measures_prices} == {"auto"}
    assert len(ADAPTIVE) == 3
    pairs = adaptive_beside_others([PLAIN, "fixed 3", "auto"])
    assert pairs == [("auto", PLAIN), ("auto", "fixed 3")]


# ---------------------------------------------------------------- tables


def row_of(load: Sequence[Any], speeds: dict[str, list[float]]) -> dict[str, Any]:
    same = {"accept_length": 1.5, "switches_per_s": 0.5, "steps_at_end": 3}
    return {
        "load": load,
        "ways": {
            way: {"tok_s": found, **{name: [value] * len(found) for name, value in same.items()}}
            for way, found in speeds.items()
        },
        "ratios": {
            f"{mine} / {other}": Interval.of(
                a / b for a, b in zip(speeds[mine], speeds[other], strict=True)
            ).stored()
            for mine, other in adaptive_beside_others([*speeds])
        },
    }


def test_a_walk_is_compared_by_the_time_of_all_its_loads() -> None:
    """As many tokens at 100 and at 300 tokens/s are 150 on average; medians are those of rounds."""
    speeds = {PLAIN: [100, 50, 100], "fixed 3": [125, 60, 120], "auto": [150, 75, 126]}
    rows = [
        row_of([8, "predictable", 1], speeds),
        row_of(
            [8, "unpredictable", 1],
            {way: [3 * each for each in found] for way, found in speeds.items()},
        ),
    ]
    whole = over_all(rows, adaptive_beside_others([*speeds]))
    assert whole["ways"][PLAIN]["tok_s"] == [150, 75, 150]
    assert whole["ratios"]["auto / fixed 3"]["ratios"] == [1.2, 1.25, 1.05]
    text = adaptive_steps({"rows": [*rows, whole]})
    assert "| 2: 8 unpredictable | 300 (1.50) | 360 (1.50) | 378 (1.50) |" in text
    assert "| all phases | **150** | **180** | **189** |" in text
    assert "| switches per second | 0.50 | 0.50 | 0.50 |" in text
    assert "Beside fixed 3: auto 1.200 (asked of the better one 1.15: yes)." in text


def test_the_table_has_each_adaptive_way_beside_plain_and_the_best_fixed_number() -> None:
    """The best is that of the best median; a round that was slow for all changes no ratio."""
    found = {
        PLAIN: [100, 50, 100],
        "fixed 1": [120, 60, 110],
        "fixed 3": [110, 900, 100],
        "auto": [118.8, 59.4, 110],
        "EMA, conservative": [114, 57, 96],
    }
    text = adaptive_stationary({"rounds": 3, "rows": [row_of([8, "predictable", 1], found)]})
    assert (
        "| 8 predictable | auto | 110 | 110 (fixed 1) | 0.990 | 1.188 | 1.100 | 0.50 | yes |"
        in text
    )
    assert (
        "EMA, conservative | 96 | 110 (fixed 1) | 0.950 | 1.140 | 0.960 | 0.50 | **no** |" in text
    )
    assert text.count("\n| ") == 3, "a line under the head, and two ways"


@pytest.mark.parametrize(
    ("auto", "fixed"), [([98.9], [100]), ([98.9] * 3, [90] * 3), ([110, 96, 110], [90, 90, 90])]
)
def test_each_figure_that_is_not_as_asked_is_a_miss(auto: list[float], fixed: list[float]) -> None:
    """Beside the best fixed number, beside plain, and in the lowest round beside plain."""
    plain = [100.0] * len(auto) if fixed[0] < 100 else [50.0]
    row = row_of([8, "predictable", 1], {PLAIN: plain, "fixed 1": fixed, "auto": auto})
    assert "**no**" in adaptive_stationary({"rounds": 1, "rows": [row]})
