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
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from tqdm import tqdm

from benchmark.command import in_turn, make_parser, print_rows, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.goals import SWITCH_US, TIERS_MEMORY_RATIO
from benchmark.random_model import GEOMETRIES, random_head, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.environ import Environ
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.adaptive_config import PRESETS, read_adaptive_config
from sglang.srt.lookahead.contract import Budget, StepPlan
from sglang.srt.lookahead.ema import AdaptiveController
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.load_aware_drafts import LoadAwareDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.price_measurement import measure_draft_prices
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.platform import Platform, free_bytes
from sglang.srt.processes.runtime_config import resolve
from sglang.srt.processes.worker_factory import drafter_models, make_worker
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_configs import EagleConfig
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, Worker

TIERS = (0, 1, 3, 7)
PAIRS = ((0, 1), (1, 3), (3, 7), (0, 7))  # between which steps switch
ALL_SIZES = "all sizes"  # a configuration in which batches of every size may have all TIERS
INPUT_LEN = 128
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
        return Budget(1 + self.settled, settled=self.settled)

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class ScheduledRounds(RoundOptions):
    """With `ScheduledTier`, whatever `tier_policy` names."""

    @property
    def policy(self) -> type[LengthPolicy]:
        return ScheduledTier

    @classmethod
    def of(cls, config: EagleConfig) -> EagleConfig:
        """The drafter's configuration with these."""
        known = {entry.name: getattr(config.rounds, entry.name) for entry in fields(config.rounds)}
        return replace(config, rounds=cls(**known))


@dataclass
class TimedWorker:
    """Another worker, whose launches are timed. Each waits first until the device is idle: else a
    launch may wait for room in the device's queue.

    Attributes:
        launch_ns: of each step.
    """

    worker: Worker
    launch_ns: list[int] = field(default_factory=list)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self.worker.step_width(params)

    def observe(self, result: HostResult) -> None:
        self.worker.observe(result)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        result = self.worker.forward_batch_generation(batch)
        self.launch_ns.append(time.perf_counter_ns() - start)
        return result


@dataclass
class Measured:
    """A batch that is measured step by step; made by `start`.

    Attributes:
        policies: both that a server may have, by strategy.
    """

    batch: OneBatch
    worker: TimedWorker
    policies: dict[str, LengthPolicy]

    @classmethod
    def start(cls, args: ServerArgs) -> Measured:
        made: dict[str, Any] = {}

        def make(
            runners: RunnerGroup, drafter: DrafterConfig | None, prices: PriceTable | None
        ) -> Worker:
            assert drafter is not None
            assert prices is not None, "The throughput strategy has them measured."
            options = drafter.options
            made["policies"] = policies_over(runners, options.rounds, prices)
            scheduled = DrafterConfig(drafter.name, ScheduledRounds.of(options))
            worker = make_worker(runners, scheduled, simulated_accept_len=1.0)
            made["worker"] = TimedWorker(worker)
            return made["worker"]

        batch = OneBatch(args, make)
        return cls(batch, made["worker"], made["policies"])

    def launch_us(self, size: int, num_steps: int, repeats: int) -> dict[tuple[int, ...], float]:
        """Median microseconds of a launch at each tier of PAIRS, and at both of a pair in turn."""
        alone = [(tier,) for tier in sorted({tier for pair in PAIRS for tier in pair})]
        found: dict[tuple[int, ...], list[float]] = {turns: [] for turns in (*alone, *PAIRS)}
        num_new = repeats * len(found) * (WARM_STEPS + num_steps) + WARM_STEPS
        params = SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
        prompts = random_prompts(size, INPUT_LEN, self.batch.vocab_size, size)
        with self.batch.overlapping_steps(prompts, params) as step:
            for number in range(repeats):
                for turns in in_turn(found, number):
                    found[turns].append(self._median_us(step, turns, num_steps))
        return {turns: statistics.median(times) for turns, times in found.items()}

    def _median_us(self, step: Callable[[], None], turns: tuple[int, ...], num_steps: int) -> float:
        """The mean, over the steps of a turn, of their median time."""
        ScheduledTier.turns = turns
        for _ in range(WARM_STEPS):
            step()
        self.worker.launch_ns.clear()
        for _ in range(num_steps):
            step()
        times, count = self.worker.launch_ns, len(turns)
        return statistics.mean(statistics.median(times[at::count]) for at in range(count)) / 1e3


