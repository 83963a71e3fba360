"""One static batch through scheduler and worker in this process, step by step:
`python -m sglang.bench_one_batch --model-path demo --batch-size 1 8 --input-len 128`.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from sglang.benchmark.datasets import FIRST_PLAIN_ID
from sglang.srt.argument_parsing import parse_flags
from sglang.srt.environ import Environ
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import BatchTokenIDOutput, TokenizedGenerateReqInput
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.platform import Platform
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.model_folders import ModelFolders
from sglang.srt.processes.resources import make_resources
from sglang.srt.processes.runtime_config import resolve, with_chunks_that_fit
from sglang.srt.processes.scheduler_process import make_ledger
from sglang.srt.processes.worker_factory import (
    BudgetMaker,
    WorkerMaker,
    drafter_models,
    make_prompt_budget,
    make_worker,
    measure_prices,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


class LocalInbox:
    """Messages put there by the same process."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def drain(self) -> Iterable[Any]:
        while self.messages:
            yield self.messages.popleft()

    def wait(self, timeout_s: float | None) -> bool:
        """Nothing comes while the scheduler waits."""
        assert timeout_s is not None, "The benchmark steps the scheduler itself."
        return False


@dataclass(frozen=True)
class BatchTimes:
    """Times of one batch, in seconds.

    Attributes:
        prefill: until every request has its first token.
        decode: of each step after that.
    """

    prefill: float
    decode: list[float]
    outputs: dict[int, list[int]]


class OneBatch:
    """A scheduler without processes around the real model.

    Attributes:
        outputs: token ids of each request of the last batch.

    Args:
        make: makes the worker.
        make_budget: makes what says how many prompt tokens a step feeds.
    """

    def __init__(
        self,
        args: ServerArgs,
        make: WorkerMaker = make_worker,
        make_budget: BudgetMaker = make_prompt_budget,
    ) -> None:
        if args.tp_size > 1:
            raise ConfigError("--tp-size: this benchmark has one rank; leave it out.")
        config = resolve(
            args,
            Platform.probe(),
            load_model_config(args.model_path, impl=args.model_impl),
            Environ.read(),
        )
        runners = make_runners(config.execution, *drafter_models(config.drafter, config.execution))
        runner = runners.target
        prices = measure_prices(config, runner)
        worker = make(runners, config.drafter, prices)
        config = with_chunks_that_fit(config, runners.max_prompt_rows)
        self.vocab_size = runner.vocab_size
        self._inbox = LocalInbox()
        self.outputs: dict[int, list[int]] = {}
        self._next_id = 0
        self._scheduler = Scheduler(
            replace(config.scheduler, enable_overlap=False),
            worker,
            ledger=make_ledger(config, runners.memory.num_pages),
            resources=make_resources(runners),
            inbox=self._inbox,
            to_detokenizer=self._collect,
            to_frontend=lambda message: None,
            make_stop_finder=_no_stop_finder,
            budget=make_budget(config, prices),
        )

    def run(self, prompts: list[list[int]], output_len: int) -> BatchTimes:
        """Runs the batch to its end."""
        self._submit(prompts, _greedy(output_len))
        start = time.perf_counter()
        while not all(self.outputs.values()):
            self._scheduler.event_loop_normal()
        prefill, decode = time.perf_counter() - start, []
        while not self._scheduler.lifecycle.is_idle:
            start = time.perf_counter()
            self._scheduler.event_loop_normal()
            decode.append(time.perf_counter() - start)
        return BatchTimes(prefill, decode, self.outputs)

    def wall_s(self, prompts: list[list[int]], output_len: int) -> float:
        """Seconds from the first to the last step of the batch, steps overlapping."""
        with self.overlapping_steps(prompts, _greedy(output_len)) as step:
            start = time.perf_counter()
            step()  # takes the prompts in; the end of the block runs the rest
        return time.perf_counter() - start

    @contextmanager
    def overlapping_steps(
        self, prompts: list[list[int]], params: SamplingParams
    ) -> Iterator[Callable[[], None]]:
        """Gives a function that runs one step of the batch; the batch ends with the block."""
        self._submit(prompts, params)
        ongoing = None

        def step() -> None:
            nonlocal ongoing
            ongoing = self._scheduler.event_loop_overlap(ongoing)

        yield step
        while ongoing is not None or not self._scheduler.lifecycle.is_idle:
            step()

    def add(self, prompts: list[list[int]], params: SamplingParams, streams: bool = False) -> None:
        """Puts requests beside those of the batch; `outputs` holds them after all others."""
        for prompt in prompts:
            self.outputs[self._next_id] = []
            self._inbox.messages.append(
                TokenizedGenerateReqInput(
                    req_id=self._next_id,
                    rid=str(self._next_id),
                    input_ids=prompt,
                    sampling_params=params,
                    streams=streams,
                )
            )
            self._next_id += 1

    def abort(self) -> None:
        """Ends all requests of the batch with the next step."""
        self._inbox.messages.append(AbortReq(abort_all=True))

    def _submit(self, prompts: list[list[int]], params: SamplingParams) -> None:
        self.outputs = {}
        self.add(prompts, params)

    def _collect(self, message: Any) -> None:
        if isinstance(message, BatchTokenIDOutput):
            for output in message.outputs:
                self.outputs[output.req_id].extend(output.token_ids)


