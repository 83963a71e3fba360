"""How much faster is speculation than plain decoding on a GPU, and is it ever slower?

The bundled model and its head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`), or for
STANDALONE its draft model in that of Llama-3.2-1B, prompts of held-out code, two Engines side by
side: one without a drafter and one with. Rounds of both at each number of requests at once, in
turn, so that each ratio is of runs side by side. What is asked: `goals.py`. Stored after each
round; rounds end before --budget-s does.

    python -m benchmark.measure.speculation_paired --model-dir FOLDER      on a GPU
    python -m benchmark.measure.speculation_paired --model-dir FOLDER --algorithm STANDALONE
    python -m benchmark.measure.speculation_paired --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, ratios
from benchmark.engine_load import Budget, LoadResult, accept_length, closed_loop, run_rounds
from benchmark.environment import ROOT, describe_environment
from benchmark.goals import (
    MIN_PAIRED_MEDIAN,
    MIN_PAIRED_ROUND,
    MIN_SPEED_UP_OF_ACCEPT_LENGTH,
    MIN_STANDALONE_SPEED_UP,
)
from benchmark.held_out import held_out_prompts
from benchmark.mtp_model import (
    INFLATED,
    SILENT_STD,
    SMALL_TARGET,
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from benchmark.random_model import DRAFT_GEOMETRIES
from sglang.srt.model_config import resolve_model_path

PLAIN, DRAFTED = "plain", "drafted"
STANDALONE = "STANDALONE"
HEADS = {"EAGLE": "demo-eagle", "EAGLE3": "demo-eagle3", STANDALONE: "demo-draft"}
DEFAULT_DRAFT_GEOMETRY = "llama-3.2-1b"
DRAFT_VOCAB_SIZE = 32000  # of published EAGLE-3 heads for this geometry
MIN_PROMPTS = 4  # of a lap
BUSY, BUSY_LAPS = 64, 2  # so many requests at once are soon done with a lap


@contextmanager
def head_path_of(arguments: argparse.Namespace) -> Iterator[str]:
    """The bundled head or draft model, or what --draft-model names; inflated if the model is."""
    options = vars(arguments)
    head = options.get("draft_model") or HEADS[arguments.algorithm]
    if arguments.model_path != INFLATED:
        yield head
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.algorithm == STANDALONE:
            subprocess.run(inflate_draft(head, folder, arguments), cwd=ROOT, check=True)
            yield folder
            return
        command = [sys.executable, "-m", "benchmark.inflate_head", "--head", head]
        command += ["--algorithm", arguments.algorithm, "--out", folder]
        command += ["--silent-std", SILENT_STD]
        is_small = arguments.geometry == "tiny"
        sizes = SMALL_TARGET if is_small else {}
        command += [f"--{name}={size}" for name, size in sizes.items()]
        if arguments.algorithm == "EAGLE3" and not is_small:
            command.append(f"--draft-vocab-size={DRAFT_VOCAB_SIZE}")
        subprocess.run(command, cwd=ROOT, check=True)
        yield folder


def inflate_draft(model: str, folder: str, arguments: argparse.Namespace) -> list[str]:
    """The command that writes a draft model in a draft model's geometry."""
    is_small = arguments.geometry == "tiny"
    options = vars(arguments)
    name = "tiny" if is_small else options.get("draft_geometry") or DEFAULT_DRAFT_GEOMETRY
    device = "cpu" if arguments.device == "cpu" else "cuda"
    command = [sys.executable, "-m", "benchmark.inflate", "--model-path", model, "--out", folder]
    command += ["--silent-std", SILENT_STD, "--device", device]
    sizes = asdict(DRAFT_GEOMETRIES[name]).items()
    return command + [f"--{key.replace('_', '-')}={size}" for key, size in sizes]


