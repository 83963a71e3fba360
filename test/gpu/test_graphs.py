"""Every captured graph gives what the same step gives without one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from random_steps import random_step
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import MIXED, ForwardBatch, GraphKey
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.model_config import resolve_model_path
from sglang.srt.model_executor.graph_keys import GraphKeys
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.processes.runtime_config import MAX_GRAPH_ROWS
from sglang.srt.registry import ATTENTION_BACKENDS
from utils import MTP_MAX_ROWS, Setup, make_runner

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEMO = Path(resolve_model_path("demo"))
SETUP = Setup(num_pages=20_000, max_running_requests=40, page_size=1)
CONTEXT = 400
MAX_PROMPT = 200
MAX_ERROR = 0.01  # of the norm, in float16
BACKENDS = [
    name
    for name in ATTENTION_BACKENDS.names
    if ATTENTION_BACKENDS.load(name).capabilities().graph is not GraphSupport.NEVER
]


def make(
    backend: str, width: int, max_decode_rows: int = MTP_MAX_ROWS, **changes: Any
) -> ModelRunner:
    runner = make_runner(
        DEMO,
        SETUP,
        CONTEXT,
        max_decode_rows,
        device="cuda",
        attention_backend=backend,
        dtype="float16",
        max_graph_width=width,
        **changes,
    )
    table = runner.req_to_token_pool.req_to_token
    slots = 1 + torch.arange(table.numel(), device="cuda", dtype=torch.int32)
    table.copy_(slots.view_as(table))
    generator = torch.Generator("cuda").manual_seed(0)
    for kv in runner.kv_pool.kv:
        kv.normal_(generator=generator)
    return runner


def step(runner: ModelRunner, q_lens: list[int], seed: int) -> ForwardBatch:
    return random_step(runner, q_lens, seed, CONTEXT)


def shapes_of(key: GraphKey, keys: GraphKeys, seed: int) -> list[list[int]]:
    """Steps that replay exactly this key: the largest, and a random smaller one if there is any."""
    chooser = random.Random(seed)
    share, rest = divmod(key.num_tokens, key.num_reqs)
    shapes = [[share + (index < rest) for index in range(key.num_reqs)]]
    for _ in range(200):
        num_reqs = chooser.randint(1, key.num_reqs)
        widest = [key.width] if key.tag != MIXED else [1, key.width, MAX_PROMPT]
        shape = [chooser.randint(1, chooser.choice(widest)) for _ in range(num_reqs)]
        if keys.find(shape) == key and shape != shapes[0]:
            return [*shapes, shape]
    return shapes


def last_rows(q_lens: list[int], chooser: random.Random) -> torch.Tensor:
    """Chooses the last rows of some of the requests, maybe of none."""
    ends = itertools.accumulate(q_lens)
    return torch.tensor([end - 1 for end in ends if chooser.random() < 0.7], device="cuda").long()


@pytest.mark.parametrize("width", [1, MTP_MAX_ROWS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_graph_equals_eager_for_every_key(backend: str, width: int) -> None:
    graphs, eager = make(backend, width, width), make(backend, 0, width)
    support = ATTENTION_BACKENDS.load(backend).capabilities().graph
    keys = GraphKeys(support, SETUP.max_running_requests, width, MAX_GRAPH_ROWS)
    assert len(keys.all) > 5
    num_padded = 0
    for seed, key in enumerate(keys.all):
        for shape in shapes_of(key, keys, seed):
            num_padded += sum(shape) < key.num_tokens
            batch = step(graphs, shape, seed)
            if key.skips_unread_rows or seed % 3 == 0:
                wanted = last_rows(shape, random.Random(seed))
                batch = replace(batch, read_index=wanted)
            replayed = graphs.forward(batch)
            assert replayed.used_graph, (key, shape)
            right = eager.forward(batch)
            assert not right.used_graph
            assert replayed.hidden.shape == right.hidden.shape
            error = (replayed.hidden.float() - right.hidden.float()).norm()
            assert error <= MAX_ERROR * right.hidden.float().norm(), (key, shape, error)
    assert num_padded > 4


@pytest.mark.parametrize("num_decodes", [3, 30])
def test_every_row_of_decodes_and_lookahead_beside_prompts_equals_eager(num_decodes: int) -> None:
    """Each row for itself: a norm over all would hide the few rows of a group of work items."""
    graphs, eager = make("triton", MTP_MAX_ROWS), make("triton", 0)
    q_lens = [*[1] * num_decodes, MTP_MAX_ROWS, 60, 2, 9, MTP_MAX_ROWS + 1]
    assert graphs.graph_keys is not None
    key = graphs.graph_keys.find(q_lens)
    assert key is not None
    assert key.tag == MIXED
    for seed in range(3):
        random.Random(seed).shuffle(q_lens)
        batch = step(graphs, q_lens, seed)
        replayed = graphs.forward(batch)
        assert replayed.used_graph
        right = eager.forward(batch).hidden.float()
        errors = (replayed.hidden.float() - right).norm(dim=1) / right.norm(dim=1)
        assert errors.max().item() <= 0.1, (seed, errors)  # left out, a row would be off by 1


def test_a_step_whose_rows_are_all_wanted_replays_no_graph_that_leaves_some() -> None:
    runner = make("triton", 1, 1)
    batch = step(runner, [1, 30, 2], 0)
    everything = runner.forward(batch)
    assert not everything.used_graph
    right = everything.hidden.clone()
    wanted = torch.tensor([0, 32], device="cuda")
    replayed = runner.forward(replace(batch, read_index=wanted))
    assert replayed.used_graph
    error = (replayed.hidden.float() - right[wanted].float()).norm()
    assert error <= MAX_ERROR * right[wanted].float().norm()


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_steps_run_eagerly_without_wide_graphs(backend: str) -> None:
    runner = make(backend, 1)
    assert runner.forward(step(runner, [1, 1, 1], 0)).used_graph
    assert not runner.forward(step(runner, [2, 1], 0)).used_graph


@pytest.mark.parametrize("q_lens", [[1, 1, 1], [2, 1, MTP_MAX_ROWS]], ids=str)
def test_a_step_with_masks_for_trees_replays_no_graph(q_lens: list[int]) -> None:
    runner = make("triton", MTP_MAX_ROWS)
    batch = step(runner, q_lens, 0)
    replayed = runner.forward(batch)
    assert replayed.used_graph
    right = replayed.hidden.float().clone()
    masked = runner.forward(replace(batch, ancestors=torch.full_like(batch.positions, -1)))
    assert not masked.used_graph
    assert (masked.hidden.float() - right).norm() <= MAX_ERROR * right.norm()


@pytest.mark.parametrize("width", [1, MTP_MAX_ROWS])
@pytest.mark.parametrize("backend", BACKENDS)
def test_taps_and_all_rows_of_the_last_layer_come_out_of_graphs(backend: str, width: int) -> None:
    capture = HiddenCapture((0, 1), all_rows=True)
    graphs, eager = (make(backend, most, width, capture=capture) for most in (width, 0))
    assert graphs.graph_keys is not None
    for seed, q_lens in enumerate(([1] * 5, [min(2, width), 1, width], [30, 1, 60])):
        batch = step(graphs, q_lens, seed)
        batch = replace(batch, read_index=last_rows(q_lens, random.Random(seed)))
        replayed, right = graphs.forward(batch), eager.forward(batch)
        assert replayed.used_graph == (graphs.graph_keys.find(q_lens) is not None)
        assert replayed.taps is not None
        assert right.taps is not None
        for found, expected in ((replayed.hidden, right.hidden), (replayed.taps, right.taps)):
            assert found.shape == expected.shape
            assert len(found) == sum(q_lens)
            error = (found.float() - expected.float()).norm()
            assert error <= MAX_ERROR * expected.float().norm(), (q_lens, error)


def test_trees_replay_the_graphs_that_were_captured_for_them() -> None:
    graphs, eager = make("triton", MTP_MAX_ROWS, captures_trees=True), make("triton", 0)
    for seed, q_lens in enumerate(([7, 1, MTP_MAX_ROWS], [5] * 12, [3, 100, 1])):
        batch = step(graphs, q_lens, seed)
        chooser = random.Random(seed)
        ancestors: list[int] = []
        for q_len in q_lens:
            masks = [1]
            for row in range(1, q_len):
                masks.append(chooser.choice(masks) | 1 << row)
            ancestors += masks if q_len <= MTP_MAX_ROWS else [-1] * q_len
        batch = replace(batch, ancestors=torch.tensor(ancestors, device="cuda"))
        replayed, right = graphs.forward(batch), eager.forward(batch)
        assert replayed.used_graph
        error = (replayed.hidden.float() - right.hidden.float()).norm()
        assert error <= MAX_ERROR * right.hidden.float().norm(), (q_lens, error)


@pytest.mark.parametrize("trees", [False, True])
def test_packed_steps_replay_the_graphs_of_look_ahead(trees: bool) -> None:
    """Checks steps of more bounds than a graph has rows; steps of known numbers of rows replay the
    same graphs before and after them."""
    graphs = make("triton", MTP_MAX_ROWS, captures_trees=trees, poisons_graphs=True)
    eager = make("triton", 0)
    shapes = ([7, 1, MTP_MAX_ROWS], [MTP_MAX_ROWS] * 12, [MTP_MAX_ROWS] * 40, [100, 3, 9])
    for seed, q_lens in enumerate(shapes):
        chooser = random.Random(seed)
        whole = step(graphs, q_lens, seed)
        fed = [q_len if q_len == 100 else chooser.randint(0, min(4, q_len)) for q_len in q_lens]
        if trees:
            whole = replace(whole, **chains_of_drafts(whole, chooser))
        for batch in (packed(whole, fed), whole, packed(whole, fed)):
            wanted = torch.arange(sum(q_lens if batch is whole else fed), device="cuda")
            batch = replace(batch, read_index=wanted)
            replayed, right = graphs.forward(batch), eager.forward(batch)
            assert replayed.used_graph
            error = (replayed.hidden.float() - right.hidden.float()).norm()
            assert error <= MAX_ERROR * right.hidden.float().norm(), (q_lens, error)


def chains_of_drafts(batch: ForwardBatch, chooser: random.Random) -> dict[str, torch.Tensor]:
    """Masks of trees that began up to 9 positions before the step."""
    starts, ancestors = [], list[int]()
    for q_len, kv_len in zip(batch.q_lens, batch.kv_len_upper_bounds, strict=True):
        earlier = min(9, kv_len - q_len)
        masks = list[int]()
        for entry in range(earlier + q_len):
            masks.append((chooser.choice(masks) if masks else 0) | 1 << entry)
        starts.append(kv_len - q_len - earlier)
        ancestors += masks[earlier:] if q_len <= MTP_MAX_ROWS else [-1] * q_len
    return {
        "ancestors": torch.tensor(ancestors, device="cuda"),
        "tree_starts": torch.tensor(starts, device="cuda"),
    }


def packed(batch: ForwardBatch, fed: list[int]) -> ForwardBatch:
    """The step, with its first rows alone: of each request so many, of which the host knows only
    that they are not more than before. A row of padding follows."""
    starts = itertools.accumulate(batch.q_lens, initial=0)
    kept = [start + row for start, q_len in zip(starts, fed, strict=False) for row in range(q_len)]

    def cut(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(values[kept], (0, 1))

    lacking = torch.tensor(batch.q_lens, device="cuda") - torch.tensor(fed, device="cuda")
    return replace(
        batch,
        input_ids=cut(batch.input_ids),
        positions=cut(batch.positions),
        slots=cut(batch.slots),
        ancestors=None if batch.ancestors is None else cut(batch.ancestors),
        kv_lens=batch.kv_lens - lacking,
        bounds_are_exact=False,
        q_starts=torch.tensor([0, *itertools.accumulate(fed)], device="cuda"),
    )
