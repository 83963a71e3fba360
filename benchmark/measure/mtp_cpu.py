"""What does multi-token prediction cost and give on a CPU?

One Engine, the bundled demo model, 1, 8 and 32 requests at once: plain; the same with `mtp_enabled`
and k = 1 (its price without its use); static, conf_adapt and verified k = 8. Greedy, float32. Each
round runs every kind right beside plain decoding of the same prompts, before or after it in turn,
and a ratio is that of such a pair: what slows the machine for longer meets both. Run it with
nothing else running.

    python -m benchmark.measure.mtp_cpu
    python -m benchmark.measure.mtp_cpu --kinds "k=8 verified" --rounds 5 --out FILE
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, make_parser, ratios, store
from benchmark.environment import describe_environment
from benchmark.measure.engine_vs_transformers import draw_prompts
from sglang.srt.model_config import resolve_model_path

PLAIN, VERIFIED = "plain", "k=8 verified"
MAX_PRICE = 0.05  # that k = 1 may cost
MIN_RATIO_VERIFIED = 0.97  # of k = 8 verified, at any number of requests
KINDS: dict[str, dict[str, Any]] = {
    PLAIN: {"temperature": 0},
    "k=1": {"mtp_enabled": True, "mtp_k": 1},
    "k=1 verified": {"mtp_enabled": True, "mtp_k": 1, "mtp_verify": True, "temperature": 0},
    "k=3 static": {"mtp_enabled": True, "mtp_k": 3},
    "k=8 tau 0.9": {"mtp_enabled": True, "mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.9]},
    VERIFIED: {"mtp_enabled": True, "mtp_k": 8, "mtp_verify": True, "temperature": 0},
}


@dataclass
class Pairs:
    """Runs of one kind, each beside a plain one; tokens per second."""

    speeds: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_steps: int = 0

    def row(self) -> dict[str, Any]:
        by_round = ratios(self.speeds, self.plain)
        return {
            "tok_s": round(statistics.median(self.speeds), 1),
            "ratio_to_plain": round(statistics.median(by_round), 3),
            "lowest_ratio": round(min(by_round), 3),
            "tokens_per_step": round(self.num_tokens / self.num_steps, 3),
            "ratios_by_round": [round(ratio, 3) for ratio in by_round],
            "tok_s_by_round": [round(speed, 1) for speed in self.speeds],
        }


def generate(
    engine: sglang.Engine, prompts: list[list[int]], kind: str, new_tokens: int
) -> tuple[float, int, int]:
    """Tokens per second, tokens and steps."""
    wanted = {**KINDS[kind], "max_new_tokens": new_tokens, "ignore_eos": True}
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=wanted)
    elapsed = time.perf_counter() - start
    engine.flush_cache()
    tokens = sum(len(answer["output_ids"]) for answer in answers)
    steps = sum(
        len(answer["meta_info"].get("mtp_effective_k", range(new_tokens))) for answer in answers
    )
    return tokens / elapsed, tokens, steps


def measure(
    engine: sglang.Engine,
    kinds: list[str],
    num_requests: int,
    rounds: int,
    new_tokens: int,
    seed: int,
) -> dict[str, Any]:
    """All kinds at one number of requests."""
    drawn = draw_prompts(resolve_model_path("demo"), seed)
    pairs = {kind: Pairs() for kind in kinds}
    with tqdm(total=(rounds + 1) * len(kinds), desc=f"{num_requests} at once", unit="pair") as bar:
        for number in range(rounds + 1):
            prompts = [next(drawn) for _ in range(num_requests)]
            for kind in in_turn(kinds, number):
                order = in_turn((PLAIN, kind), number)
                found = [generate(engine, prompts, name, new_tokens) for name in order]
                plain, mine = in_turn(found, number)
                if number:  # the first round warms up
                    pair = pairs[kind]
                    pair.speeds.append(mine[0])
                    pair.plain.append(plain[0])
                    pair.num_tokens += mine[1]
                    pair.num_steps += mine[2]
                bar.update()
    return {"requests": num_requests, "kinds": {kind: pairs[kind].row() for kind in kinds}}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "mtp_cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 8, 32], help="at once")
    arguments = parser.parse_args()
    rounds, new_tokens = arguments.rounds, arguments.new_tokens
    with sglang.Engine(model_path="demo") as engine:
        results = [
            measure(engine, arguments.kinds, count, rounds, new_tokens, seed=count)
            for count in arguments.requests
        ]
    print(f"{'tok/s, ratio, lowest':20}" + "".join(f"{r['requests']:>13} at once" for r in results))
    for name in arguments.kinds:
        cells = (r["kinds"][name] for r in results)
        shown = (
            f"{c['tok_s']:>9,.0f} {c['ratio_to_plain']:.2f} {c['lowest_ratio']:.2f}" for c in cells
        )
        print(f"{name:20}" + "  ".join(shown))
    result = {
        **describe_environment(),
        "asked": {"price_of_k_1": MAX_PRICE, VERIFIED: MIN_RATIO_VERIFIED},
        "rows": results,
    }
    store(arguments.out, result)


if __name__ == "__main__":
    main()
