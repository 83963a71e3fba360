"""The pure parts of the benchmark of adaptive steps: its phases, its work, its summary."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark.adaptive_ways import (
    ADAPTIVE,
    FIXED,
    HOT,
    KINDS,
    PLAIN,
    PREDICTABLE,
    UNPREDICTABLE,
    WAYS,
)
from benchmark.measure import adaptive_steps
from benchmark.measure.adaptive_steps import Phase, Rounds, Work, parse, phases_of, summarize
from sglang.srt.server_args import ServerArgs

PROMPT_TOKENS = 6
ONE_BATCH = "--phase-tokens=960"  # for 8 requests
Batches = list[tuple[list[list[int]], dict[str, Any]]]


@pytest.fixture(autouse=True)
def made_up_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of held-out code: prompts that all differ, none of which random prompts are."""

    def draw(
        path: Path, num_prompts: int, num_tokens: int, seed: int
    ) -> tuple[list[list[int]], dict[str, Any]]:
        return [[-1 - seed, *[-i] * (num_tokens - 1)] for i in range(num_prompts)], {}

    monkeypatch.setattr(adaptive_steps, "held_out_prompts", draw)


def options(*words: str) -> argparse.Namespace:
    return parse([f"--prompt-tokens={PROMPT_TOKENS}", *words])


def work(*words: str) -> Work:
    return Work(options(*words), "demo")


def prompts_of(batches: Batches) -> list[tuple[int, ...]]:
    return [tuple(prompt) for prompts, _ in batches for prompt in prompts]


# ---------------------------------------------------------------- phases and work


def test_the_walk_has_both_kinds_of_text_at_each_number_of_requests() -> None:
    phases = phases_of([1, 8, 1])
    assert [(phase.requests, phase.kind) for phase in phases] == [
        (requests, kind) for requests in (1, 8, 1) for kind in KINDS
    ]
    assert [phase.number for phase in phases] == list(range(6))
    assert phases[3].name == "4: 8 unpredictable"
    assert len({phase.name for phase in phases}) == 6


@pytest.mark.parametrize("tokens", [1536, 960, 480])
@pytest.mark.parametrize("new_tokens", [128, 50])
def test_phases_emit_the_same_number_of_tokens(tokens: int, new_tokens: int) -> None:
    made = work(f"--phase-tokens={tokens}", f"--new-tokens={new_tokens}")
    for phase in phases_of(options().walk):
        batches = made.batches(phase, 1)
        assert all(len(prompts) == phase.requests for prompts, _ in batches)
        longest = {params["max_new_tokens"] for _, params in batches}
        assert max(longest) <= new_tokens
        emitted = sum(len(prompts) * params["max_new_tokens"] for prompts, params in batches)
        assert emitted == tokens
        assert all(params["ignore_eos"] for _, params in batches)


@pytest.mark.parametrize("kind", KINDS)
def test_all_ways_get_the_same_prompts_and_each_round_and_phase_others(kind: str) -> None:
    made = work(ONE_BATCH)
    first = Phase(2, 8, kind)
    assert made.batches(first, 1) == work(ONE_BATCH).batches(first, 1)
    seen = [prompts_of(made.batches(first, number)) for number in range(1, 6)]
    seen.append(prompts_of(made.batches(Phase(4, 8, kind), 1)))
    assert len({tuple(prompts) for prompts in seen}) == len(seen)
    for prompts in seen:
        assert len(set(prompts)) == len(prompts) == 8
        assert all(len(prompt) == PROMPT_TOKENS for prompt in prompts)


def test_what_is_unpredictable_is_random_and_sampled_hot_with_a_seed() -> None:
    made = work(ONE_BATCH)
    [(code, greedy)] = made.batches(Phase(2, 8, PREDICTABLE), 1)
    [(noise, hot)] = made.batches(Phase(3, 8, UNPREDICTABLE), 1)
    assert all(min(prompt) < 0 for prompt in code)
    assert all(min(prompt) >= 0 for prompt in noise)
    assert greedy["temperature"] == 0
    assert "sampling_seed" not in greedy
    assert hot["temperature"] == HOT
    [(_, later)] = made.batches(Phase(3, 8, UNPREDICTABLE), 2)
    assert later["sampling_seed"] != hot["sampling_seed"]


