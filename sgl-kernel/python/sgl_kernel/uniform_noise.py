"""The noise that sample_tokens draws with, for tests and for other samplers."""

from __future__ import annotations

import torch

from sgl_kernel import reference
from sgl_kernel._checks import check_vector
from sgl_kernel._library import library_for

_MAX_ROWS = 65535
_MAX_SIZE = 1 << 30


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, size: int) -> torch.Tensor:
    """Uniform noise in (0, 1): a hash of (seed, position, token), bit for bit as on the CPU.

    Args:
        seeds, positions: [S] int64.

    Returns:
        [S, size] float32.
    """
    if seeds.dim() != 1:
        raise ValueError(f"seeds must be [S], not {list(seeds.shape)}; flatten them")
    rows = seeds.shape[0]
    check_vector("seeds", seeds, torch.int64, rows, seeds.device)
    check_vector("positions", positions, torch.int64, rows, seeds.device)
    if not 1 <= size <= _MAX_SIZE or rows > _MAX_ROWS:
        raise ValueError(
            f"size must be in 1..{_MAX_SIZE} and S at most {_MAX_ROWS}, not {size} and {rows}; "
            "ask for fewer at a time"
        )
    if seeds.is_cpu:
        return reference.uniform_noise(seeds, positions, size)
    if not seeds.is_cuda:
        raise ValueError(f"seeds is on {seeds.device}; move it to a CUDA device or to the CPU")
    noise = torch.empty(rows, size, dtype=torch.float32, device=seeds.device)
    if rows == 0:
        return noise
    index = seeds.get_device()
    library = library_for(index)
    stream = torch.cuda.current_stream(index).cuda_stream
    status = library.uniform_noise(
        index, seeds.data_ptr(), positions.data_ptr(), rows, size, noise.data_ptr(), stream
    )
    library.check(status)
    return noise
