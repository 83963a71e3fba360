"""STANDALONE: whatever the draft model says, tokens are those of a server without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_checks
from drafted_serving import abort, nothing, params_of, pause, prompts, serve
from drafter_checks import asking_requests
from eagle_models import STANDALONE, VOCAB, eagle_config_for, write_models, write_target
from eagle_serving import (
    Served,
    check_memory_that_is_released,
    check_requests_that_end_at_the_context,
    right_tokens,
    setup_for,
)
from jumping_tier import JUMPING, jumping_tiers
from pairwise import name_of, pairwise_cases
from sglang.srt.messages.control import (
    FromDirectory,
    UpdateWeightsReq,
)

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("standalone"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


CHOICES: dict[str, tuple[Any, ...]] = {
    "num_steps": (1, 3, 5),
    "tier_policy": ("fixed", JUMPING),
    "page_size": (1, 16),
    "enable_overlap": (True, False),
    "use_radix_cache": (True, False),
    "chunked_prefill_size": (6, 2048),
    "memory": ("ample", "tight", "retracts"),
    "disturb": (nothing, pause, abort),
}
CASES = pairwise_cases(CHOICES)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_a_drafter(paths: dict[str, Path], case: dict[str, Any]) -> None:
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step."""
    changes = dict(case)
    num_steps, policy, memory, disturb = (
        changes.pop(key) for key in ("num_steps", "tier_policy", "memory", "disturb")
    )
    setup = setup_for(
        num_steps,
        num_tokens=144 if memory == "tight" else 1024,
        retract_interval=3 if memory == "retracts" else 0,
        **changes,
    )
    harness = Served(paths, STANDALONE, num_steps, setup, tier_policy=policy)
    ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    outcomes = [harness.outputs[req_id] for req_id in ids]
    if memory == "retracts":
        assert any(outcome.num_retractions for outcome in outcomes)
    if case["use_radix_cache"] and disturb is nothing:
        assert any(outcome.cached_tokens for outcome in outcomes)
    if policy == JUMPING:
        assert harness.seen["plain decodes"] > 10
    harness.assert_many_of_each(least=10)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("page_size", "overlap", "chunk", "policy"), [(1, True, 5, JUMPING), (16, False, 2048, "fixed")]
)
def test_all_that_requests_ask_for_is_what_they_get_without_a_draft_model(
    paths: dict[str, Path], page_size: int, overlap: bool, chunk: int, policy: str
) -> None:
    """Penalties, biases, filters, log-probabilities, hidden states."""
    drafter = eagle_config_for(paths["target"], paths[STANDALONE], STANDALONE, 3, policy)
    setup = setup_for(3, page_size, enable_overlap=overlap, chunked_prefill_size=chunk)
    requests = asking_requests(VOCAB)
    plain = drafter_checks.serve(paths["target"], setup, None, requests)
    served = drafter_checks.serve(paths["target"], setup, drafter, requests)
    drafter_checks.assert_same(served.outcomes, plain.outcomes)
    assert served.seen["confirmed"] > 20, served.seen
    assert served.seen["fed"] - served.seen["confirmed"] > 20, served.seen


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
def test_requests_that_end_at_the_context(paths: dict[str, Path], page_size: int) -> None:
    """Drafts go past it, within the row of the page table."""
    harness = Served(paths, STANDALONE, 5, setup_for(5, page_size))
    check_requests_that_end_at_the_context(harness, paths["target"])


@pytest.mark.long_matrix
@pytest.mark.parametrize(("num_steps", "overlap"), [(1, True), (3, True), (4, False)])
def test_a_draft_model_that_is_the_target_is_always_right(
    paths: dict[str, Path], num_steps: int, overlap: bool
) -> None:
    """Checks that every draft of greedy requests is confirmed, so each step gives one token
    more."""
    twins = {"target": paths["target"], STANDALONE: paths["target"]}
    setup = setup_for(num_steps, enable_overlap=overlap, chunked_prefill_size=16)
    harness = Served(twins, STANDALONE, num_steps, setup)
    right = right_tokens(paths["target"])
    greedy = [index for index in range(len(prompts())) if index % 3 != 2]
    ids = {harness.submit(prompts()[index], **params_of(index)): index for index in greedy}
    harness.run()
    harness.check()
    for req_id, index in ids.items():
        outcome = harness.outputs[req_id]
        assert outcome.token_ids == right[index]
        *others, whole = outcome.accept_histogram
        assert len(others) == num_steps
        assert sum(others) == 0
        assert whole >= len(right[index]) // (1 + num_steps) - 1
    assert harness.seen["confirmed"] == harness.seen["fed"] > 0


def test_memory_is_released_and_taken_again(paths: dict[str, Path]) -> None:
    right = right_tokens(paths["target"])
    harness = Served(paths, STANDALONE, 3, setup_for(3, chunked_prefill_size=16))
    serve(harness, right)
    check_memory_that_is_released(harness, right)
    harness.assert_many_of_each()


def test_an_update_is_of_the_target_alone(paths: dict[str, Path], tmp_path: Path) -> None:
    """The draft model has its own weights of the same names."""
    later = write_target(tmp_path / "later", 7)
    harness = Served(paths, STANDALONE, 3, setup_for(3))
    serve(harness, right_tokens(paths["target"]))
    draft = harness.group.runners[1]
    before = {name: value.clone() for name, value in draft.model.state_dict().items()}
    harness.send(UpdateWeightsReq, source=FromDirectory(path=str(later)))
    serve(harness, right_tokens(later))
    assert draft.weights.num_updates == 0
    after = draft.model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
