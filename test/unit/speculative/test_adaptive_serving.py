"""Steps that change while requests run: tokens stay, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import params_of, prompts, serve
from eagle_models import write_models
from eagle_serving import Served, right_tokens, setup_for
from jumping_tier import CHANGING, jumping_tiers, resting
from sglang.srt.control import internal_state
from sglang.srt.lookahead.adaptive_config import parse_adaptive_config

torch.set_num_threads(1)
NUM_ROUNDS = int(os.environ.get("ADAPTIVE_STORM_ROUNDS", "1000"))  # 10,000 by hand
EACH_ROUND = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}
RESTLESS = {"up_hysteresis": -0.25, "down_hysteresis": 0.25}
SLOTS = {"1": {"candidate_steps": [0, 1, 2, 3]}, "3": {"candidate_steps": [0, 1, 3]}}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("adaptive"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
@pytest.mark.parametrize("overlap", [True, False])
def test_tokens_are_those_without_a_drafter_whatever_steps_slots_choose(
    paths: dict[str, Path], kind: str, overlap: bool
) -> None:
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step. The
    average is that of the last round, and each round decides."""
    adaptive = parse_adaptive_config(json.dumps(EACH_ROUND | RESTLESS | SLOTS).encode(), "FILE")
    setup = setup_for(3, enable_overlap=overlap, chunked_prefill_size=16)
    harness = Served(
        paths, kind, 3, setup, tier_policy="adaptive", initial_steps=2, adaptive=adaptive
    )
    right = right_tokens(paths["target"])
    serve(harness, right)
    for _ in range(2):  # one behind the other, as batches of the first slot
        for index, prompt in enumerate(prompts()):
            assert harness.generate([prompt], **params_of(index)) == [right[index]]
    harness.check()
    assert all(harness.tiers[tier] > 2 for tier in range(4)), harness.tiers
    harness.assert_many_of_each()


@pytest.mark.parametrize("policy", ["fixed", "adaptive"])
def test_where_no_tier_is_0_steps_of_a_part_of_a_prompt_draft_nothing(
    paths: dict[str, Path], policy: str
) -> None:
    """No request of such a step emits, so there is nothing to choose for."""
    slots = {"1": {"candidate_steps": [1, 3]}}
    adaptive = parse_adaptive_config(json.dumps(slots).encode(), "FILE")
    setup = setup_for(3, chunked_prefill_size=6)
    harness = Served(paths, EAGLE, 3, setup, tier_policy=policy, adaptive=adaptive)
    for index in (4, 5):  # of 40 and 32 tokens
        found = harness.generate([prompts()[index]], **params_of(index))
        assert found == [right_tokens(paths["target"])[index]]
    harness.check()
    assert harness.tiers[0] == 0
    assert harness.tiers.total() > 4


class Living(NamedTuple):
    """After so many rounds and a full collection: tensors and containers that the collector knows
    of, and blocks of memory that Python has."""

    num_rounds: int
    num_tensors: int
    num_objects: int
    num_blocks: int


def living(num_rounds: int) -> Living:
    gc.collect()
    objects = gc.get_objects()
    num_tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
    num_objects = len(objects)
    del objects
    return Living(num_rounds, num_tensors, num_objects, sys.getallocatedblocks())


@pytest.mark.long_matrix
def test_a_storm_of_switches_loses_nothing_and_leaves_nothing(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tier in every round, the ledger and each answer as they should be. Less than one
    object in two rounds is left."""
    monkeypatch.setattr(internal_state, "RECENT_STEPS", 4)  # its window is full at once
    setup = setup_for(3, use_radix_cache=False)
    harness = Served(paths, EAGLE3, 3, setup, checks_kv=False, tier_policy=CHANGING)
    right, found = right_tokens(paths["target"]), list[Living]()
    while harness.tiers.total() < NUM_ROUNDS:
        serve(harness, right)
        with resting(harness.planner.policy):  # so that what is kept of the last step is the same
            harness.generate([[1, 2, 3]], max_new_tokens=1, temperature=0.0)
        harness.outputs.clear()
        found.append(living(harness.tiers.total()))
    before, after = found[len(found) // 4], found[-1]
    assert after.num_tensors == before.num_tensors
    most_more = (after.num_rounds - before.num_rounds) / 2
    assert after.num_objects - before.num_objects < most_more, (before, after)
    assert after.num_blocks - before.num_blocks < most_more, (before, after)
    assert all(harness.tiers[tier] > NUM_ROUNDS // 10 for tier in range(4)), harness.tiers
    harness.assert_many_of_each()
