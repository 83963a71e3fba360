"""`test/hostile.py`: some inputs of each area, and what becomes of one that ends its process."""

from __future__ import annotations

import os
import random
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

import hostile
from hostile_areas import AREAS, area_of
from ledger import Ledger

NUM_INPUTS = 100


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", AREAS)
def test_hostile_inputs_are_taken_or_refused(name: str) -> None:
    area = AREAS[name][0]()
    found = set()
    try:
        for seed in range(NUM_INPUTS):
            found.add(area.feed(area.draw(random.Random(f"{name} {seed}"))))
    finally:
        area.close()
    assert found == {True, False}


def test_each_area_gets_its_share() -> None:
    found = [area_of(seed) for seed in range(2000)]
    for name, (_, share) in AREAS.items():
        assert found.count(name) == pytest.approx(20 * share, abs=90)


def hostile_feed(connection: Connection, first_seed: int, only: str | None) -> None:
    """Takes one of four; others end the process, or never end, or give an error."""
    for seed in range(first_seed, 8):
        connection.send("frames")
        connection.send("begins")
        match seed % 4:
            case 0:
                connection.send(hostile.Outcome("taken"))
            case 1:
                os._exit(9)
            case 2:
                time.sleep(60)
            case 3:
                connection.send(hostile.Outcome("errors", "frames: ValueError"))
    connection.send(None)


def test_crashes_hangs_and_errors_are_named_by_their_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hostile, "HANG_S", 1.0)
    path = tmp_path / "ledger.json"
    for num_inputs in (3, 8):  # two sittings
        ledger = Ledger(path, "commit", 0, "inputs", hostile.KINDS, dict)
        hostile.run(ledger, hostile.Feeder(main=hostile_feed), num_inputs, 60.0)
    counts = ledger.found["counts"]
    assert [counts[kind] for kind in hostile.KINDS] == [8, 2, 0, 2, 2, 2]
    failures = {each["seed"]: each["error"] for each in ledger.found["failures"]}
    assert sorted(failures) == [1, 2, 3, 5, 6, 7]
    assert "ended with 9" in failures[1]
    assert "takes over 1 s" in failures[6]


def test_inputs_are_repeated_by_their_seeds() -> None:
    area = AREAS["frames"][0]()
    try:
        for seed in range(200):
            first, again = (area.draw(random.Random(f"frames {seed}")) for _ in range(2))
            assert first == again
    finally:
        area.close()
