"""The best tokens of each row: the torch reference and the kernels' code, against a stable sort in
float64."""

from __future__ import annotations

from collections.abc import Callable

import emulated_library
import pytest
import torch
from sampling_oracle import masked

import sgl_kernel
from sgl_kernel import reference
from sgl_kernel._library import KernelLibrary
from sgl_kernel.topk_logprob import MOST_TOP

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
TopK = Callable[..., tuple[torch.Tensor, torch.Tensor]]


@pytest.fixture(params=["reference", "emulated"])
def topk_logprob(request: pytest.FixtureRequest) -> TopK:
    if request.param == "reference":
        return sgl_kernel.topk_logprob
    library: KernelLibrary = request.getfixturevalue("library")
    return lambda *arguments: emulated_library.topk_logprob(library, *arguments)


def check(
    topk_logprob: TopK, logits: torch.Tensor, topk: int, banned_ids: torch.Tensor | None = None
) -> None:
    token_ids, logprobs = topk_logprob(logits, topk, banned_ids)
    values = masked(logits, banned_ids)
    order = values.sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    assert torch.equal(token_ids, order)
    expected = torch.log_softmax(values, dim=-1).gather(-1, order)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=5e-6)


def drawn(rows: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, size, generator=generator) * 4).to(dtype)


@pytest.mark.long_matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "topk"), [(1, 1), (2, 2), (7, 4), (16, 16), (33, 8), (4097, 16), (9001, 3)]
)
def test_any_size(topk_logprob: TopK, size: int, topk: int, dtype: torch.dtype) -> None:
    logits = drawn(2, size, size, dtype)
    check(topk_logprob, emulated_library.surrounded(logits), topk)


@pytest.mark.long_matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(8))
def test_misaligned_rows(topk_logprob: TopK, offset: int, dtype: torch.dtype) -> None:
    logits = drawn(2, 1003, offset, dtype)
    check(topk_logprob, emulated_library.surrounded(logits, offset, gap=offset + 1), 5)


@pytest.mark.parametrize("topk", [1, 2, 16])
@pytest.mark.parametrize("num_values", [1, 2, 5])
def test_ties_go_to_the_lowest_index(topk_logprob: TopK, num_values: int, topk: int) -> None:
    """Within a thread, a warp, a block and over blocks; zeros of both signs are equal."""
    generator = torch.Generator().manual_seed(num_values)
    logits = torch.randint(num_values, (3, 9001), generator=generator).float()
    is_negative = torch.rand(3, 9001, generator=generator) < 0.5
    check(topk_logprob, torch.where(is_negative, -logits, logits), topk)


def test_the_best_are_anywhere(topk_logprob: TopK) -> None:
    """All in one thread's share, or one in each block."""
    logits = torch.zeros(3, 70000, dtype=torch.bfloat16)
    logits[0, 40000:40008] = torch.arange(8).bfloat16()
    logits[1, 17::4096] = torch.arange(18).bfloat16()
    logits[2, -3:] = 1.0
    check(topk_logprob, logits, 16)


def test_more_blocks_than_a_warp_has_lanes(topk_logprob: TopK) -> None:
    """Lists of blocks are merged in turns; the first turn's may be best, or the last's."""
    logits = torch.zeros(2, 270000, dtype=torch.float16)
    logits[0, 5::5000] = torch.arange(54).to(torch.float16)
    logits[1, 5::5000] = torch.arange(54, 0, -1).to(torch.float16)
    check(topk_logprob, logits, 7)


def test_bans_and_minus_infinity_come_last(topk_logprob: TopK) -> None:
    logits = drawn(3, 5000, 1, torch.float32)
    logits[1, 3:] = -torch.inf
    banned = torch.cat([logits.argmax(dim=-1), torch.tensor([0, 4999])])
    logits = emulated_library.surrounded(logits, offset=3)
    check(topk_logprob, logits, 6, banned)
    found = topk_logprob(logits, 6, banned)
    outside = torch.cat([banned, torch.tensor([9999, -1])])
    for part, expected in zip(topk_logprob(logits, 6, outside), found, strict=True):
        assert torch.equal(part, expected)


def test_rows_without_finite_logits_give_different_ids_in_range(topk_logprob: TopK) -> None:
    values = (-torch.inf, torch.nan, torch.inf)
    token_ids, _ = topk_logprob(torch.stack([torch.full((4100,), each) for each in values]), 8)
    assert torch.equal(token_ids, torch.arange(8).expand(3, 8))
    some = torch.full((1, 4100), torch.nan)
    some[0, [4000, 7]] = torch.tensor([1.0, 2.0])
    assert topk_logprob(some, 2)[0].tolist() == [[7, 4000]]


def test_the_first_is_that_of_argmax_logprob_bit_for_bit(library: KernelLibrary) -> None:
    logits = drawn(3, 9001, 8, torch.bfloat16)
    token_ids, _, logprobs = emulated_library.argmax_logprob(library, logits)
    found_ids, found = emulated_library.topk_logprob(library, logits, 4)
    assert torch.equal(found_ids[:, 0], token_ids)
    assert torch.equal(found[:, 0], logprobs)


def test_a_rows_result_does_not_depend_on_the_others(library: KernelLibrary) -> None:
    logits = drawn(5, 9001, 9, torch.float16)
    together = emulated_library.topk_logprob(library, logits, 4)
    for row in range(5):
        alone = emulated_library.topk_logprob(library, logits[row : row + 1], 4)
        for part, expected in zip(alone, together, strict=True):
            assert torch.equal(part, expected[row : row + 1])


@pytest.mark.parametrize("topk", [17, 64, 1000])
def test_more_than_the_kernels_find(topk: int) -> None:
    assert topk > MOST_TOP
    generator = torch.Generator().manual_seed(topk)
    check(sgl_kernel.topk_logprob, drawn(3, 1000, topk, torch.bfloat16), topk)
    ties = torch.randint(3, (3, 1000), generator=generator).float()
    check(reference.topk_logprob, ties, topk)


def test_no_rows_give_no_tokens() -> None:
    found = sgl_kernel.topk_logprob(torch.empty(0, 9), 3)
    assert [part.shape for part in found] == [(0, 3), (0, 3)]


@pytest.mark.parametrize("topk", [0, -1, 5])
def test_numbers_of_tokens_are_refused(topk: int) -> None:
    with pytest.raises(ValueError, match="topk must be from 1 to 4"):
        sgl_kernel.topk_logprob(torch.zeros(2, 4), topk)
    with pytest.raises(ValueError, match="last stride"):
        sgl_kernel.topk_logprob(torch.zeros(4, 2).T, 1)
