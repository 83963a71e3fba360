"""Tests how costs of adaptive steps are measured: the benchmark's arithmetic, on a small model on a
CPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from benchmark import one_batch
from benchmark.measure import adaptive_costs
from benchmark.measure.adaptive_costs import (
    PAIRS,
    TIERS,
    Measured,
    ScheduledTier,
    graph_bytes,
    measure,
    memory_rows,
    parse,
    policy_us,
    rows_of,
)
from benchmark.random_model import random_head, random_model
from benchmark.report.speculation_tables import adaptive_costs as table_of
from policy_steps import drafting_step
from recorded_graphs import recorded_graphs, replayable_backends
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from sglang.srt.processes import runtime_config
from sglang.srt.server_args import ServerArgs

SMALL = ["--geometry=tiny", "--device=cpu", "--batch-sizes=2", "--max-running-requests=2"]
MIB = 1 << 20


class MadeUp:
    """Instead of a `Measured`: launches whose switches cost 7 us, and policies."""

    def __init__(self) -> None:
        self.policies = {"ema": RecordingPolicy(), "throughput": RecordingPolicy()}

    def launch_us(self, size: int, num_steps: int, repeats: int) -> dict[tuple[int, ...], float]:
        alone = {(tier,): 100.0 * tier for tier in TIERS}
        return {**alone, **{pair: 50.0 * sum(pair) + 7.0 + pair[0] for pair in PAIRS}}


class RecordingPolicy:
    """Always two drafts; keeps what it is told."""

    needs_prices = reads_matches = may_rest = False
    settled = 2

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.outcomes: list[StepOutcome] = []

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return (2,)

    def choose(self, upcoming: UpcomingStep) -> Budget:
        self.sizes.append(upcoming.num_reqs)
        return Budget(3)

    def observe(self, outcome: StepOutcome) -> None:
        self.outcomes.append(outcome)


def test_a_switch_is_what_two_tiers_in_turn_take_beyond_each_alone() -> None:
    [row] = rows_of(MadeUp(), parse(SMALL))  # type: ignore[arg-type]
    assert row["switch_us"] == {"0 and 1": 7.0, "1 and 3": 8.0, "3 and 7": 10.0, "0 and 7": 7.0}
    assert row["most_us"] == pytest.approx(10.0 + max(row["policy_us"].values()), abs=0.02)
    assert row["batch"] == 2


def test_a_policy_is_told_of_all_requests_of_each_round() -> None:
    policy = RecordingPolicy()
    assert policy_us(policy, 3) > 0  # type: ignore[arg-type]
    assert {*policy.sizes} == {3}
    assert len(policy.outcomes) == len(policy.sizes)
    for outcome in policy.outcomes:
        assert (outcome.record.plan.draft_length, outcome.record.plan.num_drafted_for) == (2, 3)
        assert outcome.num_tried == [3, 3, 3]
    assert {taken for each in policy.outcomes for taken in each.num_accepted} == {1, 2}


def test_tiers_are_those_that_were_set_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = ScheduledTier(PolicyParts(options=RoundOptions(TIERS[-1])))

    def chosen(turns: Sequence[int]) -> list[int]:
        monkeypatch.setattr(ScheduledTier, "turns", turns)
        return [policy.choose(drafting_step(1)).limit - 1 for _ in range(4)]

    assert chosen((3,)) == [3, 3, 3, 3]
    found = chosen((1, 7))
    assert found in ([1, 7, 1, 7], [7, 1, 7, 1])
    assert policy.settled == found[-1]


def test_a_real_worker_is_measured_at_the_tiers_that_were_set(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two steps of each tier and pair on a CPU, where it has no graphs; each step has the tier that
    was set before it."""
    monkeypatch.setattr(adaptive_costs, "POLICY_ROUNDS", 3)
    monkeypatch.setattr(adaptive_costs, "WARM_STEPS", 3)
    monkeypatch.setattr(one_batch, "keep_out_of_collections", lambda: None)
    policies: list[ScheduledTier] = []

    class Noted(ScheduledTier):
        def __init__(self, parts: PolicyParts) -> None:
            super().__init__(parts)
            policies.append(self)

    monkeypatch.setattr(adaptive_costs, "ScheduledTier", Noted)
    seen: list[tuple[tuple[int, ...], set[int]]] = []
    median_us = Measured._median_us

    def noting(self: Measured, step: Any, turns: tuple[int, ...], num_steps: int) -> float:
        found = median_us(self, step, turns, num_steps)
        [policy] = policies
        seen.append((turns, {policy.settled}))
        assert len(self.launch_ns) == num_steps
        return found

    monkeypatch.setattr(Measured, "_median_us", noting)
    every_tier = tmp_path / "every_tier.json"
    every_tier.write_text(json.dumps({"1": {"candidate_steps": TIERS}}))
    result = measure(parse([*SMALL, "--steps=2", "--repeats=1"]), str(every_tier))
    assert [turns for turns, _ in seen] == [*((tier,) for tier in TIERS), *PAIRS]
    assert all(settled <= {*turns} for turns, settled in seen)
    assert result["memory"] == []
    [row] = result["rows"]
    assert len(row["switch_us"]) == len(PAIRS)
    assert set(row["policy_us"]) == {"ema", "throughput"}


