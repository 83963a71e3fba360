"""Steps that change while requests run: tokens stay, and nothing is left behind."""

from __future__ import annotations

import gc
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

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
EACH_ROUND |= {"up_hysteresis": -0.25, "down_hysteresis": 0.25}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("adaptive"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "policy", "overlap", "slots"),
    [
        (EAGLE, "adaptive", True, {"1": [0, 1, 2, 3], "3": [0, 1, 3]}),
        (EAGLE3, "adaptive", False, {"1": [0, 1, 2, 3], "3": [0, 1, 3]}),
        (EAGLE3, "adaptive", True, {"1": [1, 3]}),
        (EAGLE, "fixed", True, {"1": [3]}),
    ],
)
def test_tokens_are_those_without_a_drafter_whatever_steps_slots_choose(
    paths: dict[str, Path], kind: str, policy: str, overlap: bool, slots: dict[str, list[int]]
) -> None:
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step. The
    average is that of the last round, and each round decides. A step of a part of a prompt, where
    no request emits, drafts nothing; a slot without 0 has no other such step."""
    entries = {size: {"candidate_steps": steps} for size, steps in slots.items()}
    adaptive = parse_adaptive_config(json.dumps(EACH_ROUND | entries).encode(), "FILE")
    setup = setup_for(3, enable_overlap=overlap, chunked_prefill_size=6)
    options = {"tier_policy": policy, "initial_steps": 2, "adaptive": adaptive}
    harness = Served(paths, kind, 3, setup, **options)
    right = right_tokens(paths["target"])
    serve(harness, right)
    for _ in range(2):  # one after the other, as batches of the first slot
        for index, prompt in enumerate(prompts()):
            assert harness.generate([prompt], **params_of(index)) == [right[index]]
    harness.check()
    tiers = {tier: count for tier, count in harness.tiers.items() if count}
    assert tiers.keys() == {*slots["1"]}
    assert min(tiers.values()) > 2, tiers
    harness.assert_many_of_each()


def living() -> Counter[str]:
    """Counts, after a full collection, tensors and containers that the collector knows of, and
    blocks of memory that Python has."""
    gc.collect()
    objects = gc.get_objects()
    num_tensors = sum(issubclass(type(each), torch.Tensor) for each in objects)
    return Counter(tensors=num_tensors, objects=len(objects), blocks=sys.getallocatedblocks())


@pytest.mark.long_matrix
def test_a_storm_of_switches_loses_nothing_and_leaves_nothing(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another tier in every round, the ledger and each answer as they should be. Less than one
    object in two rounds is left."""
    monkeypatch.setattr(internal_state, "RECENT_STEPS", 4)  # its window is full at once
    setup = setup_for(3, use_radix_cache=False)
    harness = Served(paths, EAGLE3, 3, setup, checks_kv=False, tier_policy=CHANGING)
    right, found = right_tokens(paths["target"]), list[tuple[int, Counter[str]]]()
    while harness.tiers.total() < NUM_ROUNDS:
        serve(harness, right)
        with resting(harness.planner.policy):  # so that what is kept of the last step is the same
            harness.generate([[1, 2, 3]], max_new_tokens=1, temperature=0.0)
        harness.outputs.clear()
        found.append((harness.tiers.total(), living()))
    (num_before, before), (num_after, after) = found[len(found) // 4], found[-1]
    assert after["tensors"] == before["tensors"]
    more, most_more = after - before, (num_after - num_before) / 2
    assert max(more["objects"], more["blocks"]) < most_more, more
    assert all(harness.tiers[tier] > NUM_ROUNDS // 10 for tier in range(4)), harness.tiers
    harness.assert_many_of_each()
