"""Requests that take no drafts, or fewer, beside others: with every drafter, tokens are those
without one, and nothing is done for who wants nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_heads import DFLASH, EAGLE, EAGLE3
from drafted_serving import Drafted, serve
from eagle_models import STANDALONE, write_models
from eagle_serving import Served, right_tokens, setup_for, tree_setup
from jumping_tier import JUMPING, RESTING, jumping_tiers
from ngram_serving import Served as ServedNgrams
from ngram_serving import ngram_config
from request_choices import OFF, ChoiceChecks, choose_in_turn, launches_of_decodes
from sglang.srt.speculative.ngram_worker import NgramDrafter
from sglang.srt.step.draft_shapes import TreeShape
from tile_spec_rounds import DEAR_ROWS, FREE_ROWS, RandomBudgets

torch.set_num_threads(1)
TREE = TreeShape(topk=2, depth=3, num_drafts=6)
Made = Callable[[dict[str, Path], Path], Drafted]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("choices"))


def head(kind: str, policy: str = "fixed", page_size: int = 1, **changes: Any) -> Made:
    def made(paths: dict[str, Path], folder: Path) -> Drafted:
        served = Served(paths, kind, 3, setup_for(3, page_size, **changes), tier_policy=policy)
        served.may_lack = True
        if policy != "fixed":
            served.planner.policy.may_lack = True
        return served

    return made


def trees(paths: dict[str, Path], folder: Path) -> Drafted:
    return Served(paths, EAGLE3, TREE.depth, tree_setup(TREE), tree=TREE)


def ngrams(num_drafts: int, breadth: int, policy: str) -> Made:
    def made(paths: dict[str, Path], folder: Path) -> Drafted:
        drafter = ngram_config(num_drafts, breadth, tier_policy=policy)
        return ServedNgrams(paths["target"], drafter, setup_for(num_drafts), FREE_ROWS)

    return made


def cut_chains(kind: str) -> Made:
    def made(paths: dict[str, Path], folder: Path) -> Drafted:
        options = {"tile_spec_cache": folder, "prices": DEAR_ROWS}
        served = Served(paths, kind, 3, setup_for(3), **options)
        served.may_lack = True
        return served

    return made


def cut_trees(paths: dict[str, Path], folder: Path) -> Drafted:
    drafter = ngram_config(7, 3, tile_spec_cache=folder)
    return ServedNgrams(paths["target"], drafter, setup_for(7), DEAR_ROWS)


KINDS: dict[str, tuple[int, Made]] = {
    "chains of a head": (3, head(EAGLE, chunked_prefill_size=6)),
    "numbers of drafts that change": (3, head(EAGLE3, JUMPING, 16, retract_interval=3)),
    "a head that rests": (3, head(EAGLE3, RESTING)),
    "blocks of a head that rests": (3, head(DFLASH, RESTING, chunked_prefill_size=6)),
    "trees of a head": (6, trees),
    "a draft model": (3, head(STANDALONE, chunked_prefill_size=6)),
    "a draft model that rests": (3, head(STANDALONE, RESTING, 16)),
    "chains of n-grams": (5, ngrams(5, 1, "matched")),
    "trees of n-grams": (5, ngrams(5, 2, "fixed")),
    "cut chains": (3, cut_chains(EAGLE)),
    "cut blocks": (3, cut_chains(DFLASH)),
    "cut chains of a draft model": (3, cut_chains(STANDALONE)),
    "cut trees": (7, cut_trees),
}


@pytest.mark.parametrize("name", KINDS)
def test_each_request_gets_what_it_chose_and_the_right_tokens(
    paths: dict[str, Path], tmp_path: Path, name: str
) -> None:
    right, budgets = right_tokens(paths["target"]), RandomBudgets(0)
    most, made = KINDS[name]
    with jumping_tiers(), budgets.chosen():
        harness: Any = made(paths, tmp_path)
        checks = ChoiceChecks(harness, most)
        harness.listeners.append(checks)
        for runner in harness.group.runners[1:]:
            checks.watch_model(runner.checks)
        if isinstance(harness.drafter, NgramDrafter):
            checks.watch_search(harness.drafter._ops)
        choose_in_turn(harness)
        serve(harness, right)
    seen = checks.seen
    assert seen["mixed"] > 10, seen
    assert seen["looked at"] > 50, seen
    assert seen["confirmed of 0"] == 0, seen
    assert min(seen["confirmed of 1"], seen[f"confirmed of {most}"]) > 3, seen
    assert seen["steps of 0"] > 60, seen
    assert (seen["packed"] > 5) == name.startswith("cut"), seen


def passes_of(harness: Any, number: int) -> list[tuple[list[int], list[int]]]:
    """From now on, the passes of a runner: rows fed of each request, and their slots."""
    found = list[tuple[list[int], list[int]]]()
    runner = harness.group.runners[number]
    runner.checks.append(lambda batch: found.append((batch.q_lens, batch.slots.tolist())))
    return found


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "policy", "num_taps"),
    [(EAGLE, "fixed", 0), (EAGLE3, JUMPING, 3), (DFLASH, "fixed", 3), (STANDALONE, "fixed", 0)],
)
def test_where_all_take_none_steps_are_those_of_a_server_without_a_drafter(
    paths: dict[str, Path], kind: str, policy: str, num_taps: int
) -> None:
    """The same rows to the same slots, in as many steps. The drafter's model runs in none, and no
    operation is launched for it, but those of the target's layers that write what it reads."""
    right = right_tokens(paths["target"])
    setup = setup_for(3, page_size=16, chunked_prefill_size=40)
    plain = Served(paths, None, 0, setup, checks_kv=False)
    with jumping_tiers():
        served = Served(paths, kind, 3, setup, checks_kv=False, tier_policy=policy)
    served.may_lack = True
    expected, target, model = passes_of(plain, 0), passes_of(served, 0), passes_of(served, 1)
    needed, launched = launches_of_decodes(plain), launches_of_decodes(served)
    choose_in_turn(served, (OFF,))
    serve(plain, right)
    ids = serve(served, right)
    assert model == []
    assert target == expected
    taps = Counter({str(torch.ops.aten.add.out): num_taps})
    assert len(launched) > 20
    assert launched == [each + taps for each in needed]
    assert not any(served.outputs[each].accept_histogram for each in ids)
