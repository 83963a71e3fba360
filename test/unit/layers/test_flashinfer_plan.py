"""Tests what the FlashInfer backend plans, on a CPU: its host functions, and its calls of a fake
package."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch

from attention_cases import (
    CASES,
    HOLE_CASES,
    MIXED,
    PACKED_CASES,
    TOLERANCE,
    TREE_CASES,
    AttentionCase,
    PlacedCase,
)
from fake_flashinfer import FakeDecodeWrapper, FakePrefillWrapper, FakeWrapper, install_fake
from sglang.srt.layers.attention import flashinfer_backend
from sglang.srt.layers.attention.flashinfer_backend import FlashInferBackend, missing_tools
from sglang.srt.layers.attention.flashinfer_plan import (
    LEAST_FLOAT_WORKSPACE_BYTES,
    Heads,
    lay_out,
    uses_tensor_cores,
    window_left,
)
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey

DECODES = AttentionCase(shape=[(1, 1), (40, 1), (7, 1), (15, 1)])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[FakeWrapper]:
    return install_fake(monkeypatch)


def place(case: AttentionCase) -> PlacedCase:
    return PlacedCase(case, "cpu", torch.float32, seed=0)


def backend_of(placed: PlacedCase, page_size: int = 1) -> FlashInferBackend:
    case = placed.case
    return FlashInferBackend(
        placed.table, placed.pool, case.num_heads, case.windows, case.scores, page_size
    )


def graph_batch(placed: PlacedCase, key: GraphKey) -> ForwardBatch:
    """The step as a graph of `key` gets it: requests without rows are padding."""
    lacking = key.num_reqs - len(placed.batch.q_lens)
    lens = placed.batch.kv_lens.tolist() + [key.width] * lacking
    return replace(
        placed.batch,
        rows=torch.cat([placed.batch.rows, torch.zeros(lacking, dtype=torch.int64)]),
        q_lens=[key.width] * key.num_reqs,
        kv_lens=torch.tensor(lens),
        kv_len_upper_bounds=lens,
        bounds_are_exact=True,
        graph_key=key,
    )


def uniform_key(num_reqs: int, width: int) -> GraphKey:
    return GraphKey("uniform", num_reqs, width, num_reqs * width)


@pytest.mark.parametrize("page_size", [1, 2, 16])
def test_the_layout_counts_as_one_does_by_hand(page_size: int) -> None:
    numbers = random.Random(page_size)
    for _ in range(50):
        kv_lens = [numbers.randint(1, 50) for _ in range(numbers.randint(1, 6))]
        q_lens = [numbers.randint(1, kv_len) for kv_len in kv_lens]
        layout = lay_out(q_lens, kv_lens, page_size)
        assert layout.is_decode == all(q_len == 1 for q_len in q_lens)
        assert layout.num_pages == layout.page_indptr[-1]
        for request, (q_len, kv_len) in enumerate(zip(q_lens, kv_lens, strict=True)):
            pages = [position // page_size for position in range(kv_len)]
            start, end = layout.page_indptr[request : request + 2]
            assert end - start == len(set(pages))
            assert layout.last_page_lens[request] == pages.count(pages[-1])
            assert layout.qo_indptr[request] == sum(q_lens[:request])
            assert layout.qo_indptr[request + 1] == sum(q_lens[:request]) + q_len


def test_a_window_counts_the_query_and_flashinfer_does_not() -> None:
    assert [window_left(window) for window in (None, 1, 16)] == [-1, 0, 15]


def test_tensor_cores_serve_all_groups_that_the_other_kernel_lacks() -> None:
    assert [group for group in range(1, 17) if not uses_tensor_cores(group)] == [1, 2, 3]


@pytest.mark.parametrize("head_dim", [16, 80, 96, 512])
def test_other_heads_are_refused_with_a_remedy(head_dim: int) -> None:
    with pytest.raises(ValueError, match=rf"no heads of {head_dim} .*--attention-backend triton"):
        Heads(num_heads=4, num_kv_heads=2, head_dim=head_dim)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="6 query heads cannot share 4 KV heads"):
        Heads(num_heads=6, num_kv_heads=4, head_dim=64)


def test_the_workspace_covers_the_tiles_of_a_graph() -> None:
    """Figures by hand, for 132 multiprocessors: 896 rows of 4 heads each are 28 tiles of 128, and
    one more for each of 128 requests but one."""
    heads = Heads(num_heads=32, num_kv_heads=8, head_dim=128)
    assert heads.graph_workspace_bytes(132, 128, 128) == LEAST_FLOAT_WORKSPACE_BYTES
    wide = heads.graph_workspace_bytes(132, 128, 896)
    assert 0 <= wide - 32 * (28 + 127) * 128 * 129 * 4 < 1024
    assert heads.eager_workspace_bytes(132) == LEAST_FLOAT_WORKSPACE_BYTES
    grouped = Heads(num_heads=32, num_kv_heads=2, head_dim=128).eager_workspace_bytes(132)
    assert 0 <= grouped - 32 * 132 * 128 * 129 * 4 < 1024


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, None], ids=["slots", "pages"])
@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].graph_width is None])
def test_what_is_planned_is_the_step(
    made: list[FakeWrapper], name: str, page_size: int | None
) -> None:
    placed = place(replace(CASES[name], head_dim=64))
    backend = backend_of(placed, page_size or placed.case.page_size)
    backend.plan(placed.batch)
    for layer, right in enumerate(placed.expected()):
        out = backend.forward(layer, placed.q[layer])
        assert out.shape == right.shape
        assert (out - right).abs().max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("name", HOLE_CASES)
def test_kv_that_is_not_there_is_in_no_plan(
    made: list[FakeWrapper], name: str, is_exact: bool
) -> None:
    """The pool's pages are of 16 slots, and rows begin to see anywhere in them."""
    placed = place(replace(HOLE_CASES[name], head_dim=64, graph_width=None))
    batch = replace(placed.batch, graph_key=None)
    if is_exact:
        lens = batch.kv_lens.tolist()
        batch = replace(batch, kv_len_upper_bounds=lens, bounds_are_exact=True)
    backend = backend_of(placed, placed.case.page_size)
    backend.plan(batch)
    for layer, right in enumerate(placed.expected()):
        out = backend.forward(layer, placed.q[layer])[: placed.num_fed]
        assert (out - right).abs().nan_to_num(nan=1e9).max() <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("page_size", [1, None], ids=["slots", "pages"])
