"""Measures what adaptive steps cost: host time of a switch of tiers, memory of all tiers' graphs.

Random weights in a large geometry with a head of one layer, in this process. Of every step's drafts
none is right, so each request gets one token per step, whatever the tier.

A switch: steps of one batch whose tier is always the same, always another one, and both in turn.
Each step begins when the device is idle, and what counts is the host's time to launch it. Two steps
in turn do what one step of each tier does, and switch twice; so a switch costs the mean of those in
turn less the mean of the two fixed ones. Beside it stand `choose` and `observe` of both policies,
which run in each step, whether it switches or not.

Memory: what capturing all graphs of target and head takes, of each configuration and of its deepest
tier alone. What is asked: `goals.py`.

    python -m benchmark.measure.adaptive_costs            on a GPU
    python -m benchmark.measure.adaptive_costs --geometry tiny --device cpu --batch-sizes 2 \\
        --repeats 1      no graphs, and the host's time is that of computing too
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, cast
from unittest import mock

import torch
from tqdm import tqdm

from benchmark.command import print_rows, store, take_turns
from benchmark.environment import describe_environment
from benchmark.goals import SWITCH_US, TIERS_MEMORY_RATIO
from benchmark.one_batch import (
    DECODE_INPUT_LEN,
    decoding,
    make_random_parser,
    random_batch,
    random_flags,
    synchronize,
)
from sglang.srt.environ import Environ
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.adaptive_config import PRESETS, read_adaptive_config
from sglang.srt.lookahead.contract import Budget, StepPlan, StepRecord
from sglang.srt.lookahead.ema import AdaptiveController
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LoadAwareDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.platform import Platform, free_bytes
from sglang.srt.processes.runtime_config import resolve
from sglang.srt.processes.worker_factory import drafter_models, make_worker
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import DrafterParts
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.speculative.rounds import measured_rounds, planner_of_rounds
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, Worker

TIERS = (0, 1, 3, 7)
PAIRS = ((0, 1), (1, 3), (3, 7), (0, 7))  # between which steps switch
TURNS: tuple[tuple[int, ...], ...] = (*((tier,) for tier in TIERS), *PAIRS)
POLICIES = {"ema": AdaptiveController, "throughput": LoadAwareDrafts}  # by strategy
ALL_SIZES = "all sizes"  # a configuration in which batches of every size may have all TIERS
WARM_STEPS = 10  # after a change of what is measured
POLICY_ROUNDS = 2000
POLICY_KV = 512  # tokens of each request that a policy is told of
MIB = 1 << 20


class ScheduledTier:
    """A tier policy for measuring: some tiers in turn, whatever is confirmed.

    Attributes:
        turns: the tiers of the steps to come, again and again; set from outside.
    """

    needs_prices = reads_matches = may_rest = False
    turns: ClassVar[Sequence[int]] = (TIERS[-1],)

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return TIERS

    def __init__(self, parts: PolicyParts) -> None:
        self.settled = TIERS[-1]
        self._number = 0

    def choose(self, upcoming: UpcomingStep) -> Budget:
        self._number += 1
        self.settled = self.turns[self._number % len(self.turns)]
        return Budget(1 + self.settled)

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


def time_launches(worker: Worker) -> list[int]:
    """Has each launch of a worker's steps add its nanoseconds to the list that is returned. Each
    waits first until the device is idle: else it may wait for room in the device's queue."""
    launch, launch_ns = worker.forward_batch_generation, list[int]()

    def timed(batch: ScheduleBatch) -> GenerationBatchResult:
        synchronize()
        start = time.perf_counter_ns()
        result = launch(batch)
        launch_ns.append(time.perf_counter_ns() - start)
        return result

    worker.forward_batch_generation = timed  # type: ignore[method-assign]
    return launch_ns


