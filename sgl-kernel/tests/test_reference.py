"""The torch references, which are what a CPU runs, and the validation before them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from sampling_oracle import (
    assert_drawn,
    assert_penalized,
    assert_scored,
    masked,
    noise,
    random_case,
    random_penalties,
    unfiltered,
)

import sgl_kernel
from sgl_kernel import KernelUnavailableError, SamplingRows, reference

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_argmax_logprob_against_float64(dtype: torch.dtype) -> None:
    logits = (torch.randn(5, 1001, generator=torch.Generator().manual_seed(0)) * 5).to(dtype)
    banned = torch.cat([logits.argmax(dim=-1)[:2], torch.tensor([-1, 1001])])
    token_ids, best, logprobs = sgl_kernel.argmax_logprob(logits, banned)
    values = masked(logits, banned[:2])
    assert torch.equal(token_ids, values.argmax(dim=-1))
    assert torch.equal(best.double(), values.amax(dim=-1))
    expected = torch.log_softmax(values, dim=-1).amax(dim=-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=5e-6)
    assert (token_ids.dtype, best.dtype, logprobs.dtype) == (
        torch.int64,
        torch.float32,
        torch.float32,
    )


def test_argmax_prefers_the_lowest_of_equal_logits() -> None:
    logits = torch.zeros(1, 50)
    logits[0, [9, 30]] = 1.0
    assert sgl_kernel.argmax_logprob(logits)[0].tolist() == [9]


def test_the_logits_are_left_as_they_were() -> None:
    logits = torch.randn(2, 10)
    before = logits.clone()
    sgl_kernel.argmax_logprob(logits, torch.tensor([1]))
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [0.0, 0.5, 3.0])
def test_samples_against_the_float64_race(dtype: torch.dtype, spread: float) -> None:
    case = random_case(70, 200, seed=1, dtype=dtype, spread=spread)
    case = replace(case, banned_ids=torch.tensor([3, 77]))
    token_ids, logprobs = sgl_kernel.sample_tokens(*case.arguments())
    assert_scored(case, token_ids, logprobs)
    assert_drawn(case, noise(case.seeds, case.positions, 200), token_ids)


def test_noise_is_splitmix64_bit_for_bit() -> None:
    seeds = torch.tensor([0, -1, 2**63 - 1, -(2**63), 42])
    positions = torch.tensor([0, 1, 131071, 2**40, -1])
    expected = noise(seeds, positions, 500)
    assert torch.equal(sgl_kernel.uniform_noise(seeds, positions, 500).double(), expected)
    assert 0 < expected.min() < expected.max() < 1


def test_each_filter_keeps_its_tokens() -> None:
    probs = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).repeat(5, 1)
    rows = random_case(5, 4, seed=0).rows._replace(
        top_k=torch.tensor([2, 4, 4, 4, 0]),
        top_p=torch.tensor([1.0, 0.75, 1.0, 0.0, 1.0]),
        min_p=torch.tensor([0.0, 0.0, 0.25, 0.0, 0.0]),
    )
    kept = reference.kept_tokens(probs, rows)
    assert kept.sum(dim=-1).tolist() == [2, 2, 4, 1, 1]
    assert kept[:, 0].all()


def test_samples_follow_the_distribution() -> None:
    rows = 40000
    case = unfiltered(random_case(rows, 8, seed=2))
    case = replace(
        case,
        logits=torch.tensor([2.0, 1.0, 0.5, 0.0, 0.0, -1.0, -2.0, -3.0]).expand(rows, 8),
        seeds=torch.full((rows,), 7),
        positions=torch.arange(rows),
    )
    counts = torch.bincount(sgl_kernel.sample_tokens(*case.arguments())[0], minlength=8)
    expected = torch.softmax(case.logits[0].double(), dim=-1) * rows
    chi_square = ((counts - expected) ** 2 / expected).sum()
    assert chi_square < 24.3  # 7 degrees of freedom, 1 in 1000


def test_rows_without_finite_logits_give_an_id_in_range() -> None:
    case = random_case(2, 20, seed=3)
    case = replace(
        case, logits=torch.stack([torch.full((20,), v) for v in (-torch.inf, torch.nan)])
    )
    token_ids, _ = sgl_kernel.sample_tokens(*case.arguments())
    assert ((token_ids >= 0) & (token_ids < 20)).all()


def test_no_rows_give_no_tokens() -> None:
    case = random_case(0, 20, seed=4)
    assert [part.shape[0] for part in sgl_kernel.sample_tokens(*case.arguments())] == [0, 0]
    assert [part.shape[0] for part in sgl_kernel.argmax_logprob(case.logits)] == [0, 0, 0]
    assert sgl_kernel.uniform_noise(case.seeds, case.positions, 5).shape == (0, 5)


@pytest.mark.parametrize(
    ("logits", "remedy"),
    [
        (torch.zeros(3), "reshape"),
        (torch.zeros(3, 4, dtype=torch.float64), "convert"),
        (torch.zeros(3, 0), "whole vocabulary"),
        (torch.zeros(4, 3).T, "contiguous"),
        (torch.zeros(3, 4, device="meta"), "move"),
    ],
)
def test_logits_are_refused_with_a_remedy(logits: torch.Tensor, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        sgl_kernel.argmax_logprob(logits)


@pytest.mark.parametrize(
    ("banned_ids", "remedy"),
    [
        (torch.zeros(1, 1, dtype=torch.int64), "flatten"),
        (torch.zeros(2, dtype=torch.int32), "to\\(torch.int64\\)"),
        (torch.zeros(2, dtype=torch.int64, device="meta"), "move"),
        (torch.zeros(4, dtype=torch.int64)[::2], "contiguous"),
    ],
)
def test_banned_ids_are_refused_with_a_remedy(banned_ids: torch.Tensor, remedy: str) -> None:
    with pytest.raises(ValueError, match=remedy):
        sgl_kernel.argmax_logprob(torch.zeros(2, 4), banned_ids)


@pytest.mark.parametrize("name", SamplingRows._fields)
def test_row_parameters_are_refused_by_name(name: str) -> None:
    case = random_case(4, 20, seed=5)
    vector = getattr(case, name)
    for broken, remedy in [
        (vector[:3], r"\[4\]"),
        (vector.to(torch.int8), "convert"),
        (vector.repeat(2)[::2], "contiguous"),
    ]:
        with pytest.raises(ValueError, match=f"{name} .*{remedy}"):
            sgl_kernel.sample_tokens(*replace(case, **{name: broken}).arguments())


@pytest.mark.parametrize("num_extra", [0, 4])
def test_penalties_by_their_definition(num_extra: int) -> None:
    case = random_penalties(9, 50, seed=6, dtype=torch.bfloat16, num_extra=num_extra)
    assert_penalized(case, sgl_kernel.penalize_logits(*case.arguments()))


@pytest.mark.parametrize("name", ["counts", "penalties", "requests", "extra_tokens"])
def test_penalty_arguments_are_refused_by_name(name: str) -> None:
    case = random_penalties(4, 20, seed=7, num_extra=2)
    value = getattr(case, name)
    for broken in (value[:, :1] if value.dim() == 2 else value[:1], value.to(torch.int8)):
        with pytest.raises(ValueError, match=name):
            sgl_kernel.penalize_logits(*replace(case, **{name: broken}).arguments())
    with pytest.raises(ValueError, match="give both or none"):
        sgl_kernel.penalize_logits(*replace(case, extra_counts=None).arguments())


def test_noise_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="ask for fewer"):
        sgl_kernel.uniform_noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1).long(), 0)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_warm_up_without_a_gpu_says_that_the_references_run() -> None:
    with pytest.raises(KernelUnavailableError, match="torch references"):
        sgl_kernel.warm_up()
