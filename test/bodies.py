"""Random bodies of `/generate`: clients see the same with every drafter and without.

    python test/bodies.py --seconds 60

One plain Engine gives the right answers, and those of verified multi-token prediction; then each
drafter has an Engine of its own. Prints the seed of a body that differs.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))

import sglang
from body_cases import answers, draw_bodies, with_mtp

NUM_BODIES = 24
FIXED = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
DRAFTERS: dict[str, dict[str, Any]] = {
    "NGRAM": {},
    "EAGLE3": {"speculative_draft_model_path": "demo-eagle3"},
    "EAGLE": {"speculative_draft_model_path": "demo-eagle", **FIXED},
    "STANDALONE": {"speculative_draft_model_path": "demo-draft", **FIXED},
}


def make_engine(**flags: Any) -> sglang.Engine:
    return sglang.Engine(
        model_path="demo", device="cpu", dtype="float32", max_total_tokens=4096, **flags
    )


def check(right: list[Any], given: list[Any], bodies: list[dict[str, Any]], name: str) -> None:
    """
    Raises:
        AssertionError: naming the first body whose answer differs.
    """
    for place, (mine, theirs) in enumerate(zip(right, given, strict=True)):
        assert mine == theirs, f"{name}, body {place}: {bodies[place]}\n{mine}\n{theirs}"


def compare_drafters(
    first_seed: int,
    seconds: float,
    drafters: tuple[str, ...] = tuple(DRAFTERS),
    num_bodies: int = NUM_BODIES,
) -> Counter[str]:
    """Compares answers for about so long, at least one batch of `num_bodies` that run at once with
    each drafter; returns bodies compared, by drafter."""
    seen: Counter[str] = Counter()
    batches: list[tuple[list[dict[str, Any]], list[Any]]] = []
    share_s = seconds / (len(drafters) + 1)
    with make_engine() as engine:
        end = time.monotonic() + share_s
        while not batches or time.monotonic() < end:
            seed = first_seed + len(batches)
            bodies = draw_bodies(seed, num_bodies)
            batches.append((bodies, answers(engine, bodies)))
            mtp = with_mtp(bodies, seed)
            check(batches[-1][1], answers(engine, mtp), mtp, f"MTP, seed {seed}")
            seen["MTP"] += len(bodies)
    for name in drafters:
        end = time.monotonic() + share_s
        with make_engine(speculative_algorithm=name, **DRAFTERS[name]) as engine:
            for number, (bodies, right) in enumerate(batches):
                if number and time.monotonic() > end:
                    break
                check(right, answers(engine, bodies), bodies, f"{name}, seed {first_seed + number}")
                seen[name] += len(bodies)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description="The same answers with every drafter.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of the first bodies; drawn if not given")
    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    try:
        seen = compare_drafters(seed, arguments.seconds)
    except AssertionError as error:
        print(f"FAILED: {error}")
        return 1
    print(", ".join(f"{count} bodies with {name}" for name, count in seen.items()) + ": equal")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
