"""The parts of the headline result: each starts its own Engines or servers, and ends them.

    plain       one Engine alone on the card: decoding, prompts, a full load
    server      a server's cold start, its warm start, and streams over HTTP
    eagle       rounds of EAGLE with 3 drafts, of which 2 are accepted on average, and a full load
    look-ahead  multi-token prediction and TileSpec, whose texts decide what is accepted

The first three have random weights in the geometry of Llama-3.1-8B. The last has the bundled model
and its EAGLE-3 head in that geometry (`inflate.py`): two Engines, then three.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import sglang
from benchmark import http_load
from benchmark.cold_starts import starts
from benchmark.engine_load import Budget, batch_wall_s, random_prompts
from benchmark.experiments import LOAD_AWARE, MTP_WAYS, PLAIN, TILE_SPEC_WAYS, VERIFIED
from benchmark.measure import long_prompts
from benchmark.mtp_model import (
    code_prompts,
    drafter_flags,
    engine_flags,
    make_mtp_parser,
    model_path_of,
)
from benchmark.paired import (
    Interval,
    Pair,
    Paired,
    Way,
    closed_loops,
    measure_rounds,
    print_ratios,
)
from benchmark.random_model import GEOMETRIES, dummy_flags, random_head, random_model
from benchmark.stream_ways import server_command
from benchmark.ways import EngineWay, start_engines

START_LIMIT_S, NUM_WARM = 240.0, 2
LEFT_OUT = ("192 x 3,000",)  # cases of long_prompts
REPEATS, MOST_REPEATS, TRIAL_DIVISOR = 2, 3, 64
NUM_STEPS, ACCEPT_LEN = 3, 3.0  # of EAGLE; tokens of a round on average, the model's own counted
EAGLE_INPUT_LEN, EAGLE_OUTPUT_LEN = 128, 256
EAGLE_LOAD = (512, 512, 128)  # prompts, tokens in, tokens out
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"
TILE_SPEC, FIXED = "TileSpec, load-aware 7", ("static 7", "static 3")
LOOK_AHEAD_S, MTP_S, MOST_ROUNDS = 390.0, 250.0, 15  # of the part; until TileSpec's turn
LOADS = (1, 8, 64, 128)  # requests at once; the last of multi-token prediction alone
LEAST_RUN_S = 1.0  # of what is compared with fixed drafts
GREEDY_WAYS = {
    name: replace(TILE_SPEC_WAYS[name], params={"temperature": 0}) for name in (TILE_SPEC, *FIXED)
}
NAMES = {LOAD_AWARE: "conf_adapt", VERIFIED: "verified", TILE_SPEC: "TileSpec"}


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure of the headline.

    Attributes:
        name: by which `goals.HEADLINE` asks for it.
        value: the median of `values`, or the mean of an interval.
        values: of each run.
        interval: of a ratio, as `Interval.stored`.
    """

    name: str
    unit: str
    value: float
    values: Sequence[float] = ()
    interval: dict[str, Any] | None = None

    @classmethod
    def of_runs(cls, name: str, unit: str, values: Sequence[float]) -> Figure:
        """From the runs of one kind of work."""
        value = round(statistics.median(values), 4)
        return cls(name=name, unit=unit, value=value, values=[round(each, 4) for each in values])

    @classmethod
    def of_ratio(cls, name: str, interval: Interval) -> Figure:
        """From a ratio of two ways."""
        value = round(interval.mean, 4)
        return cls(name=name, unit="ratio", value=value, interval=interval.stored())


@dataclass(frozen=True)
class Setting:
    """Settings that all parts share.

    Attributes:
        model_dir: where the inflated model is kept for the next run.
        is_trial: tiny models and loads, to try the command on any machine.
    """

    model_dir: Path | None = None
    is_trial: bool = False

    @property
    def geometry(self) -> str:
        return "tiny" if self.is_trial else "llama-3.1-8b"

    @property
    def vocab_size(self) -> int:
        return GEOMETRIES[self.geometry].vocab_size


Found = dict[str, Any]  # of a part: "figures", and what else belongs to the result


