"""Compares bounds of steps that someone waits for: streams and lists under several, in turn.

Scheduler and worker alone in one process, so that all ways share one card and one measurement of
prices: random weights in a large geometry, greedy, fresh random prompts. Streams are a closed loop
of so many clients, each with its next request when its answer is there; all begin at once. A list
is sent at once, alone and beside one stream. Times are the scheduler's: what HTTP adds is not in
them.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from benchmark.command import in_turn, make_parser, print_rows, ratios, store, write
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.long_prompts import CONTEXT_LEN
from benchmark.measure.step_gaps import gaps_ms
from benchmark.random_model import GEOMETRIES, dummy_flags, random_model
from sglang.bench_one_batch import OneBatch
from sglang.benchmark.metrics import percentile
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.lookahead.prompt_budget import (
    SHARE_OF_OTHERS,
    PromptAllowance,
    PromptBudget,
)
from sglang.srt.processes.runtime_config import RuntimeConfig
from sglang.srt.processes.worker_factory import make_prompt_budget
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.step.price_table import PriceTable, StepShape

DEFAULT, TOGETHER, CHUNKS = "default", "together", "chunks"
STREAM_LEN = 4000  # new tokens of the stream beside a list, more than it gets to
UNBOUNDED = "0"
LISTS = {  # prompts, their tokens, new tokens
    "128 x (1,024, 129)": (128, 1024, 129),
    "16 x (8,192, 129)": (16, 8192, 129),
    "512 x (512, 128)": (512, 512, 128),
}
Seeds = Iterator[int]


class SwitchedBudget(PromptBudget):
    """One of several budgets of prompt tokens, which a benchmark switches between.

    Attributes:
        current: the budget of the next steps.
    """

    def __init__(self, ways: dict[str, PromptBudget]) -> None:
        super().__init__(0)
        self.ways = ways
        self.current = ways[DEFAULT]

    def open(self, decodes: StepShape, someone_streams: bool) -> PromptAllowance:
        return self.current.open(decodes, someone_streams)

    def observe(self, price_ms: float, took_ms: float) -> None:
        self.current.observe(price_ms, took_ms)


def budgets(
    names: Sequence[str], max_tokens: int, prices: PriceTable, default: PromptBudget
) -> dict[str, PromptBudget]:
    """Ways by name: `20` is a bound, `together 20` the same where all prompts come along that the
    bound has room for, `chunks 512` a fixed number."""
    found = {DEFAULT: default, UNBOUNDED: PromptBudget(max_tokens, prices, 0.0)}
    for name in names:
        kind, _, number = name.rpartition(" ")
        if kind == CHUNKS:
            found[name] = PromptBudget(int(number))
        elif name not in found:
            share = 1.0 if kind == TOGETHER else SHARE_OF_OTHERS
            found[name] = PromptBudget(max_tokens, prices, float(number), True, share)
    return found


@dataclass
class Sent:
    """A request: when it was sent, and how many tokens it had when some came."""

    at: float
    arrivals: list[tuple[float, int]] = field(default_factory=list)


class ClosedLoop:
    """Clients of `OneBatch` that stream."""

    def __init__(self, batch: OneBatch, prompts: list[list[int]], num_new: int) -> None:
        self._batch = batch
        self._prompts = prompts
        self._params = _greedy(num_new)
        self._sent = dict[int, Sent]()
        self._open = set[int]()

    def run(self, num_clients: int) -> dict[str, float]:
        """Figures of the load, once all prompts are answered."""
        start = time.perf_counter()
        with self._batch.overlapping_steps([], self._params) as step:
            for _ in range(num_clients):
                self._send()
            while self._open:
                step()
                self._look(time.perf_counter())
        seconds = time.perf_counter() - start
        return self._figures(seconds)

    def _send(self) -> None:
        if not self._prompts:
            return
        self._batch.add([self._prompts.pop()], self._params, streams=True)
        number = next(reversed(self._batch.outputs))
        self._sent[number] = Sent(time.perf_counter())
        self._open.add(number)

    def _look(self, now: float) -> None:
        for number in list(self._open):
            sent, count = self._sent[number], len(self._batch.outputs[number])
            if count > (sent.arrivals[-1][1] if sent.arrivals else 0):
                sent.arrivals.append((now, count))
            if count == self._params.max_new_tokens:
                self._open.remove(number)
                self._send()

    def _figures(self, seconds: float) -> dict[str, float]:
        sent = self._sent.values()
        firsts = [(each.arrivals[0][0] - each.at) * 1e3 for each in sent]
        gaps = [gap for each in sent for gap in gaps_ms(each.arrivals, 0.0, float("inf"))]
        return {
            "tok_s": round(len(sent) * self._params.max_new_tokens / seconds, 1),
            "first_token_p50_ms": round(percentile(firsts, 0.5), 2),
            "first_token_p90_ms": round(percentile(firsts, 0.9), 2),
            "gap_p10_ms": round(percentile(gaps, 0.1), 2),
            "gap_p50_ms": round(percentile(gaps, 0.5), 2),
            "gap_p99_ms": round(percentile(gaps, 0.99), 2),
            "gap_max_ms": round(max(gaps), 2),
        }


def list_beside_s(batch: OneBatch, prompts: list[list[int]], num_new: int) -> float:
    """Seconds of a list beside one stream."""
    stream, listed = prompts[0][:128], _greedy(num_new)
    with batch.overlapping_steps([], listed) as step:
        batch.add([stream], _greedy(STREAM_LEN), streams=True)
        while not any(batch.outputs.values()):
            step()
        number = next(reversed(batch.outputs))
        start = time.perf_counter()
        batch.add(prompts, listed)
        while any(len(out) < num_new for key, out in batch.outputs.items() if key > number):
            step()
        seconds = time.perf_counter() - start
        if len(batch.outputs[number]) >= STREAM_LEN:
            raise RuntimeError("The stream ended before the list did.")
        batch.abort()
    return seconds


def _greedy(num_new: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)


Rows = list[dict[str, Any]]


def measure_streams(
    batch: OneBatch, budget: SwitchedBudget, arguments: argparse.Namespace, seeds: Seeds
) -> Iterator[Rows]:
    """Rows of all ways, after each round; a short load warms up."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.ways}

    def load(count: int, num_new: int) -> dict[str, float]:
        shape = arguments.input_len, batch.vocab_size, next(seeds)
        return ClosedLoop(batch, random_prompts(count, *shape), num_new).run(arguments.clients)

    load(arguments.clients, 16)
    for number in range(arguments.rounds):
        for name in tqdm(in_turn(arguments.ways, number), desc=f"round {number + 1}", unit="way"):
            budget.current = budget.ways[name]
            found[name].append(load(arguments.num_requests, arguments.output_len))
        yield [
            {
                "way": name,
                **{key: statistics.median(run[key] for run in runs) for key in runs[0]},
                "runs": runs,
            }
            for name, runs in found.items()
        ]


