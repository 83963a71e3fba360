"""The FlashInfer backend on a CUDA GPU against `TorchNativeBackend` in float32 of the same values.

FlashInfer compiles its kernels when they are first asked for, which takes minutes per head
dimension and dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from attention_cases import (
    CASES,
    GROWN_CASES,
    MIXED,
    PACKED_CASES,
    TOLERANCE,
    TREE_CASES,
    AttentionCase,
    PlacedCase,
)
from sglang.srt.layers.attention.flashinfer_backend import FlashInferBackend, why_not_here
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)
if (reason := why_not_here()) is not None:
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.timeout(900)
LONG = AttentionCase(
    shape=[(1000, 1), (0, 300), (257, 4), (2047, 1), (511, 130), (63, 1), (128, 64), (4000, 2)],
    num_heads=8,
    head_dim=128,
)


def place(case: AttentionCase, dtype: torch.dtype = torch.bfloat16) -> PlacedCase:
    """The step's lengths are known to the host."""
    placed = PlacedCase(case, "cuda", dtype, seed=0)
    lens = placed.batch.kv_lens.tolist()
    placed.batch = replace(placed.batch, kv_len_upper_bounds=lens, bounds_are_exact=True)
    return placed


def backend_of(placed: PlacedCase, page_size: int | None = None) -> FlashInferBackend:
    case = placed.case
    return FlashInferBackend(
        placed.table, placed.pool, case.num_heads, case.windows, case.scores, page_size
    )


def check_close(out: torch.Tensor, right: torch.Tensor) -> None:
    assert out.shape == right.shape
    assert (out.float() - right).abs().max().item() <= TOLERANCE[out.dtype]


def check(placed: PlacedCase, page_size: int | None = None) -> None:
    backend = backend_of(placed, page_size)
    backend.plan(placed.batch)
    for layer, right in enumerate(placed.expected()):
        out = backend.forward(layer, placed.q[layer])
        assert out.dtype == placed.q[layer].dtype
        check_close(out, right)


