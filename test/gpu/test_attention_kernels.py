"""Attention backends on a CUDA GPU against `TorchNativeBackend` in float32 of the same values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_cases import (
    CASES,
    GATHER_CASES,
    IDLE_MASKS,
    MIXED,
    MORE_CASES,
    OUTSIDE_CASES,
    TOLERANCE,
    WHOLE_PACKED,
    WITH_IDLE_MASKS,
    AttentionCase,
    PlacedCase,
    change_by_idle_masks,
    change_by_packing,
    gather_case,
    max_error,
    outside_case,
    random_packed,
    with_requests,
)
from draft_chain import draft_chain_error
from sglang.srt.layers.attention.flashinfer_plan import HEAD_DIMS
from sglang.srt.layers.forward_batch import GraphKey
from sglang.srt.registry import ATTENTION_BACKENDS

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

BACKENDS = [
    name
    for name in ATTENTION_BACKENDS.names
    if not ATTENTION_BACKENDS.load(name).capabilities().problems("cuda", torch.bfloat16, 16)
]
HALF_TYPES = [torch.bfloat16, torch.float16]
LONG = AttentionCase(
    shape=[(1000, 1), (0, 300), (257, 4), (2047, 1), (511, 130), (63, 1), (128, 64), (4000, 2)],
    num_heads=8,
    head_dim=128,
)


PROMPTS = {
    "edges of whole tiles of KV": (
        *((0, 256), (1, 257), (127, 300), (128, 384), (1000, 1), (129, 511), (2000, 260)),
        *((70, 15), (3, 1000), (0, 130), (640, 128)),
    ),
    "few rows, whose KV is split": ((6001, 130), (70, 15), (300, 1), (2000, 128)),
}


def check(name: str, case: AttentionCase, dtype: torch.dtype) -> None:
    capabilities = ATTENTION_BACKENDS.load(name).capabilities()
    if problems := capabilities.problems("cuda", dtype, case.page_size):
        pytest.skip(f"{name} {'; '.join(problems)}")
    if case.trees and not capabilities.tree_masks:
        pytest.skip(f"{name} has no masks for trees")
    if case.kv_starts and not capabilities.reads_kv_starts:
        pytest.skip(f"{name} sees all KV of a row")
    if name == "flashinfer" and case.head_dim not in HEAD_DIMS:
        pytest.skip(f"FlashInfer has no heads of {case.head_dim}")
    assert max_error(name, case, "cuda", dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
@pytest.mark.parametrize("case_name", [*CASES, *MORE_CASES])
@pytest.mark.parametrize("name", BACKENDS)
def test_the_table(name: str, case_name: str, dtype: torch.dtype) -> None:
    check(name, (CASES | MORE_CASES)[case_name], dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case_name", WHOLE_PACKED)
def test_a_packed_step_of_all_rows_changes_no_bit(case_name: str, dtype: torch.dtype) -> None:
    assert change_by_packing("triton", CASES[case_name], "cuda", dtype) == 0.0


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("name", BACKENDS)
def test_random_packed_steps(name: str, seed: int) -> None:
    case = replace(random_packed(seed), head_dim=64)
    if sum(q_len for _, q_len in case.shape) > 0:
        check(name, case, torch.bfloat16)


@pytest.mark.parametrize("page_size", [1, 16])
def test_rows_of_draft_steps_see_their_own_branch_of_earlier_ones(page_size: int) -> None:
    assert draft_chain_error("triton", "cuda", page_size) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", OUTSIDE_CASES)
def test_a_length_past_its_row_reads_nothing_there_and_is_told(name: str) -> None:
    assert outside_case("triton", *OUTSIDE_CASES[name], "cuda") == ""


@pytest.mark.parametrize("name", GATHER_CASES)
def test_kv_is_gathered_side_by_side(name: str) -> None:
    shape, kv_starts = GATHER_CASES[name]
    assert gather_case(shape, "cuda", kv_starts) == ""


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(128, torch.bfloat16), (64, torch.float16)], ids=str
)
@pytest.mark.parametrize("heads", [(8, 2), (3, 1), (14, 2)], ids=str)
@pytest.mark.parametrize("windows", [(None,), (100,), (700, None)], ids=str)
@pytest.mark.parametrize("has_holes", [False, True], ids=["whole", "holes"])
@pytest.mark.parametrize("shape", PROMPTS)
def test_prompts_of_many_rows(
    shape: str,
    has_holes: bool,
    windows: tuple[int | None, ...],
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    """Checks prompts of all lengths around whole tiles, beside short ones, decodes and a tree's
    worth of rows; what the gathered KV held before is NaN."""
    case = AttentionCase(
        shape=PROMPTS[shape],
        windows=windows,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        page_size=1 if head_dim == 64 else 16,
        bound_slack=200 if dtype == torch.float16 else 0,
    )
    if has_holes:
        case = replace(case, kv_starts=[before * 2 // 3 for before, _ in case.shape])
    placed = PlacedCase(case, "cuda", dtype, seed=0)
    backend = placed.backend("triton")
    if (prompts := backend._prompts) is not None:
        prompts._gathered.fill_(float("nan"))
    backend.plan(placed.batch)
    assert prompts is None or prompts._step is not None
    for layer, right in enumerate(placed.expected()):
        out = backend.forward(layer, placed.q[layer])
        difference = (out.float() - right).abs()
        assert difference.isfinite().all()
        assert difference.max().item() <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF_TYPES], ids=str)
@pytest.mark.parametrize("masks", IDLE_MASKS)
@pytest.mark.parametrize("case_name", WITH_IDLE_MASKS)
def test_masks_that_hide_nothing_change_the_rounding_at_most(
    case_name: str, masks: str, dtype: torch.dtype
) -> None:
    """Tiles with masks and without are compiled apart."""
    change = change_by_idle_masks("triton", CASES[case_name], masks, "cuda", dtype)
    assert change <= TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("windows", [(None,), (100,)], ids=str)
@pytest.mark.parametrize("count", [1, 7, 40])
def test_1_to_40_long_sequences_with_trees(
    count: int, windows: tuple[int | None, ...], head_dim: int, dtype: torch.dtype
) -> None:
    shapes = [(1000, 16), (257, 64), (2047, 1), (511, 130), (63, 5), (4000, 9), (900, 33)]
    case = AttentionCase(
        shape=[shapes[index % len(shapes)] for index in range(count)],
        trees=tuple(index for index in range(count) if index % len(shapes) not in (2, 3)),
        num_heads=8,
        head_dim=head_dim,
        windows=windows,
    )
    check("triton", case, dtype)


@pytest.mark.parametrize("dtype", HALF_TYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("num_heads", [2, 4, 8])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("windows", [(None,), (100,)], ids=str)
@pytest.mark.parametrize("name", BACKENDS)
def test_long_sequences(
    name: str,
    windows: tuple[int | None, ...],
    page_size: int,
    num_heads: int,
    head_dim: int,
    dtype: torch.dtype,
) -> None:
    case = replace(
        LONG, windows=windows, page_size=page_size, num_heads=num_heads, head_dim=head_dim
    )
    check(name, case, dtype)


@pytest.mark.parametrize("count", [1, 2, 7, 32, 64, 128])
@pytest.mark.parametrize("q_len", [1, 4, 7, 15])
@pytest.mark.parametrize("name", BACKENDS)
def test_1_to_128_requests_of_uniform_rows(name: str, q_len: int, count: int) -> None:
    shape = [(index * 97 % 700, q_len) for index in range(count)]
    case = AttentionCase(shape=shape, num_heads=32, num_kv_heads=8, head_dim=128)
    check(name, case, torch.bfloat16)


@pytest.mark.parametrize("count", [1, 2, 7, 32, 64, 128])
@pytest.mark.parametrize("name", BACKENDS)
def test_1_to_128_mixed_requests(name: str, count: int) -> None:
    case = AttentionCase(shape=MIXED, num_heads=32, num_kv_heads=8, head_dim=128)
    check(name, with_requests(case, count), torch.bfloat16)


@pytest.mark.parametrize("count", [1, 5, 64])
@pytest.mark.parametrize("q_len", [1, 4, 15])
@pytest.mark.parametrize("tag", ["uniform", "ragged"])
def test_a_graph_of_the_triton_backend_replays_other_lengths(
    tag: str, q_len: int, count: int
) -> None:
    """Captured with about half the lengths."""
    shape = [(index * 77 % 800, q_len) for index in range(count)]
    case = AttentionCase(shape=shape, num_heads=8, head_dim=128)
    placed = PlacedCase(case, "cuda", torch.bfloat16, seed=0)
    expected = placed.expected()[0]
    backend, q = placed.backend("triton"), placed.q[0]
    key = GraphKey(tag, count, q_len, count * q_len)
    kv_lens = (placed.batch.kv_lens // 2).clamp(min=q_len)
    batch = replace(placed.batch, kv_lens=kv_lens, graph_key=key)
    for _ in range(2):  # all kernels are compiled
        backend.plan(batch)
        backend.forward(0, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(0, q)
    kv_lens.copy_(placed.batch.kv_lens)
    backend.plan(batch)
    out.fill_(float("nan"))
    graph.replay()
    assert (out.float() - expected).abs().max().item() <= TOLERANCE[torch.bfloat16]


# Of each group of items: decodes, look-ahead of few and of more rows, prompts, of which the longest
# one is gathered on Hopper.
GROUPS = (
    *((900, 1), (300, 15), (1000, 300), (77, 4), (1500, 1), (410, 5), (20, 40), (640, 9)),
    (0, 130),
)
SPLIT_GROUPS = ((900, 1), (6000, 130), (1000, 15), (77, 4), (2900, 40))


@pytest.mark.parametrize("count", [3, 8, 40])
@pytest.mark.parametrize("width", [1, 15])
@pytest.mark.parametrize("groups", [GROUPS, SPLIT_GROUPS], ids=["whole", "split"])
def test_a_graph_of_mixed_steps_replays_every_group_of_items(
    groups: tuple[tuple[int, int], ...], width: int, count: int
) -> None:
    """Captured without a request, so whatever a replay leaves out stays NaN."""
    case = with_requests(AttentionCase(shape=groups, graph_width=width), count)
    case = replace(case, num_heads=32, num_kv_heads=8, head_dim=128)
    placed = PlacedCase(case, "cuda", torch.bfloat16, seed=0)
    expected = placed.expected()[0]
    backend, q = placed.backend("triton"), placed.q[0]
    empty = replace(placed.batch, q_lens=[], kv_len_upper_bounds=[])
    for _ in range(2):  # all kernels are compiled
        backend.plan(empty)
        backend.forward(0, q)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = backend.forward(0, q)
    for _ in range(2):
        backend.plan(placed.batch)
        out.fill_(float("nan"))
        graph.replay()
        assert (out.float() - expected).abs().max().item() <= TOLERANCE[torch.bfloat16]


LONG_PACKED = replace(
    LONG,
    shape=[(0, 300), (1000, 1), (257, 4), (2047, 0), (128, 9)],
    bounds=[300, 15, 15, 15, 15],
    padding=6,
)


def test_a_long_packed_step_whose_prompt_is_gathered() -> None:
    check("triton", LONG_PACKED, torch.bfloat16)


@pytest.mark.parametrize("case", [LONG, LONG_PACKED], ids=["known lengths", "packed"])
def test_a_step_of_the_triton_backend_never_waits_for_the_device(case: AttentionCase) -> None:
    placed = PlacedCase(case, "cuda", torch.bfloat16, seed=0)
    backend, q = placed.backend("triton"), placed.q[0]
    backend.plan(placed.batch)
    backend.forward(0, q)
    torch.cuda.set_sync_debug_mode("error")
    try:
        backend.plan(placed.batch)
        backend.forward(0, q)
    finally:
        torch.cuda.set_sync_debug_mode("default")
