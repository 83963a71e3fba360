"""Rounds as CUDA graphs: tokens are those of a server without a drafter, whatever the sizes
of batches, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import (
    Disturb,
    abort,
    launches_never_wait,
    nothing,
    params_of,
    pause,
    prompts,
    serve,
)
from eagle_models import STANDALONE, write_models
from jumping_tier import JUMPING, RESTING, jumping_tiers
from round_serving import NUM_STEPS, On, right_tokens, serving, setup_of, submit_all, zero
from sglang.srt.control.memory_control import GRAPH_TAG
from sglang.srt.messages.control import MemoryOccupationReq

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

ON_GPU = On("cuda", "triton")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(autouse=True)
def with_policies() -> Iterator[None]:
    with jumping_tiers():
        yield


@cache
def right(target: Path) -> list[list[int]]:
    return right_tokens({"target": target}, ON_GPU)


@pytest.mark.parametrize(
    ("kind", "page_size", "policy", "disturb"),
    [
        (EAGLE, 1, "fixed", nothing),
        (EAGLE, 16, JUMPING, pause),
        (EAGLE3, 1, JUMPING, abort),
        (EAGLE3, 16, "fixed", nothing),
        (EAGLE3, 1, RESTING, nothing),
        (EAGLE, 16, RESTING, pause),
        (STANDALONE, 1, JUMPING, pause),
        (STANDALONE, 16, "fixed", nothing),
    ],
)
def test_tokens(
    paths: dict[str, Path], kind: str, page_size: int, policy: str, disturb: Disturb
) -> None:
    served = serving(paths, kind, setup_of(page_size), policy, ON_GPU)
    serve(served.harness, right(paths["target"]), disturb)
    assert served.seen["right"] > 10
    assert served.seen["wrong"] > 10
    sizes = {count for count, _ in served.rounds}
    assert sizes - {1, 2, 4, 8}, "Some have padding."
    assert served.num_pieces > 3


def test_graphs_are_captured_anew_with_memory(paths: dict[str, Path]) -> None:
    served = serving(paths, setup=setup_of(use_radix_cache=False), on=ON_GPU)
    for _ in range(2):
        ids = submit_all(served)
        tokens = [served.harness.outputs[each].token_ids for each in ids]
        assert tokens == right(paths["target"])
        served.group.release_weights()
        served.group.memory.release()
        served.group.restore_kv()
        served.group.restore_weights()
        zero(served.group)
        assert served.graphs.num_graphs == 8


def test_memory_of_graphs_alone_goes_back_to_the_gpu(paths: dict[str, Path]) -> None:
    served = serving(paths, setup=setup_of(use_radix_cache=False), on=ON_GPU)
    submit_all(served)
    num_graphs, reserved = served.graphs.num_graphs, torch.cuda.memory_reserved()
    served.harness.send(MemoryOccupationReq, action="release", tags=[GRAPH_TAG])
    assert served.graphs.num_graphs == 0
    assert torch.cuda.memory_reserved() < reserved
    served.harness.send(MemoryOccupationReq, action="resume", tags=[GRAPH_TAG])
    assert served.graphs.num_graphs == num_graphs
    ids = submit_all(served)
    assert [served.harness.outputs[each].token_ids for each in ids] == right(paths["target"])


@pytest.mark.parametrize("policy", ["fixed", JUMPING, RESTING])
def test_launches_do_not_wait(paths: dict[str, Path], policy: str) -> None:
    """Also where requests begin with cached prefixes, and where the head rests and is fed again."""
    served = serving(paths, policy=policy, on=ON_GPU)
    serve(served.harness, right(paths["target"]))  # all is compiled
    served.unwatch()
    with launches_never_wait(served.harness):
        serve(served.harness, right(paths["target"]))


@pytest.mark.parametrize("kind", [EAGLE3, STANDALONE])
def test_rounds_neither_wait_nor_allocate(paths: dict[str, Path], kind: str) -> None:
    served = serving(paths, kind, on=ON_GPU)
    harness = served.harness
    params = params_of(0) | {"max_new_tokens": 90, "ignore_eos": True}
    ids = [harness.submit(each[:9], **params) for each in prompts()[:5]]
    while len(served.rounds) < 3:
        harness.step()
    torch.cuda.synchronize()
    allocated, graphs = torch.cuda.memory_allocated(), served.graphs.num_graphs
    for _ in range(8):
        harness.step()
    torch.cuda.synchronize()
    assert len(served.rounds) > 8
    assert {count for _, count in served.rounds} == {NUM_STEPS}
    assert abs(torch.cuda.memory_allocated() - allocated) < 1 << 16
    assert served.graphs.num_graphs == graphs
    harness.run()
    assert all(len(harness.outputs[each].token_ids) == 90 for each in ids)
