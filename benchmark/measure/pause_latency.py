"""Measures how soon a pause returns, and how soon the next token comes after it.

One Engine with the bundled demo model and 64 running requests, radix cache off, so that a retracted
request computes all of its prompt again. Per round: a pause while all decode, one while prompts are
prefilled, and the first new token after each. Times are compared with steps: decode steps counted
by the server just before, and the first chunk of prompts that arrive together. With overlap and
without: on a CPU a launch computes, so with overlap a token is read one step after its own.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import make_parser, store
from benchmark.environment import describe_environment

NUM_REQUESTS = 64
CHUNK = 512
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "mtp k=4": {"mtp_enabled": True, "mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.9]},
}
CASES = [
    (phase, kind, mode)
    for kind in KINDS
    for phase, mode in (
        ("decode", "in_place"),
        ("decode", "retract"),
        ("decode", "abort"),
        ("prefill", "in_place"),
        ("prefill", "retract"),
    )
]


class Load:
    """Requests of which some stream; when tokens of the first come, those of others come too.

    Args:
        num_streams: one while decoding, as building 64 chunks per step takes a client's time; all
            where they must arrive together.
    """

    def __init__(
        self,
        engine: sglang.Engine,
        params: dict[str, Any],
        prompt_len: int,
        num_new: int,
        num_streams: int = 1,
    ) -> None:
        self.num_tokens = 0
        self._news = asyncio.Event()
        wanted = {**params, "max_new_tokens": num_new, "ignore_eos": True}
        prompts = [[100 + (i * j) % 3000 for i in range(prompt_len)] for j in range(NUM_REQUESTS)]
        self._tasks = [
            asyncio.create_task(self._follow(engine, prompts[:num_streams], wanted)),
            *(
                asyncio.create_task(engine.async_generate(input_ids=rest, sampling_params=wanted))
                for rest in [prompts[num_streams:]]
                if rest
            ),
        ]

    async def next_token(self) -> None:
        """Returns when a token comes that is not there yet."""
        await self.has(self.num_tokens + 1)

    async def has(self, count: int) -> None:
        while self.num_tokens < count:
            self._news.clear()
            await self._news.wait()

    async def _follow(
        self, engine: sglang.Engine, prompts: list[list[int]], params: dict[str, Any]
    ) -> None:
        stream = await engine.async_generate(input_ids=prompts, sampling_params=params, stream=True)
        async for chunk in stream:
            if chunk.get("index", 0) == 0:
                self.num_tokens = len(chunk["output_ids"])
                self._news.set()

    async def end(self, engine: sglang.Engine) -> None:
        await engine.async_abort_request(abort_all=True)
        await asyncio.gather(*self._tasks)


async def num_decode_steps(engine: sglang.Engine) -> int:
    info = await asyncio.to_thread(engine.get_server_info)
    return int(info["internal_states"][0]["forward_ct_decode"])


async def paused(engine: sglang.Engine, load: Load, mode: str) -> dict[str, float]:
    """Pauses; seconds of the pause and, where requests are left, until the first token after it."""
    start = time.perf_counter()
    await engine.async_pause_generation(mode)
    found = {"pause": time.perf_counter() - start}
    if mode == "abort":
        await load.end(engine)
        await engine.async_continue_generation()
        return found
    await asyncio.sleep(0.3)
    start = time.perf_counter()
    await engine.async_continue_generation()
    await load.next_token()
    found["resume"] = time.perf_counter() - start
    await load.end(engine)
    return found


async def pause_while_decoding(
    engine: sglang.Engine, params: dict[str, Any], mode: str
) -> dict[str, float]:
    """Seconds: a decode step, and `paused`."""
    load = Load(engine, params, prompt_len=24, num_new=2000)
    await load.has(15)
    start, first = time.perf_counter(), await num_decode_steps(engine)
    await asyncio.sleep(1.5)
    num_steps = await num_decode_steps(engine) - first
    step = (time.perf_counter() - start) / num_steps
    return {"step": step, **await paused(engine, load, mode)}


async def pause_while_prefilling(
    engine: sglang.Engine, params: dict[str, Any], mode: str
) -> dict[str, float]:
    """Seconds: a chunk of prompts (by the first token of prompts that arrive together), and
    `paused` with such a chunk in flight."""
    start = time.perf_counter()
    load = Load(engine, params, prompt_len=CHUNK // 2, num_new=200, num_streams=NUM_REQUESTS)
    await load.next_token()
    chunk = time.perf_counter() - start
    await asyncio.sleep(2 * chunk)
    return {"step": chunk, **await paused(engine, load, mode)}


Case = tuple[str, str, str]  # phase, kind, mode


async def measure(engine: sglang.Engine, rounds: int, bar: tqdm[Any]) -> list[dict[str, Any]]:
    """Medians over the rounds, the cases in turn within each."""
    samples: dict[Case, list[dict[str, float]]] = defaultdict(list)
    for number in range(rounds + 1):
        for case in CASES:
            phase, kind, mode = case
            pause = pause_while_decoding if phase == "decode" else pause_while_prefilling
            sample = await pause(engine, KINDS[kind], mode)
            if number:  # the first round warms up
                samples[case].append(sample)
            bar.update()
    return [row_of(case, samples) for case in CASES]


def row_of(case: Case, samples: dict[Case, list[dict[str, float]]]) -> dict[str, Any]:
    """Milliseconds and steps: a pause in steps of the kind in flight, the first token in steps of
    the kind that makes it."""
    phase, kind, mode = case
    values = samples[case]
    row: dict[str, Any] = {"phase": phase, "kind": kind, "mode": mode}
    for name in values[0]:
        row[f"{name}_ms"] = round(1e3 * statistics.median(v[name] for v in values), 2)
    pauses = [v["pause"] / v["step"] for v in values]
    row["pause_in_steps"] = round(statistics.median(pauses), 2)
    row["pause_in_steps_max"] = round(max(pauses), 2)
    if "resume" in values[0]:
        own = case if (phase, mode) == ("decode", "in_place") else ("prefill", kind, mode)
        steps = [v["step"] for v in samples[own]]
        ratios = [v["resume"] / step for v, step in zip(values, steps, strict=True)]
        row["token_after"] = "decode step" if own == case else "first chunk"
        row["token_after_in_steps"] = round(statistics.median(ratios), 2)
    return row


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "pause_latency_cpu")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    with tqdm(total=2 * (arguments.rounds + 1) * len(CASES), unit="pause") as bar:
        for overlap in (True, False):
            with sglang.Engine(
                model_path="demo",
                max_running_requests=NUM_REQUESTS,
                chunked_prefill_size=CHUNK,
                max_total_tokens=80_000,
                disable_radix_cache=True,
                disable_overlap_schedule=not overlap,
            ) as engine:
                found = asyncio.run(measure(engine, arguments.rounds, bar))
            rows += [{"overlap": overlap, **row} for row in found]
    for row in rows:
        token = ""
        if "token_after" in row:
            token = f"token after {row['token_after_in_steps']:5.2f} x {row['token_after']}"
        print(
            f"{'overlap' if row['overlap'] else 'no overlap':10} {row['phase']:8} {row['kind']:8}"
            f" {row['mode']:9} step {row['step_ms']:6.1f} ms, pause {row['pause_ms']:6.1f} ms ="
            f" {row['pause_in_steps']:4.2f} steps (max {row['pause_in_steps_max']:4.2f}); {token}"
        )
    result = {**describe_environment(), "requests": NUM_REQUESTS, "chunk": CHUNK, "rows": rows}
    store(arguments.out, result)


if __name__ == "__main__":
    main()
