"""Measures an experiment of `benchmark.experiments`: ways in turn, until their ratios are certain.

    python -m benchmark.measure.experiment mtp --model-dir FOLDER          on a GPU
    python -m benchmark.measure.experiment speculation --ways plain drafted 1x7x8 2x7x16
    python -m benchmark.measure.experiment adaptive_steps --ways 'fixed 3' auto --prompt-tokens 64
    python -m benchmark.measure.experiment ngram --model-path demo --device cpu --concurrency 1 4

The result is stored after each round; rounds end before --budget-s does.
"""

from __future__ import annotations

import argparse
import operator
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import sglang
from benchmark.command import RESULTS
from benchmark.engine_load import AsyncEngine, Budget
from benchmark.environment import describe_environment
from benchmark.experiments import EXPERIMENTS, Experiment, Text
from benchmark.mtp_model import (
    HEADS,
    code_prompts,
    drafter_flags,
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
)
from benchmark.paired import (
    Figures,
    Paired,
    Run,
    Way,
    batches,
    closed_loops,
    over_all,
    print_ratios,
    store_rounds,
)
from benchmark.server_process import running_server
from benchmark.stream_ways import HttpStreams, server_command
from benchmark.ways import Asked, EngineWay, start_engines
from sglang.srt.garbage import keep_out_of_collections

START_LIMIT_S = 240.0


class Load(NamedTuple):
    """A number of requests at once, of one text.

    Attributes:
        visit: counts from 1 where a work has the same load several times.
    """

    requests: int
    text: str
    visit: int = 1


class Servings:
    """Serves the ways: Engines, and a server for those over HTTP; they end with the stack."""

    def __init__(
        self,
        stack: ExitStack,
        ways: Mapping[str, EngineWay],
        flags: dict[str, Any],
        drafter: Mapping[str, Any],
    ) -> None:
        self._ways = ways
        over_http = [way for way in ways.values() if way.route is not None]
        self.port = 0
        if over_http:
            command = server_command(flags | dict(over_http[0].flags))
            self.port = stack.enter_context(running_server(command, {}, START_LIMIT_S)).port
        beside = {name: way for name, way in ways.items() if way.route is None}
        self.engines = start_engines(stack, beside, flags, drafter)
        if over_http:
            keep_out_of_collections()  # as a server does; an Engine leaves that to its caller

    def of(self, name: str, text: Text) -> AsyncEngine:
        """Gives the server of a way."""
        way = self._ways[name]
        if way.route is not None:
            return HttpStreams(self.port, way.route)
        return Asked(self.engines[name], way.fields, text.is_new, way.of_one)


