"""Is multi-token prediction that heeds the load ever slower than plain decoding on a GPU?

The bundled model in Llama-3.1-8B's geometry (`inflate.py`), prompts of held-out code, one Engine
with --mtp-load-aware-k. Plain, conf_adapt and verified requests take turns at each number at once
(`paired.py`). Stored after each round; rounds end before --budget-s does.

    python -m benchmark.measure.mtp_paired --model-dir FOLDER        on a GPU
    python -m benchmark.measure.mtp_paired --model-path demo --concurrency 1 4 --new-tokens 16
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmark.engine_load import Budget
from benchmark.environment import describe_environment
from benchmark.mtp_kinds import KINDS, LOAD_AWARE, PLAIN, VERIFIED
from benchmark.mtp_model import (
    code_prompts,
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from benchmark.paired import Paired, Way, closed_loops, print_ratios, store_rounds


def measure(arguments: argparse.Namespace, model_path: str, budget: Budget) -> dict[str, Any]:
    """Runs all rounds; the result is stored after each."""
    prompts, source = code_prompts(arguments, model_path)
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    result["has_equal_lengths"] = arguments.equal_lengths
    outputs = {"max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    with start_engine(engine_flags(arguments, model_path), mtp_load_aware_k=True) as engine:
        result["attention_backend"] = engine.get_server_info()["resolved"]["attention_backend"]
        result["startup_s"] = round(time.perf_counter() - budget.start_s, 1)
        ways = {name: Way(engine, kind.params | outputs) for name, kind in KINDS.items()}
        run = closed_loops(ways, prompts, has_equal_lengths=arguments.equal_lengths)
        pairs = [(LOAD_AWARE, PLAIN), (VERIFIED, PLAIN)]
        paired = Paired(run, arguments.concurrency, pairs)
        store_rounds(paired, budget, arguments, result)
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "mtp_paired")
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 16, 64, 128])
    parser.add_argument(
        "--equal-lengths",
        action="store_true",
        help="every output has --new-tokens tokens; else those of a lap differ",
    )
    parser.set_defaults(budget_s=230.0, rounds=12)
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path:
        result = measure(arguments, model_path, budget)
    print_ratios(result["rows"])


if __name__ == "__main__":
    main()
