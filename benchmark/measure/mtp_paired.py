"""Is multi-token prediction that heeds the load ever slower than plain decoding on a GPU?

The bundled model in Llama-3.1-8B's geometry (`inflate.py`), prompts of held-out code, one Engine
with --mtp-load-aware-k. Rounds of plain, conf_adapt and verified requests at each number at
once, plain first and last in turn, so that each ratio is of runs side by side. What is asked: the
median of the rounds' ratios, and the lowest (`goals.py`). Stored after each round; rounds end
before --budget-s does.

    python -m benchmark.measure.mtp_paired --model-dir FOLDER        on a GPU
    python -m benchmark.measure.mtp_paired --model-path demo --concurrency 1 4 --new-tokens 16
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, ratios, store
from benchmark.engine_load import Budget, closed_loop, varied_lengths
from benchmark.environment import describe_environment
from benchmark.goals import MIN_PAIRED_MEDIAN, MIN_PAIRED_ROUND
from benchmark.held_out import held_out_prompts
from benchmark.mtp_kinds import KINDS, LOAD_AWARE, PLAIN, VERIFIED
from benchmark.mtp_model import engine_flags, make_mtp_parser, model_path_of, settings
from sglang.srt.model_config import resolve_model_path

COMPARED = (LOAD_AWARE, VERIFIED)
MIN_PROMPTS = 4  # of a lap
BUSY, BUSY_LAPS = 64, 2  # so many requests at once are soon done with a lap


def num_laps(num_requests: int) -> int:
    """Laps that count: of many requests at once one lasts a second, of one client it is long."""
    return BUSY_LAPS if num_requests >= BUSY else 1


class Rounds:
    """Speeds of each kind at each number of requests at once, one per round."""

    def __init__(
        self,
        engine: sglang.Engine,
        prompts: list[list[int]],
        loads: list[int],
        new_tokens: int,
        has_equal_lengths: bool = False,
    ) -> None:
        self._engine = engine
        self._has_equal_lengths = has_equal_lengths
        self._prompts = prompts
        self._new_tokens = new_tokens
        kinds = (PLAIN, *COMPARED)
        self.tok_s: dict[int, dict[str, list[float]]] = {
            load: {kind: [] for kind in kinds} for load in loads
        }
        self.tokens_per_step: dict[int, dict[str, list[float]]] = {
            load: {kind: [] for kind in kinds} for load in loads
        }

    def run(self, number: int) -> float:
        """One round; round 0 warms up and is not counted. Seconds."""
        start = time.perf_counter()
        runs = [*itertools.product(self.tok_s, in_turn((PLAIN, *COMPARED), number))]
        for load, kind in tqdm(runs, desc=f"round {number}", unit="run", mininterval=2.0):
            new_tokens = self._new_tokens if number else max(8, self._new_tokens // 4)
            params = {**KINDS[kind].params, "max_new_tokens": new_tokens, "ignore_eos": True}
            prompts = self._prompts[: max(MIN_PROMPTS, load)]
            laps, lengths = num_laps(load) if number else 1, None
            if not self._has_equal_lengths:
                lengths = varied_lengths(len(prompts), new_tokens)
            run = closed_loop(self._engine, prompts, params, load, laps, lengths=lengths)
            result = asyncio.run(run)
            if number:
                self.tok_s[load][kind].append(result.tok_s)
                self.tokens_per_step[load][kind].append(result.tokens_per_step)
        return time.perf_counter() - start

    def rows(self) -> list[dict[str, Any]]:
        """Of each load, each kind beside plain requests."""
        return [
            {
                "requests": load,
                "plain_tok_s": [round(speed, 1) for speed in speeds[PLAIN]],
                "kinds": {
                    kind: summary(speeds[kind], speeds[PLAIN], self.tokens_per_step[load][kind])
                    for kind in COMPARED
                },
            }
            for load, speeds in self.tok_s.items()
        ]


def summary(
    speeds: list[float], plain: list[float], tokens_per_step: list[float]
) -> dict[str, Any]:
    """The ratios of paired runs, and whether they are what is asked."""
    by_round = ratios(speeds, plain)
    median, lowest = statistics.median(by_round), min(by_round)
    return {
        "ratios": [round(ratio, 4) for ratio in by_round],
        "median": round(median, 4),
        "lowest": round(lowest, 4),
        "passed": median >= MIN_PAIRED_MEDIAN and lowest >= MIN_PAIRED_ROUND,
        "tok_s": [round(speed, 1) for speed in speeds],
        "tokens_per_step": round(statistics.median(tokens_per_step), 4),
    }


def measure(arguments: argparse.Namespace, model_path: str, budget: Budget) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    loads = arguments.concurrency
    prompts, source = held_out_prompts(
        resolve_model_path(model_path),
        max(MIN_PROMPTS, *loads),
        arguments.prompt_tokens,
        arguments.seed,
    )
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    result["has_equal_lengths"] = arguments.equal_lengths
    result["asked"] = {"median": MIN_PAIRED_MEDIAN, "lowest": MIN_PAIRED_ROUND}
    with sglang.Engine(**engine_flags(arguments, model_path), mtp_load_aware_k=True) as engine:
        result["attention_backend"] = engine.get_server_info()["resolved"]["attention_backend"]
        result["startup_s"] = round(time.perf_counter() - budget.start_s, 1)
        rounds = Rounds(engine, prompts, loads, arguments.new_tokens, arguments.equal_lengths)
        rounds.run(0)
        last_s, number = 0.0, 0
        while budget.has_room(number, arguments.rounds, last_s):
            number += 1
            last_s = rounds.run(number)
            result |= {"rounds": number, "round_s": round(last_s, 1), "rows": rounds.rows()}
            result["seconds"] = round(time.perf_counter() - budget.start_s, 1)
            store(arguments.out, result)
    return result


def print_result(result: dict[str, Any]) -> None:
    """The ratios of each round, and what was asked of them."""
    print(f"\n{result['rounds']} rounds, {result['seconds']:.0f} s; tok/s beside plain requests")
    for row, kind in itertools.product(result["rows"], COMPARED):
        found = row["kinds"][kind]
        verdict = "ok  " if found["passed"] else "MISS"
        rounds = " ".join(f"{ratio:.3f}" for ratio in found["ratios"])
        print(
            f"{verdict} {row['requests']:3d} at once, {kind:24} median {found['median']:.3f}"
            f" lowest {found['lowest']:.3f}  ({rounds})  {found['tokens_per_step']:.2f} tokens/step"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "mtp_paired")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument(
        "--equal-lengths",
        action="store_true",
        help="every output has --new-tokens tokens; else those of a lap differ",
    )
    parser.set_defaults(budget_s=230.0)
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path:
        result = measure(arguments, model_path, budget)
    print_result(result)


if __name__ == "__main__":
    main()