def measure_plain(setting: Setting) -> Found:
    """Decoding, prompts and a full load of one Engine with default flags, alone on the card."""
    divisor = TRIAL_DIVISOR if setting.is_trial else 1
    cases = [case.divided(divisor) for case in long_prompts.CASES if case.name not in LEFT_OUT]
    seeds, rows = itertools.count(), list[dict[str, Any]]()
    with (
        random_model(setting.geometry, long_prompts.CONTEXT_LEN) as folder,
        sglang.Engine(**dummy_flags(folder)) as engine,
    ):
        info = engine.get_server_info()
        wall_s = partial(batch_wall_s, engine)
        for case in cases:
            row = long_prompts.measure(
                case, wall_s, REPEATS, setting.vocab_size, seeds, MOST_REPEATS
            )
            print(f"{case.name}: {row['value']:.4g} {case.unit}", flush=True)
            rows.append(row)
    return {
        "attention_backend": info["resolved"]["attention_backend"],
        "kv_tokens": info["max_total_num_tokens"],
        "figures": [Figure.of_runs(row["name"], row["unit"], row["values"]) for row in rows],
    }


def measure_server(setting: Setting) -> Found:
    """Seconds until a server's first token, with empty caches of compiled code and full ones, and
    what streams of `/generate` get."""
    load = http_load.HttpLoad()
    if setting.is_trial:
        load = replace(load, clients=4, num_requests=8, input_len=8, output_len=4)
    seconds_of: dict[str, list[float]] = {"cold": [], "warm": []}
    with random_model(setting.geometry, long_prompts.CONTEXT_LEN) as folder:
        command = server_command(dummy_flags(folder) | {"log_level": None})
        for run, server, seconds in starts(command, NUM_WARM, START_LIMIT_S):
            seconds_of[run].append(seconds)
            print(f"{run} start: {seconds:.1f} s", flush=True)
            if len(seconds_of["warm"]) == NUM_WARM:
                seeds = itertools.count()
                runs = http_load.measure(server.port, load, setting.vocab_size, seeds)
    figures = [
        Figure.of_runs(f"HTTP, {name}", unit, [run[key] for run in runs])
        for name, unit, key in (
            ("output", "tokens/s", "tok_s"),
            ("first token p50", "ms", "first_token_p50_ms"),
            ("gap p99", "ms", "gap_p99_ms"),
        )
    ]
    figures += [
        Figure.of_runs(f"start, {start}", "s", seconds) for start, seconds in seconds_of.items()
    ]
    return {"figures": figures, "http": runs}


def measure_eagle(setting: Setting) -> Found:
    """Milliseconds of a round of EAGLE by batch size, and tokens per second of a full load.

    A head of one layer that shares the target's output head drafts in a chain. How many drafts are
    accepted is pinned, since random weights agree in nothing. A round is
    (wall(256 new tokens) - wall(1 new token)) / rounds.
    """
    sizes = (1, 2) if setting.is_trial else (1, 8, 32, 64, 128)
    seeds = itertools.count()
    with (
        mock.patch.dict(os.environ, {SIMULATED: str(ACCEPT_LEN)}),
        random_model(setting.geometry) as folder,
        random_head(folder) as head,
        sglang.Engine(
            **dummy_flags(folder),
            speculative_algorithm="EAGLE",
            speculative_draft_model_path=head,
            speculative_num_steps=NUM_STEPS,
        ) as engine,
    ):

        def prompts(count: int, input_len: int = EAGLE_INPUT_LEN) -> list[list[int]]:
            return random_prompts(count, input_len, setting.vocab_size, next(seeds))

        params = {"temperature": 0, "max_new_tokens": EAGLE_OUTPUT_LEN, "ignore_eos": True}
        [answer] = engine.generate(input_ids=prompts(1), sampling_params=params)
        num_rounds, figures = int(answer["meta_info"]["spec_verify_ct"]), []
        for size in sizes:
            batch_wall_s(engine, prompts(size), 8)  # warms up
            round_ms = []
            for _ in range(REPEATS):
                wall_s = batch_wall_s(engine, prompts(size), EAGLE_OUTPUT_LEN)
                decoding_s = wall_s - batch_wall_s(engine, prompts(size), 1)
                round_ms.append(decoding_s / num_rounds * 1e3)
            print(f"EAGLE, {size} at once: {round_ms[0]:.2f} ms/round", flush=True)
            figures.append(Figure.of_runs(f"EAGLE, {size}", "ms/round", round_ms))
        if not setting.is_trial:
            count, input_len, num_new = EAGLE_LOAD
            tok_s = count * num_new / batch_wall_s(engine, prompts(count, input_len), num_new)
            figures.append(Figure.of_runs("EAGLE, 512 x 512", "output tokens/s", [tok_s]))
    return {"figures": figures, "num_steps": NUM_STEPS, "accept_length": ACCEPT_LEN}


