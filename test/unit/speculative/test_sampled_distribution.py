"""Sampled requests, with drafts and without: how their tokens are distributed, against the target's
own logits. Seeds are fixed, so each test passes always or never."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import Drafted
from drafter_checks import DraftCounter, make_drafter_runners
from eagle_models import CONTEXT, VOCAB, eagle_config_for, write_models
from model_harness import Model
from ngram_serving import ngram_config
from sglang.srt.speculative.drafter_options import EXACT, AcceptThresholds
from sglang.srt.speculative.spec_info import NGRAM
from sglang.srt.step.draft_shapes import TreeShape
from utils import Setup

torch.set_num_threads(1)
PROMPT = [5, 17, 2, 9, 20, 11, 3]
NUM_NEW, NUM_REQUESTS = 3, 1500  # drafts take part from the second token on
TREE = TreeShape(topk=3, depth=2, num_drafts=7)
LIMIT = 1e-4  # a right implementation is below it with this probability
Cells = torch.Tensor  # [VOCAB ** NUM_NEW], by the tokens in order


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def target(paths: dict[str, Path]) -> Model:
    return Model(paths["target"])


def serve(
    paths: dict[str, Path],
    kind: str | None,
    thresholds: AcceptThresholds = EXACT,
    first_seed: int | None = None,
    tree: TreeShape | None = None,
    **params: Any,
) -> tuple[Cells, Counter[str]]:
    """Counts how often each NUM_NEW tokens were given, and what became of drafts.

    Args:
        first_seed: of the first of NUM_REQUESTS requests; None: they have no seeds.
    """
    drafter = None
    if kind is not None:
        if kind == NGRAM:
            drafter = ngram_config(num_drafts=7, breadth=4)
        else:
            num_steps = 3 if tree is None else tree.depth
            drafter = eagle_config_for(paths["target"], paths[kind], kind, num_steps, tree=tree)
        drafter = replace(drafter, thresholds=thresholds)
    setup = Setup(num_pages=8192, max_running_requests=400, context_len=CONTEXT)
    group, setup = make_drafter_runners(paths["target"], setup, drafter)
    counter = DraftCounter()
    harness = Drafted(group, drafter, replace(setup, max_queued_requests=None), on_step=counter)
    ids = []
    for number in range(NUM_REQUESTS):
        seed = {} if first_seed is None else {"sampling_seed": first_seed + number}
        ids.append(harness.submit(PROMPT, max_new_tokens=NUM_NEW, **seed, **params))
    harness.run()
    harness.check()
    given = torch.tensor([harness.outputs[req_id].token_ids for req_id in ids])
    weights = torch.tensor([VOCAB**place for place in reversed(range(NUM_NEW))])
    return torch.bincount((given * weights).sum(1), minlength=VOCAB**NUM_NEW), counter.seen


def exact(target: Model, temperature: float) -> Cells:
    """Probabilities by the target's logits behind every prefix."""
    prefixes, mass = torch.tensor([PROMPT]), torch.ones(1, dtype=torch.float64)
    for _ in range(NUM_NEW):
        with torch.inference_mode():
            logits = target.reference(prefixes).logits[:, -1].double()
        mass = (mass[:, None] * (logits / temperature).softmax(-1)).flatten()
        tokens = torch.arange(VOCAB).repeat(len(prefixes))[:, None]
        prefixes = torch.cat((prefixes.repeat_interleave(VOCAB, 0), tokens), 1)
    return mass


def groups(weights: Cells, total: int) -> torch.Tensor:
    """The group of each cell; cells of alike weight are put together until each group can expect 5
    of `total`."""
    order = weights.argsort(descending=True)
    group, filled, found = 0, 0.0, torch.zeros(len(weights), dtype=torch.int64)
    for cell in order.tolist():
        found[cell] = group
        filled += float(weights[cell]) * total
        if filled >= 5:
            group, filled = group + 1, 0.0
    return found.clamp(max=group - 1)


def p_value(observed: Cells, expected: Cells, variance: Cells) -> float:
    chi_square = ((observed - expected) ** 2 / variance).sum()
    freedom = torch.tensor((len(observed) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, chi_square / 2))


def fit(observed: Cells, probs: Cells) -> float:
    """Returns how probable it is that draws from `probs` are as far from it as `observed`, or
    farther."""
    total = int(observed.sum())
    group = groups(probs, total)
    assert int(group.max()) > 20
    counts = torch.bincount(group, observed.double())
    expected = torch.bincount(group, probs * total)
    print("P", p_value(counts, expected, expected), len(counts))
    return p_value(counts, expected, expected)


def assert_many_of_each(seen: Counter[str]) -> None:
    assert seen["confirmed"] > NUM_REQUESTS / 4, seen
    assert seen["fed"] - seen["confirmed"] > NUM_REQUESTS / 4, seen


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "temperature", "first_seed", "tree"),
    [
        (EAGLE, 0.7, None, None),
        (EAGLE3, 0.7, 10_000, None),
        (EAGLE3, 1.3, None, None),
        (EAGLE, 1.3, 10_000, None),
        (EAGLE3, 0.7, None, TREE),
        (EAGLE, 1.3, 10_000, TREE),
        (NGRAM, 0.7, 10_000, None),
        (None, 0.7, 50_000, None),
        (None, 1.3, 50_000, None),
    ],
)
def test_tokens_follow_the_targets_distribution(
    paths: dict[str, Path],
    target: Model,
    kind: str | None,
    temperature: float,
    first_seed: int | None,
    tree: TreeShape | None,
) -> None:
    cells, seen = serve(paths, kind, EXACT, first_seed, tree, temperature=temperature)
    if kind is not None:
        assert_many_of_each(seen)
    assert fit(cells, exact(target, temperature)) > LIMIT


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "tree"),
    [(EAGLE, None), (EAGLE, TREE), (NGRAM, None)],
    ids=["chains", "trees", "trees of n-grams"],
)
def test_thresholds_of_almost_1_give_almost_the_targets_distribution(
    paths: dict[str, Path], target: Model, kind: str, tree: TreeShape | None
) -> None:
    """The rule itself is exact: what is accepted and what is drawn where a draft is refused."""
    thresholds = AcceptThresholds(single=1.0, acc=1 - 1e-6)
    cells, seen = serve(paths, kind, thresholds, tree=tree, temperature=1.3)
    assert_many_of_each(seen)
    assert fit(cells, exact(target, 1.3)) > LIMIT


@pytest.mark.long_matrix
@pytest.mark.parametrize("thresholds", [AcceptThresholds(acc=0.7), AcceptThresholds(single=0.2)])
def test_thresholds_below_1_give_another_distribution(
    paths: dict[str, Path], target: Model, thresholds: AcceptThresholds
) -> None:
    cells, seen = serve(paths, EAGLE, thresholds, temperature=1.0)
    assert_many_of_each(seen)
    assert fit(cells, exact(target, 1.0)) < LIMIT
