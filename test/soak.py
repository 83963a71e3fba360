"""Rounds of the storm until there have been a million requests, in as many sittings as it takes.

    python test/soak.py --ledger soak.json --seconds 3600     # goes on where the ledger ends
    python test/storm.py --seed 12345 --rounds 1              # a round again that the ledger names

Each round is one of `test/storm.py`: every drafter, sampling parameter, grammar, abort, pause,
update and forced retraction, with small pools and pages of several sizes. The ledger, a JSON file,
counts them, names the seeds of rounds that failed, and has a line for each sitting: commit, time,
memory and open files. It is written after every round.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "support"))

from storm import run_rounds
from storm_checks import StormFailure
from storm_parts import TinyModels

ALL_REQUESTS = 1_000_000
FIRST_SEED = 1_000_000
RATE_AFTER = 1_000  # requests
KINDS = ("requests", "tokens", "near-ties", "retractions", "abort", "rounds with a head", "updates")


class Ledger:
    """Counts what there was in all sittings.

    Attributes:
        found: `next_seed`, `rounds`, `counts` by kind, `failures` (seed, error, commit) and
            `sittings`.
    """

    def __init__(self, path: Path, commit: str, first_seed: int = FIRST_SEED) -> None:
        self._path, self._commit = path, commit
        self.found: dict[str, Any] = {"next_seed": first_seed, "rounds": 0, "counts": {}}
        self.found |= {"failures": [], "sittings": []}
        if path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))
        self._process = psutil.Process()
        self._start_s, self._first = time.monotonic(), self._used()
        self._sitting: dict[str, Any] = {"commit": commit, "requests": 0}
        self.found["sittings"].append(self._sitting)

    @property
    def num_requests(self) -> int:
        return int(self.found["counts"].get("requests", 0))

    @property
    def is_warm(self) -> bool:
        """Tells whether this sitting has had enough requests to tell its rate."""
        return int(self._sitting["requests"]) >= RATE_AFTER

    @property
    def requests_per_s(self) -> float:
        """Returns the rate of this sitting."""
        return float(self._sitting["requests"] / (time.monotonic() - self._start_s))

    def add(self, seen: Mapping[str, int], failure: str | None) -> None:
        """Counts a round, the next one, and writes the file."""
        found, sitting = self.found, self._sitting
        if failure is not None:
            seed = found["next_seed"]
            found["failures"].append({"seed": seed, "error": failure, "commit": self._commit})
        found["next_seed"] += 1
        found["rounds"] += 1
        for kind in KINDS:
            found["counts"][kind] = found["counts"].get(kind, 0) + seen.get(kind, 0)
        sitting["requests"] += seen.get("requests", 0)
        sitting["seconds"] = round(time.monotonic() - self._start_s, 1)
        if not self.is_warm:  # caches fill meanwhile
            self._first = self._used()
        sitting["first"], sitting["last"] = self._first, self._used()
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        part.replace(self._path)

    def _used(self) -> dict[str, float]:
        """Returns memory in MB and open files."""
        memory = self._process.memory_info().rss / 1e6
        return {"memory_mb": round(memory, 1), "open_files": self._process.num_fds()}


def run(ledger: Ledger, models: TinyModels, num_requests: int, seconds: float) -> None:
    """Runs rounds until there are so many requests in all, or the time is over."""
    end_s, was_told = time.monotonic() + seconds, False
    bar = tqdm(total=num_requests, initial=ledger.num_requests, unit="request", desc="soak")
    while ledger.num_requests < num_requests and time.monotonic() < end_s:
        seen, failure = Counter[str](), None
        try:
            seen = run_rounds(models, ledger.found["next_seed"], 0.0, 1, 1)
        except StormFailure as error:  # the ledger names the round, and the others go on
            failure = str(error)
            bar.write(failure)
        ledger.add(seen, failure)
        bar.update(seen.get("requests", 0))
        if not was_told and ledger.is_warm:
            left_h = (num_requests - ledger.num_requests) / ledger.requests_per_s / 3600
            bar.write(f"{ledger.requests_per_s:.1f} requests/s, {left_h:.1f} hours for the rest")
            was_told = True
    bar.close()


def commit_of_tree() -> str:
    """Returns the commit, with a mark if files differ from it."""
    git = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--dirty",
        "--abbrev=12",
    ]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


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
    commit = os.environ.get("SGLANG_BENCHMARK_COMMIT") or commit_of_tree()
    ledger = Ledger(args.ledger, commit, args.first_seed)
    with tempfile.TemporaryDirectory() as directory:
        run(ledger, TinyModels(Path(directory), 1), args.requests, args.seconds)
    found = ledger.found
    counts = ", ".join(f"{count} {kind}" for kind, count in found["counts"].items())
    print(f"{found['rounds']} rounds, {len(found['failures'])} failed: {counts}")
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