def policies_over(
    runners: RunnerGroup, options: RoundOptions, prices: PriceTable
) -> dict[str, LengthPolicy]:
    """The policies of both strategies, over a drafter's models."""
    target, head = runners.runners
    num_rows = runners.memory.table.num_rows
    width, steps = 1 + options.num_steps, tuple(options.draft_steps)
    drafts = measure_draft_prices(head, num_rows, width, steps)
    rounds = MeasuredRoundPrices(prices, drafts, max_requests=num_rows)
    parts = PolicyParts(
        options=options,
        num_rows=num_rows,
        max_prompt_rows=runners.max_prompt_rows,
        rounds=rounds,
    )
    if target.graph_keys is not None:
        parts = replace(parts, graph_size=target.graph_keys.decode_size)
    return {"ema": AdaptiveController(parts), "throughput": LoadAwareDrafts(parts)}


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
        outcome = StepOutcome(
            plan=StepPlan(counts=counts, draft_length=budget.settled, num_drafted_for=size),
            rows=rows,
            num_tried=[budget.limit] * size,
            num_accepted=accepted,
            num_tokens=sum(accepted),
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
        launches = {" and ".join(map(str, turns)): round(us, 1) for turns, us in found.items()}
        rows.append(
            {
                "batch": size,
                "launch_us": launches,
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
                "deepest": deepest,
                "deepest_mib": round(mib[0]),
                "all_mib": round(mib[1]),
                "ratio": round(mib[1] / mib[0], 3),
                "of_deepest": alone[deepest],
                "of_all": every,
            }
        )
    return rows


def measure(arguments: argparse.Namespace, folder: str, head: str, slots: str) -> dict[str, Any]:
    """Both parts.

    Args:
        folder, head: of `random_model` and `random_head`.
        slots: path of the configuration ALL_SIZES.
    """
    flags: dict[str, Any] = {
        "model_path": folder,
        "load_format": "dummy",
        "device": arguments.device,
        "attention_backend": arguments.attention_backend,
        "disable_radix_cache": True,
        "max_running_requests": max(arguments.max_running_requests, *arguments.batch_sizes),
        "context_length": arguments.context_length,
        "speculative_algorithm": "EAGLE",
        "speculative_draft_model_path": head,
    }
    has_graphs = Platform.probe().device == "cuda" and arguments.device != "cpu"
    memory: list[dict[str, Any]] = []
    if has_graphs:
        memory = memory_rows(flags, {**{name: name for name in PRESETS}, ALL_SIZES: slots})
    choosing = {"speculative_adaptive": True, "speculative_adaptive_config": slots}
    choosing["speculative_adaptive_strategy"] = "throughput"
    measured = Measured.start(ServerArgs(**flags, **choosing))
    keep_out_of_collections()
    return {
        **describe_environment(),
        "geometry": arguments.geometry,
        "attention_backend": arguments.attention_backend or "default",
        "max_running_requests": flags["max_running_requests"],
        "launches_alone": has_graphs,
        "steps": arguments.steps,
        "repeats": arguments.repeats,
        "rows": rows_of(measured, arguments),
        "memory": memory,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "adaptive_costs")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32])
    add("--steps", type=int, default=50, help="of each tier or pair in a row")
    add("--repeats", type=int, default=6, help="of all tiers and pairs")
    add("--max-running-requests", type=int, default=128, help="that graphs are captured for")
    add("--device", default="auto")
    add("--attention-backend")
    arguments = parser.parse_args(argv)
    num_kinds = len(PAIRS) + len({tier for pair in PAIRS for tier in pair})
    num_new = arguments.repeats * num_kinds * (WARM_STEPS + arguments.steps) + WARM_STEPS
    arguments.context_length = INPUT_LEN + num_new + 2 * TIERS[-1]
    return arguments


def main() -> None:
    """Measures, prints, writes the result."""
    arguments = parse()
    with (
        random_model(arguments.geometry) as folder,
        random_head(folder) as head,
        tempfile.TemporaryDirectory() as temporary,
    ):
        slots = Path(temporary) / "slots.json"
        slots.write_text(json.dumps({"1": {"candidate_steps": TIERS}}), encoding="utf-8")
        result = measure(arguments, folder, head, str(slots))
    print_rows(result["rows"] + result["memory"])
    print(f"asked: most_us below {SWITCH_US:g} on a GPU, ratio up to {TIERS_MEMORY_RATIO:g}")
    store(arguments.out, result)


if __name__ == "__main__":
    main()