class Graph:
    """Captures and replays attention alone, as the graph runner does with a key: captured with
    padding only, in buffers that stay."""

    def __init__(self, backend: FlashInferBackend, key: GraphKey, placed: PlacedCase) -> None:
        self._backend, self._key = backend, key
        self._rows = torch.zeros(key.num_reqs, dtype=torch.int64, device="cuda")
        self._kv_lens = torch.full_like(self._rows, key.width)
        self._q = [q.new_zeros((key.num_tokens, *q.shape[1:])) for q in placed.q]
        batch = self._batch([key.width] * key.num_reqs, True)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(2):
                backend.plan(batch)
                self._forward()
        torch.cuda.current_stream().wait_stream(side)
        backend.plan(batch)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = self._forward()

    def replay(self, batch: ForwardBatch, q: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Per layer, the rows of the batch alone."""
        lacking = self._key.num_reqs - len(batch.q_lens)
        self._rows.zero_()[: len(batch.rows)].copy_(batch.rows)
        self._kv_lens.fill_(self._key.width)[: len(batch.kv_lens)].copy_(batch.kv_lens)
        for static, own in zip(self._q, q, strict=True):
            static[: len(own)].copy_(own)
        for out in self._out:
            out.fill_(float("nan"))
        bounds = [*batch.kv_len_upper_bounds, *[self._key.width] * lacking]
        self._backend.plan(self._batch(bounds, batch.bounds_are_exact))
        self._graph.replay()
        return [out[: len(own)].clone() for out, own in zip(self._out, q, strict=True)]

    def _batch(self, bounds: list[int], is_exact: bool) -> ForwardBatch:
        unread = self._rows[:0]
        return ForwardBatch(
            input_ids=unread,
            positions=unread,
            slots=unread,
            rows=self._rows,
            q_lens=[self._key.width] * self._key.num_reqs,
            kv_lens=self._kv_lens,
            kv_len_upper_bounds=bounds,
            bounds_are_exact=is_exact,
            graph_key=self._key,
        )

    def _forward(self) -> list[torch.Tensor]:
        return [self._backend.forward(layer, q) for layer, q in enumerate(self._q)]


def key_of(num_reqs: int, width: int) -> GraphKey:
    return GraphKey("decode" if width == 1 else "uniform", num_reqs, width, num_reqs * width)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_heads(num_kv_heads: int, head_dim: int) -> None:
    for shape in (MIXED, CASES["decodes"].shape):
        check(place(AttentionCase(shape=shape, num_kv_heads=num_kv_heads, head_dim=head_dim)))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("num_heads", [2, 6, 8, 14])
@pytest.mark.parametrize("windows", [(None,), (None, 100, 5, 100)], ids=str)
def test_long_sequences(
    windows: tuple[int | None, ...], num_heads: int, dtype: torch.dtype
) -> None:
    check(place(replace(LONG, windows=windows, num_heads=num_heads), dtype))
    decodes = [(index * 397 % 3000, 1) for index in range(9)]
    check(place(replace(LONG, windows=windows, num_heads=num_heads, shape=decodes), dtype))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("name", ["page edges, pages of 16", "decodes", "slices"])
def test_pages_of_one_slot_and_of_many(name: str, page_size: int) -> None:
    check(place(CASES[name]), page_size)


def test_lengths_that_only_the_device_knows() -> None:
    placed = place(AttentionCase(shape=MIXED))
    width = placed.table.req_to_token.shape[1]
    loose = [min(bound + 50, width) for bound in placed.batch.kv_len_upper_bounds]
    placed.batch = replace(placed.batch, kv_len_upper_bounds=loose, bounds_are_exact=False)
    check(placed)


@pytest.mark.parametrize("name", [*TREE_CASES, *GROWN_CASES, "packed, trees"])
def test_trees(name: str) -> None:
    case = (TREE_CASES | GROWN_CASES | PACKED_CASES)[name]
    placed = PlacedCase(replace(case, head_dim=64, graph_width=None), "cuda", torch.bfloat16, 0)
    backend = backend_of(placed)
    for _ in range(2):  # causal steps between them have no masks
        backend.plan(placed.batch)
        for layer, right in enumerate(placed.expected()):
            out = backend.forward(layer, placed.q[layer])[: placed.num_fed]
            check_close(out, right.float())
        check(place(AttentionCase(shape=MIXED)))


@pytest.mark.parametrize("count", [1, 3, 64])
@pytest.mark.parametrize("num_heads", [2, 8])
@pytest.mark.parametrize("width", [1, 7])
@pytest.mark.parametrize("is_exact", [True, False])
def test_a_graph_replays_other_lengths_beside_padding(
    is_exact: bool, width: int, num_heads: int, count: int
) -> None:
    shape = [(index * 77 % 800, width) for index in range(count)]
    placed = place(replace(LONG, shape=shape, num_heads=num_heads, windows=(None, 30)))
    backend = backend_of(placed)
    graph = Graph(backend, key_of(count + 3, width), placed)
    shorter = (placed.batch.kv_lens // 2).clamp(min=width)
    half = replace(placed.batch, kv_lens=shorter, kv_len_upper_bounds=shorter.tolist())
    graph.replay(replace(half, bounds_are_exact=is_exact), placed.q)
    outs = graph.replay(replace(placed.batch, bounds_are_exact=is_exact), placed.q)
    for out, right in zip(outs, placed.expected(), strict=True):
        check_close(out, right)


def test_graphs_of_keys_that_differ_in_width_alone_do_not_share_plans() -> None:
    shape = [(index * 177 % 900 + 4, 7) for index in range(4)]
    placed = place(replace(LONG, shape=shape))
    backend = backend_of(placed)
    wide = Graph(backend, key_of(4, 7), placed)
    last = torch.cat([torch.arange(index * 7 + 4, index * 7 + 7) for index in range(4)]).cuda()
    narrow = Graph(backend, key_of(4, 3), placed)
    right = placed.expected()[0]
    for _ in range(2):
        check_close(wide.replay(placed.batch, placed.q)[0], right)
        check_close(narrow.replay(placed.batch, [placed.q[0][last]])[0], right[last])


def test_a_graph_and_eager_steps_do_not_disturb_each_other() -> None:
    placed = place(replace(LONG, shape=[(index * 177 % 900, 1) for index in range(6)]))
    backend = backend_of(placed)
    graph = Graph(backend, key_of(8, 1), placed)
    right = placed.expected()[0]
    for _ in range(2):
        check_close(graph.replay(placed.batch, placed.q)[0], right)
        backend.plan(placed.batch)
        check_close(backend.forward(0, placed.q[0]), right)


def test_a_plan_made_before_the_last_one_reached_the_device_waits_for_it() -> None:
    """FlashInfer writes both to the same page-locked memory."""
    placed = place(replace(LONG, shape=[(index * 577 % 4000, 1) for index in range(9)]))
    backend = backend_of(placed)
    shorter = (placed.batch.kv_lens // 9).clamp(min=1)
    half = replace(placed.batch, kv_lens=shorter, kv_len_upper_bounds=shorter.tolist())
    backend.plan(placed.batch)
    backend.forward(0, placed.q[0])
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    backend.plan(placed.batch)
    out = backend.forward(0, placed.q[0])
    backend.plan(half)
    backend.forward(0, placed.q[0])
    check_close(out, placed.expected()[0])


@pytest.mark.parametrize("num_heads", [2, 8])
@pytest.mark.parametrize("shape", [[(1000, 1), (63, 1), (7, 1)], LONG.shape], ids=str)
def test_a_step_of_known_lengths_never_waits_for_the_device(
    shape: Sequence[tuple[int, int]], num_heads: int
) -> None:
    placed = place(replace(LONG, shape=shape, num_heads=num_heads, windows=(None, 30)))
    backend = backend_of(placed)
    for mode in ("default", "default", "error"):
        torch.cuda.set_sync_debug_mode(mode)
        try:
            backend.plan(placed.batch)
            for layer, q in enumerate(placed.q):
                backend.forward(layer, q)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("width", [1, 7])
def test_a_replay_of_known_lengths_never_waits_for_the_device(width: int) -> None:
    placed = place(replace(LONG, shape=[(1000, width), (63, width), (7, width)]))
    graph = Graph(backend_of(placed), key_of(4, width), placed)
    graph.replay(placed.batch, placed.q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        graph.replay(placed.batch, placed.q)
    finally:
        torch.cuda.set_sync_debug_mode("default")