class Measured:
    """A batch that is measured step by step.

    Attributes:
        policies: both that a server may have, by strategy.
    """

    def __init__(self, geometry: str, **flags: Any) -> None:
        self.policies: dict[str, LengthPolicy] = {}
        self.launch_ns: list[int] = []
        self.batch = random_batch(geometry, has_head=True, make=self._make, **flags)

    def _make(
        self, runners: RunnerGroup, drafter: DrafterConfig | None, prices: PriceTable | None
    ) -> Worker:
        assert drafter is not None
        assert prices is not None, "The throughput strategy has them measured."
        parts = DrafterParts(drafter.options, runners, cast(Any, None), prices)
        rounds = measured_rounds(parts)
        for name, policy in POLICIES.items():
            with mock.patch.object(RoundOptions, "policy", policy):
                planner = planner_of_rounds(drafter.options.rounds, parts, rounds)
            self.policies[name] = planner.policy
        with mock.patch.object(RoundOptions, "policy", ScheduledTier):
            worker = make_worker(runners, drafter, simulated_accept_len=1.0)
        self.launch_ns = time_launches(worker)
        return worker

    def launch_us(self, size: int, num_steps: int, repeats: int) -> dict[tuple[int, ...], float]:
        """Median microseconds of a launch at each tier of PAIRS, and at both of a pair in turn."""
        num_all = repeats * len(TURNS) * (WARM_STEPS + num_steps)
        with decoding(self.batch, size, num_all, WARM_STEPS) as step:
            works = {turns: partial(self._median_us, step, turns, num_steps) for turns in TURNS}
            found = take_turns(works, repeats)
        return {turns: statistics.median(times) for turns, times in found.items()}

    def _median_us(self, step: Callable[[], None], turns: tuple[int, ...], num_steps: int) -> float:
        """The mean, over the steps of a turn, of their median time."""
        ScheduledTier.turns = turns
        for _ in range(WARM_STEPS):
            step()
        self.launch_ns.clear()
        for _ in range(num_steps):
            step()
        times, count = self.launch_ns, len(turns)
        return statistics.mean(statistics.median(times[at::count]) for at in range(count)) / 1e3


def policy_us(policy: LengthPolicy, size: int) -> float:
    """Mean microseconds of what a policy does in a step of so many requests, of whose drafts one or
    none is right. Not all steps do the same."""
    rows, times, counts = range(size), [], StepCounts([1], [1], [1], [True])
    emitting = Counter({EmittingRequest(Kind(), 1 + TIERS[-1]): size})
    upcoming = UpcomingStep(emitting, size * POLICY_KV)
    for number in range(POLICY_ROUNDS):
        start = time.perf_counter_ns()
        budget = policy.choose(upcoming)
        middle = time.perf_counter_ns()
        accepted = [1 + ((index + number) % 2 if budget.limit > 1 else 0) for index in rows]
        plan = StepPlan(counts=counts, draft_length=policy.settled, num_drafted_for=size)
        outcome = StepOutcome(
            record=StepRecord(rows=rows, plan=plan),
            result=HostResult([[]] * size, accepted, accepted),
            num_tried=[budget.limit] * size,
            num_accepted=accepted,
        )
        before = time.perf_counter_ns()
        policy.observe(outcome)
        times.append(time.perf_counter_ns() - before + middle - start)
    return statistics.mean(times) / 1e3


