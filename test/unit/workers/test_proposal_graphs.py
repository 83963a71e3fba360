"""Proposals that are graphs, behind steps that run piece by piece: prompts, log-probabilities."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import params_of, prompts
from eagle_models import STANDALONE, write_models
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import NUM_STEPS, Served, serving, setup_of, submit_all
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.workers.round_graphs import RoundGraphs

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with recorded_graphs(), replayable_backends():
        yield


def histograms(served: Served) -> list[list[int]]:
    """Of each request, how many of its steps confirmed 0, 1, ... drafts."""
    ids = submit_all(served, logprobs=LogprobOptions(start_len=-1))
    assert not served.rounds, "Verification is no graph."
    return [list(served.harness.outputs[each].accept_histogram) for each in ids]


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3, STANDALONE])
def test_they_propose_what_pieces_would(paths: dict[str, Path], kind: str) -> None:
    """Tokens would be right with any drafts, so it is counted how many are."""
    setup = setup_of(use_radix_cache=False)
    by_graph = serving(paths, kind, setup)
    found = histograms(by_graph)
    assert len(by_graph.proposals) > 3
    with mock.patch.object(RoundGraphs, "_capture_proposals", return_value=None):
        by_pieces = serving(paths, kind, setup)
    right = histograms(by_pieces)
    assert not by_pieces.proposals
    assert found == right
    assert sum(map(sum, right)) > 10


@pytest.mark.parametrize("kind", [EAGLE3, STANDALONE])
def test_they_are_replayed_behind_prompts(paths: dict[str, Path], kind: str) -> None:
    served = serving(paths, kind)
    for _ in range(3):
        served.harness.submit(prompts()[0], **params_of(0))
    served.harness.step()
    assert served.num_pieces == 1
    assert served.proposals[:1] == [(3, NUM_STEPS)]
    assert not served.num_eager_proposals
