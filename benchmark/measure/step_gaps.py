"""Measures how long streams wait for a token beside a prompt of the full context.

One Engine per value of --max-step-ms, a large geometry with random weights, greedy, the server's
default flags else. Requests decode and stream; when all do, fresh long prompts come one after the
other. A gap is the time between two pieces of one stream, as the Engine's caller sees them,
while a long prompt waits for its first token. The first long prompt is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import print_rows, store, write
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.long_prompts import CONTEXT_LEN
from benchmark.one_batch import make_random_parser
from benchmark.random_model import GEOMETRIES, dummy_flags, random_model
from sglang.benchmark.metrics import percentile
from sglang.srt.garbage import keep_out_of_collections

DEFAULT = "default"
SPARE_TOKENS = 8  # of the context, beyond the long prompt
WARM_PIECES = 16  # of every stream, before anything is measured
BETWEEN_S = 0.3  # of one long prompt and the next
POLL_S = 0.02
STREAM_ENDED = "A stream ended before the long prompts did: raise --output-len."


async def follow(
    engine: sglang.Engine, prompt: list[int], params: dict[str, Any], arrivals: list[float]
) -> None:
    """Notes when each piece of a stream arrives, in seconds of `time.perf_counter`."""
    chunks = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
    async for _ in chunks:
        arrivals.append(time.perf_counter())


def gaps_ms(arrivals: Sequence[float], start: float, end: float) -> list[float]:
    """Returns the gaps between arrivals that lie, if only in part, between two times."""
    return [
        (after - before) * 1e3
        for before, after in itertools.pairwise(arrivals)
        if after > start and before < end
    ]


def describe(
    streams: Sequence[Sequence[float]], windows: Sequence[tuple[float, float]]
) -> dict[str, float]:
    """Gaps of all streams within some windows of time, in milliseconds."""
    gaps = [gap for arrivals in streams for window in windows for gap in gaps_ms(arrivals, *window)]
    return {
        "p50_ms": round(percentile(gaps, 0.5), 3),
        "p99_ms": round(percentile(gaps, 0.99), 3),
        "max_ms": round(max(gaps, default=0.0), 3),
    }


async def measure(
    engine: sglang.Engine, arguments: argparse.Namespace, vocab_size: int, seeds: Iterator[int]
) -> dict[str, Any]:
    """Gaps beside long prompts, and the seconds until a long prompt's first token."""

    def prompts(count: int, length: int) -> list[list[int]]:
        return random_prompts(count, length, vocab_size, next(seeds))

    async def first_token() -> tuple[float, float]:
        """Sends a long prompt; returns when it was sent and when its first token was there."""
        params = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        start = time.perf_counter()
        await engine.async_generate(input_ids=long_prompts.pop(), sampling_params=params)
        return start, time.perf_counter()

    # Made before anything runs: while a prompt is made, no stream is looked at.
    long_prompts = prompts(2 + 1 + arguments.repeats, arguments.prompt_len)
    await first_token()  # warms up
    start, end = await first_token()
    idle_s = end - start
    params = {"temperature": 0, "max_new_tokens": arguments.output_len, "ignore_eos": True}
    streams: list[list[float]] = [[] for _ in range(arguments.streams)]
    tasks = [
        asyncio.create_task(follow(engine, prompt, params, arrivals))
        for arrivals, prompt in zip(
            streams, prompts(arguments.streams, arguments.input_len), strict=True
        )
    ]
    while any(len(arrivals) < WARM_PIECES for arrivals in streams):
        await asyncio.sleep(POLL_S)
    beside = []
    for _ in range(arguments.repeats + 1):
        beside.append(await first_token())
        await asyncio.sleep(BETWEEN_S)
    if any(task.done() for task in tasks):
        raise RuntimeError(STREAM_ENDED)
    await engine.async_abort_request(abort_all=True)
    await asyncio.gather(*tasks)
    waits = [end - start for start, end in beside[1:]]
    return {
        "beside": describe(streams, beside[1:]),
        "first_token_s": round(statistics.median(waits), 4),
        "first_token_s_on_idle": round(idle_s, 4),
    }


def measure_value(
    arguments: argparse.Namespace, folder: str, value: str, seeds: Iterator[int]
) -> dict[str, Any]:
    """One Engine with a value of --max-step-ms, or with the server's own."""
    flags: dict[str, Any] = {} if value == DEFAULT else {"max_step_ms": float(value)}
    flags |= {"device": arguments.device, "attention_backend": arguments.attention_backend}
    vocab_size = GEOMETRIES[arguments.geometry].vocab_size
    with sglang.Engine(**dummy_flags(folder), **flags) as engine:
        keep_out_of_collections()  # of this process, whose pauses are none of the server's
        info = engine.get_server_info()
        found = asyncio.run(measure(engine, arguments, vocab_size, seeds))
    bound_ms = {**info, **info["resolved"]["schedule"]}.get("max_step_ms")
    return {"max_step_ms": value, "bound_ms": bound_ms, **found}


def main() -> None:
    """Measures, prints a table; the result is written after every Engine."""
    parser = make_random_parser(__doc__, "step_gaps")
    add = parser.add_argument
    values = [DEFAULT, "0", "20", "40", "80"]
    add("--max-step-ms", nargs="+", default=values, help=f"{DEFAULT}: the server's own")
    add("--streams", type=int, default=64, help="requests that decode")
    add("--input-len", type=int, default=128, help="of a stream")
    add("--output-len", type=int, default=3000, help="of a stream, more than it gets to")
    add("--prompt-len", type=int, default=CONTEXT_LEN - SPARE_TOKENS, help="of a long prompt")
    add("--repeats", type=int, default=3, help="long prompts")
    arguments, seeds = parser.parse_args(), itertools.count()
    rows: list[dict[str, Any]] = []
    result = {
        **describe_environment(),
        "geometry": arguments.geometry,
        "attention_backend": arguments.attention_backend or DEFAULT,
        "streams": arguments.streams,
        "prompt_len": arguments.prompt_len,
        "rows": rows,
    }
    with random_model(arguments.geometry, CONTEXT_LEN) as folder:
        for value in tqdm(arguments.max_step_ms, unit="engine"):
            rows.append(measure_value(arguments, folder, value, seeds))
            write(arguments.out, result)
    print_rows(rows)
    store(arguments.out, result)


if __name__ == "__main__":
    main()
