"""Measures how soon a pause returns, and how soon the next token comes after it.

One Engine with the bundled demo model and 64 running requests, radix cache off, so that a retracted
request computes all of its prompt again. Per round: a pause while all decode, one while prompts are
prefilled, and the first new token after each; beside them a step, and a chunk of prompts that
arrive together. With overlap and without: on a CPU a launch computes, so with overlap a token is
read one step after its own.
"""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import Any

import sglang
from benchmark.command import make_parser, medians, print_rows, store, take_turns
from benchmark.environment import describe_environment

NUM_REQUESTS, CHUNK = 64, 512
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "mtp k=4": {"mtp_enabled": True, "mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.9]},
}
MODES = {"decode": ("in_place", "retract", "abort"), "prefill": ("in_place", "retract")}
CASES = [(phase, kind, mode) for kind in KINDS for phase in MODES for mode in MODES[phase]]


class Load:
    """Requests whose first one streams; of prompts that must arrive together all do.

    Attributes:
        num_tokens: that the first one has.
    """

    def __init__(
        self, engine: sglang.Engine, params: dict[str, Any], prompt_len: int, num_streams: int
    ) -> None:
        self.num_tokens = 0
        self._engine, self._news = engine, asyncio.Event()
        self._params = {**params, "max_new_tokens": 2000, "ignore_eos": True}
        prompts = [[100 + (i * j) % 3000 for i in range(prompt_len)] for j in range(NUM_REQUESTS)]
        self._tasks = [asyncio.create_task(self._follow(prompts[:num_streams]))]
        if rest := prompts[num_streams:]:
            others = engine.async_generate(input_ids=rest, sampling_params=self._params)
            self._tasks.append(asyncio.create_task(others))

    async def has(self, count: int) -> None:
        """Returns when the first request has so many tokens."""
        while self.num_tokens < count:
            self._news.clear()
            await self._news.wait()

    async def _follow(self, prompts: list[list[int]]) -> None:
        stream = await self._engine.async_generate(
            input_ids=prompts, sampling_params=self._params, stream=True
        )
        async for chunk in stream:
            if chunk.get("index", 0) == 0:
                self.num_tokens = len(chunk["output_ids"])
                self._news.set()

    async def end(self) -> None:
        await self._engine.async_abort_request(abort_all=True)
        await asyncio.gather(*self._tasks)


async def num_decode_steps(engine: sglang.Engine) -> int:
    info = await asyncio.to_thread(engine.get_server_info)
    return int(info["internal_states"][0]["forward_ct_decode"])


async def pause(
    engine: sglang.Engine, phase: str, params: dict[str, Any], mode: str
) -> dict[str, float]:
    """Milliseconds of a decode step or of a chunk of prompts, of a pause and, where requests are
    left, until the first token after it."""
    start = time.perf_counter()

    def since_ms() -> float:
        return (time.perf_counter() - start) * 1e3

    if phase == "decode":
        load = Load(engine, params, prompt_len=24, num_streams=1)
        await load.has(15)
        start, first = time.perf_counter(), await num_decode_steps(engine)
        await asyncio.sleep(1.5)
        num_steps = await num_decode_steps(engine) - first
        found = {"step_ms": since_ms() / num_steps}
    else:
        load = Load(engine, params, prompt_len=CHUNK // 2, num_streams=NUM_REQUESTS)
        await load.has(1)
        found = {"step_ms": since_ms()}
        await asyncio.sleep(2 * found["step_ms"] / 1e3)
    start = time.perf_counter()
    await engine.async_pause_generation(mode)
    found["pause_ms"] = since_ms()
    if mode == "abort":
        await load.end()
        await engine.async_continue_generation()
        return found
    await asyncio.sleep(0.3)
    start = time.perf_counter()
    await engine.async_continue_generation()
    await load.has(load.num_tokens + 1)
    found["token_after_ms"] = since_ms()
    await load.end()
    return found


def measure(engine: sglang.Engine, num_rounds: int) -> list[dict[str, Any]]:
    """Medians over the rounds, the cases in turn within each; one more round warms up."""

    def run(phase: str, kind: str, mode: str) -> dict[str, float]:
        return asyncio.run(pause(engine, phase, KINDS[kind], mode))

    works = {case: partial(run, *case) for case in CASES}
    take_turns(works, 1)
    rows = []
    for (phase, kind, mode), runs in take_turns(works, num_rounds).items():
        figures = {name: round(value, 2) for name, value in medians(runs).items()}
        longest = round(max(each["pause_ms"] for each in runs), 2)
        case = {"phase": phase, "kind": kind, "mode": mode}
        rows.append({**case, **figures, "longest_pause_ms": longest})
    return rows


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "pause_latency_cpu")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    rows = []
    for overlap in (True, False):
        with sglang.Engine(
            model_path="demo",
            max_running_requests=NUM_REQUESTS,
            chunked_prefill_size=CHUNK,
            max_total_tokens=80_000,
            disable_radix_cache=True,
            disable_overlap_schedule=not overlap,
        ) as engine:
            rows += [{"overlap": overlap, **row} for row in measure(engine, arguments.rounds)]
    print_rows(rows)
    result = {**describe_environment(), "requests": NUM_REQUESTS, "chunk": CHUNK, "rows": rows}
    store(arguments.out, result)


if __name__ == "__main__":
    main()
