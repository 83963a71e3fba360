"""How soon does a pause return, and how soon does the next token come after it?

One Engine with the bundled demo model and 64 running requests, radix cache off, so that a retracted
request computes all of its prompt again. Per round: a pause while all decode, one while prompts are
prefilled, and the first new token after each. Times are compared with the steps of the same round:
decode steps counted by the server, and the first chunk of prompts that arrive together.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from environment import describe_environment
from tqdm import tqdm

import sglang

RESULT = Path(__file__).parent / "results" / "pause_latency_cpu.json"
NUM_REQUESTS = 64
CHUNK = 512
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "mtp k=4": {"mtp_enabled": True, "mtp_k": 4, "mtp_strategy": ["conf_adapt", 0.9]},
}


class Streams:
    """Requests that stream; knows when each token came."""

    def __init__(
        self, engine: sglang.Engine, params: dict[str, Any], prompt_len: int, num_new: int
    ) -> None:
        self._num_tokens = [0] * NUM_REQUESTS
        self._news = asyncio.Event()
        wanted = {**params, "max_new_tokens": num_new, "ignore_eos": True}
        prompts = [[100 + (i * j) % 3000 for i in range(prompt_len)] for j in range(NUM_REQUESTS)]
        self._tasks = [
            asyncio.create_task(self._follow(engine, index, prompt, wanted))
            for index, prompt in enumerate(prompts)
        ]

    @property
    def num_tokens(self) -> int:
        return sum(self._num_tokens)

    async def next_token(self) -> None:
        """Returns when a token comes that is not there yet."""
        before = self.num_tokens
        while self.num_tokens == before:
            self._news.clear()
            await self._news.wait()

    async def all_have(self, count: int) -> None:
        while min(self._num_tokens) < count:
            self._news.clear()
            await self._news.wait()

    async def _follow(
        self, engine: sglang.Engine, index: int, prompt: list[int], params: dict[str, Any]
    ) -> None:
        stream = await engine.async_generate(input_ids=prompt, sampling_params=params, stream=True)
        async for chunk in stream:
            self._num_tokens[index] = len(chunk["output_ids"])
            self._news.set()

    async def end(self, engine: sglang.Engine) -> None:
        await engine.async_abort_request(abort_all=True)
        await asyncio.gather(*self._tasks)


async def num_decode_steps(engine: sglang.Engine) -> int:
    info = await asyncio.to_thread(engine.get_server_info)
    return int(info["internal_states"][0]["forward_ct_decode"])


async def pause_while_decoding(
    engine: sglang.Engine, params: dict[str, Any], mode: str
) -> dict[str, float]:
    """Seconds: a decode step, the pause, the first token after it."""
    streams = Streams(engine, params, prompt_len=24, num_new=2000)
    await streams.all_have(5)
    start, first = time.perf_counter(), await num_decode_steps(engine)
    await asyncio.sleep(1.5)
    num_steps = await num_decode_steps(engine) - first
    step = (time.perf_counter() - start) / num_steps
    start = time.perf_counter()
    await engine.async_pause_generation(mode)
    pause = time.perf_counter() - start
    await asyncio.sleep(0.3)
    start = time.perf_counter()
    await engine.async_continue_generation()
    await streams.next_token()
    resume = time.perf_counter() - start
    await streams.end(engine)
    return {"step": step, "pause": pause, "resume": resume}


async def pause_while_prefilling(
    engine: sglang.Engine, params: dict[str, Any], mode: str
) -> dict[str, float]:
    """Seconds: a chunk of prompts (by the first token of prompts that arrive together), the pause
    with such a chunk in flight, the first token after it."""
    start = time.perf_counter()
    streams = Streams(engine, params, prompt_len=CHUNK, num_new=200)
    await streams.next_token()
    chunk = time.perf_counter() - start
    await asyncio.sleep(2 * chunk)
    start = time.perf_counter()
    await engine.async_pause_generation(mode)
    pause = time.perf_counter() - start
    await asyncio.sleep(0.3)
    start = time.perf_counter()
    await engine.async_continue_generation()
    await streams.next_token()
    resume = time.perf_counter() - start
    await streams.end(engine)
    return {"step": chunk, "pause": pause, "resume": resume}


async def measure(engine: sglang.Engine, rounds: int) -> list[dict[str, Any]]:
    """Medians over the rounds, the modes in turn within each."""
    cases = [
        (phase, kind, mode)
        for kind in KINDS
        for phase in ("decode", "prefill")
        for mode in ("in_place", "retract", "abort")
        if not (mode == "abort" and phase == "prefill")
    ]
    samples: dict[tuple[str, str, str], list[dict[str, float]]] = defaultdict(list)
    with tqdm(total=(rounds + 1) * len(cases), unit="pause") as bar:
        for number in range(rounds + 1):
            for phase, kind, mode in cases:
                run = pause_while_decoding if phase == "decode" else pause_while_prefilling
                if mode == "abort":
                    sample = await abort_while_decoding(engine, KINDS[kind])
                else:
                    sample = await run(engine, KINDS[kind], mode)
                if number:  # the first round warms up
                    samples[phase, kind, mode].append(sample)
                bar.update()
    rows = []
    for (phase, kind, mode), values in samples.items():
        row: dict[str, Any] = {"phase": phase, "kind": kind, "mode": mode}
        for name in values[0]:
            row[f"{name}_ms"] = round(1e3 * statistics.median(v[name] for v in values), 2)
        for name in set(values[0]) - {"step"}:
            ratios = [v[name] / v["step"] for v in values]
            row[f"{name}_in_steps"] = round(statistics.median(ratios), 2)
            row[f"{name}_in_steps_max"] = round(max(ratios), 2)
        rows.append(row)
    return rows


async def abort_while_decoding(engine: sglang.Engine, params: dict[str, Any]) -> dict[str, float]:
    """Seconds: a decode step, and the pause that ends all requests."""
    streams = Streams(engine, params, prompt_len=24, num_new=2000)
    await streams.all_have(5)
    start, first = time.perf_counter(), await num_decode_steps(engine)
    await asyncio.sleep(1.5)
    step = (time.perf_counter() - start) / (await num_decode_steps(engine) - first)
    start = time.perf_counter()
    await engine.async_pause_generation("abort")
    pause = time.perf_counter() - start
    await streams.end(engine)
    await engine.async_continue_generation()
    return {"step": step, "pause": pause}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with sglang.Engine(
        model_path="demo",
        max_running_requests=NUM_REQUESTS,
        chunked_prefill_size=CHUNK,
        max_total_tokens=80_000,
        disable_radix_cache=True,
    ) as engine:
        rows = asyncio.run(measure(engine, arguments.rounds))
    print(f"{'phase':8} {'kind':8} {'mode':9} {'step':>9} {'pause':>18} {'continue to token':>22}")
    for row in rows:
        resume = ""
        if "resume_ms" in row:
            resume = f"{row['resume_ms']:8.1f} ms {row['resume_in_steps']:5.2f} steps"
        print(
            f"{row['phase']:8} {row['kind']:8} {row['mode']:9} {row['step_ms']:6.1f} ms"
            f" {row['pause_ms']:6.1f} ms {row['pause_in_steps']:5.2f} steps {resume}"
        )
    result = {**describe_environment(), "requests": NUM_REQUESTS, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"written: {arguments.out}")


if __name__ == "__main__":
    main()
