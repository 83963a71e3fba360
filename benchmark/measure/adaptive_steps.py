"""Do adaptive steps beat every fixed number of steps on work that changes?

The bundled model and its EAGLE-3 head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`).
The work walks through phases: 1, 8, 32, 96, 8 and 1 requests at once, each on text that the head
predicts well (held-out code, greedy) and then on text that it does not (random prompts, sampled hot
with seeds). Every phase emits the same number of tokens. One Engine per way to choose steps, all
side by side on one GPU: fixed numbers of steps, the EMA rule with each preset, and `auto`, the
default. They take turns phase by phase. What is asked: `goals.py`. Stored after each round.

    python -m benchmark.measure.adaptive_steps --model-dir FOLDER      on a GPU
    python -m benchmark.measure.adaptive_steps --model-path demo --device cpu --walk 1 4 1
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import sglang
from benchmark.adaptive_ways import (
    ADAPTIVE,
    FIXED,
    KINDS,
    PLAIN,
    WAYS,
    Texts,
    engine_ways,
    num_switches,
    params_of,
    state_of,
)
from benchmark.command import median_ratio, ratios
from benchmark.drafters import drafter_flags
from benchmark.engine_load import Budget
from benchmark.environment import describe_environment
from benchmark.goals import ADAPTIVE_OVER_BEST_FIXED, ADAPTIVE_OVER_FIXED_3
from benchmark.mtp_model import engine_flags, make_mtp_parser, model_path_of, settings
from benchmark.paired import SPEED, Figures, Interval, Paired, Run, store_rounds
from benchmark.ways import start_engines

Batch = tuple[list[list[int]], dict[str, Any]]  # prompts and parameters


@dataclass(frozen=True)
class Phase:
    """So many requests at once on one kind of text."""

    number: int
    requests: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.number + 1}: {self.requests} {self.kind}"


def phases_of(walk: Sequence[int]) -> list[Phase]:
    """Both kinds of text at each number of requests."""
    pairs = itertools.product(walk, KINDS)
    return [Phase(number, requests, kind) for number, (requests, kind) in enumerate(pairs)]


def texts_of(arguments: argparse.Namespace, model_path: str) -> Texts:
    """Prompts for all phases."""
    num_code = 2 * max(arguments.walk) + arguments.phase_tokens // arguments.new_tokens
    return Texts(arguments, model_path, num_code)


def batches(texts: Texts, phase: Phase, number: int, arguments: argparse.Namespace) -> list[Batch]:
    """Batches one after the other, each of the phase's requests; the same for all ways, others in
    each round."""
    per_request = arguments.phase_tokens // phase.requests  # no rest: `parse`
    num_batches = -(-per_request // arguments.new_tokens)
    while per_request % num_batches:
        num_batches += 1
    count, size = num_batches * phase.requests, phase.requests
    seed = 1000 * number + phase.number
    params = params_of(phase.kind, per_request // num_batches, seed)
    prompts = texts.draw(phase.kind, count, seed)
    return [(prompts[first : first + size], params) for first in range(0, count, size)]


def run_phase(engine: sglang.Engine, work: Sequence[Batch]) -> Figures:
    """Gives the figures of all batches of a phase."""
    before, infos = state_of(engine), list[dict[str, Any]]()
    start = time.perf_counter()
    for prompts, params in work:
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        infos += [answer["meta_info"] for answer in answers]
    seconds = time.perf_counter() - start
    num_tokens = sum(len(prompts) * params["max_new_tokens"] for prompts, params in work)
    steps = sum(info.get("spec_verify_ct", 0) for info in infos)
    right = sum(info.get("spec_num_correct_drafts", 0) for info in infos)
    after = state_of(engine)
    return {
        SPEED: num_tokens / seconds,
        "seconds": seconds,
        "accept_length": 1 + right / steps if steps else 1.0,
        "steps_at_end": after["speculative_num_steps"],
        "switches": num_switches((before, after)),
    }


def make_run(
    engines: Mapping[str, sglang.Engine], texts: Texts, arguments: argparse.Namespace
) -> Run[Phase]:
    """Makes the run of `Paired`. Round 0 has one phase of each number of requests, but of one
    request, which takes long."""
    phases = phases_of(arguments.walk)
    first = {each.requests: each for each in reversed(phases) if each.requests > 1}
    short = [*first.values()] or phases[:1]

    def run(phase: Phase, way: str, number: int) -> Figures:
        if not number and phase not in short:
            return {}
        return run_phase(engines[way], batches(texts, phase, number, arguments))

    return run


def rows_of(paired: Paired[Phase], phases: Sequence[Phase], tokens: int) -> list[dict[str, Any]]:
    """One row per way: all phases, and each one.

    Args:
        tokens: of a phase.
    """
    rows = []
    found = {phase: paired.figures(phase) for phase in phases}
    for name in found[phases[0]]:
        own = {phase: ways[name] for phase, ways in found.items()}
        totals = [sum(each) for each in zip(*(ph["seconds"] for ph in own.values()), strict=True)]
        switches = sum(sum(each["switches"]) for each in own.values())
        rows.append(
            {
                "way": name,
                "tok_s": [round(tokens * len(phases) / total, 1) for total in totals],
                "switches_per_s": round(switches / sum(totals), 3),
                "phases": [
                    {
                        "phase": phase.name,
                        "tok_s": round(tokens / statistics.median(each["seconds"]), 1),
                        "accept_length": round(statistics.median(each["accept_length"]), 3),
                        "steps_at_end": each["steps_at_end"],
                        "switches": each["switches"],
                    }
                    for phase, each in own.items()
                ],
            }
        )
    return rows


def summarize(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Each adaptive way beside the fixed ones: medians of the rounds' ratios."""
    speeds = {row["way"]: row["tok_s"] for row in rows}

    def over(name: str, other: str) -> float:
        return round(median_ratio(speeds[name], speeds[other]), 4)

    fixed = [name for name in FIXED if name in speeds]
    best = max(fixed, key=lambda name: statistics.median(speeds[name]))
    return {
        "best_fixed": best,
        "over_best_fixed": {name: over(name, best) for name in ADAPTIVE if name in speeds},
        "intervals": {
            name: Interval.of(ratios(speeds[name], speeds[best])).stored()
            for name in ADAPTIVE
            if name in speeds
        },
        "over_fixed_3": {name: over(name, "fixed 3") for name in ADAPTIVE if name in speeds},
        "over_no_drafts": {name: over(name, PLAIN) for name in speeds if PLAIN in speeds},
    }


