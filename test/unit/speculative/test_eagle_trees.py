"""Trees of drafts by EAGLE and EAGLE-3: whatever the head drafts, tokens are those of a server
without it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_checks
from draft_heads import EAGLE, EAGLE3
from drafted_serving import abort, nothing, params_of, pause, prompts, serve
from drafter_checks import asking_requests
from eagle_models import VOCAB, eagle_config_for, write_models
from eagle_serving import (
    Served,
    check_memory_that_is_released,
    check_requests_that_end_at_the_context,
    right_tokens,
    setup_for,
    tree_setup,
)
from pairwise import name_of, pairwise_cases
from sglang.srt.step.draft_shapes import TreeShape
from utils import Setup

torch.set_num_threads(1)
KINDS = (EAGLE, EAGLE3)
BOTH = pytest.mark.parametrize("kind", KINDS)
WIDE, DEEP = TreeShape(topk=4, depth=3, num_drafts=10), TreeShape(topk=2, depth=5, num_drafts=7)
SHAPES = {
    "flat": TreeShape(topk=4, depth=1, num_drafts=3),
    "wide": WIDE,
    "deep": DEEP,
    "all found": TreeShape(topk=2, depth=3, num_drafts=10),
    "few": TreeShape(topk=4, depth=5, num_drafts=3),
    "full": TreeShape(topk=8, depth=4, num_drafts=63),
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


def served(
    paths: dict[str, Path], kind: str, shape: TreeShape, setup: Setup | None = None
) -> Served:
    return Served(paths, kind, shape.depth, setup or tree_setup(shape), tree=shape)


def assert_many_of_each(harness: Served, least: int = 10) -> None:
    """Drafts were often right and often wrong, and the right path was often not the first."""
    harness.assert_many_of_each(least)
    assert harness.seen["moved"] > least // 4, harness.seen


CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "shape": tuple(SHAPES),
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
    kind, shape, memory, disturb = (
        changes.pop(key) for key in ("kind", "shape", "memory", "disturb")
    )
    setup = tree_setup(
        SHAPES[shape],
        num_tokens=256 if memory == "tight" else 1024,
        retract_interval=3 if memory == "retracts" else 0,
        **changes,
    )
    harness = served(paths, kind, SHAPES[shape], setup)
    ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    outcomes = [harness.outputs[req_id] for req_id in ids]
    if memory == "retracts":
        assert any(outcome.num_retractions for outcome in outcomes)
    if case["use_radix_cache"] and disturb is nothing:
        assert any(outcome.cached_tokens for outcome in outcomes)
    assert_many_of_each(harness)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "shape", "page_size", "overlap", "chunk"),
    [(EAGLE, WIDE, 1, True, 5), (EAGLE3, DEEP, 16, False, 2048)],
)
def test_all_that_requests_ask_for_is_what_they_get_without_a_head(
    paths: dict[str, Path], kind: str, shape: TreeShape, page_size: int, overlap: bool, chunk: int
) -> None:
    """Penalties, biases, filters, log-probabilities, hidden states."""
    drafter = eagle_config_for(paths["target"], paths[kind], kind, shape.depth, tree=shape)
    setup = setup_for(3, page_size, enable_overlap=overlap, chunked_prefill_size=chunk)
    requests = asking_requests(VOCAB)
    plain = drafter_checks.serve(paths["target"], setup, None, requests)
    drafted = drafter_checks.serve(paths["target"], setup, drafter, requests)
    drafter_checks.assert_same(drafted.outcomes, plain.outcomes)
    drafter_checks.assert_many_of_each(drafted.seen, has_trees=True)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "page_size", "shape"), [(EAGLE, 16, WIDE), (EAGLE3, 1, SHAPES["full"])]
)
def test_requests_that_end_at_the_context(
    paths: dict[str, Path], kind: str, page_size: int, shape: TreeShape
) -> None:
    """Nodes go past it, within the row of the page table."""
    harness = served(paths, kind, shape, tree_setup(shape, page_size))
    check_requests_that_end_at_the_context(harness, paths["target"])


@BOTH
def test_memory_is_released_and_taken_again(paths: dict[str, Path], kind: str) -> None:
    harness = served(paths, kind, WIDE, tree_setup(WIDE, chunked_prefill_size=16))
    check_memory_that_is_released(harness, right_tokens(paths["target"]))


@pytest.mark.long_matrix
@BOTH
def test_a_tree_confirms_more_than_a_chain_as_deep(paths: dict[str, Path], kind: str) -> None:
    """Compares both with the same head, which is often wrong with its best token."""
    accepted = []
    for harness in (
        Served(paths, kind, 3, setup_for(3)),
        served(paths, kind, TreeShape(topk=4, depth=3, num_drafts=20)),
    ):
        serve(harness, right_tokens(paths["target"]))
        accepted.append(harness.scheduler.control.internal_state()["avg_spec_accept_length"])
    assert accepted[1] > accepted[0] + 0.1


@BOTH
def test_figures_are_of_steps_that_verified_drafts(paths: dict[str, Path], kind: str) -> None:
    """Checks the figures of each request, and of all."""
    harness = served(paths, kind, WIDE, tree_setup(WIDE, chunked_prefill_size=6))
    ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
    harness.run()
    confirmed = fed = 0
    for outcome in (harness.outputs[req_id] for req_id in ids):
        histogram = outcome.accept_histogram
        assert len(histogram) <= 1 + WIDE.depth
        assert outcome.num_proposed_drafts == WIDE.num_drafts * sum(histogram)
        num_tokens = 1 + sum((1 + count) * each for count, each in enumerate(histogram))
        assert 0 <= num_tokens - len(outcome.token_ids) <= WIDE.depth
        confirmed += sum(count * each for count, each in enumerate(histogram))
        fed += outcome.num_proposed_drafts
    state = harness.scheduler.control.internal_state()
    assert state["avg_spec_accept_rate"] == confirmed / fed
    mean = 1 + WIDE.num_drafts * state["avg_spec_accept_rate"]
    assert state["avg_spec_accept_length"] == pytest.approx(mean)
