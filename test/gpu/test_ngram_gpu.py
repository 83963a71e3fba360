"""The search for n-grams on a CUDA GPU, and graphs of rounds that search: tokens are those of a
server without drafts, and nothing waits for the device."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark.replay import ERROR_RATE, ReplayDrafter
from drafted_serving import Disturb, Drafted, abort, launches_never_wait, nothing, pause, serve
from eagle_models import write_models
from jumping_tier import JUMPING, jumping_tiers
from ngram_ops_cases import CASES, difference
from ngram_serving import ngram_config
from round_serving import NUM_STEPS, On, Served, right_tokens, runners, setup_of, zero
from sglang.srt.speculative import ngram_worker
from tile_spec_rounds import prices_of

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

ON_GPU = On("cuda", "triton")


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("ngram"))


@pytest.fixture(autouse=True)
def with_policies() -> Iterator[None]:
    with jumping_tiers():
        yield


@cache
def right(target: Path) -> list[list[int]]:
    return right_tokens({"target": target}, ON_GPU)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ["torch", "triton"])
def test_the_search(name: str, case: str) -> None:
    assert difference(name, "cuda", CASES[case], num_rounds=30) == ""


def serving(
    paths: dict[str, Path], policy: str, breadth: int, page_size: int = 1, **options: Any
) -> Served:
    """`options` are of `ngram_config`."""
    drafter = ngram_config(NUM_STEPS, breadth, tier_policy=policy, **options)
    setup = setup_of(page_size)
    group = runners(paths, drafter, setup, ON_GPU)
    prices = prices_of((1, 1024), (1.0, 40.0)) if policy == "matched" else None
    served = Served(Drafted(group, drafter, setup, prices=prices), group)
    zero(group)
    return served


@pytest.mark.parametrize(
    ("policy", "breadth", "page_size", "disturb"),
    [
        ("fixed", 1, 1, nothing),
        (JUMPING, 1, 16, pause),
        ("matched", 1, 1, abort),
        ("fixed", 2, 16, nothing),
        (JUMPING, 3, 1, pause),
        ("matched", 3, 16, abort),
    ],
)
def test_tokens(
    paths: dict[str, Path], policy: str, breadth: int, page_size: int, disturb: Disturb
) -> None:
    served = serving(paths, policy, breadth, page_size)
    served.watch()
    serve(served.harness, right(paths["target"]), disturb)
    assert served.seen["right"] > 10
    assert served.seen["wrong"] > 10


@pytest.mark.parametrize("breadth", [1, 3])
def test_tokens_with_a_corpus_by_frequency(paths: dict[str, Path], breadth: int) -> None:
    known = right(paths["target"])
    options: dict[str, Any] = {"by_frequency": True, "corpus": known[::2], "corpus_budget": 2}
    served = serving(paths, "fixed", breadth, **options)
    serve(served.harness, known)


@pytest.mark.parametrize("breadth", [1, 3])
@pytest.mark.parametrize("by_frequency", [False, True])
@pytest.mark.parametrize("policy", ["fixed", "matched"])
def test_rounds_do_not_wait(
    paths: dict[str, Path], policy: str, breadth: int, by_frequency: bool
) -> None:
    """Neither in graphs nor while texts that have ended are kept."""
    options: dict[str, Any] = {
        "by_frequency": by_frequency,
        "corpus": [[1, 2, 3]],
        "corpus_budget": 2,
    }
    served = serving(paths, policy, breadth, **options)
    harness = served.harness
    serve(harness, right(paths["target"]))  # all is compiled
    with launches_never_wait(harness):
        serve(harness, right(paths["target"]))


def test_replay_in_graphs_does_not_wait(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drafter of benchmarks that stands in NGRAM's place."""
    monkeypatch.setattr(ngram_worker, "NgramDrafter", ReplayDrafter)
    monkeypatch.setenv(ERROR_RATE, "0.3")
    served = serving(paths, "fixed", 1)
    served.may_lack = True
    served.watch()
    serve(served.harness, right(paths["target"]))
    assert min(served.seen["right"], served.seen["wrong"]) > 10
    served.unwatch()
    with launches_never_wait(served.harness):
        serve(served.harness, right(paths["target"]))