def measure_lists(
    batch: OneBatch, budget: SwitchedBudget, arguments: argparse.Namespace, seeds: Seeds
) -> Iterator[Rows]:
    """Rows of all lists, after each round: by the default, without any bound, and beside one stream
    by the default."""
    ways: dict[str, tuple[str, Callable[[OneBatch, list[list[int]], int], float]]]
    ways = {
        "alone_s": (DEFAULT, OneBatch.wall_s),
        "unbounded_s": (UNBOUNDED, OneBatch.wall_s),
        "beside_s": (DEFAULT, list_beside_s),
    }
    found: dict[str, dict[str, list[float]]] = {name: {way: [] for way in ways} for name in LISTS}
    batch.wall_s(random_prompts(8, 1024, batch.vocab_size, next(seeds)), 8)
    for number in range(arguments.list_rounds):
        for name, (count, input_len, num_new) in LISTS.items():
            for way in in_turn(ways, number):
                prompts = random_prompts(count, input_len, batch.vocab_size, next(seeds))
                way_of_budget, seconds_of = ways[way]
                budget.current = budget.ways[way_of_budget]
                found[name][way].append(round(seconds_of(batch, prompts, num_new), 4))
        yield [
            {
                "name": name,
                **times,
                "beside_over_alone": ratios(times["beside_s"], times["alone_s"]),
                "alone_over_unbounded": ratios(times["alone_s"], times["unbounded_s"]),
            }
            for name, times in found.items()
        ]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "stream_bounds")
    add = parser.add_argument
    ways = ["20", "25", "30", "40", f"{TOGETHER} 30", f"{CHUNKS} 512"]
    add("--ways", nargs="+", default=ways, help=f"bounds in ms, `{CHUNKS} N`, `{TOGETHER} MS`")
    add("--rounds", type=int, default=2, help="of streams; 0 for none")
    add("--list-rounds", type=int, default=2, help="of lists; 0 for none")
    add("--clients", type=int, default=128, help="streams at once")
    add("--num-requests", type=int, default=512)
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--device", default="auto")
    add("--max-step-ms", type=float, help=f"of the way `{DEFAULT}`; default: the server's own")
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints a table; the result is written after every round."""
    arguments, seeds = parse(), itertools.count()
    shape = ("geometry", "clients", "num_requests", "input_len", "output_len")
    result = {**describe_environment(), **{name: vars(arguments)[name] for name in shape}}
    made: list[SwitchedBudget] = []

    def make(config: RuntimeConfig, prices: PriceTable | None) -> PromptBudget:
        if prices is None:
            raise SystemExit("Without a bound there are no prices: give --max-step-ms on a CPU.")
        max_tokens = config.scheduler.planner.chunked_prefill_size
        default = make_prompt_budget(config, prices)
        made.append(SwitchedBudget(budgets(arguments.ways, max_tokens, prices, default)))
        return made[0]

    with random_model(arguments.geometry, CONTEXT_LEN) as folder:
        batch = OneBatch(
            ServerArgs(
                **dummy_flags(folder),
                device=arguments.device,
                max_step_ms=arguments.max_step_ms,
                max_running_requests=arguments.clients + 1,  # a list, and a stream beside it
                disable_radix_cache=True,
            ),
            make_budget=make,
        )
        keep_out_of_collections()
        for rows in measure_streams(batch, made[0], arguments, seeds):
            write(arguments.out, result := {**result, "streams": rows})
        for rows in measure_lists(batch, made[0], arguments, seeds):
            write(arguments.out, result := {**result, "lists": rows})
    print_rows(result.get("streams", []) + result.get("lists", []))
    store(arguments.out, result)


if __name__ == "__main__":
    main()