def measure(
    arguments: argparse.Namespace, model_path: str, drafter: Mapping[str, Any], budget: Budget
) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    texts, phases = texts_of(arguments, model_path), phases_of(arguments.walk)
    arguments.concurrency = arguments.walk  # what `engine_flags` sizes Engines by
    result = {**describe_environment(), **settings(arguments), "prompts": texts.source}
    result |= {"walk": arguments.walk, "phase_tokens": arguments.phase_tokens, "ways": WAYS}
    with ExitStack() as stack:
        ways = engine_ways({name: WAYS[name] for name in arguments.ways})
        engines = start_engines(stack, ways, engine_flags(arguments, model_path), drafter)
        result["started_s"] = round(time.perf_counter() - budget.start_s, 1)
        run = make_run(engines, texts, arguments)
        paired = Paired(run, phases, [], arguments.ways, arguments.rounds)

        def found() -> dict[str, Any]:
            rows = rows_of(paired, phases, arguments.phase_tokens)
            return {"summary": summarize(rows), "rows": rows}

        store_rounds(paired, budget, arguments, result, found)
    return result


def print_result(result: dict[str, Any]) -> None:
    """Speeds, and the ratios that are asked for."""
    for row in result["rows"]:
        speeds = " ".join(f"{speed:,.0f}" for speed in row["tok_s"])
        print(f"{row['way']:18} {speeds} tok/s, {row['switches_per_s']:.2f} switches/s")
    summary = result["summary"]
    for key, asked in (
        ("over_best_fixed", ADAPTIVE_OVER_BEST_FIXED),
        ("over_fixed_3", ADAPTIVE_OVER_FIXED_3),
    ):
        found = ", ".join(f"{name} {ratio:.3f}" for name, ratio in summary[key].items())
        print(f"{key} ({summary['best_fixed']}; asked of the better one {asked}): {found}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "adaptive_steps")
    add = parser.add_argument
    add("--walk", type=int, nargs="+", default=[1, 8, 32, 96, 8, 1], help="requests at once")
    add("--phase-tokens", type=int, default=1536, help="new tokens of a phase")
    add("--ways", nargs="+", choices=tuple(WAYS), default=list(WAYS), metavar="WAY")
    parser.set_defaults(budget_s=345.0, prompt_tokens=64, algorithm="EAGLE3")
    arguments = parser.parse_args(argv)
    if "fixed 3" not in arguments.ways:
        parser.error("--ways: 'fixed 3' is what the others are compared with.")
    if not {*ADAPTIVE} & {*arguments.ways}:
        parser.error(f"--ways: none of {', '.join(ADAPTIVE)}, which are what is compared.")
    if any(arguments.phase_tokens % requests for requests in arguments.walk):
        parser.error("--phase-tokens must be a multiple of each number of --walk.")
    return arguments


def main() -> int:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, drafter_flags(arguments) as drafter:
        print_result(measure(arguments, model_path, drafter, budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
