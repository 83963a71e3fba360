"""How fast is the Engine beside transformers' `generate`, and what does a server cost when idle?

The same prompts go to both in alternating rounds: the Engine takes 1, 8 and 32 requests at once,
transformers takes them one by one at its best thread count, in a process of its own. While one
is timed the other waits. Greedy, float32, the bundled demo model. Run it with nothing else
running.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import statistics
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer
from tqdm import tqdm

import sglang
from benchmark.command import in_turn, make_parser, median_ratio, store
from benchmark.environment import describe_environment
from benchmark.server_process import free_port, wait_until_healthy
from sglang.srt.model_config import resolve_model_path

PROMPT_TOKENS = 128
ASKED = {1: 0.6, 8: 3.0, 32: 6.0}  # requests at once: ratio that the project wants at least
SAMPLING = {"temperature": 0, "ignore_eos": True}
READY_LIMIT_S = 120.0


class TransformersProcess:
    """transformers' `generate` behind a pipe: one JSON line per job, one per answer."""

    def __init__(self, model_dir: Path) -> None:
        worker = Path(__file__).parent / "transformers_worker.py"
        self._process = subprocess.Popen(
            [sys.executable, str(worker), str(model_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._ask({})  # loaded

    def _ask(self, job: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"The transformers process ended with {self._process.wait()}.")
        return json.loads(answer)

    def generate(
        self, prompts: list[list[int]], num_threads: int, new_tokens: int
    ) -> tuple[float, list[list[int]]]:
        """Seconds for all prompts one after the other, and their new tokens."""
        job = {"prompts": prompts, "num_threads": num_threads, "new_tokens": new_tokens}
        answer = self._ask(job)
        return answer["seconds"], answer["output_ids"]

    def close(self) -> None:
        self._process.communicate(timeout=30)  # end of its input ends it


@dataclass
class Samples:
    """Tokens per second in each round, for one number of requests."""

    engine: list[float] = field(default_factory=list)
    transformers: list[float] = field(default_factory=list)
    identical: int = 0
    compared: int = 0

    def row(self, num_requests: int) -> dict[str, Any]:
        return {
            "requests": num_requests,
            "engine_tok_s": round(statistics.median(self.engine), 1),
            "transformers_tok_s": round(statistics.median(self.transformers), 1),
            "ratio": round(median_ratio(self.engine, self.transformers), 2),
            "asked": ASKED[num_requests],
            "engine_tok_s_by_round": [round(speed, 1) for speed in self.engine],
            "transformers_tok_s_by_round": [round(speed, 1) for speed in self.transformers],
            "identical_outputs": f"{self.identical}/{self.compared}",
        }


def draw_prompts(model_dir: Path, seed: int) -> Iterator[list[int]]:
    """Windows of 128 tokens at random places of the standard library, without end."""
    tokenizer = Tokenizer.from_file(str(model_dir / "tokenizer.json"))
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    generator = random.Random(seed)
    while True:
        text = generator.choice(files).read_text(encoding="utf-8", errors="ignore")
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) >= PROMPT_TOKENS:
            start = generator.randrange(len(ids) - PROMPT_TOKENS + 1)
            yield ids[start : start + PROMPT_TOKENS]


def time_engine(
    engine: sglang.Engine, prompts: list[list[int]], new_tokens: int
) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    results = engine.generate(
        input_ids=prompts, sampling_params={**SAMPLING, "max_new_tokens": new_tokens}
    )
    seconds = time.perf_counter() - start
    return seconds, [result["output_ids"] for result in results]


def best_thread_count(
    transformers: TransformersProcess,
    prompts: Iterator[list[int]],
    candidates: list[int],
    new_tokens: int,
) -> tuple[int, dict[str, float]]:
    """The candidate with the best median tokens/s of three alternating tries, and all medians."""
    speeds: dict[int, list[float]] = {threads: [] for threads in candidates}
    for _ in tqdm(range(3), desc="transformers: threads"):
        prompt = next(prompts)
        for threads in candidates:
            seconds, outputs = transformers.generate([prompt], threads, new_tokens)
            speeds[threads].append(len(outputs[0]) / seconds)
    medians = {threads: statistics.median(speed) for threads, speed in speeds.items()}
    best = max(medians, key=lambda threads: medians[threads])
    return best, {str(threads): round(speed, 1) for threads, speed in medians.items()}


def compare(
    engine: sglang.Engine,
    transformers: TransformersProcess,
    prompts: Iterator[list[int]],
    num_threads: int,
    args: argparse.Namespace,
) -> dict[int, Samples]:
    """Rounds of fresh prompts (nothing is in the prefix cache); who begins alternates."""
    samples = {num_requests: Samples() for num_requests in ASKED}
    jobs = [(number, num) for number in range(args.rounds) for num in ASKED]
    for number, num_requests in tqdm(jobs, desc="Engine and transformers"):
        batch = [next(prompts) for _ in range(num_requests)]
        results = {}
        for name in in_turn(("engine", "transformers"), number):
            if name == "engine":
                results[name] = time_engine(engine, batch, args.new_tokens)
            else:
                results[name] = transformers.generate(batch, num_threads, args.new_tokens)
        sample = samples[num_requests]
        for name, speeds in (("engine", sample.engine), ("transformers", sample.transformers)):
            seconds, outputs = results[name]
            speeds.append(sum(map(len, outputs)) / seconds)
        sample.compared += num_requests
        pairs = zip(results["engine"][1], results["transformers"][1], strict=True)
        sample.identical += sum(ours == theirs for ours, theirs in pairs)
    return samples


@contextmanager
def running_server() -> Iterator[tuple[psutil.Process, float]]:
    """A server of the demo model; yields its process and the seconds until /health was 200."""
    port = free_port()
    command = [sys.executable, "-m", "sglang.launch_server", "--model-path", "demo"]
    start = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    try:
        wait_until_healthy(process, port, start + READY_LIMIT_S)
        yield psutil.Process(process.pid), time.perf_counter() - start
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)


def measure_server(num_starts: int, idle_s: float) -> tuple[list[float], float]:
    """Seconds of each start, and the idle CPU of the last server's processes in % of one core."""
    startups, idle_percent = [], 0.0
    for number in tqdm(range(num_starts), desc="server starts"):
        with running_server() as (root, seconds):
            startups.append(seconds)
            if number == num_starts - 1:
                time.sleep(3.0)  # let the warm-up settle
                idle_percent = _cpu_percent(root, idle_s)
    return startups, idle_percent


def _cpu_percent(root: psutil.Process, seconds: float) -> float:
    tree = [root, *root.children(recursive=True)]

    def cpu_seconds() -> float:
        return sum(times.user + times.system for times in (node.cpu_times() for node in tree))

    before, start = cpu_seconds(), time.perf_counter()
    time.sleep(seconds)
    return 100.0 * (cpu_seconds() - before) / (time.perf_counter() - start)


def measure(args: argparse.Namespace) -> dict[str, Any]:
    model_dir = resolve_model_path("demo")
    prompts = draw_prompts(model_dir, args.seed)
    startups, idle_percent = measure_server(args.starts, args.idle_s)
    transformers = TransformersProcess(model_dir)
    try:
        threads, by_threads = best_thread_count(
            transformers, prompts, args.threads, args.new_tokens
        )
        with sglang.Engine(model_path="demo") as engine:
            for num_requests in ASKED:  # warm-up, not counted
                time_engine(engine, [next(prompts) for _ in range(num_requests)], 16)
            samples = compare(engine, transformers, prompts, threads, args)
    finally:
        transformers.close()
    return {
        **describe_environment(),
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": args.new_tokens,
        "rounds": args.rounds,
        "transformers_threads": threads,
        "transformers_tok_s_by_threads": by_threads,
        "rows": [sample.row(num_requests) for num_requests, sample in samples.items()],
        "startup_s": round(statistics.median(startups), 2),
        "startup_s_samples": [round(seconds, 2) for seconds in startups],
        "idle_cpu_percent": round(idle_percent, 2),
    }


def print_table(result: dict[str, Any]) -> None:
    print(f"\n{'requests':>8} {'Engine tok/s':>13} {'transformers':>13} {'ratio':>6} {'asked':>6}")
    for row in result["rows"]:
        print(
            f"{row['requests']:>8} {row['engine_tok_s']:>13} {row['transformers_tok_s']:>13}"
            f" {row['ratio']:>6} {row['asked']:>6}"
        )
    print(
        f"server ready in {result['startup_s']} s; idle {result['idle_cpu_percent']} % of a core;"
        f" transformers with {result['transformers_threads']} threads"
    )


def main() -> None:
    parser = make_parser(__doc__, "engine_vs_transformers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--idle-s", type=float, default=20.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    result = measure(args)
    print_table(result)
    store(args.out, result)


if __name__ == "__main__":
    main()
