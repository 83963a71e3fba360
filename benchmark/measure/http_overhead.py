"""What does HTTP take of an Engine's throughput? The same streams from both, side by side.

Random weights in a large geometry, greedy, fresh random prompts, no radix cache. An Engine and a
server with the same flags are alive on one GPU, and only one of them works at a time: 64 streams at
once in a closed loop, in turn from the Engine and from each route. All are asked by one loop in
this process, which has a task for each stream; what that thread takes of a core is in the result,
and what the server's processes take (an Engine's front end is this process, clients and all). Each
id has a text, from a tokenizer made up for it. Judged is the median of the rounds' ratios. Stored
after each round; rounds end before --budget-s does.

    python -m benchmark.measure.http_overhead                       on a GPU
    python -m benchmark.measure.http_overhead --paced-step-ms 6.9   no model, no Engine: what the
        server's processes take at the pace of a GPU (`benchmark.paced_server`)
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import RESULTS, in_turn, make_parser, median_ratio
from benchmark.engine_load import Budget, random_prompts, run_rounds
from benchmark.environment import describe_environment
from benchmark.goals import MIN_HTTP_OVER_ENGINE
from benchmark.made_up_tokenizer import write_tokenizer
from benchmark.random_model import GEOMETRIES, random_model
from benchmark.server_process import RunningServer, running_server
from benchmark.sse_client import StreamError
from benchmark.stream_ways import ROUTES, Load, run_engine, run_http
from sglang.srt.garbage import keep_out_of_collections

ENGINE = "Engine"
START_LIMIT_S = 150.0
SPARE_TOKENS = 256  # of each request's KV, beside its own tokens
SHAPE = ("geometry", "clients", "input_len", "output_len", "laps", "paced_step_ms")


class Rounds:
    """Figures of each way, one per round."""

    def __init__(
        self, engine: sglang.Engine | None, server: RunningServer, arguments: argparse.Namespace
    ) -> None:
        self._engine = engine
        self._server = server
        self._arguments = arguments
        self._seeds = itertools.count()
        self._ways = [*([ENGINE] if engine is not None else []), *arguments.routes]
        self.found: dict[str, list[dict[str, Any]]] = {way: [] for way in self._ways}

    def run(self, number: int) -> float:
        """One round; round 0 warms up and is not counted. Seconds."""
        start = time.perf_counter()
        ways = in_turn(self._ways, number)
        for way in tqdm(ways, desc=f"round {number}", unit="run", mininterval=2.0):
            figures = asyncio.run(self._figures(way, self._arguments.laps if number else 1))
            if number:
                self.found[way].append(figures)
        return time.perf_counter() - start

    async def _figures(self, way: str, num_laps: int) -> dict[str, Any]:
        """Of one way, with prompts that no other run has."""
        given = self._arguments
        vocab_size = GEOMETRIES[given.geometry].vocab_size
        prompts = random_prompts(given.clients, given.input_len, vocab_size, next(self._seeds))
        params = {"temperature": 0, "max_new_tokens": given.output_len, "ignore_eos": True}
        load = Load(prompts, params, given.clients, num_laps)
        if way == ENGINE:
            assert self._engine is not None
            return await run_engine(self._engine, load, os.getpid())
        return await run_http(self._server.port, ROUTES[way], load, self._server.process.pid)

    def rows(self) -> list[dict[str, Any]]:
        """Of each way, beside the Engine where there is one."""
        return [self._row(way, runs) for way, runs in self.found.items()]

    def _row(self, way: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
        speeds = [run["tok_s"] for run in runs]
        roles = runs[0]["cpu_shares"]
        shares = {role: _median([run["cpu_shares"][role] for run in runs]) for role in roles}
        row: dict[str, Any] = {
            "way": way,
            "tok_s": _median(speeds),
            "tokens_per_chunk": _median([run["tokens_per_chunk"] for run in runs]),
            "cpu_shares": shares,
            "all_tok_s": speeds,
        }
        if self._engine is not None and way != ENGINE:
            row["over_engine"] = median_ratio(speeds, [one["tok_s"] for one in self.found[ENGINE]])
            row["is_reached"] = row["over_engine"] >= MIN_HTTP_OVER_ENGINE
        return row


def _median(values: list[float]) -> float:
    return round(statistics.median(values), 3)


def flags_of(arguments: argparse.Namespace, folder: str) -> dict[str, Any]:
    """Of the Engine and of the server, by their names in `ServerArgs`."""
    tokens_of_one = arguments.input_len + arguments.output_len + SPARE_TOKENS
    flags = {
        "model_path": folder,
        "load_format": "dummy",
        "device": arguments.device,
        "max_running_requests": arguments.clients,
        "max_total_tokens": arguments.clients * tokens_of_one,
        "disable_radix_cache": True,
    }
    if arguments.attention_backend is not None:
        flags["attention_backend"] = arguments.attention_backend
    return flags


def server_command(arguments: argparse.Namespace, flags: dict[str, Any]) -> list[str]:
    """Of a server with these flags, or of one without a model."""
    module = ["sglang.launch_server"]
    if arguments.paced_step_ms is not None:
        module = ["benchmark.paced_server", "--step-ms", str(arguments.paced_step_ms)]
    words = []
    for name, value in flags.items():
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(str(value))
    return [sys.executable, "-m", *module, *words]


def started(arguments: argparse.Namespace, stack: ExitStack) -> Rounds:
    """The rounds, once everything is up; all of it ends with the stack."""
    context_len = arguments.input_len + arguments.output_len + SPARE_TOKENS
    folder = stack.enter_context(random_model(arguments.geometry, context_len))
    write_tokenizer(Path(folder), GEOMETRIES[arguments.geometry].vocab_size)
    flags = flags_of(arguments, folder)
    command = server_command(arguments, flags)
    server = stack.enter_context(running_server(command, {}, START_LIMIT_S))
    engine = None
    if arguments.paced_step_ms is None:
        engine = stack.enter_context(sglang.Engine(**flags))
    keep_out_of_collections()  # as the server does; an Engine leaves that to its caller
    return Rounds(engine, server, arguments)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "http_overhead")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--clients", type=int, default=64, help="streams at once")
    add("--input-len", type=int, default=128)
    add("--output-len", type=int, default=256)
    add("--routes", nargs="+", choices=ROUTES, default=[*ROUTES])
    add("--laps", type=int, default=3, help="answers of each stream that count, in each run")
    add("--rounds", type=int, default=9, help="at most")
    add("--budget-s", type=float, default=270.0, help="no round begins that would end after it")
    add("--device", default="auto")
    add("--attention-backend")
    add("--paced-step-ms", type=float, help="a step of a server without a model; no Engine then")
    arguments = parser.parse_args(argv)
    is_paced = arguments.paced_step_ms is not None
    if is_paced and arguments.out == parser.get_default("out"):
        arguments.out = RESULTS / "http_overhead_paced.json"
    return arguments


def lines_of(result: dict[str, Any]) -> Iterator[str]:
    """The result, to be read."""
    for row in result["rows"]:
        shares = ", ".join(f"{role} {share:.0%}" for role, share in row["cpu_shares"].items())
        judged = ""
        if "over_engine" in row:
            verdict = "reached" if row["is_reached"] else "MISSED"
            judged = f", {row['over_engine']:.3f} of the Engine's: {verdict}"
        yield f"{row['way']}: {row['tok_s']:,.0f} tokens/s{judged}; of a core: {shares}"


def main(argv: list[str] | None = None) -> int:
    """Measures, prints the figures, writes the result; 1 if a request failed."""
    arguments = parse(argv)
    budget = Budget(arguments.budget_s, time.perf_counter())
    result = {
        **describe_environment(),
        **{name: vars(arguments)[name] for name in SHAPE},
        "attention_backend": arguments.attention_backend or "default",
        "asked_over_engine": MIN_HTTP_OVER_ENGINE,
    }
    try:
        with ExitStack() as stack:
            rounds = started(arguments, stack)
            rounds.run(0)
            run_rounds(rounds, budget, arguments, result)
    except StreamError as error:
        print(f"A request failed: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines_of(result)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
