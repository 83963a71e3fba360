"""The kernels' code on the CPU: everything but the GPU itself."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from pathlib import Path

import emulated_library
import pytest
import torch
from sampling_oracle import (
    SamplingCase,
    assert_drawn,
    assert_penalized,
    assert_scored,
    masked,
    noise,
    random_case,
    random_penalties,
    unfiltered,
)

from sgl_kernel import reference
from sgl_kernel._library import KernelLibrary
from sgl_kernel.sampling_rows import FLOATS, SamplingRows

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 2, 7, 8, 9, 33, 1000, 4095, 4096, 4097, 9001]


def check_argmax(
    library: KernelLibrary, logits: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> None:
    token_ids, best, logprobs = emulated_library.argmax_logprob(library, logits, banned_ids)
    values = masked(logits, banned_ids)
    torch.testing.assert_close(token_ids, values.argmax(dim=-1), rtol=0, atol=0)
    torch.testing.assert_close(best.double(), values.amax(dim=-1), rtol=0, atol=0)
    expected = torch.log_softmax(values, dim=-1).amax(dim=-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=5e-6)


def draw(library: KernelLibrary, case: SamplingCase) -> torch.Tensor:
    """Tokens whose log-probabilities have been checked."""
    token_ids, logprobs = emulated_library.sample_tokens(library, case)
    assert_scored(case, token_ids, logprobs)
    return token_ids


@pytest.mark.long_matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
def test_argmax_and_its_logprob_of_any_size(
    library: KernelLibrary, size: int, dtype: torch.dtype
) -> None:
    logits = (torch.randn(2, size, generator=torch.Generator().manual_seed(size)) * 4).to(dtype)
    check_argmax(library, emulated_library.surrounded(logits))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(8))
def test_misaligned_rows_read_nothing_outside(
    library: KernelLibrary, offset: int, dtype: torch.dtype
) -> None:
    logits = torch.randn(3, 1003, generator=torch.Generator().manual_seed(offset)).to(dtype)
    check_argmax(library, emulated_library.surrounded(logits, offset, gap=offset + 1))


def test_sums_of_rows_at_multiples_of_16_bytes_have_one_order(library: KernelLibrary) -> None:
    logits = 4 * torch.randn(32, 9001, generator=torch.Generator().manual_seed(0))

    def sums(rows: torch.Tensor, gap: int = 3) -> list[float]:
        laid_out = emulated_library.surrounded(rows, 0, gap)
        found: list[float] = emulated_library.argmax_logprob(library, laid_out)[2].tolist()
        return found

    alone = [sums(row)[0] for row in logits.split(1)]
    assert sums(logits) == alone
    assert sums(logits, gap=0) != alone, "There is nothing to tell apart."


def test_ties_go_to_the_lowest_index(library: KernelLibrary) -> None:
    logits = torch.zeros(3, 9001)
    logits[1, [8000, 4500, 77]] = 2.0
    logits[2, [8000, 4500, 4501]] = 2.0
    assert emulated_library.argmax_logprob(library, logits)[0].tolist() == [0, 77, 4500]


@pytest.mark.long_matrix
def test_ties_over_more_chunks_than_a_warp_has_lanes(library: KernelLibrary) -> None:
    logits = torch.zeros(2, 200000, dtype=torch.float16)
    logits[:, [190000, 150000]] = 2.0
    logits[0, 9000] = 2.0
    token_ids, _, logprobs = emulated_library.argmax_logprob(library, logits)
    assert token_ids.tolist() == [9000, 150000]
    expected = torch.log_softmax(logits.double(), dim=-1).amax(dim=-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=5e-6)
    case = replace(random_case(2, 200000, seed=7), logits=logits)
    case = replace(case, top_k=torch.tensor([2, 1]), temperature=torch.tensor([1.0, 0.0]))
    token_ids = draw(library, case)
    assert token_ids[0] in (9000, 150000)
    assert token_ids[1] == 150000


def test_bans_and_minus_infinity(library: KernelLibrary) -> None:
    logits = torch.randn(3, 5000, generator=torch.Generator().manual_seed(1))
    logits[1, 40:] = -torch.inf
    banned = torch.cat([logits.argmax(dim=-1), torch.tensor([0, 4999])])
    check_argmax(library, emulated_library.surrounded(logits, offset=3), banned)


def test_rows_without_finite_logits_give_an_id_in_range(library: KernelLibrary) -> None:
    logits = torch.stack(
        [torch.full((4100,), value) for value in (-torch.inf, torch.nan, torch.inf)]
    )
    token_ids, best, _ = emulated_library.argmax_logprob(library, logits)
    assert token_ids.tolist() == [0, 0, 0]
    assert best.tolist() == [-torch.inf, -torch.inf, torch.inf]
    case = replace(random_case(3, 4100, seed=1), logits=logits)
    assert emulated_library.sample_tokens(library, case)[0].tolist() == [0, 0, 0]


def test_logprobs_of_chunks_with_very_different_logits(library: KernelLibrary) -> None:
    logits = torch.full((2, 9000), -3e38)
    logits[0, 8500] = 100.0
    logits[1, 5] = -1000.0
    check_argmax(library, logits)


def test_the_kernels_struct_of_pointers_has_the_fields_of_sampling_rows() -> None:
    header = Path(__file__).parents[1] / "include" / "sgl_kernel" / "sampling_filters.cuh"
    _, _, rest = header.read_text().partition("struct SamplingView {")
    struct, _, _ = rest.partition("};")
    expected = [("float" if name in FLOATS else "int64_t", name) for name in SamplingRows._fields]
    assert re.findall(r"const (\w+)\* (\w+);", struct) == expected


def test_noise_bits(library: KernelLibrary) -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), 123456789])
    positions = torch.tensor([0, 5, 2**31, 7, 131071, -3])
    expected = reference.uniform_noise(seeds, positions, 3000)
    assert torch.equal(emulated_library.uniform_noise(library, seeds, positions, 3000), expected)
    assert torch.equal(expected.double(), noise(seeds, positions, 3000))


# Types differ in how a row is read, spreads in how many tokens the filters keep.
@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("size", "dtype", "spread"),
    [
        *product([1, 7, 300, 4097], DTYPES, [0.3]),
        (9001, torch.float32, 0.3),  # a third chunk is read as the second one
        *product([300, 9001], [torch.float32], [0.0, 3.0]),
    ],
)
def test_samples_are_the_filtered_winners(
    library: KernelLibrary, size: int, dtype: torch.dtype, spread: float
) -> None:
    case = random_case(14, size, seed=size + int(10 * spread), dtype=dtype, spread=spread)
    case = replace(case, logits=emulated_library.surrounded(case.logits, offset=size % 8, gap=3))
    uniform = reference.uniform_noise(case.seeds, case.positions, size)
    assert_drawn(case, uniform, draw(library, case))


def test_samples_without_filters(library: KernelLibrary) -> None:
    case = unfiltered(random_case(40, 5000, seed=3))
    uniform = reference.uniform_noise(case.seeds, case.positions, 5000)
    assert_drawn(case, uniform, draw(library, case))


def test_samples_never_hold_banned_tokens(library: KernelLibrary) -> None:
    case = random_case(20, 4200, seed=4, dtype=torch.bfloat16)
    banned = torch.unique(torch.cat([case.logits.argmax(dim=-1), torch.tensor([0, 4199])]))
    case = replace(case, banned_ids=banned)
    token_ids = draw(library, case)
    assert not torch.isin(token_ids, banned).any()
    uniform = reference.uniform_noise(case.seeds, case.positions, 4200)
    assert_drawn(case, uniform, token_ids)


def test_a_rows_token_does_not_depend_on_the_other_rows(library: KernelLibrary) -> None:
    case = random_case(9, 5000, seed=5)
    together = emulated_library.sample_tokens(library, case)
    for row in range(9):
        single = emulated_library.sample_tokens(library, case.row(row))
        for part, expected in zip(single, together, strict=True):
            assert torch.equal(part, expected[row : row + 1])


@pytest.mark.long_matrix
@pytest.mark.parametrize("temperature", [1e-30, 1e-4, 1e4, 1e30])
def test_extreme_temperatures_give_tokens_in_range(
    library: KernelLibrary, temperature: float
) -> None:
    case = random_case(6, 4100, seed=6)
    case = replace(case, temperature=torch.full((6,), temperature))
    token_ids = draw(library, case)
    assert ((token_ids >= 0) & (token_ids < 4100)).all()
    if temperature < 1e-3:
        assert torch.equal(token_ids, case.logits.argmax(dim=-1))


@pytest.mark.long_matrix
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 4089, 4097, 9001])
@pytest.mark.parametrize("num_extra", [0, 3])
def test_penalties(library: KernelLibrary, size: int, dtype: torch.dtype, num_extra: int) -> None:
    case = random_penalties(7, size, seed=size, dtype=dtype, num_extra=num_extra)
    case = replace(case, logits=emulated_library.surrounded(case.logits, offset=3, gap=5))
    result = emulated_library.penalize_logits(library, case)
    assert_penalized(case, result)
    assert torch.equal(result, reference.penalize_logits(*case.arguments()))


def test_an_extra_token_at_each_end_of_each_chunk_counts(library: KernelLibrary) -> None:
    tokens = torch.tensor([[0, 4095, 4096, 8191, 8192, 9000, 9000]])
    case = replace(
        random_penalties(1, 9001, seed=2),
        requests=torch.tensor([3]),
        extra_tokens=tokens,
        extra_counts=torch.ones_like(tokens, dtype=torch.int32),
    )
    assert_penalized(case, emulated_library.penalize_logits(library, case))


def test_shapes_beyond_the_grid_are_refused(library: KernelLibrary) -> None:
    logits = torch.zeros(1, 1).expand(2**28, 1)
    code = library.argmax_logprob(
        0, 0, logits.data_ptr(), 0, 2**40, 128256, None, 0, None, None, None, None, None
    )
    assert code != 0
    with pytest.raises(RuntimeError, match="sgl_kernel launch"):
        library.check(code)
