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
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from benchmark.command import print_rows, ratios, store, take_turns, write
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.http_load import summarize
from benchmark.measure.long_prompts import CONTEXT_LEN
from benchmark.one_batch import make_random_parser, random_batch
from benchmark.sse_client import StreamedAnswer
from sglang.bench_one_batch import OneBatch
from sglang.srt.lookahead.prompt_budget import (
    SHARE_OF_OTHERS,
    PromptAllowance,
    PromptBudget,
)
from sglang.srt.processes.runtime_config import RuntimeConfig
from sglang.srt.processes.worker_factory import make_prompt_budget
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.price_table import PriceTable, StepShape

DEFAULT, TOGETHER, CHUNKS = "default", "together", "chunks"
STREAM_LEN = 4000  # new tokens of the stream beside a list, more than it gets to
UNBOUNDED = "0"
LISTS = {  # prompts, their tokens, new tokens
    "128 x (1,024, 129)": (128, 1024, 129),
    "16 x (8,192, 129)": (16, 8192, 129),
    "512 x (512, 128)": (512, 512, 128),
}
LIST_WAYS = ("alone_s", "unbounded_s", "beside_s")
Rows = list[dict[str, Any]]


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


def closed_loop(
    batch: OneBatch, prompts: list[list[int]], num_new: int, num_clients: int
) -> dict[str, Any]:
    """Figures of clients that stream, once all prompts are answered."""
    params, running, answered = _greedy(num_new), dict[int, StreamedAnswer](), []
    last = {"meta_info": {"completion_tokens": num_new}}

    def send() -> None:
        if prompts:
            batch.add([prompts.pop()], params, streams=True)
            number = next(reversed(batch.outputs))
            running[number] = StreamedAnswer(time.perf_counter(), [], last)

    start = time.perf_counter()
    with batch.overlapping_steps([], params) as step:
        for _ in range(num_clients):
            send()
        while running:
            step()
            now = time.perf_counter()
            for number, answer in list(running.items()):
                count = len(batch.outputs[number])
                if count > len(answer.events_s):  # a step gives one token
                    answer.events_s.append(now)
                if count == num_new:
                    answered.append(running.pop(number))
                    send()
    return summarize(answered, time.perf_counter() - start)


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


def measure_streams(
    batch: OneBatch,
    budget: SwitchedBudget,
    arguments: argparse.Namespace,
    seeds: Iterator[int],
    keep: Callable[[Rows], None],
) -> None:
    """Runs the load of all ways in turn; a short one warms up.

    Args:
        keep: stores the rows of all ways, after each round.
    """

    def load(count: int, num_new: int) -> dict[str, Any]:
        prompts = random_prompts(count, arguments.input_len, batch.vocab_size, next(seeds))
        return closed_loop(batch, prompts, num_new, arguments.clients)

    def run(way: str) -> dict[str, Any]:
        budget.current = budget.ways[way]
        return load(arguments.num_requests, arguments.output_len)

    def keep_rows(found: Mapping[str, list[dict[str, Any]]]) -> None:
        medians = {
            way: {name: statistics.median(run[name] for run in runs) for name in runs[0]}
            for way, runs in found.items()
        }
        keep([{"way": way, **medians[way], "runs": runs} for way, runs in found.items()])

    load(arguments.clients, 16)
    take_turns({way: partial(run, way) for way in arguments.ways}, arguments.rounds, keep_rows)


def measure_lists(
    batch: OneBatch,
    budget: SwitchedBudget,
    arguments: argparse.Namespace,
    seeds: Iterator[int],
    keep: Callable[[Rows], None],
) -> None:
    """Runs all lists in turn: by the default, without any bound, and beside one stream by the
    default; see `measure_streams`."""

    def run(name: str, way: str) -> float:
        count, input_len, num_new = LISTS[name]
        prompts = random_prompts(count, input_len, batch.vocab_size, next(seeds))
        budget.current = budget.ways[UNBOUNDED if way == "unbounded_s" else DEFAULT]
        seconds_of = list_beside_s if way == "beside_s" else OneBatch.wall_s
        return round(seconds_of(batch, prompts, num_new), 4)

    def keep_rows(found: Mapping[tuple[str, str], list[float]]) -> None:
        rows = []
        for name in LISTS:
            times = {way: found[name, way] for way in LIST_WAYS}
            compared = {"beside_over_alone": ratios(times["beside_s"], times["alone_s"])}
            rows.append({"name": name, **times, **compared})
        keep(rows)

    batch.wall_s(random_prompts(8, 1024, batch.vocab_size, next(seeds)), 8)
    works = {each: partial(run, *each) for each in product(LISTS, LIST_WAYS)}
    take_turns(works, arguments.list_rounds, keep_rows)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_random_parser(__doc__, "stream_bounds")
    add = parser.add_argument
    ways = ["20", "25", "30", "40", f"{TOGETHER} 30", f"{CHUNKS} 512"]
    add("--ways", nargs="+", default=ways, help=f"bounds in ms, `{CHUNKS} N`, `{TOGETHER} MS`")
    add("--rounds", type=int, default=2, help="of streams; 0 for none")
    add("--list-rounds", type=int, default=2, help="of lists; 0 for none")
    add("--clients", type=int, default=128, help="streams at once")
    add("--num-requests", type=int, default=512)
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=128)
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

    def keep(name: str, rows: Rows) -> None:
        result[name] = rows
        write(arguments.out, result)

    batch = random_batch(
        arguments.geometry,
        CONTEXT_LEN,
        make_budget=make,
        device=arguments.device,
        attention_backend=arguments.attention_backend,
        max_step_ms=arguments.max_step_ms,
        max_running_requests=arguments.clients + 1,  # a list, and a stream beside it
    )
    if arguments.rounds:
        measure_streams(batch, made[0], arguments, seeds, partial(keep, "streams"))
    if arguments.list_rounds:
        measure_lists(batch, made[0], arguments, seeds, partial(keep, "lists"))
    print_rows(result.get("streams", []) + result.get("lists", []))
    store(arguments.out, result)


if __name__ == "__main__":
    main()
