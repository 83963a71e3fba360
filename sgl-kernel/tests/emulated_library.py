"""The kernels' own code, compiled by g++ and run on emulated CUDA threads."""

from __future__ import annotations

import subprocess
from pathlib import Path

import torch
from sampling_oracle import PenaltyCase, SamplingCase
from speculation_oracle import DraftCase, MoveCase

from sgl_kernel import ConfirmedDrafts
from sgl_kernel._library import DTYPE_CODES, PARTIAL_BYTES, KernelLibrary, address_array

_TESTS = Path(__file__).parent
_GUARD = 64  # bytes of poison around the logits' storage and the workspace


def compile_emulation(out: Path) -> KernelLibrary:
    """Compiles tests/emulation and loads it through the package's own ctypes signatures."""
    library = out / "libemulated.so"
    include = _TESTS.parent / "include"
    command = ["g++", "-std=c++17", "-O1", "-fno-stack-protector", "-shared", "-fPIC"]
    # A GPU faults at a misaligned address, so this stops there too.
    command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]
    command += [f"-I{include}", "-Wno-unknown-pragmas"]
    sources = sorted((_TESTS / "emulation").glob("*.cpp"))
    command += [*map(str, sources), "-o", str(library)]
    subprocess.run(command, check=True)
    return KernelLibrary(library)