@pytest.mark.parametrize(
    "name",
    [name for name, case in PACKED_CASES.items() if not case.trees and case.graph_width is None],
)
def test_a_packed_step_is_planned_by_what_the_device_says(
    made: list[FakeWrapper], name: str, page_size: int | None
) -> None:
    placed = place(replace(PACKED_CASES[name], head_dim=64))
    backend = backend_of(placed, page_size or placed.case.page_size)
    backend.plan(replace(placed.batch, bounds_are_exact=True))  # of no use: rows are not known
    for layer, right in enumerate(placed.expected()):
        out = backend.forward(layer, placed.q[layer])
        assert (out[: placed.num_fed] - right).abs().max() <= TOLERANCE[torch.float32]
        assert (out[placed.num_fed :] == 0).all()


def test_a_request_without_rows_makes_a_step_no_decode(made: list[FakeWrapper]) -> None:
    placed = place(AttentionCase(shape=[(3, 1), (9, 0), (4, 1)], bounds=[1] * 3, padding=1))
    backend = backend_of(placed)
    backend.plan(placed.batch)
    assert [type(wrapper) for wrapper in made] == [FakePrefillWrapper]
    out = backend.forward(0, placed.q[0])
    assert (out[:2] - placed.expected()[0]).abs().max() <= TOLERANCE[torch.float32]


def test_a_step_in_which_nobody_feeds_a_row_is_all_padding(made: list[FakeWrapper]) -> None:
    placed = place(AttentionCase(shape=[(3, 0), (9, 0)], bounds=[4] * 2, padding=8))
    backend = backend_of(placed)
    backend.plan(placed.batch)
    assert not made
    assert (backend.forward(0, placed.q[0]) == 0).all()