def measure_look_ahead(setting: Setting) -> Found:
    """Ratios of multi-token prediction and TileSpec to plain requests, then of TileSpec to fixed
    numbers of drafts, on held-out code."""
    start_s = time.perf_counter()
    arguments = _look_ahead_arguments(setting)
    *few, most = arguments.concurrency
    prompts, source = code_prompts(arguments, "demo")
    most_rounds = 1 if setting.is_trial else MOST_ROUNDS

    def compare(
        ways: Mapping[str, Way], pairs: Mapping[int, Sequence[Pair]], end_s: float, **more: float
    ) -> Paired[int]:
        """Measures until the ratios of all pairs are certain, or the part is as old as `end_s`."""
        print(f"{time.perf_counter() - start_s:5.0f} s: Engines of {', '.join(ways)}", flush=True)
        paired = Paired(closed_loops(ways, prompts, **more), [*pairs], pairs)
        measure_rounds(paired, Budget(end_s, start_s), most_rounds)
        print_ratios(paired.rows(), {})
        return paired

    with ExitStack() as stack:
        model_path = stack.enter_context(model_path_of(arguments))
        drafter = stack.enter_context(drafter_flags(arguments))
        flags = engine_flags(arguments, model_path)
        of_few = flags | {"max_running_requests": few[-1]}
        outputs = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}

        def started(
            within: ExitStack, ways: Mapping[str, EngineWay], flags: dict[str, Any]
        ) -> dict[str, Way]:
            engines = start_engines(within, ways, flags, drafter)
            return {name: Way(engines[name], {**ways[name].params, **outputs}) for name in ways}

        ways = started(stack, {TILE_SPEC: GREEDY_WAYS[TILE_SPEC]}, of_few)
        with ExitStack() as mtp_stack:
            ahead = [(name, PLAIN) for name in (LOAD_AWARE, VERIFIED)]
            pairs = {load: [*ahead, (TILE_SPEC, PLAIN)] for load in few} | {most: ahead}
            kinds = started(mtp_stack, MTP_WAYS, flags)
            beside_plain = compare({**kinds, **ways}, pairs, MTP_S)
        ways |= started(stack, {name: GREEDY_WAYS[name] for name in FIXED}, of_few)
        pairs = {load: [(TILE_SPEC, name) for name in FIXED] for load in few}
        beside_fixed = compare(ways, pairs, LOOK_AHEAD_S, least_s=LEAST_RUN_S)
    return {
        "figures": [
            *_beside_plain(beside_plain, arguments.concurrency),
            *_beside_fixed(beside_fixed, few),
        ],
        "prompts": source,
        "beside_plain": beside_plain.rows(),
        "beside_fixed": beside_fixed.rows(),
    }


def _look_ahead_arguments(setting: Setting) -> argparse.Namespace:
    """Those that the benchmarks of these Engines share."""
    words = ["--model-dir", str(setting.model_dir)] if setting.model_dir else []
    if setting.is_trial:
        words = ["--model-path", "demo", "--new-tokens", "8"]
    arguments = make_mtp_parser(__doc__, "headline").parse_args(words)
    arguments.algorithm = "EAGLE3"
    arguments.concurrency = [1, 2] if setting.is_trial else [*LOADS]
    return arguments


def _beside_plain(paired: Paired[int], loads: Sequence[int]) -> Iterator[Figure]:
    for name, shown in NAMES.items():
        for load in loads[:-1] if name == TILE_SPEC else loads:
            yield Figure.of_ratio(f"{shown} / plain, {load}", paired.interval(load, name, PLAIN))


def _beside_fixed(paired: Paired[int], loads: Sequence[int]) -> Iterator[Figure]:
    """Ratios to each fixed number of drafts, and to the best of each load."""
    for load in loads:
        found = {name: paired.interval(load, TILE_SPEC, name) for name in FIXED}
        for name, interval in found.items():
            number = name.removeprefix("static ")
            yield Figure.of_ratio(f"TileSpec / {number} drafts, {load}", interval)
        best = min(found.values(), key=lambda interval: interval.mean)
        yield Figure.of_ratio(f"TileSpec / best fixed drafts, {load}", best)


PARTS: dict[str, Callable[[Setting], Found]] = {
    "plain": measure_plain,
    "server": measure_server,
    "eagle": measure_eagle,
    "look-ahead": measure_look_ahead,
}
