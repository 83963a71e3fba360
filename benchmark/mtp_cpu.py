"""What does multi-token prediction cost and give on a CPU?

One Engine, the bundled demo model, 1, 8 and 32 requests at once, kinds of requests in alternating
rounds: plain; the same with `mtp_enabled` and k = 1 (its price without its use); static, conf_adapt
and verified k = 8. Greedy, float32. Run it with nothing else running.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from engine_vs_transformers import draw_prompts
from environment import describe_environment
from tqdm import tqdm

import sglang
from sglang.srt.model_config import resolve_model_path

RESULT = Path(__file__).parent / "results" / "mtp_cpu.json"
MAX_PRICE = 0.05  # that k = 1 may cost
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"temperature": 0},
    "k=1": {"mtp_enabled": True, "mtp_k": 1},
    "k=1 verified": {"mtp_enabled": True, "mtp_k": 1, "mtp_verify": True, "temperature": 0},
    "k=3 static": {"mtp_enabled": True, "mtp_k": 3},
    "k=8 tau 0.9": {"mtp_enabled": True, "mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.9]},
    "k=8 verified": {"mtp_enabled": True, "mtp_k": 8, "mtp_verify": True, "temperature": 0},
}


def measure(
    engine: sglang.Engine, num_requests: int, rounds: int, new_tokens: int, seed: int
) -> dict[str, Any]:
    """Medians per kind; ratios are medians of the ratios within a round."""
    drawn = draw_prompts(resolve_model_path("demo"), seed)
    speeds: dict[str, list[float]] = defaultdict(list)
    tokens, steps = defaultdict(int), defaultdict(int)
    total = rounds * len(KINDS)
    bar = tqdm(total=total, desc=f"{num_requests} at once", unit="run")
    for number in range(rounds + 1):
        prompts = [next(drawn) for _ in range(num_requests)]
        kinds = list(KINDS.items())
        for name, params in kinds if number % 2 else reversed(kinds):
            wanted = {**params, "max_new_tokens": new_tokens, "ignore_eos": True}
            start = time.perf_counter()
            answers = engine.generate(input_ids=prompts, sampling_params=wanted)
            elapsed = time.perf_counter() - start
            engine.flush_cache()
            if number == 0:  # warm-up
                continue
            speeds[name].append(num_requests * new_tokens / elapsed)
            for answer in answers:
                tokens[name] += len(answer["output_ids"])
                steps[name] += len(answer["meta_info"].get("mtp_effective_k", range(new_tokens)))
            bar.update()
    bar.close()
    rows = {}
    for name, values in speeds.items():
        ratios = [a / b for a, b in zip(values, speeds["plain"], strict=True)]
        rows[name] = {
            "tok_s": round(statistics.median(values), 1),
            "ratio_to_plain": round(statistics.median(ratios), 3),
            "tokens_per_step": round(tokens[name] / steps[name], 3),
            "tok_s_by_round": [round(value, 1) for value in values],
        }
    return {"requests": num_requests, "kinds": rows}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    with sglang.Engine(model_path="demo") as engine:
        results = [
            measure(engine, count, arguments.rounds, arguments.new_tokens, seed=count)
            for count in (1, 8, 32)
        ]
    print(f"{'kind':14} " + "  ".join(f"{r['requests']:>3} at once: tok/s  ratio" for r in results))
    for name in KINDS:
        cells = (r["kinds"][name] for r in results)
        print(
            f"{name:14} "
            + "  ".join(f"{c['tok_s']:>17,.0f} {c['ratio_to_plain']:>6.2f}" for c in cells)
        )
    prices = {r["requests"]: round(1 - r["kinds"]["k=1"]["ratio_to_plain"], 3) for r in results}
    result = {
        **describe_environment(),
        "price_of_k_1": prices,
        "price_allowed": MAX_PRICE,
        "rows": results,
    }
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(f"price of k=1 by requests: {prices} (allowed {MAX_PRICE}); written: {arguments.out}")


if __name__ == "__main__":
    main()
