"""Which trees of drafts are faster than chains, and than plain decoding?

The bundled model and its head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`), prompts
of held-out code, and an Engine for each shape side by side, one without a drafter too. Rounds of
all at each number of requests at once, in turn, so that each ratio is of runs side by side. A shape
is TOPK x STEPS x TOKENS, as in the flags `--speculative-eagle-topk`, `--speculative-num-steps` and
`--speculative-num-draft-tokens`; with TOPK 1 it is a chain, of that length in every step. Stored
after each round; rounds end before --budget-s does.

    python -m benchmark.measure.tree_shapes --model-dir FOLDER      on a GPU
    python -m benchmark.measure.tree_shapes --model-path demo --device cpu --shapes 1x3x4 2x3x6
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, ratios
from benchmark.engine_load import Budget, LoadResult, accept_length, closed_loop, run_rounds
from benchmark.environment import describe_environment
from benchmark.held_out import held_out_prompts
from benchmark.measure.speculation_paired import HEADS, MIN_PROMPTS, head_path_of
from benchmark.mtp_model import (
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from sglang.srt.model_config import resolve_model_path

PLAIN = "plain"
SHAPES = ("1x3x4", "1x5x6", "2x4x8", "4x5x8", "4x4x16")


class Shape(NamedTuple):
    """Of an Engine's drafts; `num_tokens` counts the certain one."""

    topk: int
    num_steps: int
    num_tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """
        Raises:
            ValueError: for other texts than TOPKxSTEPSxTOKENS.
        """
        topk, num_steps, num_tokens = map(int, text.split("x"))
        return cls(topk, num_steps, num_tokens)

    @property
    def flags(self) -> dict[str, Any]:
        """Of the Engine; chains do not change with the load, as trees do not."""
        return {
            "speculative_eagle_topk": self.topk,
            "speculative_num_steps": self.num_steps,
            "speculative_num_draft_tokens": self.num_tokens,
            "speculative_load_aware": "off",
        }

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Rounds:
    """Speeds of all Engines at each number of requests at once, one per round."""

    def __init__(
        self,
        engines: dict[str, sglang.Engine],
        prompts: list[list[int]],
        loads: Sequence[int],
        params: dict[str, Any],
    ) -> None:
        self._engines = engines
        self._prompts = prompts
        self._params = params
        self.results: dict[int, dict[str, list[LoadResult]]] = {
            load: {kind: [] for kind in engines} for load in loads
        }
        self.accept_lengths: dict[int, dict[str, float]] = {load: {} for load in loads}

    def run(self, number: int) -> float:
        """One round; round 0 warms up and is not counted. Seconds."""
        start = time.perf_counter()
        runs = [*itertools.product(self.results, in_turn(self._engines, number))]
        for load, kind in tqdm(runs, desc=f"round {number}", unit="run", mininterval=2.0):
            prompts, engine = self._prompts[: max(MIN_PROMPTS, load)], self._engines[kind]
            result = asyncio.run(closed_loop(engine, prompts, self._params, load, 1))
            if number:
                self.results[load][kind].append(result)
            elif kind != PLAIN:
                self.accept_lengths[load][kind] = accept_length(engine, prompts, self._params)
        return time.perf_counter() - start

    def rows(self) -> list[dict[str, Any]]:
        """Of each load: all shapes beside plain decoding, and the best tree beside the best
        chain."""
        return [self._row(load, found) for load, found in self.results.items()]

    def _row(self, load: int, found: dict[str, list[LoadResult]]) -> dict[str, Any]:
        speeds = {kind: [each.tok_s for each in results] for kind, results in found.items()}
        shapes = {
            kind: {
                "tok_s": [round(speed, 1) for speed in tok_s],
                "speed_up": round(statistics.median(ratios(tok_s, speeds[PLAIN])), 4),
                "accept_length": round(self.accept_lengths[load][kind], 4),
            }
            for kind, tok_s in speeds.items()
            if kind != PLAIN
        }
        row = {
            "requests": load,
            "plain_tok_s": [round(speed, 1) for speed in speeds[PLAIN]],
            "shapes": shapes,
        }
        chains = [kind for kind in shapes if Shape.parse(kind).topk == 1]
        trees = [kind for kind in shapes if Shape.parse(kind).topk > 1]
        if chains and trees:
            chain, tree = (
                max(kinds, key=lambda kind: shapes[kind]["speed_up"]) for kinds in (chains, trees)
            )
            by_round = ratios(speeds[tree], speeds[chain])
            row |= {"best_chain": chain, "best_tree": tree}
            row["tree_over_chain"] = round(statistics.median(by_round), 4)
        return row


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
    result |= {"algorithm": arguments.algorithm}
    flags = engine_flags(arguments, model_path)
    drafter = {
        "speculative_algorithm": arguments.algorithm,
        "speculative_draft_model_path": head_path,
    }
    params = {"temperature": 0, "max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    with ExitStack() as stack:
        engines = {PLAIN: stack.enter_context(start_engine(flags))}
        for shape in arguments.shapes:
            engine = start_engine(flags, **drafter, **shape.flags)
            engines[str(shape)] = stack.enter_context(engine)
        rounds = Rounds(engines, prompts, loads, params)
        rounds.run(0)
        run_rounds(rounds, budget, arguments, result)
    return result


def print_result(result: dict[str, Any]) -> None:
    """The speed-up and accept length of each shape, and the best ones."""
    print(f"\n{result['rounds']} rounds, {result['seconds']:.0f} s")
    for row in result["rows"]:
        print(f"{row['requests']} at once:")
        for shape, found in row["shapes"].items():
            print(
                f"    {shape:>8}: {found['speed_up']:.3f} times plain decoding, accept length"
                f" {found['accept_length']:.2f}"
            )
        if "tree_over_chain" in row:
            print(
                f"    best tree {row['best_tree']} over best chain {row['best_chain']}:"
                f" {row['tree_over_chain']:.3f}"
            )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "tree_shapes")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8])
    add("--algorithm", choices=HEADS, default="EAGLE3")
    add("--shapes", type=Shape.parse, nargs="+", default=[Shape.parse(each) for each in SHAPES])
    parser.set_defaults(budget_s=500.0)
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
