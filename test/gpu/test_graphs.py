"""Every captured graph gives what the same step gives without one."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import MIXED, ForwardBatch, GraphKey
from sglang.srt.model_config import resolve_model_path
from sglang.srt.model_executor.cuda_graph_runner import GraphKeys
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


def make(backend: str, width: int, max_decode_rows: int = MTP_MAX_ROWS) -> ModelRunner:
    runner = make_runner(
        DEMO,
        SETUP,
        CONTEXT,
        max_decode_rows,
        device="cuda",
        attention_backend=backend,
        dtype="float16",
        max_graph_width=width,
        poisons_graphs=True,
    )
    table = runner.req_to_token_pool.req_to_token
    slots = 1 + torch.arange(table.numel(), device="cuda", dtype=torch.int32)
    table.copy_(slots.view_as(table))
    generator = torch.Generator("cuda").manual_seed(0)
    for kv in runner.kv_pool.kv:
        kv.normal_(generator=generator)
    return runner


def step(runner: ModelRunner, q_lens: list[int], seed: int) -> ForwardBatch:
    """A step of requests that have some KV."""
    chooser = random.Random(seed)
    table = runner.req_to_token_pool.req_to_token
    rows = chooser.sample(range(len(table)), len(q_lens))
    before = [chooser.randrange(0, CONTEXT - q_len) for q_len in q_lens]
    positions = [n + i for n, q_len in zip(before, q_lens, strict=True) for i in range(q_len)]
    row_of = [row for row, q_len in zip(rows, q_lens, strict=True) for _ in range(q_len)]
    lens = [n + q_len for n, q_len in zip(before, q_lens, strict=True)]
    return ForwardBatch(
        input_ids=torch.tensor([chooser.randrange(4, 4096) for _ in positions], device="cuda"),
        positions=torch.tensor(positions, device="cuda"),
        slots=table[torch.tensor(row_of), torch.tensor(positions)].long(),
        rows=torch.tensor(rows, device="cuda"),
        q_lens=q_lens,
        kv_lens=torch.tensor(lens, device="cuda"),
        kv_len_upper_bounds=lens,
        bounds_are_exact=True,
    )


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
    """Of some of the requests, maybe none."""
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
