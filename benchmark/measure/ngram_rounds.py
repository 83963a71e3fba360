"""How much faster than plain decoding is NGRAM, is it ever slower, and what does the host spend?

Two Engines side by side over the bundled model in Llama-3.1-8B's geometry (`inflate.py`), one with
NGRAM and one without a drafter, in turn, so that each ratio is of runs side by side. The work:

- repeats: prompts of held-out code that stands there several times, greedy, so that answers go on
  repeating it;
- novel: prompts of held-out code, at a temperature at which answers follow no text;
- known: the same prompts, greedy, after each was answered once: each answer is text of an ended
  request.

Of the first two each request has a cache salt of its own, so nothing is known of those before it.

Host: over random weights, steps of one batch, each of which begins when the device is idle. What
counts is how long launching the step and hearing its result takes, beside a step without a drafter.
What is asked: `goals.py`. Stored after each round; rounds end before --budget-s does.

    python -m benchmark.measure.ngram_rounds --model-dir FOLDER      on a GPU
    python -m benchmark.measure.ngram_rounds --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import sglang
from benchmark.engine_load import AsyncEngine, Budget
from benchmark.engine_load import random_prompts as prompts_of_nothing
from benchmark.environment import describe_environment
from benchmark.goals import NGRAM_HOST_US
from benchmark.mtp_model import (
    code_prompts,
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from benchmark.paired import Figures, Paired, Run, Way, closed_loops, print_ratios, store_rounds
from benchmark.random_model import random_model
from benchmark.scheduled_tiers import TimedWorker
from sglang.bench_one_batch import OneBatch
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.worker import HostResult, Worker

PLAIN, NGRAM = "plain", "ngram"
REPEATS, NOVEL, KNOWN = "repeats", "novel", "known"
NUM_COPIES = 4  # of the code in a prompt that repeats it
HOT = 1.5  # temperature of answers that follow no text
HOST_INPUT_LEN, HOST_WARM_STEPS = 128, 10


@dataclass
class Salted:
    """An Engine whose requests have a cache salt each."""

    engine: sglang.Engine
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    async def async_generate(self, *, input_ids: list[int], sampling_params: dict[str, Any]) -> Any:
        salt = str(next(self._numbers))
        return await self.engine.async_generate(
            input_ids=input_ids, sampling_params=sampling_params, cache_salt=salt
        )

    async def async_abort_request(self, *, abort_all: bool) -> int:
        return await self.engine.async_abort_request(abort_all=abort_all)


@dataclass(frozen=True)
class Work:
    """Prompts, and how they are answered."""

    prompts: list[list[int]]
    params: dict[str, Any]


def works_of(prompts: list[list[int]], num_new: int) -> dict[str, Work]:
    """All work over prompts of code."""
    shared = {"max_new_tokens": num_new, "ignore_eos": True}
    greedy = {"temperature": 0, **shared}
    return {
        REPEATS: Work([repeated(prompt) for prompt in prompts], greedy),
        NOVEL: Work(prompts, {"temperature": HOT, **shared}),
        KNOWN: Work(prompts, greedy),
    }


def repeated(prompt: list[int]) -> list[int]:
    """The first tokens behind the first one, NUM_COPIES times; as long as the prompt or less."""
    first, *code = prompt
    return [first, *code[: len(code) // NUM_COPIES] * NUM_COPIES]


@dataclass
class Heard(TimedWorker):
    """Results that are heard are timed too.

    Attributes:
        observe_ns: of each.
    """

    observe_ns: list[int] = field(default_factory=list)

    def observe(self, result: HostResult) -> None:
        start = time.perf_counter_ns()
        super().observe(result)
        self.observe_ns.append(time.perf_counter_ns() - start)


def host_us(flags: dict[str, Any], size: int, num_steps: int) -> float:
    """Median microseconds of a step of so many requests, launched and heard."""
    made: list[Heard] = []

    def make(
        runners: RunnerGroup, drafter: DrafterConfig | None, prices: PriceTable | None
    ) -> Worker:
        made.append(Heard(make_worker(runners, drafter, prices)))
        return made[0]

    batch = OneBatch(ServerArgs(**flags), make)
    # Each step may give as many tokens as it verifies.
    num_new = (HOST_WARM_STEPS + num_steps) * flags.get("speculative_num_draft_tokens", 1)
    params = SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
    prompts = prompts_of_nothing(size, HOST_INPUT_LEN, batch.vocab_size, size)
    with batch.overlapping_steps(prompts, params) as step:
        for _ in range(HOST_WARM_STEPS):
            step()
        [worker] = made
        worker.launch_ns.clear()
        worker.observe_ns.clear()
        for _ in range(num_steps):
            step()
        launched, heard = worker.launch_ns, worker.observe_ns
        return (statistics.median(launched) + statistics.median(heard)) / 1e3


def host_row(arguments: argparse.Namespace) -> dict[str, Any]:
    """What steps of both ways take of the host; NGRAM always verifies all its drafts."""
    size, count = arguments.host_batch, arguments.num_draft_tokens
    ngram = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": count,
        "speculative_load_aware": "off",
    }
    num_tokens = HOST_INPUT_LEN + (HOST_WARM_STEPS + arguments.host_steps + 4) * count
    with random_model("tiny", num_tokens) as folder:
        flags = {
            "model_path": folder,
            "load_format": "dummy",
            "device": arguments.device,
            "attention_backend": arguments.attention_backend,
            "disable_radix_cache": True,
            "max_running_requests": size,
        }
        plain = host_us(flags, size, arguments.host_steps)
        drafted = host_us(flags | ngram, size, arguments.host_steps)
    return {
        "batch": size,
        "plain_us": round(plain, 1),
        "ngram_us": round(drafted, 1),
        "added_us": round(drafted - plain, 1),
    }


def work_run(
    works: dict[str, Work], engines: dict[str, dict[str, AsyncEngine]]
) -> tuple[Run[str], Callable[[str, int], str]]:
    """Makes the run of `Paired` for all work, and the name of a load of so many requests."""
    loops = {
        name: closed_loops(
            {kind: Way(each[name], work.params) for kind, each in engines.items()}, work.prompts
        )
        for name, work in works.items()
    }

    def run(load: str, way: str, number: int) -> Figures:
        name, _, requests = load.partition(", ")
        return loops[name](int(requests), way, number)

    return run, lambda name, requests: f"{name}, {requests}"


def measure(arguments: argparse.Namespace, model_path: str, budget: Budget) -> dict[str, Any]:
    """Runs all rounds; the result is stored after each."""
    prompts, source = code_prompts(arguments, model_path)
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    result |= {"num_draft_tokens": arguments.num_draft_tokens, "host": host_row(arguments)}
    flags = engine_flags(arguments, model_path)
    drafter = {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": arguments.num_draft_tokens,
    }
    works = works_of(prompts, arguments.new_tokens)
    with start_engine(flags) as plain, start_engine(flags, **drafter) as ngram:
        engines: dict[str, dict[str, AsyncEngine]] = {}
        for kind, engine in ((PLAIN, plain), (NGRAM, ngram)):
            salted = Salted(engine)
            engines[kind] = {REPEATS: salted, NOVEL: salted, KNOWN: engine}
        ngram.generate(input_ids=prompts, sampling_params=works[KNOWN].params)
        run, name_of = work_run(works, engines)
        loads = [name_of(name, count) for name in works for count in arguments.concurrency]
        store_rounds(Paired(run, loads, [(NGRAM, PLAIN)]), budget, arguments, result)
    return result


def print_result(result: dict[str, Any]) -> None:
    """Prints the ratios, and what the host spends."""
    host = result["host"]
    verdict = "ok  " if host["added_us"] < NGRAM_HOST_US else "MISS"
    print(
        f"\n{verdict} host, batch {host['batch']}: {host['ngram_us']} us per step,"
        f" {host['added_us']} more than plain (asked < {NGRAM_HOST_US:g})"
    )
    print_ratios(result["rows"])


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "ngram_rounds")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    add("--num-draft-tokens", type=int, default=12, help="verified per request and step at most")
    add("--host-batch", type=int, default=64, help="requests whose steps' host time is measured")
    add("--host-steps", type=int, default=100)
    parser.set_defaults(budget_s=300.0, rounds=12)
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path:
        result = measure(arguments, model_path, budget)
    print_result(result)


if __name__ == "__main__":
    main()
