"""The ledger of `test/soak.py`: later sittings go on where the one before has ended."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import soak
from storm_checks import StormFailure


def test_sittings_add_to_one_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds = list[tuple[int, bool]]()

    def run_rounds(models: Any, seed: int, *limits: Any, crowds: bool) -> Counter[str]:
        seeds.append((seed, crowds))
        if seed == 8:
            raise StormFailure("two final answers")
        return Counter(requests=10, tokens=30)

    monkeypatch.setattr(soak, "run_rounds", run_rounds)
    models: Any = None
    for num_requests in (20, 40, 40):
        ledger = soak.open_ledger(tmp_path / "ledger.json", f"until {num_requests}", first_seed=7)
        soak.run(ledger, models, num_requests, 60.0)
    assert seeds == [(7, True), (8, False), (9, True), (10, False), (11, True)]
    found = soak.open_ledger(tmp_path / "ledger.json", "read").found
    failure = {"seed": 8, "error": "two final answers", "commit": "until 20"}
    assert found["failures"] == [failure]
    assert found["rounds"] == 5
    assert (found["counts"]["requests"], found["counts"]["tokens"]) == (40, 120)
    assert [sitting["requests"] for sitting in found["sittings"]] == [20, 20, 0]