def _greedy(output_len: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_new_tokens=output_len, ignore_eos=True)


def _no_stop_finder(params: SamplingParams, input_ids: list[int]) -> Any:
    raise RuntimeError("The benchmark sends no stop strings.")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m sglang.bench_one_batch", description=__doc__)
    ServerArgs.add_cli_args(parser)
    parser.add_argument("--batch-size", type=int, nargs="+", default=[1])
    parser.add_argument("--input-len", type=int, nargs="+", default=[1024])
    parser.add_argument("--output-len", type=int, nargs="+", default=[16])
    parser.add_argument("--run-name", default="default")
    parser.add_argument("--result-filename", help="Gets one JSON line per batch.")
    parser.add_argument("--correctness-test", action="store_true", help="Print the tokens.")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: list[str] | None = None) -> int:
    args, given = parse_flags(make_parser(), argv, ServerArgs)
    given["disable_radix_cache"] = True
    given["max_running_requests"] = max(args.max_running_requests, *args.batch_size)
    server_args = ServerArgs(**given)
    batch = OneBatch(ModelFolders.find(server_args).with_weights())
    chooser = random.Random(args.seed)
    shapes = [(b, i, o) for b in args.batch_size for i in args.input_len for o in args.output_len]
    for index, (size, input_len, output_len) in enumerate([shapes[0], *shapes]):
        prompts = [
            [chooser.randrange(FIRST_PLAIN_ID, batch.vocab_size) for _ in range(input_len)]
            for _ in range(size)
        ]
        times = batch.run(prompts, output_len)
        if index == 0:
            continue  # the first run warms up
        _report(args, times, size, input_len, output_len)
    return 0


def _report(
    args: argparse.Namespace, times: BatchTimes, size: int, input_len: int, output_len: int
) -> None:
    """Prints SGLang's rows and writes the JSON line."""
    total = times.prefill + sum(times.decode)
    throughput = size * input_len / times.prefill
    print(f"Batch {size} x ({input_len} in, {output_len} out), {args.run_name}")
    print(f"Prefill. latency: {times.prefill:6.5f} s, throughput: {throughput:9.2f} token/s")
    result: dict[str, Any] = {
        "run_name": args.run_name,
        "batch_size": size,
        "input_len": input_len,
        "output_len": output_len,
        "prefill_latency": times.prefill,
        "prefill_throughput": throughput,
    }
    if times.decode:
        median = statistics.median(times.decode)
        print(
            f"Decode.  median latency: {median:6.5f} s,"
            f" median throughput: {size / median:9.2f} token/s"
        )
        result |= {"median_decode_latency": median, "median_decode_throughput": size / median}
    overall = size * (input_len + output_len) / total
    print(f"Total. latency: {total:6.3f} s, throughput: {overall:9.2f} token/s")
    result |= {"total_latency": total, "overall_throughput": overall}
    if args.correctness_test:
        for req_id, tokens in times.outputs.items():
            print(f"Request {req_id}: {tokens}")
    if args.result_filename:
        with open(args.result_filename, "a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    sys.exit(main())