def test_one_row_each_is_a_decode_and_anything_else_is_not(made: list[FakeWrapper]) -> None:
    placed = place(DECODES)
    backend_of(placed).plan(placed.batch)
    placed = place(AttentionCase(shape=[*DECODES.shape, (3, 2)]))
    backend_of(placed).plan(placed.batch)
    assert [type(wrapper) for wrapper in made] == [FakeDecodeWrapper, FakePrefillWrapper]


@pytest.mark.parametrize(("num_heads", "expected"), [(4, False), (8, True)])
def test_decodes_of_large_groups_use_tensor_cores(
    made: list[FakeWrapper], num_heads: int, expected: bool
) -> None:
    placed = place(replace(DECODES, num_heads=num_heads))
    backend_of(placed).plan(placed.batch)
    assert made[0].options["use_tensor_cores"] == expected


def test_layers_of_the_same_window_share_a_plan(made: list[FakeWrapper]) -> None:
    placed = place(AttentionCase(shape=MIXED, windows=(None, 20, 5, 20, None)))
    backend = backend_of(placed)
    for _ in range(2):
        backend.plan(placed.batch)
    assert [wrapper.plan_options["window_left"] for wrapper in made] == [-1, 19, 4]
    assert [wrapper.num_plans for wrapper in made] == [2, 2, 2]


def test_exact_bounds_are_planned_without_reading_the_lengths(made: list[FakeWrapper]) -> None:
    placed = place(AttentionCase(shape=MIXED))
    unreadable = torch.empty(len(MIXED), dtype=torch.int64, device="meta")
    batch = replace(placed.batch, kv_lens=unreadable, bounds_are_exact=True)
    backend = backend_of(placed)
    backend.plan(batch)
    out = backend.forward(0, placed.q[0])
    assert (out - placed.expected()[0]).abs().max() <= TOLERANCE[torch.float32]


def test_a_request_may_fill_its_row(made: list[FakeWrapper]) -> None:
    placed = place(replace(DECODES, page_size=16))
    placed.table.req_to_token = placed.table.req_to_token[:, :41].clone()  # the longest's
    backend = backend_of(placed, 16)
    backend.plan(placed.batch)
    out = backend.forward(0, placed.q[0])
    assert (out - placed.expected()[0]).abs().max() <= TOLERANCE[torch.float32]


def test_every_graph_key_and_window_has_plan_memory_of_its_own(made: list[FakeWrapper]) -> None:
    placed = place(AttentionCase(shape=[(5, 7), (40, 7)], windows=(None, 9)))
    narrow = place(AttentionCase(shape=[(5, 3), (40, 3)], windows=(None, 9)))
    backend = backend_of(placed)
    for batch in (
        graph_batch(placed, uniform_key(2, 7)),
        graph_batch(placed, uniform_key(4, 7)),
        graph_batch(narrow, uniform_key(2, 3)),
        placed.batch,
        graph_batch(placed, uniform_key(2, 7)),
    ):
        backend.plan(batch)
    assert len(made) == 8
    of_graphs = [wrapper for wrapper in made if wrapper.is_graph]
    assert len(of_graphs) == 6
    roles = ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
    own = [tensor for wrapper in of_graphs for tensor in map(wrapper.buffers.get, roles)]
    own += [wrapper.ints for wrapper in of_graphs]
    assert len({tensor.data_ptr() for tensor in own if tensor is not None}) == 4 * 6


