"""Rounds of the storm until there have been a million requests, in as many sittings as it takes.

    python test/soak.py --ledger soak.json --seconds 3600     # goes on where the ledger ends

Each round is one of `test/storm.py`: every drafter, sampling parameter, grammar, abort, pause,
update and forced retraction, with small pools and pages of several sizes. Rounds of odd seeds are
crowds: hundreds of requests, up to 64 in a step. The ledger, a JSON file, counts them, has the seed
of each round that failed with the command that runs it again, and a line for each sitting: commit,
time, memory and open files. It is written after every round.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "support"))

from ledger import Ledger, commit_of_tree
from storm import run_rounds
from storm_checks import StormFailure
from storm_parts import TinyModels

ALL_REQUESTS = 1_000_000
FIRST_SEED = 1_000_000
KINDS = (
    "requests",
    "requests in crowds",
    "tokens",
    "near-ties",
    "retractions",
    "abort",
    "rounds with a head",
    "updates",
)


def open_ledger(path: Path, commit: str, first_seed: int = FIRST_SEED) -> Ledger:
    """Opens a ledger of requests, with memory in MB and open files of this process."""
    process = psutil.Process()

    def used() -> dict[str, float]:
        memory = process.memory_info().rss / 1e6
        return {"memory_mb": round(memory, 1), "open_files": process.num_fds()}

    return Ledger(path, commit, first_seed, KINDS[0], KINDS, used)


def run(ledger: Ledger, models: TinyModels, num_requests: int, seconds: float) -> None:
    """Runs rounds until there are so many requests in all, or the time is over."""
    end_s, was_told = time.monotonic() + seconds, False
    bar = tqdm(total=num_requests, initial=ledger.total, unit="request", desc="soak")
    while ledger.total < num_requests and time.monotonic() < end_s:
        seen, failure, seed = Counter[str](), None, int(ledger.found["next_seed"])
        try:
            seen = run_rounds(models, seed, 0.0, 1, 1, crowds=seed % 2 == 1)
        except StormFailure as error:  # the ledger names the round, and the others go on
            failure = str(error)
            bar.write(failure)
        ledger.add({kind: seen[kind] for kind in KINDS}, failure)
        ledger.write()
        bar.update(seen["requests"])
        if not was_told and ledger.is_warm:
            bar.write(ledger.rate(num_requests))
            was_told = True
    bar.close()


def main() -> int:
    """Runs a sitting; 1 if any round of the ledger has failed."""
    parser = argparse.ArgumentParser(description="Rounds of the storm, counted in a ledger.")
    parser.add_argument("--ledger", type=Path, default=Path("soak.json"))
    parser.add_argument("--requests", type=int, default=ALL_REQUESTS, help="of all sittings")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of this sitting")
    parser.add_argument("--first-seed", type=int, default=FIRST_SEED, help="of a new ledger")
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)  # leases that run out
    ledger = open_ledger(args.ledger, commit_of_tree(), args.first_seed)
    with tempfile.TemporaryDirectory() as directory:
        run(ledger, TinyModels(Path(directory), 1), args.requests, args.seconds)
    found = ledger.found
    counts = ", ".join(f"{count} {kind}" for kind, count in found["counts"].items())
    print(f"{found['rounds']} rounds, {len(found['failures'])} failed: {counts}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
