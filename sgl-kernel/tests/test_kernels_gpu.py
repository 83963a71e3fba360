"""The kernels on a GPU, against float64 on fresh inputs."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from sampling_oracle import (
    SamplingCase,
    assert_drawn,
    assert_penalized,
    assert_scored,
    masked,
    random_case,
    random_penalties,
    unfiltered,
)
from speculation_oracle import (
    MoveCase,
    assert_confirmed,
    expected_kv,
    random_drafts,
    random_moves,
)

import sgl_kernel
from sgl_kernel import reference

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SIZES = [1, 7, 8, 4095, 4096, 4097, 32000, 128256, 151937]
# Fresh inputs in every run; the value is printed with a failure, and setting it repeats the run.
BASE_SEED = int(os.environ.get("SGL_KERNEL_TEST_SEED", torch.seed() % 2**31))


@pytest.fixture(scope="module", autouse=True)
def warmed_up() -> None:
    print(f"SGL_KERNEL_TEST_SEED={BASE_SEED}")
    sgl_kernel.warm_up()


def random_logits(rows: int, size: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(BASE_SEED + seed)
    return (torch.randn(rows, size, generator=generator, device="cuda") * 4).to(dtype)


def surrounded(logits: torch.Tensor, offset: int, gap: int) -> torch.Tensor:
    """The same rows inside a storage of greater values, row stride V + gap."""
    rows, size = logits.shape
    storage = torch.full((offset + rows * (size + gap) + 64,), 30000.0, device="cuda")
    view = storage.to(logits.dtype).as_strided((rows, size), (size + gap, 1), offset)
    return view.copy_(logits)


def gpu_case(rows: int, size: int, seed: int, dtype: torch.dtype, spread: float) -> SamplingCase:
    return random_case(rows, size, BASE_SEED + seed, dtype, spread).to("cuda")


def poison_the_allocator() -> None:
    """Fills the memory that the next small allocations get with values no result has."""
    blocks = [torch.full((1 << 18,), -7, dtype=torch.int64, device="cuda") for _ in range(4)]
    blocks += [torch.full((size,), -7, dtype=torch.int64, device="cuda") for size in (1, 64, 999)]
    del blocks


def check_argmax(logits: torch.Tensor, banned_ids: torch.Tensor | None = None) -> None:
    poison_the_allocator()
    token_ids, best, logprobs = sgl_kernel.argmax_logprob(logits, banned_ids)
    values = masked(logits, banned_ids)
    greatest = values.amax(dim=-1)
    # argmax on a GPU promises no index among ties.
    columns = torch.arange(values.shape[1], device="cuda")
    lowest = torch.where(values == greatest[:, None], columns, values.shape[1]).amin(dim=-1)
    assert torch.equal(token_ids, lowest)
    assert torch.equal(best.double(), greatest)
    expected = torch.log_softmax(values, dim=-1).amax(dim=-1)
    torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=5e-6)


def check_samples(case: SamplingCase) -> torch.Tensor:
    poison_the_allocator()
    token_ids, logprobs = sgl_kernel.sample_tokens(*case.arguments())
    assert_scored(case, token_ids, logprobs)
    uniform = sgl_kernel.uniform_noise(case.seeds, case.positions, case.logits.shape[1])
    assert_drawn(case, uniform, token_ids)
    return token_ids


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [1, 3, 128])
def test_argmax_logprob(rows: int, size: int, dtype: torch.dtype) -> None:
    check_argmax(random_logits(rows, size, size, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("topk", [1, 2, 4, 8, 16, 33])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 128])
def test_topk_logprob(rows: int, topk: int, dtype: torch.dtype) -> None:
    """Tests random logits, and few values, so that there are ties."""
    for size in (33, 4097, 128256):
        logits = random_logits(rows, size, size + topk, dtype)
        for case in (logits, logits.round(), surrounded(logits, topk % 8, 3)):
            poison_the_allocator()
            token_ids, logprobs = sgl_kernel.topk_logprob(case, topk)
            expected_ids, expected = reference.topk_logprob(case, topk)
            assert torch.equal(token_ids, expected_ids)
            torch.testing.assert_close(logprobs, expected, rtol=1e-6, atol=2e-5)


def test_a_graph_of_topk_logprob_sees_changed_inputs() -> None:
    logits = random_logits(9, 128256, 5, torch.bfloat16)
    for topk in (4, 20):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = sgl_kernel.topk_logprob(logits, topk)
        for seed in range(3):
            logits.copy_(random_logits(9, 128256, 50 + seed, torch.bfloat16))
            graph.replay()
            for part, expected in zip(found, sgl_kernel.topk_logprob(logits, topk), strict=True):
                assert torch.equal(part, expected)


def test_argmax_of_a_thousand_rows() -> None:
    check_argmax(random_logits(1000, 32000, 1, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", range(8))
def test_misaligned_rows_read_nothing_outside(offset: int, dtype: torch.dtype) -> None:
    logits = random_logits(5, 9001, offset, dtype)
    check_argmax(surrounded(logits, offset, gap=offset + 1))
    case = gpu_case(5, 9001, offset, dtype, 3.0)
    check_samples(replace(case, logits=surrounded(case.logits, offset, gap=offset + 1)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_ties_go_to_the_lowest_index(dtype: torch.dtype) -> None:
    logits = torch.zeros(3, 128256, dtype=dtype, device="cuda")
    logits[1, [100000, 4500, 77]] = 2.0
    logits[2, [100000, 90001, 90000]] = 2.0
    assert sgl_kernel.argmax_logprob(logits)[0].tolist() == [0, 77, 90000]
    case = gpu_case(3, 128256, 2, dtype, 0.0)
    case = replace(case, logits=logits, temperature=torch.zeros(3, device="cuda"))
    assert sgl_kernel.sample_tokens(*case.arguments())[0].tolist() == [0, 77, 90000]


def test_bans_and_minus_infinity() -> None:
    logits = random_logits(9, 128256, 3, torch.bfloat16)
    logits[1, 40:] = -torch.inf
    outside = torch.tensor([0, 128255], device="cuda")
    check_argmax(logits, torch.unique(torch.cat([logits.argmax(dim=-1), outside])))
    many = torch.randint(0, 128256, (200,), device="cuda")
    check_argmax(logits, many)
    case = replace(gpu_case(9, 128256, 3, torch.bfloat16, 3.0), logits=logits, banned_ids=many)
    assert not torch.isin(check_samples(case), many).any()


def test_banned_ids_outside_the_vocabulary_ban_nothing() -> None:
    logits = random_logits(2, 4097, 4, torch.float32)
    banned = torch.tensor([-1, 4097, 2**40], device="cuda")
    assert torch.equal(
        sgl_kernel.argmax_logprob(logits, banned)[0], sgl_kernel.argmax_logprob(logits)[0]
    )


@pytest.mark.parametrize("value", [-torch.inf, torch.nan, torch.inf])
def test_rows_without_finite_logits_give_an_id_in_range(value: float) -> None:
    logits = torch.full((2, 5000), value, device="cuda")
    assert sgl_kernel.argmax_logprob(logits)[0].tolist() == [0, 0]
    case = replace(gpu_case(2, 5000, 5, torch.float32, 1.0), logits=logits)
    assert sgl_kernel.sample_tokens(*case.arguments())[0].tolist() == [0, 0]


def test_noise_is_the_references_bit_for_bit() -> None:
    seeds = torch.tensor([0, 1, -1, 2**63 - 1, -(2**63), BASE_SEED])
    positions = torch.tensor([0, 5, 2**31, 7, 131071, -3])
    expected = reference.uniform_noise(seeds, positions, 128256)
    assert torch.equal(
        sgl_kernel.uniform_noise(seeds.cuda(), positions.cuda(), 128256).cpu(), expected
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 7, 4096, 4097, 128256])
@pytest.mark.parametrize("spread", [0.0, 0.3, 3.0])
def test_samples_are_the_filtered_winners(size: int, dtype: torch.dtype, spread: float) -> None:
    check_samples(gpu_case(70, size, size + int(spread * 10), dtype, spread))


def test_samples_without_filters() -> None:
    check_samples(unfiltered(gpu_case(128, 128256, 6, torch.bfloat16, 2.0)))


@pytest.mark.parametrize("top_k", [2, 20, 1000])
def test_small_top_k_of_a_flat_distribution(top_k: int) -> None:
    case = unfiltered(gpu_case(64, 128256, top_k, torch.float32, 0.01))
    check_samples(replace(case, top_k=torch.full_like(case.top_k, top_k)))


def test_the_same_input_gives_the_same_output_alone_and_in_a_batch() -> None:
    case = gpu_case(128, 128256, 8, torch.bfloat16, 1.0)
    first = sgl_kernel.sample_tokens(*case.arguments())
    parts = sgl_kernel.argmax_logprob(case.logits)
    for _ in range(20):
        for part, again in zip(first, sgl_kernel.sample_tokens(*case.arguments()), strict=True):
            assert torch.equal(part, again)
        for part, again in zip(parts, sgl_kernel.argmax_logprob(case.logits), strict=True):
            assert torch.equal(part, again)
    for row in range(0, 128, 9):
        alone = sgl_kernel.sample_tokens(*case.row(row).arguments())
        for part, again in zip(first, alone, strict=True):
            assert torch.equal(part[row : row + 1], again)
        single = sgl_kernel.argmax_logprob(case.logits[row : row + 1])
        assert torch.equal(single[2], parts[2][row : row + 1])


def test_graph_replays_see_changed_inputs() -> None:
    case = gpu_case(33, 128256, 9, torch.bfloat16, 2.0)
    banned = torch.tensor([5], device="cuda")
    case = replace(case, banned_ids=banned)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        draws = sgl_kernel.sample_tokens(*case.arguments())
        parts = sgl_kernel.argmax_logprob(case.logits, banned)
    for step in range(5):
        fresh = gpu_case(33, 128256, 100 + step, torch.bfloat16, 2.0)
        case.logits.copy_(fresh.logits)
        for target, source in zip(case.rows, fresh.rows, strict=True):
            target.copy_(source)
        banned.fill_(step)
        for output in (*draws, *parts):
            output.fill_(-7)
        graph.replay()
        for part, expected in zip(draws, sgl_kernel.sample_tokens(*case.arguments()), strict=True):
            assert torch.equal(part, expected)
        eager = sgl_kernel.argmax_logprob(case.logits, banned)
        for part, expected in zip(parts, eager, strict=True):
            assert torch.equal(part, expected)


def test_two_streams_at_once_do_not_disturb_each_other() -> None:
    cases = [gpu_case(64, 128256, 10 + i, torch.bfloat16, 2.0) for i in range(2)]
    expected = [sgl_kernel.sample_tokens(*case.arguments())[0] for case in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    results: list[list[torch.Tensor]] = [[], []]
    for _ in range(20):
        for i, stream in enumerate(streams):
            with torch.cuda.stream(stream):
                results[i].append(sgl_kernel.sample_tokens(*cases[i].arguments())[0])
    torch.cuda.synchronize()
    for i in range(2):
        assert all(torch.equal(result, expected[i]) for result in results[i])


@pytest.mark.parametrize("filtered", [False, True])
def test_samples_follow_the_distribution(filtered: bool) -> None:
    rows, size = 60000, 16
    case = unfiltered(gpu_case(rows, size, 11, torch.float32, 1.0))
    logits = torch.linspace(2.0, -1.0, size, device="cuda")
    case = replace(
        case,
        logits=logits.expand(rows, size),
        seeds=torch.full((rows,), 7, device="cuda"),
        positions=torch.arange(rows, device="cuda"),
        top_k=torch.full((rows,), 9 if filtered else size, device="cuda"),
    )
    counts = torch.bincount(sgl_kernel.sample_tokens(*case.arguments())[0], minlength=size)
    num_kept = 9 if filtered else size
    assert counts[num_kept:].sum() == 0
    expected = torch.softmax(logits[:num_kept].double(), dim=-1) * rows
    chi_square = ((counts[:num_kept] - expected) ** 2 / expected).sum().item()
    assert chi_square < (26.1 if filtered else 37.7)  # 8 and 15 degrees of freedom, 1 in 1000


def test_no_rows_give_no_tokens() -> None:
    case = gpu_case(0, 4096, 12, torch.float32, 1.0)
    assert [part.shape[0] for part in sgl_kernel.sample_tokens(*case.arguments())] == [0, 0]
    assert [part.shape[0] for part in sgl_kernel.argmax_logprob(case.logits)] == [0, 0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 4089, 4097, 32001])
@pytest.mark.parametrize("num_extra", [0, 15])
def test_penalties(size: int, dtype: torch.dtype, num_extra: int) -> None:
    case = random_penalties(9, size, BASE_SEED + size, dtype, num_extra)
    poison_the_allocator()
    result = sgl_kernel.penalize_logits(*case.to("cuda").arguments())
    assert_penalized(case, result.cpu())


def test_penalties_of_many_rows_and_a_graph() -> None:
    case = random_penalties(128, 128256, BASE_SEED, torch.bfloat16).to("cuda")
    expected = reference.penalize_logits(*case.arguments())
    assert torch.equal(sgl_kernel.penalize_logits(*case.arguments()), expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sgl_kernel.penalize_logits(*case.arguments())
    result.fill_(-7)
    graph.replay()
    assert torch.equal(result, expected)


def test_parameters_on_the_cpu_are_refused() -> None:
    case = gpu_case(2, 4096, 13, torch.float32, 1.0)
    with pytest.raises(ValueError, match="top_k is on cpu; move it"):
        sgl_kernel.sample_tokens(*replace(case, top_k=case.top_k.cpu()).arguments())


def assert_moved(case: MoveCase, on_gpu: MoveCase) -> None:
    """The pools on the GPU hold what the moves make of those of `case`, still as they were."""
    for tensor, expected in zip(on_gpu.kv.tensors, expected_kv(case), strict=True):
        assert torch.equal(tensor.cpu(), expected)


@pytest.mark.parametrize("reads_all", [True, False])
@pytest.mark.parametrize("has_tree", [True, False])
@pytest.mark.parametrize("max_rows", [1, 8, 33, 64, 1024])
def test_confirmed_drafts(max_rows: int, has_tree: bool, reads_all: bool) -> None:
    for requests in (1, 37, 1024 if max_rows <= 33 else 5):
        case = random_drafts(requests, max_rows, BASE_SEED + max_rows, has_tree, reads_all)
        poison_the_allocator()
        assert_confirmed(case, sgl_kernel.confirm_drafts(*case.to("cuda").arguments()))


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("max_rows", [2, 16, 64, 700])
def test_moved_kv(max_rows: int, page_size: int) -> None:
    case = random_moves(3 if max_rows > 64 else 40, max_rows, page_size, BASE_SEED + max_rows)
    on_gpu = case.to("cuda")
    sgl_kernel.move_kept_kv(*on_gpu.arguments())
    assert_moved(case, on_gpu)


def test_a_graph_of_verification_and_moves_sees_changed_inputs() -> None:
    drafts = random_drafts(30, 16, BASE_SEED).to("cuda")
    case = random_moves(30, 16, 4, BASE_SEED)
    on_gpu = case.to("cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = sgl_kernel.confirm_drafts(*drafts.arguments())
        moves = replace(on_gpu, path=result.path, num_confirmed=result.num_confirmed)
        sgl_kernel.move_kept_kv(*moves.arguments())
    fresh = replace(
        random_drafts(30, 16, BASE_SEED),
        targets=torch.randint(5, 7, drafts.targets.shape),
        tokens=torch.randint(5, 7, drafts.tokens.shape),
    )
    drafts.targets.copy_(fresh.targets)
    drafts.tokens.copy_(fresh.tokens)
    for tensor in on_gpu.kv.tensors:  # as a pool that was given back and taken again
        tensor.data = tensor.clone()
    on_gpu.kv.refresh()
    graph.replay()
    assert_confirmed(fresh, result)
    kept = replace(case, path=result.path.cpu(), num_confirmed=result.num_confirmed.cpu())
    assert_moved(kept, on_gpu)
