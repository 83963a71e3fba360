"""Graphs, as a CPU can have them (`support/recorded_graphs.py`), give what the same step gives
without one: hidden states, taps, trees, and whatever else a callable computes."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from random_steps import random_step
from recorded_graphs import ReplayableAttention, recorded_graphs, replayable_backends
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.step.torch_step_ops import TorchStepOps
from utils import Setup, make_random_model, make_runner

CONTEXT, WIDTH, MAX_ROWS = 60, 7, 64
SETUP = Setup(num_pages=1000, max_running_requests=5)
CAPTURES = {
    "plain": NO_CAPTURE,
    "taps": HiddenCapture((0, 2)),
    "all rows": HiddenCapture(all_rows=True),
    "taps and all rows": HiddenCapture((1,), all_rows=True),
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return make_random_model("llama", folder, num_hidden_layers=3)


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with recorded_graphs(), replayable_backends():
        yield


def make(
    path: Path, backend: str, width: int, capture: HiddenCapture = NO_CAPTURE, trees: bool = False
) -> ModelRunner:
    """A runner over KV that is random, of which every request has some; width 0: no graphs."""
    runner = make_runner(
        path,
        SETUP,
        CONTEXT,
        WIDTH,
        device="cpu",
        attention_backend=backend,
        dtype="float32",
        max_graph_width=width,
        max_graph_rows=MAX_ROWS,
        capture=capture,
        captures_trees=trees,
    )
    table = runner.req_to_token_pool.req_to_token
    table.copy_(1 + torch.arange(table.numel()).view_as(table))
    for kv in runner.kv_pool.kv:
        kv.normal_(generator=torch.Generator().manual_seed(0))
    return runner


def step(runner: ModelRunner, q_lens: list[int], seed: int) -> ForwardBatch:
    return random_step(runner, q_lens, seed, CONTEXT)


def shapes(keys: GraphKeys, seed: int, has_tree: bool = False) -> dict[GraphKey, list[int]]:
    """A step for each graph that random ones find, not the largest where that can be."""
    chooser = random.Random(seed)
    found: dict[GraphKey, list[int]] = {}
    for _ in range(600):
        widest = chooser.choice([1, 2, WIDTH, 30])
        shape = [chooser.randint(1, widest) for _ in range(chooser.randint(1, 5))]
        key = keys.find(shape, has_tree)
        if key is not None and (key not in found or sum(found[key]) == key.num_tokens):
            found[key] = shape
    return found


@cache
def eager(path: Path, capture: HiddenCapture) -> ModelRunner:
    return make(path, "torch_native", 0, capture)


def assert_same(
    graphs: ModelRunner, path: Path, batch: ForwardBatch, capture: HiddenCapture = NO_CAPTURE
) -> None:
    plain = eager(path, capture)
    for kv, other in zip(plain.kv_pool.kv, graphs.kv_pool.kv, strict=True):
        kv.copy_(other)
    right, replayed = plain.forward(batch), graphs.forward(batch)
    assert replayed.used_graph
    assert not right.used_graph
    torch.testing.assert_close(replayed.hidden, right.hidden, rtol=1e-4, atol=1e-4)
    assert (replayed.taps is None) == (right.taps is None) == (not capture.layers)
    if replayed.taps is not None and right.taps is not None:
        fed = slice(None if batch.q_starts is None else int(batch.q_starts[-1]))
        torch.testing.assert_close(replayed.taps[fed], right.taps[fed], rtol=1e-4, atol=1e-4)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", CAPTURES)
@pytest.mark.parametrize(("backend", "width"), [("ragged", 1), ("ragged", WIDTH), ("uniform", 7)])
def test_graphs_give_what_is_asked_for(path: Path, backend: str, width: int, name: str) -> None:
    capture = CAPTURES[name]
    graphs = make(path, backend, width, capture)
    assert graphs.graph_keys is not None
    found = shapes(graphs.graph_keys, width)
    assert {key.tag for key in found} == {key.tag for key in graphs.graph_keys.all}
    assert any(sum(shape) < key.num_tokens for key, shape in found.items())
    for seed, (key, shape) in enumerate(found.items()):
        assert key.computes_all_rows == capture.all_rows
        batch = step(graphs, shape, seed)
        ends = torch.tensor(shape).cumsum(0) - 1
        if not key.skips_unread_rows:
            assert_same(graphs, path, batch, capture)
        assert_same(graphs, path, replace(batch, read_index=ends[seed % 2 :]), capture)


@pytest.mark.long_matrix
def test_where_all_rows_are_asked_for_no_graph_skips_any(path: Path) -> None:
    """So every step of prompts without look-ahead finds a graph, whatever is read."""
    batch = step(eager(path, NO_CAPTURE), [30, 1, 2], 0)
    assert not make(path, "ragged", 1).forward(batch).used_graph
    runner = make(path, "ragged", 1, HiddenCapture(all_rows=True))
    result = runner.forward(replace(batch, read_index=torch.tensor([29])))
    assert result.used_graph
    assert len(result.hidden) == 33


@pytest.mark.long_matrix
@pytest.mark.parametrize("backend", ["ragged", "uniform"])
def test_trees_replay_graphs_that_were_captured_for_them(path: Path, backend: str) -> None:
    graphs = make(path, backend, WIDTH, HiddenCapture((1,)), trees=True)
    assert graphs.graph_keys is not None
    found = shapes(graphs.graph_keys, 0, has_tree=True)
    assert len(found) > 5
    for seed, (key, shape) in enumerate(found.items()):
        assert key.has_tree
        batch = step(graphs, shape, seed)
        ancestors = masks_of_trees(shape, random.Random(seed))
        assert_same(
            graphs, path, replace(batch, ancestors=torch.tensor(ancestors)), HiddenCapture((1,))
        )
        assert_same(graphs, path, with_earlier_trees(graphs, shape, seed), HiddenCapture((1,)))
        assert_same(graphs, path, batch, HiddenCapture((1,)))


def packed(batch: ForwardBatch, fed: list[int], padding: int) -> ForwardBatch:
    """The step, with its first rows alone: of each request so many, of which the host knows only
    that they are not more than before. Padding follows."""
    starts = [0, *accumulate(batch.q_lens)]
    kept = [start + row for start, q_len in zip(starts, fed, strict=False) for row in range(q_len)]

    def cut(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values[kept], (0, padding))

    lacking = torch.tensor(batch.q_lens) - torch.tensor(fed)
    return replace(
        batch,
        input_ids=cut(batch.input_ids),
        positions=cut(batch.positions),
        slots=cut(batch.slots),
        ancestors=None if batch.ancestors is None else cut(batch.ancestors),
        kv_lens=batch.kv_lens - lacking,
        bounds_are_exact=False,
        q_starts=torch.tensor([0, *accumulate(fed)]),
    )


def some_rows(shape: list[int], chooser: random.Random) -> list[int]:
    """A prompt feeds all of its rows, any other request so many or fewer, maybe none."""
    return [q_len if q_len > WIDTH else chooser.randint(0, q_len) for q_len in shape]


def masks_of_trees(shape: list[int], chooser: random.Random, num_earlier: int = 0) -> list[int]:
    """Ancestors of rows whose parents are drawn among the rows of their request and as many before
    them; a prompt has no tree."""
    ancestors = []
    for q_len in shape:
        seen: list[int] = []
        for entry in range(num_earlier + q_len):
            seen.append((chooser.choice(seen) if seen else 0) | 1 << entry)
        ancestors += seen[num_earlier:] if q_len <= WIDTH else [-1] * q_len
    return ancestors


def with_earlier_trees(runner: ModelRunner, shape: list[int], seed: int) -> ForwardBatch:
    """A step whose trees begin among the KV from before it, as far as there is any."""
    batch = step(runner, shape, seed)
    before = batch.kv_lens - torch.tensor(shape)
    num_earlier = min(3, int(before.min()))
    ancestors = masks_of_trees(shape, random.Random(seed), num_earlier)
    return replace(batch, ancestors=torch.tensor(ancestors), tree_starts=before - num_earlier)


@pytest.mark.long_matrix
@pytest.mark.parametrize("trees", [False, True])
def test_packed_steps_replay_the_graphs_of_look_ahead(path: Path, trees: bool) -> None:
    """Checks steps of more bounds than a graph has rows, too; steps whose numbers of rows the host
    knows replay the same graphs before and after them."""
    capture = HiddenCapture((1,))
    graphs = make(path, "ragged", WIDTH, capture, trees)
    assert graphs.graph_keys is not None
    replayed: set[GraphKey] = set()
    for seed in range(60):
        chooser = random.Random(seed)
        prompts = [30] * (seed % 4 == 0)
        shape = [
            *prompts,
            *(chooser.choice([1, 3, WIDTH]) for _ in range(chooser.randint(0, 3))),
            2,
        ]
        fed = some_rows(shape, chooser)
        whole = (with_earlier_trees if trees else step)(graphs, shape, seed)
        batch = packed(whole, fed, padding=min(MAX_ROWS - sum(fed), chooser.randint(0, 2)))
        num_rows = len(batch.input_ids)
        if num_rows == 0:
            continue
        key = graphs.graph_keys.find_shape(len(shape), max(shape), num_rows, trees, is_packed=True)
        assert key is not None
        replayed.add(key)
        for each in (batch, whole, batch):
            num_read = sum(shape if each is whole else fed)
            assert_same(
                graphs, path, replace(each, read_index=torch.arange(num_read).flip(0)), capture
            )
    assert {key.tag for key in replayed} == {"ragged", "mixed"}
    assert len(replayed) >= 5


def test_without_being_asked_no_graph_is_for_trees(path: Path) -> None:
    graphs = make(path, "ragged", WIDTH)
    assert graphs.graph_keys is not None
    assert not any(key.has_tree for key in graphs.graph_keys.all)
    batch = step(graphs, [3, 2], 0)
    assert not graphs.forward(replace(batch, ancestors=torch.full((5,), -1))).used_graph


def test_a_backend_without_masks_for_trees_has_no_graphs_for_them(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without = replace(ReplayableAttention.capabilities(), captures_trees=False)
    monkeypatch.setattr(ReplayableAttention, "capabilities", lambda: without)
    graphs = make(path, "ragged", WIDTH, trees=True)
    assert graphs.graph_keys is not None
    assert not any(key.has_tree for key in graphs.graph_keys.all)


class Computed(NamedTuple):
    doubled: torch.Tensor
    missing: None
    share: torch.Tensor
    lens: torch.Tensor


@pytest.mark.parametrize("support", [GraphSupport.RAGGED_Q, GraphSupport.UNIFORM_Q])
def test_a_graph_captures_any_callable(path: Path, support: GraphSupport) -> None:
    def compute(batch: ForwardBatch) -> Computed:
        ids, lens = batch.input_ids, batch.kv_lens
        return Computed(ids * 2, None, ids[:, None] / batch.positions[:, None], lens + 1)

    keys = GraphKeys(support, 5, WIDTH)
    ops = TorchStepOps(torch.device("cpu"))
    runner = CudaGraphRunner(lambda _: None, compute, ops, keys, CONTEXT, "cpu", poisons=True)
    runner.capture()
    for seed, (key, shape) in enumerate(shapes(keys, 0).items()):
        batch = step(eager(path, NO_CAPTURE), shape, seed)
        assert runner.key_of(batch) == key
        replay = runner.run(key, batch)
        num_tokens, right = sum(shape), compute(batch)
        assert replay.results.missing is None
        assert torch.equal(replay.rows(replay.results.doubled, num_tokens), right.doubled)
        torch.testing.assert_close(
            replay.rows(replay.results.share, num_tokens), right.share, equal_nan=True
        )
        if replay.places is None:
            assert torch.equal(replay.results.lens[: len(shape)], right.lens)


def test_the_log_says_what_each_kind_of_graphs_took(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    runner = make(path, "ragged", WIDTH, trees=True)
    assert runner.graph_keys is not None
    kinds: dict[str, int] = {}
    for key in runner.graph_keys.all:
        kind = f"{key.tag}, trees" if key.has_tree else key.tag
        kinds[kind] = kinds.get(kind, 0) + 1
    assert set(kinds) == {"decode", "ragged", "mixed", "ragged, trees", "mixed, trees"}
    text = "\n".join(record.getMessage() for record in caplog.records)
    for kind, count in kinds.items():
        assert text.count(f"CUDA graphs of kind {kind}: {count}, ") == 1
        assert f"s, {count} MiB." in text  # a graph takes 1 MiB of the fake GPU
    assert f"Captured {sum(kinds.values())} CUDA graphs for up to 5 requests" in text


@pytest.mark.long_matrix
def test_cheaper_graphs_are_preferred_also_once_they_are_captured_anew(path: Path) -> None:
    runner = make(path, "ragged", WIDTH)
    keys = runner.graph_keys
    assert keys is not None
    small = keys.find([3, 3])
    larger = [key for key in keys.all if key.tag == "ragged" and key.num_tokens > 16]
    assert small is not None
    runner.prefer_cheaper_graphs({small: 2.0, larger[0]: 1.0})
    assert keys.find([3, 3]) != small
    runner.capture_graphs()
    assert runner.graph_keys is not keys
    assert runner.graph_keys is not None
    assert runner.graph_keys.find([3, 3]) == keys.find([3, 3])