class Rounds:
    """Speeds of both Engines at each number of requests at once, one per round."""

    def __init__(
        self,
        engines: dict[str, sglang.Engine],
        prompts: list[list[int]],
        loads: list[int],
        params: dict[str, Any],
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._params = params
        self.results: dict[int, dict[str, list[LoadResult]]] = {
            load: {kind: [] for kind in engines} for load in loads
        }
        self.accept_lengths: dict[int, list[float]] = {load: [] for load in loads}

    def run(self, number: int) -> float:
        """One round; round 0 warms up and is not counted. Seconds."""
        start = time.perf_counter()
        runs = [*itertools.product(self.results, in_turn(self._engines, number))]
        for load, kind in tqdm(runs, desc=f"round {number}", unit="run", mininterval=2.0):
            prompts = self._prompts[: max(MIN_PROMPTS, load)]
            laps = BUSY_LAPS if number and load >= BUSY else 1
            engine = self._engines[kind]
            result = asyncio.run(closed_loop(engine, prompts, self._params, load, laps))
            if number:
                self.results[load][kind].append(result)
            if number and kind == DRAFTED:
                found = accept_length(engine, prompts[:MIN_PROMPTS], self._params)
                self.accept_lengths[load].append(found)
        return time.perf_counter() - start

    def rows(self) -> list[dict[str, Any]]:
        """Of each load, drafted beside plain."""
        rows = []
        for load, found in self.results.items():
            speeds = {kind: [each.tok_s for each in results] for kind, results in found.items()}
            by_round = ratios(speeds[DRAFTED], speeds[PLAIN])
            accept_length = statistics.median(self.accept_lengths[load])
            rows.append(
                {
                    "requests": load,
                    "plain_tok_s": [round(speed, 1) for speed in speeds[PLAIN]],
                    "drafted_tok_s": [round(speed, 1) for speed in speeds[DRAFTED]],
                    "ratios": [round(ratio, 4) for ratio in by_round],
                    "median": round(statistics.median(by_round), 4),
                    "lowest": round(min(by_round), 4),
                    "accept_length": round(accept_length, 4),
                    "of_accept_length": round(statistics.median(by_round) / accept_length, 4),
                }
            )
        return rows


def measure(
    arguments: argparse.Namespace, model_path: str, head_path: str, budget: Budget
) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    loads = arguments.concurrency
    prompts, source = held_out_prompts(
        resolve_model_path(model_path),
        max(MIN_PROMPTS, *loads),
        arguments.prompt_tokens,
        arguments.seed,
    )
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    result |= {"algorithm": arguments.algorithm, "num_steps": arguments.num_steps}
    if arguments.algorithm == STANDALONE:
        result["draft_geometry"] = arguments.draft_geometry
    flags = engine_flags(arguments, model_path)
    drafter = {
        "speculative_algorithm": arguments.algorithm,
        "speculative_draft_model_path": head_path,
        "speculative_num_steps": arguments.num_steps,
    }
    params = {"temperature": 0, "max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    starts = {}
    begin = time.perf_counter()
    with start_engine(flags) as plain:
        starts[PLAIN] = round(time.perf_counter() - begin, 1)
        begin = time.perf_counter()
        with start_engine(flags, **drafter) as drafted:
            starts[DRAFTED] = round(time.perf_counter() - begin, 1)
            result["startup_s"] = starts
            rounds = Rounds({PLAIN: plain, DRAFTED: drafted}, prompts, loads, params)
            rounds.run(0)
            run_rounds(rounds, budget, arguments, result)
    return result


def print_result(result: dict[str, Any]) -> None:
    """The ratios of each round, and what was asked of them."""
    print(f"\n{result['rounds']} rounds, {result['seconds']:.0f} s; starts {result['startup_s']}")
    for row in result["rows"]:
        is_fast = row["median"] >= MIN_PAIRED_MEDIAN and row["lowest"] >= MIN_PAIRED_ROUND
        is_share = result["algorithm"] != STANDALONE
        goals = MIN_SPEED_UP_OF_ACCEPT_LENGTH if is_share else MIN_STANDALONE_SPEED_UP
        asked = goals.get(row["requests"], 0.0)
        reached = row["of_accept_length"] if is_share else row["median"]
        verdict = "ok  " if is_fast and reached >= asked else "MISS"
        rounds = " ".join(f"{ratio:.3f}" for ratio in row["ratios"])
        print(
            f"{verdict} {row['requests']:3d} at once: median {row['median']:.3f} lowest"
            f" {row['lowest']:.3f} ({rounds}), accept length {row['accept_length']:.2f},"
            f" {row['of_accept_length']:.3f} of it (asked {'of it' if is_share else 'median'}"
            f" {asked:.2f})"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "speculation_paired")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--algorithm", choices=HEADS, default="EAGLE3")
    add("--num-steps", type=int, default=3, help="drafts of a chain")
    add("--draft-model", help="folder of a head or draft model; default: the bundled one")
    add(
        "--draft-geometry",
        choices=DRAFT_GEOMETRIES,
        default=DEFAULT_DRAFT_GEOMETRY,
        help="of an inflated draft model",
    )
    parser.set_defaults(budget_s=250.0)
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, head_path_of(arguments) as head_path:
        result = measure(arguments, model_path, head_path, budget)
    print_result(result)


if __name__ == "__main__":
    main()