@pytest.mark.long_matrix
def test_bytes_of_graphs_are_those_of_target_and_head(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With recorded graphs, of which each takes the made-up GPU a MiB or two. All tiers verify in
    the target's graphs; of the head's, those of 2 and of 6 draft steps are more than of 6 alone."""
    monkeypatch.setattr(runtime_config, "_captures_graphs", lambda args, device: True)
    monkeypatch.setattr(runtime_config, "MAX_GRAPH_ROWS", 16)
    slots = tmp_path / "slots.json"
    slots.write_text(json.dumps({"1": {"candidate_steps": [1, 3, 7]}}))
    fixed = {"speculative_num_steps": 7, "speculative_load_aware": "off"}
    adaptive = {"speculative_adaptive": True, "speculative_adaptive_config": str(slots)}
    found = []
    with (
        random_model("tiny") as folder,
        random_head(folder) as head,
        recorded_graphs(),
        replayable_backends(),
    ):
        for choosing in (fixed, adaptive):
            args = ServerArgs(
                model_path=folder,
                load_format="dummy",
                device="cpu",
                max_running_requests=2,
                context_length=32,
                max_total_tokens=256,
                speculative_algorithm="EAGLE",
                speculative_draft_model_path=head,
                **choosing,
            )
            args.attention_backend = "ragged"
            found.append(graph_bytes(args))
    alone, every = found
    assert alone["target"] == every["target"] > 0
    assert every["head_graphs"] - alone["head_graphs"] == 2, "of 2 draft steps: 1 and 2 requests"
    assert 2 * MIB <= every["head"] - alone["head"] <= 4 * MIB


def test_memory_is_beside_that_of_the_deepest_tier_which_is_measured_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    paths = {}
    for name, steps in (("a", [1, 3]), ("b", [0, 3]), ("c", [1, 5])):
        paths[name] = str(tmp_path / name)
        Path(paths[name]).write_text(json.dumps({"1": {"candidate_steps": steps}}))
    asked: list[ServerArgs] = []

    def graph_bytes(args: ServerArgs) -> dict[str, int]:
        asked.append(args)
        mib = 12 if args.speculative_adaptive else args.speculative_num_steps or 0
        return {"target": 10 * MIB, "head": mib * MIB, "rounds": 0}

    monkeypatch.setattr(adaptive_costs, "graph_bytes", graph_bytes)
    monkeypatch.setattr(adaptive_costs, "_free_all", lambda: None)
    rows = memory_rows({"model_path": "x"}, paths)
    fixed = [args.speculative_num_steps for args in asked if not args.speculative_adaptive]
    assert fixed == [3, 5]
    assert all(args.speculative_load_aware == "off" for args in asked if args.speculative_num_steps)
    found = [(row["config"], row["deepest_mib"], row["all_mib"], row["ratio"]) for row in rows]
    assert found == [("a", 13, 22, 1.692), ("b", 13, 22, 1.692), ("c", 15, 22, 1.467)]


def test_the_context_has_room_for_all_steps() -> None:
    arguments: argparse.Namespace = parse(["--steps=100", "--repeats=5"])
    assert arguments.context_length > 5 * (len(TIERS) + len(PAIRS)) * 100


def test_the_tables_judge_each_batch_size_and_configuration() -> None:
    row = {
        "batch": 8,
        "switch_us": {"0 and 1": 3.25, "1 and 3": -2.0},
        "policy_us": {"ema": 5.0, "throughput": 40.0},
        "most_us": 43.25,
    }
    memory = {"config": "c", "deepest_mib": 1000, "all_mib": 1310, "ratio": 1.31}
    slow = {**row, "batch": 32, "most_us": 100.0}
    text = table_of({"rows": [row, slow], "memory": [memory]})
    assert "| 8 | 3.2 | -2.0 | 5.0 | 40.0 | 43.2 | yes |" in text
    assert "| 32 | 3.2 | -2.0 | 5.0 | 40.0 | 100.0 | **no** |" in text
    assert "| c | 1,000 MiB | 1,310 MiB | 1.31 | **no** |" in text
    assert "configuration" not in table_of({"rows": [row], "memory": []})