def test_a_graph_keeps_its_addresses_from_plan_to_plan(made: list[FakeWrapper]) -> None:
    placed = place(DECODES)
    key = GraphKey("decode", 8, 1, 8)
    batch = graph_batch(placed, key)
    backend = backend_of(placed)
    backend.plan(batch)
    addresses = {name: tensor.data_ptr() for name, tensor in made[0].buffers.items()}
    shorter = [max(1, length // 2) for length in batch.kv_len_upper_bounds]
    backend.plan(replace(batch, kv_len_upper_bounds=shorter))
    backend.plan(batch)
    assert {name: tensor.data_ptr() for name, tensor in made[0].buffers.items()} == addresses
    q = torch.cat([placed.q[0], placed.q[0]])
    out = backend.forward(0, q)[: len(DECODES.shape)]
    assert (out - placed.expected()[0]).abs().max() <= TOLERANCE[torch.float32]


def test_keys_that_differ_in_width_alone_keep_their_plans_apart(made: list[FakeWrapper]) -> None:
    backend = None
    placed = [
        place(AttentionCase(shape=[(20, width), (3, width)], num_heads=8)) for width in (7, 3, 7)
    ]
    for case in placed:  # the same pool and table, as the seed and the number of pages agree
        backend = backend or backend_of(case)
        backend.plan(graph_batch(case, uniform_key(2, case.batch.q_lens[0])))
    by_width = [wrapper.buffers["qo_indptr"].tolist() for wrapper in made]
    assert by_width == [[0, 7, 14], [0, 3, 6]]
    assert [wrapper.num_plans for wrapper in made] == [2, 1]


def test_graphs_have_room_for_all_that_their_rows_can_name(made: list[FakeWrapper]) -> None:
    placed = place(DECODES)
    num_rows, width = placed.table.req_to_token.shape
    backend = backend_of(placed, 16)
    backend.plan(graph_batch(placed, uniform_key(4, 1)))
    backend.plan(graph_batch(placed, uniform_key(2 * num_rows, 1)))
    rooms = [wrapper.buffers["paged_kv_indices"] for wrapper in made]
    pages_per_row = -(-width // 16)
    assert [len(room) for room in rooms] == [
        num_rows * pages_per_row,
        2 * num_rows * pages_per_row,
    ]


def test_trees_are_planned_with_masks_by_wrappers_for_prompts(made: list[FakeWrapper]) -> None:
    placed = place(TREE_CASES["one tree"])
    backend = backend_of(placed)
    backend.plan(placed.batch)
    [wrapper] = made
    options = wrapper.plan_options
    q_len, kv_len = placed.batch.q_lens[0], int(placed.batch.kv_lens[0])
    assert options["custom_mask"].shape == (q_len * kv_len,)
    assert options["window_left"] == -1
    backend.plan(replace(placed.batch, ancestors=None))
    assert "custom_mask" not in wrapper.plan_options


def test_the_large_workspace_is_shared(made: list[FakeWrapper]) -> None:
    placed = place(DECODES)
    backend = backend_of(placed)
    backend.plan(placed.batch)
    backend.plan(graph_batch(placed, GraphKey("decode", 4, 1, 4)))
    assert len({wrapper.floats.data_ptr() for wrapper in made}) == 1


def test_its_capabilities_need_no_package() -> None:
    capabilities = FlashInferBackend.capabilities()
    assert capabilities.problems("cuda", torch.bfloat16, 16) == []
    assert capabilities.problems("cuda", torch.float32, 1) == [
        "has no torch.float32; use --dtype bfloat16 or float16"
    ]
    assert capabilities.problems("cpu", torch.bfloat16, 1) == ["runs on ['cuda'], not on cpu"]


def test_a_missing_package_is_named_with_the_remedies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    remedies = "pip install flashinfer-python==0.6.14.*--attention-backend triton"
    with pytest.raises(ValueError, match=remedies):
        backend_of(place(DECODES))


def test_missing_compilers_are_named(
    made: list[FakeWrapper], monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(flashinfer_backend, "missing_tools", missing_tools)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.delenv("FLASHINFER_NVCC", raising=False)
    with pytest.raises(ValueError, match=rf"no {tmp_path}/bin/nvcc and no ninja.*CUDA_HOME"):
        backend_of(place(DECODES))
    (tmp_path / "bin").mkdir()
    for tool in (tmp_path / "bin" / "nvcc", tmp_path / "ninja"):
        tool.touch(mode=0o755)
    backend_of(place(DECODES))
