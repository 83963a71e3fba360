"""Streams of /generate that a launched server gives: how soon and how evenly their tokens come.

Random weights, the server's default flags, greedy, fresh random prompts. A closed loop: so many
clients, each sends its next request when its answer is there. The clients are one process that
reads no event but the last of an answer; what it takes of a core is in the result. A gap is the
time between two tokens of one stream.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from benchmark.engine_load import random_prompts
from benchmark.sse_client import StreamClient, StreamedAnswer
from sglang.benchmark.metrics import percentile

WARM_OUTPUT_LEN = 16


@dataclass(frozen=True, kw_only=True)
class HttpLoad:
    """A load of streams.

    Attributes:
        clients: streams at once.
        input_len, output_len: tokens of each.
        repeats: of the load of many clients.
    """

    clients: int = 128
    num_requests: int = 512
    input_len: int = 512
    output_len: int = 128
    repeats: int = 2


def bodies(prompts: Sequence[list[int]], num_new: int) -> list[bytes]:
    """Requests for /generate, ready to be sent."""
    params = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    return [
        json.dumps({"input_ids": prompt, "sampling_params": params, "stream": True}).encode()
        for prompt in prompts
    ]


async def first_token(port: int) -> None:
    """Waits for the first token after a short prompt."""
    client = await StreamClient.connect(port)
    [body] = bodies([[3, 4, 5]], num_new=1)
    await client.generate(body)
    client.close()


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
        "gap_p50_ms": round(percentile(gaps_ms, 0.5), 2),
        "gap_p99_ms": round(percentile(gaps_ms, 0.99), 2),
    }


def measure(
    port: int, load: HttpLoad, vocab_size: int, seeds: Iterator[int]
) -> list[dict[str, Any]]:
    """The figures of each run of the load, which is warmed up by a run that does not count."""

    def run(count: int, num_new: int) -> dict[str, Any]:
        prompts = random_prompts(count, load.input_len, vocab_size, next(seeds))
        return asyncio.run(closed_loop(port, bodies(prompts, num_new), load.clients))

    run(load.clients, min(load.output_len, WARM_OUTPUT_LEN))
    return [
        run(load.num_requests, load.output_len)
        for _ in tqdm(range(load.repeats), desc=f"{load.clients} at once", unit="run")
    ]