def rows_of(measured: Measured, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One per batch size: what a switch adds to the launch of a step, and what policies take."""
    rows = []
    for size in tqdm(arguments.batch_sizes, desc="switches", unit="size"):
        found = measured.launch_us(size, arguments.steps, arguments.repeats)
        switches = {
            f"{low} and {high}": round(
                found[low, high] - statistics.mean((found[(low,)], found[(high,)])), 2
            )
            for low, high in PAIRS
        }
        policies = {
            name: round(policy_us(each, size), 2) for name, each in measured.policies.items()
        }
        rows.append(
            {
                "batch": size,
                "switch_us": switches,
                "policy_us": policies,
                "most_us": round(max(switches.values()) + max(policies.values()), 2),
            }
        )
    return rows


def graph_bytes(args: ServerArgs) -> dict[str, int]:
    """Measures the bytes that graphs take: of the target, of the head with those of its draft
    steps, and of whole rounds with the worker's device rows. Those of the models are captured once
    more, so that all that is loaded or compiled is there already."""
    model = load_model_config(args.model_path)
    config = resolve(args, Platform.probe(), model, Environ.read())
    runners = make_runners(config.execution, *drafter_models(config.drafter, config.execution))
    for runner in runners.runners:
        runner.drop_graphs()
    _free_all()
    found = {}
    for name, runner in zip(("target", "head"), runners.runners, strict=True):
        before = free_bytes(config.execution.device)
        runner.capture_graphs()
        found[name] = before - free_bytes(config.execution.device)
        found[f"{name}_graphs"] = runner.num_graphs
    before = free_bytes(config.execution.device)
    make_worker(runners, config.drafter)
    found["rounds"] = before - free_bytes(config.execution.device)
    return found


def _free_all() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def memory_rows(flags: dict[str, Any], configs: dict[str, str]) -> list[dict[str, Any]]:
    """One per configuration: memory of all its graphs, and of those of its deepest tier alone.

    Args:
        flags: of `ServerArgs`, but those that choose steps.
        configs: of --speculative-adaptive-config, by the names that the result has for them.
    """
    alone: dict[int, dict[str, int]] = {}
    rows = []
    for name, config in tqdm(configs.items(), desc="memory", unit="configuration"):
        deepest = read_adaptive_config(config).candidate_steps[-1]
        if deepest not in alone:
            fixed = {"speculative_num_steps": deepest, "speculative_load_aware": "off"}
            alone[deepest] = graph_bytes(ServerArgs(**flags, **fixed))
            _free_all()
        slots = {"speculative_adaptive": True, "speculative_adaptive_config": config}
        every = graph_bytes(ServerArgs(**flags, **slots))
        _free_all()
        parts = ("target", "head", "rounds")
        mib = [sum(each[part] for part in parts) / MIB for each in (alone[deepest], every)]
        rows.append(
            {
                "config": name,
                "deepest_mib": round(mib[0]),
                "all_mib": round(mib[1]),
                "ratio": round(mib[1] / mib[0], 3),
            }
        )
    return rows


def measure(arguments: argparse.Namespace, every_tier: str) -> dict[str, Any]:
    """Both parts.

    Args:
        every_tier: path of the configuration ALL_SIZES.
    """
    flags: dict[str, Any] = {
        "device": arguments.device,
        "attention_backend": arguments.attention_backend,
        "max_running_requests": max(arguments.max_running_requests, *arguments.batch_sizes),
        "context_length": arguments.context_length,
    }
    has_graphs = Platform.probe().device == "cuda" and arguments.device != "cpu"
    memory: list[dict[str, Any]] = []
    if has_graphs:
        configs = {**{name: name for name in PRESETS}, ALL_SIZES: every_tier}
        with random_flags(arguments.geometry, has_head=True) as model:
            memory = memory_rows(model | flags, configs)
    choosing = {"speculative_adaptive": True, "speculative_adaptive_config": every_tier}
    choosing["speculative_adaptive_strategy"] = "throughput"
    measured = Measured(arguments.geometry, **flags, **choosing)
    return {
        **describe_environment(),
        "geometry": arguments.geometry,
        "attention_backend": arguments.attention_backend or "default",
        "max_running_requests": flags["max_running_requests"],
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "rows": rows_of(measured, arguments),
        "memory": memory,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_random_parser(__doc__, "adaptive_costs")
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    add("--steps", type=int, default=50, help="of each tier or pair in a row")
    add("--repeats", type=int, default=6, help="of all tiers and pairs")
    add("--max-running-requests", type=int, default=128, help="that graphs are captured for")
    arguments = parser.parse_args(argv)
    num_new = arguments.repeats * len(TURNS) * (WARM_STEPS + arguments.steps) + 3 * WARM_STEPS
    arguments.context_length = 2 * DECODE_INPUT_LEN + num_new + 2 * TIERS[-1]
    return arguments


def main() -> None:
    """Measures, prints, writes the result."""
    arguments = parse()
    with tempfile.TemporaryDirectory() as folder:
        every_tier = Path(folder) / "every_tier.json"
        every_tier.write_text(json.dumps({"1": {"candidate_steps": TIERS}}), encoding="utf-8")
        result = measure(arguments, str(every_tier))
    print_rows(result["rows"] + result["memory"])
    print(f"asked: most_us below {SWITCH_US:g} on a GPU, ratio up to {TIERS_MEMORY_RATIO:g}")
    store(arguments.out, result)


if __name__ == "__main__":
    main()
