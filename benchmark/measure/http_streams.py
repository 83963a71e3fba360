"""How soon and how evenly do tokens come over HTTP? A launched server and streams of /generate.

Random weights in a large geometry, the server's default flags, greedy, fresh random prompts. A
closed loop: so many clients, each sends its next request when its answer is there. Then one
request at a time. The clients are one process that reads no event but the last of an answer; what
it takes of a core is in the result. A gap is the time between two tokens of one stream. What is
asked is what was measured before on one H100, the peer's figures are of one as well.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

from benchmark.command import add_schedule_options, make_parser, schedule_flags, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.goals import GPU_OF_GOALS
from benchmark.measure.long_prompts import CONTEXT_LEN, MAX_RUNNING
from benchmark.random_model import GEOMETRIES, random_model
from benchmark.server_process import running_server
from benchmark.sse_client import StreamClient, StreamedAnswer, StreamError
from sglang.benchmark.metrics import percentile
from sglang.srt.model_config import resolve_model_path

START_LIMIT_S = 300.0
ALONE_OUTPUT_LEN = 16


def bodies(prompts: Sequence[list[int]], num_new: int) -> list[bytes]:
    """Requests for /generate, ready to be sent."""
    params = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    return [
        json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True}).encode()
        for prompt in prompts
    ]


async def closed_loop(port: int, requests: Sequence[bytes], num_clients: int) -> dict[str, Any]:
    """Figures of a load; times in milliseconds.

    Raises:
        StreamError: if a request fails.
    """
    clients = [await StreamClient.connect(port) for _ in range(num_clients)]
    left, answers = iter(requests), list[StreamedAnswer]()

    async def run(client: StreamClient) -> None:
        for body in left:  # shared: each takes the next
            answers.append(await client.generate(body))

    start, cpu_start = time.perf_counter(), time.process_time()
    await asyncio.gather(*(run(client) for client in clients))
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    for client in clients:
        client.close()
    return {**summarize(answers, seconds), "client_cpu_share": round(cpu_s / seconds, 3)}


def summarize(answers: Sequence[StreamedAnswer], seconds: float) -> dict[str, Any]:
    """Tokens per second, and milliseconds until first tokens and between tokens."""
    num_tokens = sum(answer.last["meta_info"]["completion_tokens"] for answer in answers)
    first_ms = [answer.first_token_s * 1e3 for answer in answers]
    gaps_ms = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
    return {
        "tok_s": round(num_tokens / seconds, 1),
        "first_token_p50_ms": round(percentile(first_ms, 0.5), 2),
        "first_token_p99_ms": round(percentile(first_ms, 0.99), 2),
        "gap_p50_ms": round(percentile(gaps_ms, 0.5), 2),
        "gap_p99_ms": round(percentile(gaps_ms, 0.99), 2),
        "gap_max_ms": round(max(gaps_ms, default=0.0), 2),
        "num_tokens": num_tokens,
        "num_events": sum(len(answer.events_s) for answer in answers),
    }


def medians(runs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each figure over the runs."""
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def measure(
    port: int, arguments: argparse.Namespace, vocab_size: int, seeds: Iterator[int]
) -> dict[str, Any]:
    """The load of many clients, then of one; both are warmed up by a run that does not count."""

    def load(count: int, num_new: int, num_clients: int) -> dict[str, Any]:
        prompts = random_prompts(count, arguments.input_len, vocab_size, next(seeds))
        return asyncio.run(closed_loop(port, bodies(prompts, num_new), num_clients))

    num_clients, num_new = arguments.clients, arguments.output_len
    load(num_clients, min(num_new, ALONE_OUTPUT_LEN), num_clients)
    runs = [
        load(arguments.num_requests, num_new, num_clients)
        for _ in tqdm(range(arguments.repeats), desc=f"{num_clients} at once", unit="run")
    ]
    load(2, ALONE_OUTPUT_LEN, 1)
    alone = load(arguments.num_alone, ALONE_OUTPUT_LEN, 1)
    return {"at_once": medians(runs), "runs": runs, "alone": alone}


def server_command(arguments: argparse.Namespace, folder: str) -> list[str]:
    """Of a server with default flags and those that were given."""
    flags = {
        "model-path": folder,
        "tokenizer-path": resolve_model_path("demo"),
        "load-format": "dummy",
        "max-running-requests": MAX_RUNNING,
        "device": arguments.device,
        **{name.replace("_", "-"): value for name, value in schedule_flags(arguments).items()},
    }
    if arguments.attention_backend is not None:
        flags["attention-backend"] = arguments.attention_backend
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
    return [sys.executable, "-m", "sglang.launch_server", *words]


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "http_streams")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--clients", type=int, default=128, help="streams at once")
    add("--num-requests", type=int, default=512)
    add("--num-alone", type=int, default=32, help="requests one at a time")
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--repeats", type=int, default=3)
    add("--device", default="auto")
    add("--attention-backend")
    add_schedule_options(parser)
    return parser.parse_args(argv)


def main() -> int:
    """Measures, prints the figures, writes the result; 1 if a request failed."""
    arguments, seeds = parse(), itertools.count()
    vocab_size = GEOMETRIES[arguments.geometry].vocab_size
    try:
        with (
            random_model(arguments.geometry, CONTEXT_LEN) as folder,
            running_server(server_command(arguments, folder), {}, START_LIMIT_S) as server,
        ):
            found = measure(server.port, arguments, vocab_size, seeds)
            server.stop()
    except StreamError as error:
        print(f"A request failed: {error}", file=sys.stderr)
        return 1
    shape = ("geometry", "clients", "num_requests", "input_len", "output_len")
    result = {
        **describe_environment(),
        **{name: vars(arguments)[name] for name in shape},
        "attention_backend": arguments.attention_backend or "default",
        "flags": schedule_flags(arguments),
        "goals_are_of": GPU_OF_GOALS,
        **found,
    }
    at_once, alone = found["at_once"], found["alone"]
    print(f"{arguments.clients} at once: {at_once['tok_s']:,.0f} output tokens/s,", end=" ")
    print(f"first token p50 {at_once['first_token_p50_ms']:.1f} ms,", end=" ")
    print(f"gap p99 {at_once['gap_p99_ms']:.1f} ms;", end=" ")
    print(f"the clients take {at_once['client_cpu_share']:.0%} of a core")
    print(f"one at a time: first token p50 {alone['first_token_p50_ms']:.1f} ms")
    store(arguments.out, result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
