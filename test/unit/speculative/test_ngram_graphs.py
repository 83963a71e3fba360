"""Rounds with drafts of n-grams as graphs, as a CPU can have them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafted_serving import Disturb, Drafted, abort, nothing, pause, prompts, serve
from eagle_models import write_models
from jumping_tier import JUMPING, jumping_tiers
from ngram_serving import learnt, ngram_config
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import NUM_STEPS, Served, copied, right_tokens, runners, setup_of, zero
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.worker import ScheduleBatch
from sglang.srt.workers.round_graphs import VerifiedStep
from tile_spec_rounds import FREE_ROWS, prices_of

torch.set_num_threads(1)
GREEDY = {"temperature": 0.0, "max_new_tokens": 40}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("ngram"))


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with recorded_graphs(), replayable_backends(), jumping_tiers():
        yield


@pytest.fixture(scope="module")
def right(paths: dict[str, Path]) -> list[list[int]]:
    with recorded_graphs(), replayable_backends():
        return right_tokens(paths)


def serving(
    paths: dict[str, Path],
    drafter: DrafterConfig,
    page_size: int = 1,
    prices: PriceTable | None = None,
) -> Served:
    setup = setup_of(page_size)
    group = runners(paths, drafter, setup)
    served = Served(Drafted(group, drafter, setup, prices=prices), group)
    zero(group)
    served.watch()
    return served


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("page_size", "policy", "breadth", "disturb", "options"),
    [
        (1, JUMPING, 1, abort, {}),
        (16, "fixed", 1, pause, {}),
        (1, "matched", 1, nothing, {"by_frequency": True, "corpus_budget": 2}),
        (16, JUMPING, 2, pause, {"by_frequency": True}),
        (1, "fixed", 3, abort, {"corpus_budget": 2}),
        (16, "matched", 3, nothing, {"min_breadth": 2, "by_frequency": True}),
        (1, "matched", 4, pause, {"min_breadth": 2, "corpus_budget": 1}),
    ],
)
def test_tokens(
    paths: dict[str, Path],
    right: list[list[int]],
    page_size: int,
    policy: str,
    breadth: int,
    disturb: Disturb,
    options: dict[str, Any],
) -> None:
    """`options` are of `ngram_config`; some have half of the answers as a corpus."""
    prices = prices_of((1, 1024), (1.0, 40.0)) if policy == "matched" else None
    corpus = right[::2] if options else None
    drafter = ngram_config(NUM_STEPS, breadth, tier_policy=policy, corpus=corpus, **options)
    served = serving(paths, drafter, page_size, prices)
    served.may_lack = "corpus_budget" in options
    serve(served.harness, right, disturb)
    assert served.seen["right"] > 10
    assert served.seen["wrong"] > 10
    sizes = {count for count, _ in served.rounds}
    assert sizes - {1, 2, 4, 8}, "Some have padding."
    drafts = {count for _, count in served.rounds}
    assert drafts == {NUM_STEPS} if policy == "fixed" else len(drafts) > 1


@pytest.mark.long_matrix
def test_graphs_find_texts_that_ended_after_their_capture(paths: dict[str, Path]) -> None:
    served = serving(paths, ngram_config(NUM_STEPS, longest=12))
    harness, found = served.harness, []
    for _ in range(2):
        before, num_rounds = served.seen["right"], len(served.rounds)
        [tokens] = harness.generate([prompts()[4]], **GREEDY)
        found.append((served.seen["right"] - before, tokens))
        assert len(served.rounds) - num_rounds > 5
    assert found[0][1] == found[1][1]
    assert found[1][0] > found[0][0]
    assert found[1][0] >= 40 * NUM_STEPS // (1 + NUM_STEPS) - NUM_STEPS


@pytest.mark.long_matrix
@pytest.mark.parametrize("breadth", [1, 3])
def test_graphs_feed_as_many_drafts_of_the_corpus_as_its_budget(
    paths: dict[str, Path], right: list[list[int]], breadth: int
) -> None:
    drafter = ngram_config(NUM_STEPS, breadth, corpus=right, corpus_budget=1)
    served = serving(paths, drafter)
    served.unwatch()  # it checks that all are fed
    verify, fed = served.graphs.verify, Counter[int]()

    def noted(batch: ScheduleBatch, plan: StepPlan) -> VerifiedStep | None:
        taken = verify(batch, plan)
        if taken is None:
            return None
        if taken.accepted.num_drafts is not None:
            fed.update(taken.accepted.num_drafts.tolist())
        return copied(taken)

    vars(served.graphs)["verify"] = noted
    serve(served.harness, right)
    assert set(fed) == {1, NUM_STEPS}
    assert min(fed.values()) > 10, fed


@pytest.mark.long_matrix
def test_without_drafts_rounds_search_nothing(paths: dict[str, Path]) -> None:
    served = serving(paths, ngram_config(1, tier_policy=JUMPING))
    graphs = {kind.num_drafts: each[1].graph for kind, each in served.graphs._proposals.items()}
    assert not graphs[0].calls
    assert len(graphs[1].calls) > 50


@pytest.mark.long_matrix
def test_confidences_are_learnt_in_graphs(
    paths: dict[str, Path], right: list[list[int]], tmp_path: Path
) -> None:
    """Checks that graphs learn what a step piece by piece does, from as many drafts; padding
    teaches nothing."""
    drafter = ngram_config(NUM_STEPS, tile_spec_cache=tmp_path)
    served = serving(paths, drafter, prices=FREE_ROWS)
    serve(served.harness, right)
    assert served.seen["right"] <= learnt(served.harness).right.sum() < 512
    assert len(served.rounds) > 10