def argmax_logprob(
    library: KernelLibrary, logits: torch.Tensor, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As sgl_kernel.argmax_logprob; outputs and workspace hold poison before."""
    rows, size = logits.shape
    token_ids = torch.full((rows,), -7)
    best = torch.full((rows,), torch.nan)
    logprobs = torch.full((rows,), torch.nan)
    workspace = _workspace(library, rows, size)
    status = library.argmax_logprob(
        0, *_logits_arguments(logits, banned_ids), workspace.data_ptr(),
        token_ids.data_ptr(), best.data_ptr(), logprobs.data_ptr(), None,
    )  # fmt: skip
    library.check(status)
    return token_ids, best, logprobs


def topk_logprob(
    library: KernelLibrary, logits: torch.Tensor, topk: int, banned_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """As sgl_kernel.topk_logprob; outputs and workspace hold poison before, and after them."""
    rows, size = logits.shape
    token_ids = torch.full((rows * topk + _GUARD,), -7)
    logprobs = torch.full((rows * topk + _GUARD,), torch.nan)
    num_bytes = rows * library.num_chunks(size) * (16 + 8 * topk)
    workspace = torch.full((num_bytes + _GUARD,), 0x7F, dtype=torch.uint8)
    status = library.topk_logprob(
        0, *_logits_arguments(logits, banned_ids), topk, workspace.data_ptr(),
        token_ids.data_ptr(), logprobs.data_ptr(), None,
    )  # fmt: skip
    library.check(status)
    assert (token_ids[-_GUARD:] == -7).all()
    assert logprobs[-_GUARD:].isnan().all()
    assert (workspace[-_GUARD:] == 0x7F).all(), "the workspace is too small"
    return token_ids[:-_GUARD].view(rows, topk), logprobs[:-_GUARD].view(rows, topk)


def sample_tokens(library: KernelLibrary, case: SamplingCase) -> tuple[torch.Tensor, torch.Tensor]:
    """As sgl_kernel.sample_tokens; outputs and workspace hold poison before."""
    rows, size = case.logits.shape
    token_ids = torch.full((rows,), -7)
    logprobs = torch.full((rows,), torch.nan)
    workspace = _workspace(library, rows, size)
    status = library.sample_tokens(
        0,
        *_logits_arguments(case.logits, case.banned_ids),
        address_array(case.rows),
        workspace.data_ptr(),
        token_ids.data_ptr(),
        logprobs.data_ptr(),
        None,
    )
    library.check(status)
    return token_ids, logprobs


def penalize_logits(library: KernelLibrary, case: PenaltyCase) -> torch.Tensor:
    """As sgl_kernel.penalize_logits; the result holds poison before."""
    rows, size = case.logits.shape
    result = torch.full((rows, size), torch.nan)
    code, address, stride, *shape = _logits_arguments(case.logits, None)[:5]
    extra = (case.extra_tokens, case.extra_counts)
    status = library.penalize_logits(
        0,
        *(code, address, stride, *shape),
        *(value.data_ptr() for value in (case.counts, case.penalties, case.requests)),
        *(None if value is None else value.data_ptr() for value in extra),
        0 if case.extra_tokens is None else case.extra_tokens.shape[1],
        result.data_ptr(),
        None,
    )
    library.check(status)
    return result


def uniform_noise(
    library: KernelLibrary, seeds: torch.Tensor, positions: torch.Tensor, size: int
) -> torch.Tensor:
    """As sgl_kernel.uniform_noise."""
    noise = torch.empty(len(seeds), size)
    library.check(
        library.uniform_noise(
            0, seeds.data_ptr(), positions.data_ptr(), len(seeds), size, noise.data_ptr(), None
        )
    )
    return noise


def confirm_drafts(library: KernelLibrary, case: DraftCase) -> ConfirmedDrafts:
    """As sgl_kernel.confirm_drafts; the results hold poison before, and after them."""
    rows, width = len(case.num_rows), case.max_rows
    sizes, dtypes = (rows, rows * width, rows), (torch.int64, torch.int32, torch.int64)
    storages = [
        torch.full((size + _GUARD,), -7, dtype=dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    arguments = (case.tokens, case.targets, case.parents, case.starts, case.target_starts)
    status = library.confirm_drafts(
        0,
        *(None if tensor is None else tensor.data_ptr() for tensor in (*arguments, case.num_rows)),
        *(len(case.tokens), len(case.targets), rows, width),
        *(storage.data_ptr() for storage in storages),
        None,
    )
    library.check(status)
    for storage, size in zip(storages, sizes, strict=True):
        assert (storage[size:] == -7).all(), "a result reaches over its end"
    num_confirmed, path, next_token = (storage[:-_GUARD] for storage in storages)
    return ConfirmedDrafts(num_confirmed, path.view(rows, width), next_token)


def move_kept_kv(library: KernelLibrary, case: MoveCase) -> None:
    """As sgl_kernel.move_kept_kv."""
    kv = case.kv
    vectors = (case.table_rows, case.committed, case.path, case.num_confirmed)
    status = library.move_kept_kv(
        *(0, kv.table.data_ptr(), len(kv.tensors)),
        *(case.page_table.data_ptr(), *case.page_table.shape),
        *(vector.data_ptr() for vector in vectors),
        *(*case.path.shape, None),
    )
    library.check(status)


def surrounded(logits: torch.Tensor, offset: int = 0, gap: int = 0) -> torch.Tensor:
    """The same rows, `offset` elements into a storage of values greater than any logit.

    Args:
        logits: [S, V].
        gap: elements between two rows.

    Returns:
        [S, V] with row stride V + gap.
    """
    rows, size = logits.shape
    storage = torch.full((_GUARD + offset + rows * (size + gap) + _GUARD,), 30000.0)
    storage = storage.to(logits.dtype)
    view = storage.as_strided((rows, size), (size + gap, 1), _GUARD + offset)
    return view.copy_(logits)


def _logits_arguments(
    logits: torch.Tensor, banned_ids: torch.Tensor | None
) -> tuple[int | None, ...]:
    rows, size = logits.shape
    banned_address = None if banned_ids is None else banned_ids.data_ptr()
    num_banned = 0 if banned_ids is None else len(banned_ids)
    code = DTYPE_CODES[logits.dtype]
    return code, logits.data_ptr(), logits.stride(0), rows, size, banned_address, num_banned


def _workspace(library: KernelLibrary, rows: int, size: int) -> torch.Tensor:
    num_bytes = rows * library.num_chunks(size) * PARTIAL_BYTES
    return torch.full((num_bytes,), 0x7F, dtype=torch.uint8)
