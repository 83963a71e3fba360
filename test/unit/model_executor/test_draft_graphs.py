"""Graphs of draft heads: of their steps behind the target's, and of all draft steps at once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draft_heads import DFLASH, EAGLE, EAGLE3, P_EAGLE
from head_rounds import (
    HIDDEN_SIZE,
    MAX_REQUESTS,
    MAX_ROWS,
    NUM_STEPS,
    WRITERS,
    Rounds,
    make_head,
)
from recorded_graphs import RecordedGraph, recorded_graphs, replayable_backends
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import DECODE, DRAFT_STEPS, MIXED, RAGGED, ForwardBatch
from sglang.srt.model_executor.graph_keys import GraphKeys, kind_of
from sglang.srt.model_executor.model_runner import ModelRunner
from utils import make_random_llama

BOTH = pytest.mark.parametrize("kind", [EAGLE, EAGLE3, P_EAGLE])
WIDTHS = {EAGLE: HIDDEN_SIZE, EAGLE3: 3 * HIDDEN_SIZE, P_EAGLE: 3 * HIDDEN_SIZE}
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`target`, and a head by the name of each kind."""
    folder = tmp_path_factory.mktemp("models")
    make_random_llama(folder / "target", num_hidden_layers=8, tie_word_embeddings=False)
    for kind, write in WRITERS.items():
        write(folder / kind)
    return folder


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with recorded_graphs(), replayable_backends():
        yield


@cache
def head(
    folders: Path, kind: str, backend: str = "ragged", page_size: int = 1, graphs: bool = True
) -> ModelRunner:
    changes: dict[str, Any] = {"max_graph_width": MAX_ROWS if graphs else 0}
    return make_head(
        *(folders / "target", folders / kind, kind, page_size),
        **{"device": "cpu", "dtype": "float32", "attention_backend": backend, **changes},
    )


def rounds(folders: Path, kind: str, backend: str = "ragged", page_size: int = 1) -> Rounds:
    graphs, eager = (head(folders, kind, backend, page_size, flag) for flag in (True, False))
    for runner in (graphs, eager):
        runner.kv_pool.kv[0].zero_()
    # Where there are no graphs of prompts, chunks are as short as rows to verify.
    return Rounds(graphs, eager, TOLERANCE, max_prompt=MAX_ROWS if backend == "uniform" else 7)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "backend", "page_size"),
    [
        (EAGLE, "ragged", 1),
        (EAGLE3, "ragged", 16),
        (EAGLE, "uniform", 16),
        (EAGLE3, "uniform", 1),
        (P_EAGLE, "ragged", 16),
        (P_EAGLE, "uniform", 1),
        (DFLASH, "ragged", 16),
    ],
)
def test_rounds_with_graphs_equal_rounds_without(
    folders: Path, kind: str, backend: str, page_size: int
) -> None:
    """Prompts in chunks, draft steps and rows to verify, with padding and without; inputs and
    results are overwritten before each replay."""
    pair = rounds(folders, kind, backend, page_size)
    for num_reqs in (1, 3, 8):
        pair.run(num_reqs)
    num_drafts = 2 * sum(NUM_STEPS) * (1 + 3 + 8)
    assert pair.seen == {"drafts": num_drafts, "near-ties": 0, "rows": pair.seen["rows"]}


@pytest.mark.long_matrix
@BOTH
def test_a_replay_gives_the_bits_of_the_same_pass_with_its_padding(
    folders: Path, kind: str
) -> None:
    pair = rounds(folders, kind)
    for num_reqs, size in ((1, 1), (3, 4), (8, 8), (9, 9)):
        rows, before = list(range(num_reqs)), [2 * row + 1 for row in range(num_reqs)]
        for runner in (pair.graphs, pair.eager):
            generator = torch.Generator().manual_seed(num_reqs)
            runner.kv_pool.kv[0].normal_(generator=generator)
        hidden = torch.randn(num_reqs, HIDDEN_SIZE, generator=torch.Generator().manual_seed(1))
        first, found = pair.draft(rows, before, hidden, 3)
        padded = with_padding(first, size - num_reqs)
        pair.eager.kv_pool.kv[0].normal_(generator=torch.Generator().manual_seed(num_reqs))
        right = pair.eager.draft(padded, 3)
        for mine, his in zip(found[:2], right[:2], strict=True):
            assert torch.equal(mine, his[:num_reqs])
        assert not right.slots[:, num_reqs:].any()


def with_padding(first: ForwardBatch, count: int) -> ForwardBatch:
    """`count` more requests that write their one row to the dummy slot."""

    def pad(values: torch.Tensor) -> torch.Tensor:
        return torch.cat((values, values.new_zeros(count, *values.shape[1:])))

    assert first.hidden is not None
    return replace(
        first,
        input_ids=pad(first.input_ids),
        positions=pad(first.positions),
        slots=pad(first.slots),
        rows=pad(first.rows),
        q_lens=[1] * (len(first.q_lens) + count),
        kv_lens=torch.cat((first.kv_lens, torch.ones(count, dtype=torch.int64))),
        kv_len_upper_bounds=first.kv_len_upper_bounds + [1] * count,
        hidden=pad(first.hidden),
    )


# --- which graphs there are ----------------------------------------------------------------------


