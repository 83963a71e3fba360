"""What does multi-token prediction give on a GPU, at the cost of an 8B model's steps?

The bundled model, inflated into Llama-3.1-8B's geometry (`inflate.py`), on prompts of held-out
code. Kinds of requests take turns within each round; so do numbers of requests at once. What counts
is whole laps through the same texts at a constant load (`engine_load.closed_loop`). Two Engines
live side by side, one of them with --mtp-load-aware-k; only one works at a time. Greedy, no radix
cache. Rounds end before --budget-s does, and each writes the result.

    python -m benchmark.measure.mtp_gpu                                      on a GPU
    python -m benchmark.measure.mtp_gpu --model-path demo --concurrency 1 4 --new-tokens 16
    python -m benchmark.measure.mtp_gpu --concurrency --static-graph-check   the check alone
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, median_ratio, store
from benchmark.engine_load import Budget, LoadResult, closed_loop
from benchmark.environment import describe_environment
from benchmark.held_out import held_out_prompts
from benchmark.mtp_checks import KINDS, PLAIN, STATIC_3, Samples, checks_of, static_graph_check
from benchmark.mtp_model import engine_flags, make_mtp_parser, model_path_of, settings
from sglang.srt.model_config import resolve_model_path

MIN_PROMPTS = 12  # of a lap: texts differ in how many tokens a step gives
MANY_PROMPTS = 48
STATIC_CHECK_PROMPTS = 4
STATIC_CHECK_S = 90.0  # for one more Engine and its rounds, kept free of the budget
PROGRESS_S = 2.0  # between two updates of a bar: logs keep them all


def num_prompts(num_requests: int) -> int:
    """Prompts of a lap: one for each request at once, of few requests more."""
    return max(MIN_PROMPTS, num_requests, min(3 * num_requests, MANY_PROMPTS))


def num_laps(num_requests: int) -> int:
    """That count; few requests over few prompts begin and end a lap unevenly."""
    return 2 if 1 < num_requests < MIN_PROMPTS else 1


class Sweep:
    """Runs kinds at numbers of requests, round by round.

    Args:
        engines: by whether they are load-aware.
        prompts: laps of n requests at once go through the first of them.
    """

    def __init__(
        self,
        engines: dict[bool, sglang.Engine],
        prompts: list[list[int]],
        loads: list[int],
        kinds: list[str],
        new_tokens: int,
    ) -> None:
        self._engines = engines
        self._kinds = kinds
        self._prompts = prompts
        self._new_tokens = new_tokens
        self.samples = [Samples(load) for load in loads]

    def warm_up(self) -> None:
        """Short runs, so that all is compiled and the length policies have learnt a little."""
        deque(self._runs(self._kinds, max(1, self._new_tokens // 8), "warm-up"), maxlen=0)

    def round(self, number: int) -> float:
        """One run of every kind at every load, in turn forwards and backwards; seconds."""
        start = time.perf_counter()
        kinds = in_turn(self._kinds, number)
        for kind, sample, result in self._runs(kinds, self._new_tokens, f"round {number}"):
            sample.add(kind, result)
        return time.perf_counter() - start

    def _runs(
        self, kinds: list[str], new_tokens: int, label: str
    ) -> Iterator[tuple[str, Samples, LoadResult]]:
        total = len(self.samples) * len(kinds)
        with tqdm(total=total, desc=label, unit="run", mininterval=PROGRESS_S) as bar:
            for sample, kind in itertools.product(self.samples, kinds):
                bar.set_postfix_str(f"{kind}, {sample.num_requests} at once", refresh=False)
                prompts = self._prompts[: num_prompts(sample.num_requests)]
                engine = self._engines[KINDS[kind].is_load_aware]
                params = {**KINDS[kind].params, "max_new_tokens": new_tokens, "ignore_eos": True}
                count = sample.num_requests
                load = closed_loop(engine, prompts, params, count, num_laps(count))
                yield kind, sample, asyncio.run(load)
                bar.update()


def compare_static_graphs(
    graphs: sglang.Engine,
    flags: dict[str, Any],
    prompts: list[list[int]],
    rounds: int,
    new_tokens: int,
) -> dict[str, Any]:
    """Static k=3, one request at once: an Engine beside one that bypasses its graphs."""
    params = {**KINDS[STATIC_3].params, "max_new_tokens": new_tokens, "ignore_eos": True}
    speeds: dict[str, list[float]] = {"graphs": [], "bypass": []}
    with sglang.Engine(**flags, disable_mtp_cuda_graph=True) as bypass:
        engines = {"graphs": graphs, "bypass": bypass}
        for number in tqdm(range(rounds + 1), desc="static k=3", unit="round"):
            for name in in_turn(engines, number):
                result = asyncio.run(closed_loop(engines[name], prompts, params, 1))
                if number:  # the first round warms up
                    speeds[name].append(result.tok_s)
    ratio = median_ratio(speeds["graphs"], speeds["bypass"])
    by_round = {name: [round(speed, 1) for speed in values] for name, values in speeds.items()}
    return {"ratio": round(ratio, 4), "tok_s_by_round": by_round}


def measure(arguments: argparse.Namespace, model_path: str, budget: Budget) -> dict[str, Any]:
    """All rounds; the result is stored after each."""
    count = num_prompts(max(arguments.concurrency, default=1))
    folder = resolve_model_path(model_path)
    prompts, source = held_out_prompts(folder, count, arguments.prompt_tokens, arguments.seed)
    flags = engine_flags(arguments, model_path)
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    with ExitStack() as stack:
        base = stack.enter_context(sglang.Engine(**flags))
        info = base.get_server_info()
        result["attention_backend"] = info["resolved"]["attention_backend"]
        if arguments.concurrency:
            with sglang.Engine(**flags, mtp_load_aware_k=True) as aware:
                engines = {False: base, True: aware}
                result["startup_s"] = round(time.perf_counter() - budget.start_s, 1)
                loads, kinds = arguments.concurrency, arguments.kinds
                sweep = Sweep(engines, prompts, loads, kinds, arguments.new_tokens)
                sweep.warm_up()
                last_s, number = 0.0, 0
                while budget.has_room(number, arguments.rounds, last_s):
                    last_s, number = sweep.round(number), number + 1
                    result["rounds"], result["round_s"] = number, round(last_s, 1)
                    result["rows"] = [sample.row() for sample in sweep.samples]
                    result["checks"] = checks_of(sweep.samples)
                    store(arguments.out, result)
        if arguments.static_graph_check:
            found = compare_static_graphs(
                base,
                flags,
                prompts[:STATIC_CHECK_PROMPTS],
                arguments.rounds,
                arguments.new_tokens,
            )
            result["static_graphs"] = found
            result["checks"] = [*result.get("checks", []), static_graph_check(found["ratio"])]
            store(arguments.out, result)
    return result


def print_result(result: dict[str, Any]) -> None:
    """Tokens per second (and beside plain) by requests at once, then what was asked."""
    rows = result.get("rows", [])
    if rows:
        heads = "".join(f"{row['requests']:>8} at once" for row in rows)
        print(f"\n{result['rounds']} rounds, tokens/s and ratio to plain\n{'':22}{heads}  tok/step")
        for kind in rows[0]["kinds"]:
            cells = [row["kinds"][kind] for row in rows]
            shown = "".join(f"{c['tok_s']:>10,.0f} {c['ratio_to_plain']:>4.2f}x" for c in cells)
            print(f"{kind:22}{shown}  {cells[0]['tokens_per_step']:.2f}")
    for check in result.get("checks", []):
        verdict = "ok  " if check["passed"] else "MISS"
        print(
            f"{verdict} {check['value']:.3f} (asked {check['asked']:.2f}) at"
            f" {check['requests']:3d}: {check['what']}"
        )


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "mtp_gpu")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="*", default=[1, 4, 16, 64, 128])
    add("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="of requests")
    add("--static-graph-check", action="store_true", help="static k=3 beside its eager bypass")
    parser.set_defaults(budget_s=420.0)
    arguments = parser.parse_args(argv)
    arguments.kinds = [PLAIN, *(kind for kind in arguments.kinds if kind != PLAIN)]
    return arguments


def main() -> None:
    """Measures, prints a table, writes the result."""
    start = time.perf_counter()
    arguments = parse()
    reserved_s = STATIC_CHECK_S if arguments.static_graph_check else 0.0
    budget = Budget(arguments.budget_s - reserved_s, start)
    with model_path_of(arguments) as model_path:
        result = measure(arguments, model_path, budget)
    print_result(result)


if __name__ == "__main__":
    main()