def run_of(
    experiment: Experiment,
    ways: Mapping[str, EngineWay],
    servings: Servings,
    prompts: list[list[int]],
    arguments: argparse.Namespace,
) -> Run[Load]:
    """Makes the run of `Paired`; answers texts once whose answers are to be known."""
    outputs = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    loops = {}
    for text_name, text in experiment.texts.items():
        lap = [text.prompt(prompt) for prompt in prompts]
        served = {
            name: Way(servings.of(name, text), {**text.params, **way.params, **outputs})
            for name, way in ways.items()
        }
        longest = {"max_new_tokens": arguments.new_tokens * 5 // 4}  # of `varied_lengths`
        for name, engine in servings.engines.items():
            if text.is_known or ways[name].replay_errors is not None:
                engine.generate(input_ids=lap, sampling_params=served[name].params | longest)
        if experiment.phase_tokens is not None:
            params = {name: way.params for name, way in served.items()}
            loops[text_name] = batches(servings.engines, params, lap, arguments.phase_tokens)
        else:
            is_equal = arguments.equal_lengths
            loops[text_name] = closed_loops(served, lap, has_equal_lengths=is_equal)

    def run(load: Load, way: str, number: int) -> Figures:
        return loops[load.text](load.requests, way, number)

    return telling_steps(run, servings.engines) if experiment.tells_steps else run


def telling_steps(run: Run[Load], engines: Mapping[str, sglang.Engine]) -> Run[Load]:
    """Adds to figures how often the settled number of drafts changed, in laps that do not count
    too, and the number at the end."""

    def state_of(way: str) -> dict[str, Any]:
        state: dict[str, Any] = engines[way].get_server_info()["internal_states"][0]
        return state

    def told(load: Load, way: str, number: int) -> Figures:
        before, start = state_of(way), time.perf_counter()
        figures = run(load, way, number)
        seconds, after = time.perf_counter() - start, state_of(way)
        ends = (sum(state["speculative_tier_switches"].values()) for state in (after, before))
        switches = operator.sub(*ends) / seconds
        steps = after["speculative_num_steps"]
        return {**figures, "switches_per_s": round(switches, 3), "steps_at_end": steps}

    return told


def loads_of(experiment: Experiment, requests: Sequence[int]) -> list[Load]:
    """Lists each number of requests with each text."""
    seen: Counter[int] = Counter()
    loads = []
    for count in requests:
        seen[count] += 1
        loads += [Load(count, text, seen[count]) for text in experiment.texts]
    return loads


def measure(
    arguments: argparse.Namespace, model_path: str, drafter: Mapping[str, Any], budget: Budget
) -> dict[str, Any]:
    """Runs all rounds; the result is stored after each."""
    experiment = EXPERIMENTS[arguments.name]
    prompts, source = code_prompts(arguments, model_path)
    result = {**describe_environment(), "experiment": arguments.name, **settings(arguments)}
    result |= {"prompts": source, "has_equal_lengths": arguments.equal_lengths}
    if drafter:
        result["algorithm"] = arguments.algorithm
    ways = {name: experiment.way(name) for name in arguments.ways}
    with ExitStack() as stack:
        servings = Servings(stack, ways, engine_flags(arguments, model_path), drafter)
        result["started_s"] = round(time.perf_counter() - budget.start_s, 1)
        run = run_of(experiment, ways, servings, prompts, arguments)
        loads, pairs = loads_of(experiment, arguments.concurrency), experiment.pairs(arguments.ways)
        if experiment.phase_tokens is None:
            paired = Paired(run, loads, pairs, arguments.ways)
            store_rounds(paired, budget, arguments, result)
        else:
            paired = Paired(run, loads, [], arguments.ways, arguments.rounds)
            store_rounds(
                paired,
                budget,
                arguments,
                result,
                lambda: {"rows": [*(rows := paired.rows()), over_all(rows, pairs)]},
            )
    return result


def parse(
    argv: list[str] | None = None,
    doc: str | None = __doc__,
    result_name: str = "{name}",
    add_more: Callable[[argparse.ArgumentParser], None] = lambda parser: None,
) -> argparse.Namespace:
    """Reads a command line that names an experiment.

    Args:
        result_name: of the default --out; `{name}` is the experiment.
        add_more: adds further options.
    """
    parser = make_mtp_parser(doc, "NAME")
    add_more(parser)
    add = parser.add_argument
    questions = "; ".join(f"{name}: {each.question}" for name, each in EXPERIMENTS.items())
    add("name", choices=EXPERIMENTS, help=questions, metavar="NAME")
    add("--concurrency", type=int, nargs="+", help="requests at once")
    add("--ways", nargs="+", metavar="WAY", help="with a drafter also shapes, such as 2x7x16")
    add("--phase-tokens", type=int, help="new tokens of each load of a work of several")
    add("--equal-lengths", action="store_true", help="of outputs; else those of a lap differ")
    add("--algorithm", choices=HEADS, help="of the drafter, where ways have one")
    add("--draft-model", help="folder of a head or draft model; default: the bundled one")
    parser.set_defaults(budget_s=300.0, rounds=12, out=None)
    arguments = parser.parse_args(argv)
    experiment = EXPERIMENTS[arguments.name]
    arguments.out = arguments.out or RESULTS / f"{result_name.format(name=arguments.name)}.json"
    arguments.concurrency = arguments.concurrency or [*experiment.requests]
    arguments.ways = arguments.ways or [*(experiment.default or experiment.ways)]
    arguments.phase_tokens = arguments.phase_tokens or experiment.phase_tokens
    if experiment.algorithm is None:
        arguments.algorithm = None
    arguments.algorithm = arguments.algorithm or experiment.algorithm
    try:
        for name in arguments.ways:
            experiment.way(name)
    except ValueError as error:
        parser.error(f"--ways: {error}")
    return arguments


def main(argv: list[str] | None = None) -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse(argv)
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, drafter_flags(arguments) as drafter:
        result = measure(arguments, model_path, drafter, budget)
    print_ratios(result["rows"], EXPERIMENTS[arguments.name].asked)


if __name__ == "__main__":
    main()
