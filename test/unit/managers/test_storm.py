"""Random rounds of everything at once against the real worker: `test/storm.py` says what holds.

Longer, with seeds of its own: `python test/storm.py --seconds 600`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from storm import run_rounds
from storm_parts import TinyModels
from storm_round import Round

NUM_ROUNDS = 10
MAX_NEAR_TIES = 1e-3  # per token
FIRST_SEEDS = (13_000, 40_000, 80_000)


@pytest.mark.long_matrix
@pytest.mark.parametrize("first_seed", FIRST_SEEDS)
def test_nothing_is_lost_doubled_or_changed_whatever_happens(
    tmp_path: Path, first_seed: int
) -> None:
    seen = run_rounds(TinyModels(tmp_path), first_seed, 0.0, NUM_ROUNDS)
    # The rounds must really do what they are meant to.
    assert seen["rounds"] >= NUM_ROUNDS
    wanted = {
        "length": 40,
        "stop": 10,
        "abort": 10,
        "retractions": 20,
        "cached tokens": 50,
        "verified leaps": 1,
        "unverified leaps": 1,
        "mixed KV": 1,
        "without drafts": 1,
        "updates": 5,
        "refused calls": 5,
        "PauseGenerationReq": 10,
        "ContinueGenerationReq": 10,
        "FlushCacheReqInput": 5,
        "WeightSessionReq": 1,
        "leases run out": 1,
        "drafts confirmed": 10,
        "MemoryOccupationReq": 2,
        "late masks": 5,
    }
    lacking = {name: seen[name] for name, least in wanted.items() if seen[name] < least}
    assert not lacking
    assert seen["near-ties"] <= MAX_NEAR_TIES * seen["tokens"]


@pytest.mark.long_matrix
@pytest.mark.parametrize("heads_only", [True, False])
def test_nothing_is_lost_over_two_ranks(tmp_path: Path, heads_only: bool) -> None:
    """The ranks' rows are equal after every step with a drafter, and at the end of each round."""
    seen = run_rounds(TinyModels(tmp_path, 2), FIRST_SEEDS[0], 0.0, 2, 2, heads_only)
    assert seen["rounds"] == 2
    assert seen["tokens"] > 50
    assert seen["near-ties"] <= MAX_NEAR_TIES * seen["tokens"]


def test_a_seed_gives_the_same_round_again(tmp_path: Path) -> None:
    models = TinyModels(tmp_path)
    first, again = Round(FIRST_SEEDS[0], models), Round(FIRST_SEEDS[0], models)
    assert first.run_round() == again.run_round()
    assert first.outputs == again.outputs
    assert first.replies == again.replies


def test_requests_that_no_step_has_fed_get_no_kv_of_old_weights(tmp_path: Path) -> None:
    """In this round some have a row and a cached prefix when weights change in place."""
    seen = run_rounds(TinyModels(tmp_path), 1_000_052, 0.0, 1, 1)
    assert seen["updates"] >= 1