# ---------------------------------------------------------------- rounds and summary


class FakeEngine:
    """Switches once per answer; of three drafts two are right."""

    def __init__(self) -> None:
        self.num_batches = 0
        self.batch_sizes: list[int] = []

    def generate(self, input_ids: Sequence[list[int]], sampling_params: Any) -> list[Any]:
        self.num_batches += 1
        self.batch_sizes.append(len(input_ids))
        return [{"meta_info": {"spec_verify_ct": 10, "spec_num_correct_drafts": 20}}] * len(
            input_ids
        )

    def get_server_info(self) -> dict[str, Any]:
        switches = {"0": self.num_batches, "3": 0}
        state = {"speculative_num_steps": 3, "speculative_tier_switches": switches}
        return {"internal_states": [state]}


def test_a_row_has_the_speed_of_each_round_and_what_each_phase_did() -> None:
    words = ("--walk", "1", "4", "--phase-tokens=64", "--new-tokens=32")
    phases = phases_of([1, 4])
    engines = {name: FakeEngine() for name in (PLAIN, "fixed 3")}
    made = Rounds(engines, work(*words), phases, 64)  # type: ignore[arg-type]
    made.run(0)
    assert [engine.batch_sizes for engine in engines.values()] == [[4], [4]], "a short warm-up"
    for number in (1, 2):
        made.run(number)
    rows = made.rows()
    assert [row["way"] for row in rows] == [PLAIN, "fixed 3"]
    for row in rows:
        assert len(row["tok_s"]) == 2
        assert all(speed > 0 for speed in row["tok_s"])
        assert [each["phase"] for each in row["phases"]] == [phase.name for phase in phases]
        assert [each["switches"] for each in row["phases"]] == [[2, 2], [2, 2], [1, 1], [1, 1]]
        assert all(each["steps_at_end"] == [3, 3] for each in row["phases"])
        assert all(each["accept_length"] == 3.0 for each in row["phases"])


def rows_of(**speeds: list[float]) -> list[dict[str, Any]]:
    return [{"way": way, "tok_s": tok_s} for way, tok_s in speeds.items()]


def test_ratios_are_medians_of_rounds_beside_the_best_fixed_way() -> None:
    """The best one is that of the best median; a round that was slow for all changes nothing."""
    rows = rows_of(
        **{
            PLAIN: [100, 50, 100],
            "fixed 1": [110, 55, 110],
            "fixed 3": [125, 60, 120],
            "fixed 7": [90, 1000, 90],
            "auto": [150, 75, 126],
        }
    )
    summary = summarize(rows)
    interval = summary.pop("intervals").pop("auto")
    assert interval["ratios"] == [1.2, 1.25, 1.05]
    assert interval["low"] < 1.16 < interval["high"]
    assert summary == {
        "best_fixed": "fixed 3",
        "over_best_fixed": {"auto": 1.2},
        "over_fixed_3": {"auto": 1.2},
        "over_no_drafts": {
            PLAIN: 1.0,
            "fixed 1": 1.1,
            "fixed 3": 1.2,
            "fixed 7": 0.9,
            "auto": 1.5,
        },
    }


def test_the_ways_are_those_that_are_compared_and_their_flags_exist() -> None:
    assert "fixed 3" in FIXED
    assert {PLAIN, *FIXED, *ADAPTIVE} == set(WAYS)
    assert len(ADAPTIVE) == 3
    for flags in WAYS.values():
        ServerArgs(model_path="x", **flags)


def test_what_others_are_compared_with_is_always_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    others = [name for name in WAYS if name != "fixed 3"]
    with pytest.raises(SystemExit):
        parse(["--ways", *others])
    assert "is what the others are compared with" in capsys.readouterr().err
