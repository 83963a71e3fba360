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
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.adaptive_ways import (
    ADAPTIVE,
    FIXED,
    KINDS,
    PLAIN,
    PREDICTABLE,
    WAYS,
    params_of,
    start_engines,
    switches_of,
)
from benchmark.command import in_turn, median_ratio, ratios
from benchmark.engine_load import Budget, random_prompts, run_rounds
from benchmark.environment import describe_environment
from benchmark.goals import ADAPTIVE_OVER_BEST_FIXED, ADAPTIVE_OVER_FIXED_3
from benchmark.held_out import held_out_prompts
from benchmark.measure.speculation_paired import head_path_of
from benchmark.mtp_model import engine_flags, make_mtp_parser, model_path_of, settings
from benchmark.paired import Interval
from sglang.srt.model_config import load_model_config, resolve_model_path


@dataclass(frozen=True)
class Phase:
    """So many requests at once on one kind of text."""

    number: int
    requests: int
    kind: str

    @property
    def name(self) -> str:
        return f"{self.number + 1}: {self.requests} {self.kind}"


@dataclass
class Found:
    """What one way did in one phase, round by round."""

    seconds: list[float] = field(default_factory=list)
    accept_length: list[float] = field(default_factory=list)
    steps_at_end: list[int] = field(default_factory=list)
    num_switches: list[int] = field(default_factory=list)


def phases_of(walk: Sequence[int]) -> list[Phase]:
    """Both kinds of text at each number of requests."""
    pairs = itertools.product(walk, KINDS)
    return [Phase(number, requests, kind) for number, (requests, kind) in enumerate(pairs)]


class Work:
    """The prompts and parameters of all phases; the same for all ways, others in each round."""

    def __init__(self, arguments: argparse.Namespace, model_path: str) -> None:
        self._arguments = arguments
        self._vocab_size = load_model_config("demo").vocab_size
        most = max(arguments.walk)
        self._code, self.source = held_out_prompts(
            resolve_model_path(model_path),
            2 * most + arguments.phase_tokens // arguments.new_tokens,
            arguments.prompt_tokens,
            arguments.seed,
        )

    def batches(self, phase: Phase, number: int) -> list[tuple[list[list[int]], dict[str, Any]]]:
        """Batches one after the other, each of the phase's requests, with their parameters."""
        arguments = self._arguments
        per_request = arguments.phase_tokens // phase.requests  # no rest: `parse`
        num_batches = -(-per_request // arguments.new_tokens)
        while per_request % num_batches:
            num_batches += 1
        count = num_batches * phase.requests
        seed = 1000 * number + phase.number
        params = params_of(phase.kind, per_request // num_batches, seed)
        if phase.kind == PREDICTABLE:
            prompts = random.Random(seed).sample(self._code, count)
        else:
            length = arguments.prompt_tokens
            prompts = random_prompts(count, length, self._vocab_size, seed)
        size = phase.requests
        return [(prompts[first : first + size], params) for first in range(0, count, size)]


def run_phase(engine: sglang.Engine, work: Work, phase: Phase, number: int, found: Found) -> None:
    """All batches of a phase."""
    before, infos = switches_of(engine), list[dict[str, Any]]()
    start = time.perf_counter()
    for prompts, params in work.batches(phase, number):
        answers = engine.generate(input_ids=prompts, sampling_params=params)
        infos += [answer["meta_info"] for answer in answers]
    found.seconds.append(time.perf_counter() - start)
    steps = sum(info.get("spec_verify_ct", 0) for info in infos)
    right = sum(info.get("spec_num_correct_drafts", 0) for info in infos)
    found.accept_length.append(1 + right / steps if steps else 1.0)
    state = engine.get_server_info()["internal_states"][0]
    found.steps_at_end.append(state["speculative_num_steps"])
    found.num_switches.append(switches_of(engine) - before)


class Rounds:
    """Each way's figures in each phase."""

    def __init__(
        self, engines: dict[str, sglang.Engine], work: Work, phases: list[Phase], tokens: int
    ) -> None:
        self._engines, self._work, self._phases = engines, work, phases
        self._tokens = tokens
        self.found = {(name, phase): Found() for name in engines for phase in phases}

    def run(self, number: int) -> float:
        """One round; round 0 warms up and is not counted. Seconds."""
        start = time.perf_counter()
        phases = self._phases if number else self._short_phases
        runs = [(phase, name) for phase in phases for name in in_turn(self._engines, number)]
        for phase, name in tqdm(runs, desc=f"round {number}", unit="phase", mininterval=2.0):
            found = self.found[name, phase] if number else Found()
            run_phase(self._engines[name], self._work, phase, number, found)
        return time.perf_counter() - start

    @property
    def _short_phases(self) -> list[Phase]:
        """One of each number of requests, but of one request, which takes long."""
        first = {each.requests: each for each in reversed(self._phases) if each.requests > 1}
        return [*first.values()] or self._phases[:1]

    def rows(self) -> list[dict[str, Any]]:
        """Of each way, all phases and each one."""
        rows = []
        for name in self._engines:
            found = [self.found[name, phase] for phase in self._phases]
            totals = [sum(times) for times in zip(*(each.seconds for each in found), strict=True)]
            tokens = self._tokens * len(self._phases)
            num_switches = sum(sum(each.num_switches) for each in found)
            rows.append(
                {
                    "way": name,
                    "tok_s": [round(tokens / total, 1) for total in totals],
                    "switches_per_s": round(num_switches / sum(totals), 3),
                    "phases": [
                        {
                            "phase": phase.name,
                            "tok_s": round(self._tokens / statistics.median(each.seconds), 1),
                            "accept_length": round(statistics.median(each.accept_length), 3),
                            "steps_at_end": each.steps_at_end,
                            "switches": each.num_switches,
                        }
                        for phase, each in zip(self._phases, found, strict=True)
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
    arguments: argparse.Namespace, model_path: str, head: str, budget: Budget
) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    work = Work(arguments, model_path)
    arguments.concurrency = arguments.walk  # what `engine_flags` sizes Engines by
    phases = phases_of(arguments.walk)
    result = {**describe_environment(), **settings(arguments), "prompts": work.source}
    result |= {"walk": arguments.walk, "phase_tokens": arguments.phase_tokens, "ways": WAYS}
    with ExitStack() as stack:
        flags = engine_flags(arguments, model_path)
        ways = {name: WAYS[name] for name in arguments.ways}
        engines = start_engines(stack, ways, flags, head)
        result["started_s"] = round(time.perf_counter() - budget.start_s, 1)
        rounds = Rounds(engines, work, phases, arguments.phase_tokens)
        rounds.run(0)
        run_rounds(rounds, budget, arguments, result, lambda rows: {"summary": summarize(rows)})
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
    with model_path_of(arguments) as model_path, head_path_of(arguments) as head:
        print_result(measure(arguments, model_path, head, budget))
    return 0


if __name__ == "__main__":
    sys.exit(main())
