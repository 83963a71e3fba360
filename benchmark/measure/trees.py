"""Compares this tree of sources with others: the same ways of an experiment, in turn.

    git archive COMMIT python sgl-kernel benchmark | tar x -C /tmp/other
    python -m benchmark.measure.trees mtp --other /tmp/other --concurrency 1 8 64 128
    python -m benchmark.measure.trees tile_spec --other /tmp/other --ways plain 'static 3'

Each Engine of a way runs in a process that imports `sglang` from its tree. One of each tree is
resident; those that measure prices start one after the other. The result is stored after each
round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmark.engine_load import Budget
from benchmark.environment import ROOT, describe_environment, measured_commit
from benchmark.experiments import EXPERIMENTS
from benchmark.measure.experiment import parse as parse_experiment
from benchmark.mtp_model import code_prompts, drafter_flags, engine_flags, model_path_of, settings
from benchmark.paired import Figures, Pair, Paired, print_ratios, store_rounds
from benchmark.ways import EngineWay, servings

STOP_LIMIT_S = 60.0
SOURCES = ("python", "sgl-kernel/python")


class TreeEngine:
    """An Engine of a tree, in a process of its own."""

    def __init__(self, tree: Path) -> None:
        paths = [str(tree / each) for each in SOURCES] + [
            str(ROOT),
            os.environ.get("PYTHONPATH", ""),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmark.tree_engine"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree / SOURCES[0],  # `python -m` looks there before PYTHONPATH
            env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._answers = self._process.stdin, self._process.stdout

    def send(self, message: Any) -> None:
        print(json.dumps(message), file=self._requests, flush=True)

    def receive(self) -> Figures:
        """
        Raises:
            RuntimeError: the process has ended; its error is on standard error.
        """
        line = self._answers.readline()
        if not line:
            raise RuntimeError(f"An Engine ended with {self._process.wait()}; see above.")
        found: Figures = json.loads(line)
        return found

    def stop(self) -> None:
        """Ends the process, which shuts its Engine down."""
        self._requests.close()
        try:
            self._process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()


@contextmanager
def tree_engines(
    trees: Mapping[str, Path], served: dict[str, Any], one_by_one: bool
) -> Iterator[dict[str, TreeEngine]]:
    """Starts an Engine of each tree, by name.

    Args:
        served: see `benchmark/tree_engine.py`.
        one_by_one: each starts when the one before it serves.
    """
    with ExitStack() as stack:
        engines = {}
        for name, tree in trees.items():
            engines[name] = engine = TreeEngine(tree)
            stack.callback(engine.stop)
            engine.send(served)
            if one_by_one:
                engine.receive()
        if not one_by_one:
            for engine in engines.values():
                engine.receive()
        yield engines


def paired_trees(
    engines: Mapping[str, TreeEngine], ways: Mapping[str, EngineWay], loads: list[int]
) -> Paired[int]:
    """Pairs each way of the first tree with that of each other one."""
    named = {f"{way}, {tree}": (engine, way) for way in ways for tree, engine in engines.items()}
    this, *others = engines
    pairs: list[Pair] = [(f"{way}, {this}", f"{way}, {other}") for way in ways for other in others]

    def run(load: int, way: str, number: int) -> Figures:
        engine, name = named[way]
        engine.send((load, name, number))
        return engine.receive()

    return Paired(run, loads, pairs)


def measure(
    arguments: argparse.Namespace, model_path: str, drafter: Mapping[str, Any], budget: Budget
) -> dict[str, Any]:
    """Measures one Engine's ways after the other's; the time left is shared evenly."""
    experiment = EXPERIMENTS[arguments.name]
    prompts, source = code_prompts(arguments, model_path)
    others = {tree.name: tree.absolute() for tree in arguments.other}
    result = {**describe_environment(), "experiment": arguments.name, **settings(arguments)}
    commits = {name: measured_commit(tree) for name, tree in others.items()}
    result |= {"prompts": source, "others": commits, "rows": []}
    outputs = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True, "temperature": 0}
    groups = servings({name: experiment.way(name) for name in arguments.ways})
    for number, ways in enumerate(groups):
        way = next(iter(ways.values()))
        start_s = time.perf_counter()
        left_s = budget.total_s - (start_s - budget.start_s)
        share = Budget(left_s / (len(groups) - number), start_s)
        served = {
            "flags": engine_flags(arguments, model_path),
            "more": {**(drafter if way.is_drafted else {}), **way.flags},
            "ways": {name: {**outputs, **each.params} for name, each in ways.items()},
            "prompts": prompts,
        }
        trees = {"this tree": ROOT} | others
        with tree_engines(trees, served, way.measures_prices) as engines:
            paired, before = paired_trees(engines, ways, arguments.concurrency), result["rows"]

            def found(paired: Paired[int] = paired, before: list[Any] = before) -> dict[str, Any]:
                return {"rows": before + paired.rows()}

            store_rounds(paired, share, arguments, result, found)
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    def add_other(parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--other", type=Path, nargs="+", required=True, help="folders of other trees"
        )

    arguments = parse_experiment(argv, __doc__, "{name}_trees", add_other)
    experiment = EXPERIMENTS[arguments.name]
    if any(experiment.way(name).replay_errors is not None for name in arguments.ways):
        sys.exit("--ways: replayed drafts are of this tree alone; leave them out.")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse(argv)
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, drafter_flags(arguments) as drafter:
        result = measure(arguments, model_path, drafter, budget)
    print_ratios(result["rows"], {})


if __name__ == "__main__":
    main()
