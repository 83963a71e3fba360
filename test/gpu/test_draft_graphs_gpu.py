"""Graphs of draft heads on a CUDA GPU: rounds with them equal rounds without."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from head_rounds import HIDDEN_SIZE, MAX_ROWS, NUM_STEPS, WRITERS, Rounds, make_head
from utils import make_random_llama

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

BOTH = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
TOLERANCES = {"float32": 2e-3, "bfloat16": 0.1}  # of the norm


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, and a head by the name of each kind."""
    folder = tmp_path_factory.mktemp("models")
    make_random_llama(folder / "target", num_hidden_layers=8, tie_word_embeddings=False)
    for kind, write in WRITERS.items():
        write(folder / kind)
    return folder


@cache
def rounds(folders: Path, kind: str, page_size: int = 1, dtype: str = "float32") -> Rounds:
    graphs, eager = (
        make_head(
            *(folders / "target", folders / kind, kind, page_size),
            device="cuda",
            attention_backend="triton",
            dtype=dtype,
            max_graph_width=width,
        )
        for width in (MAX_ROWS, 0)
    )
    return Rounds(graphs, eager, TOLERANCES[dtype])


@pytest.mark.parametrize("page_size", [1, 16])
@BOTH
def test_rounds_with_graphs_equal_rounds_without(folders: Path, kind: str, page_size: int) -> None:
    pair = rounds(folders, kind, page_size)
    assert set(pair.graphs.draft_graph_keys) == set(NUM_STEPS)
    pair.seen.clear()
    for num_reqs in (1, 3, 8):
        pair.run(num_reqs)
    assert pair.seen["drafts"] > 80
    assert pair.seen["near-ties"] < 5


@BOTH
def test_hidden_states_of_two_bytes_reach_a_graph(folders: Path, kind: str) -> None:
    pair = rounds(folders, kind, dtype="bfloat16")
    pair.extend([3, 0, 7], [0, 0, 0], [4, 1, 6], [0, 2])
    pair.extend([3, 0, 7], [4, 1, 6], [5, 5, 2], [0, 1, 2])


@BOTH
def test_the_host_waits_for_nothing(folders: Path, kind: str) -> None:
    pair = rounds(folders, kind)
    first = pair._batch([1, 2, 0], [3, 4, 5], [1, 1, 1])
    first = replace(first, hidden=torch.ones(3, HIDDEN_SIZE, device="cuda"))
    pair.graphs.draft(first, 3)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pair.graphs.draft(first, 3)
    finally:
        torch.cuda.set_sync_debug_mode("default")
