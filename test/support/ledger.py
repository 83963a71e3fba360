"""A ledger of seeds: several sittings of a long test count in one file of JSON."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

RATE_AFTER = 1_000  # of what is counted


class Ledger:
    """Counts what there was in all sittings, by seeds that follow each other.

    Args:
        unit: name of the count that the goal is about.
        kinds: names of the counts that are there from the beginning, `unit` among them.
        used: memory and open files now.

    Attributes:
        found: `next_seed`, `rounds` (one a seed), `counts` by kind, `failures` (seed, error,
            commit; whoever mends one adds `mended_in`, a commit) and `sittings`.
    """

    def __init__(
        self,
        path: Path,
        commit: str,
        first_seed: int,
        unit: str,
        kinds: tuple[str, ...],
        used: Callable[[], dict[str, float]],
    ) -> None:
        self._path, self._commit, self._unit, self._used = path, commit, unit, used
        self.found: dict[str, Any] = {"next_seed": first_seed, "rounds": 0}
        self.found |= {"counts": dict.fromkeys(kinds, 0), "failures": [], "sittings": []}
        if path.exists():
            self.found = json.loads(path.read_text(encoding="utf-8"))
        self._start_s, self._first = time.monotonic(), used()
        self._sitting: dict[str, Any] = {"commit": commit, unit: 0}
        self.found["sittings"].append(self._sitting)

    @property
    def total(self) -> int:
        return int(self.found["counts"][self._unit])

    @property
    def is_warm(self) -> bool:
        """Tells whether this sitting has had enough to tell its rate."""
        return int(self._sitting[self._unit]) >= RATE_AFTER

    @property
    def per_s(self) -> float:
        """Returns the rate of this sitting."""
        return float(self._sitting[self._unit] / (time.monotonic() - self._start_s))

    def rate(self, goal: int) -> str:
        """Returns a line with the rate, and how long the rest takes."""
        left_h = (goal - self.total) / self.per_s / 3600
        return f"{self.per_s:.1f} {self._unit}/s, {left_h:.1f} hours for the rest"

    def add(self, seen: Mapping[str, int], failure: str | None) -> None:
        """Counts what the next seed gave."""
        found, sitting = self.found, self._sitting
        if failure is not None:
            seed = found["next_seed"]
            found["failures"].append({"seed": seed, "error": failure, "commit": self._commit})
        found["next_seed"] += 1
        found["rounds"] += 1
        for kind, count in seen.items():
            found["counts"][kind] = found["counts"].get(kind, 0) + count
        sitting[self._unit] += seen.get(self._unit, 0)

    def write(self) -> None:
        """Writes the file, as a whole."""
        sitting = self._sitting
        sitting["seconds"] = round(time.monotonic() - self._start_s, 1)
        if not self.is_warm:  # caches fill meanwhile
            self._first = self._used()
        sitting["first"], sitting["last"] = self._first, self._used()
        part = self._path.with_suffix(".part")
        part.write_text(json.dumps(self.found, indent=2) + "\n", encoding="utf-8")
        part.replace(self._path)


def commit_of_tree() -> str:
    """Returns the commit, with a mark if files differ from it; SGLANG_BENCHMARK_COMMIT goes
    before."""
    if commit := os.environ.get("SGLANG_BENCHMARK_COMMIT"):
        return commit
    folder = str(Path(__file__).parent)
    git = ["git", "-C", folder, "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
