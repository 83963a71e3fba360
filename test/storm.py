"""A storm over the whole surface of the scheduler, with the real worker over a tiny model.

    python test/storm.py --seconds 180           # random rounds; prints the seed of one that fails
    python test/storm.py --seed 12345 --rounds 1 # that round again
    python test/storm.py --heads --seconds 180   # only rounds with a head or a draft model
    python test/storm.py --swaps 1000            # those, whose weights change 1,000 times meanwhile
    python test/storm.py --tp-size 2             # over two ranks, in threads

A round draws a configuration, three of ten with a draft head, then requests and control calls of
every kind at random steps. Its seed decides all of it: time, threads and what a device would do are
part of the draw. After every step the ledger must be exact; at the end each request has got one
final answer, with the tokens of the request run alone (`storm_oracle`), each call one reply, and
all memory is free again.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent / "support"))

from jumping_tier import jumping_tiers
from storm_checks import StormFailure
from storm_parts import TinyModels
from storm_round import Round, has_head


def run_rounds(
    models: TinyModels,
    first_seed: int,
    seconds: float,
    min_rounds: int,
    max_rounds: int | None = None,
    heads_only: bool = False,
    num_swaps: int = 0,
    crowds: bool = False,
    show: Callable[[str], None] = lambda line: None,
) -> Counter[str]:
    """Rounds of consecutive seeds until the time is up, or of those whose rounds have a draft head;
    returns what there was to see.

    Args:
        num_swaps: go on until the weights of heads have changed so often; 0: they never do.
        crowds: rounds of hundreds of requests.

    Raises:
        StormFailure: naming the seed of the round.
    """
    seen: Counter[str] = Counter()
    start = last = time.monotonic()
    seeds = (seed for seed in itertools.count(first_seed) if has_head(seed) or not heads_only)
    for number, seed in enumerate(seeds):
        now = time.monotonic()
        is_over = number >= min_rounds and now - start >= seconds
        if (is_over and seen["head swaps"] >= num_swaps) or number == max_rounds:
            return seen
        try:
            with jumping_tiers():
                seen += Round(seed, models, num_swaps > 0, crowds).run_round()
        except Exception as error:
            swaps = f" --swaps {num_swaps}" if num_swaps else ""
            ranks = f" --tp-size {models.num_ranks}" if models.num_ranks > 1 else ""
            crowd = " --crowds" if crowds else ""
            command = f"python test/storm.py --seed {seed} --rounds 1{swaps}{ranks}{crowd}"
            raise StormFailure(f"{type(error).__name__}: {error}\nAgain: {command}") from error
        seen["rounds"] += 1
        if now - last > 10:
            last = now
            shown = Counter(
                {name: seen[name] for name in ("rounds", "requests", "tokens", "head swaps")}
            )
            show(f"{now - start:4.0f} s, next seed {seed + 1}: {summary(shown)}")
    raise AssertionError


def summary(seen: Counter[str]) -> str:
    return ", ".join(f"{seen[name]} {name}" for name in sorted(seen))


def main() -> int:
    parser = argparse.ArgumentParser(description="A storm of requests and control calls.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of the first round; drawn if left out")
    parser.add_argument("--rounds", type=int, help="this many instead of a time")
    parser.add_argument("--heads", action="store_true", help="only rounds with a draft head")
    parser.add_argument("--swaps", type=int, default=0, help="changes of heads' weights")
    parser.add_argument("--crowds", action="store_true", help="rounds of hundreds of requests")
    parser.add_argument("--tp-size", type=int, default=1, help="ranks that hold each model, 1 or 2")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # leases that run out
    seed = random.SystemRandom().randrange(10**9) if args.seed is None else args.seed
    print(f"storm: first seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as directory:
        models = TinyModels(Path(directory), args.tp_size)
        try:
            seen = run_rounds(
                models,
                seed,
                0.0 if args.swaps else args.seconds,
                args.rounds or 1,
                args.rounds,
                args.heads or args.swaps > 0,
                args.swaps,
                args.crowds,
                print,
            )
        except StormFailure:
            traceback.print_exc()
            return 1
    print(f"storm: {summary(seen)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