@pytest.mark.long_matrix
@BOTH
def test_every_graph_of_a_head_can_be_reached(folders: Path, kind: str) -> None:
    """None of single draft steps where one graph has all of them, unless it has the width of the
    target's steps."""
    runner, tap_width = head(folders, kind), WIDTHS[kind]
    keys, drafts = runner.graph_keys, runner.draft_graph_keys
    assert keys is not None
    assert {key.tag for key in keys.all} == {DECODE, RAGGED, MIXED}
    assert {key.hidden_width for key in keys.all} == {tap_width}
    assert all(key.skips_unread_rows == (key.tag != DECODE) for key in keys.all)
    assert set(drafts) == set(NUM_STEPS)
    for num_steps, each in drafts.items():
        assert [key.num_reqs for key in each.all] == [1, 2, 4, 8, MAX_REQUESTS]
        assert {(key.tag, key.num_steps) for key in each.all} == {(DRAFT_STEPS, num_steps)}
        assert {key.hidden_width for key in each.all} == {HIDDEN_SIZE}
    every = [*keys.all, *(key for each in drafts.values() for key in each.all)]
    assert len(set(every)) == len(every) == runner.num_graphs


@pytest.mark.long_matrix
@BOTH
def test_a_backend_that_plans_on_the_host_has_graphs_of_single_draft_steps(
    folders: Path, kind: str
) -> None:
    runner = head(folders, kind, "uniform")
    assert runner.graph_keys is not None
    assert runner.draft_graph_keys == {}
    decodes = {key.hidden_width for key in runner.graph_keys.all if key.tag == DECODE}
    assert decodes == {HIDDEN_SIZE, WIDTHS[kind]}
    several = {key.hidden_width for key in runner.graph_keys.all if key.tag != DECODE}
    assert several == {WIDTHS[kind]}


@pytest.mark.parametrize("support", [GraphSupport.RAGGED_Q, GraphSupport.UNIFORM_Q])
def test_steps_of_two_widths_never_share_a_graph(support: GraphSupport) -> None:
    keys = GraphKeys(support, 8, 5, 64, hidden_width=192, draft_hidden_width=64)
    for shape in ([1], [1] * 7):
        found = [keys.find_shape(len(shape), 1, len(shape), hidden_width=w) for w in (64, 192)]
        assert [key and key.hidden_width for key in found] == [64, 192]
        assert keys.find(shape) is None
    assert keys.find_shape(2, 3, 5, hidden_width=64) is None
    assert len({kind_of(key) for key in keys.all if key.tag == DECODE}) == 2


@pytest.mark.long_matrix
def test_a_head_whose_rows_are_all_read_replays_no_graph_that_skips_some(folders: Path) -> None:
    pair = rounds(folders, EAGLE)
    batch = pair._batch([0, 1], [0, 0], [3, 2])
    batch = replace(batch, hidden=torch.ones(5, HIDDEN_SIZE))
    assert not pair.graphs.forward(batch).used_graph
    read = replace(batch, read_index=torch.tensor([1, 4]))
    assert pair.graphs.forward(read).used_graph
    more = replace(batch, read_index=torch.arange(5))
    assert not pair.graphs.forward(more).used_graph


@pytest.mark.long_matrix
def test_a_number_of_draft_steps_without_graphs_runs_step_by_step(folders: Path) -> None:
    pair = rounds(folders, EAGLE3)
    assert 2 not in NUM_STEPS
    _, found = pair.draft([4, 2], [3, 5], torch.ones(2, HIDDEN_SIZE), 2)
    assert found.token_ids.shape == (2, 2)


@pytest.mark.long_matrix
def test_graphs_are_captured_anew_when_memory_comes_back(folders: Path) -> None:
    runner = make_head(
        *(folders / "target", folders / EAGLE3, EAGLE3, 1),
        device="cpu",
        dtype="float32",
        attention_backend="ragged",
        max_graph_width=MAX_ROWS,
    )
    num_graphs = runner.num_graphs
    runner.memory.release()
    runner.memory.restore()
    runner.capture_graphs()
    assert runner.num_graphs == num_graphs > 0
    Rounds(runner, head(folders, EAGLE3, graphs=False), TOLERANCE).run(3)


# --- what the host does --------------------------------------------------------------------------


class _Calls(TorchDispatchMode):
    """Counts operations, which on a GPU are a launch each."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_what_the_host_launches_does_not_grow_with_the_number_of_steps(folders: Path) -> None:
    pair = rounds(folders, EAGLE3)
    first = pair._batch([0, 1, 2], [3, 4, 5], [1, 1, 1])
    first = replace(first, hidden=torch.ones(3, HIDDEN_SIZE))
    launched: dict[str, list[int]] = {}
    with mock.patch.object(RecordedGraph, "replay") as replay:
        for name, runner in (("graphs", pair.graphs), ("eager", pair.eager)):
            for num_steps in NUM_STEPS:
                with _Calls() as calls:
                    runner.draft(first, num_steps)
                launched.setdefault(name, []).append(calls.count)
    assert replay.call_count == len(NUM_STEPS)
    assert launched["graphs"][0] == launched["graphs"][1]
    assert launched["eager"][1] > 2 * launched["eager"][0]
    assert launched["graphs"][1] < launched["eager"][1] / 4


def test_checks_see_each_step_of_a_graph(folders: Path) -> None:
    """As the KV canary does: the tokens that each step was fed, and where it wrote."""
    pair = rounds(folders, EAGLE)
    seen: list[list[ForwardBatch]] = []
    hidden = torch.ones(2, HIDDEN_SIZE)
    for runner in (pair.graphs, pair.eager):
        seen.append([])
        runner.checks.append(seen[-1].append)
    try:
        pair.draft([5, 0], [7, 2], hidden, 3)
    finally:
        for runner in (pair.graphs, pair.eager):
            runner.checks.clear()
    mine, his = seen
    assert len(mine) == len(his) == 3
    for left, right in zip(mine, his, strict=True):
        for name in ("input_ids", "positions", "slots", "rows", "kv_lens"):
            assert torch.equal(getattr(left, name), getattr(right, name)), name
        assert left.kv_len_upper_bounds == right.kv_len_upper_bounds
        assert left.q_lens == right.q_lens == [1, 1]
