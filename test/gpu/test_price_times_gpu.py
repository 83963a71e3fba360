"""Times of steps on a GPU, which prices are made of."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection

import pytest
import torch

from sglang.srt.model_executor.measured_times import GpuTimer

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

CYCLES = 100_000_000  # some 50 ms
LATE_S = 0.02


@pytest.mark.parametrize(
    ("late_at", "late_s"), [((), 0), *(((run,), LATE_S) for run in range(3)), (range(3), 0.1)]
)
def test_a_late_host_changes_no_time(late_at: Collection[int], late_s: float) -> None:
    """Such as one that waits for pinned memory after a launch, or is put aside by other processes:
    by its own clock it would see two runs end together. While it is slower than the GPU, runs do
    not count."""
    numbers = itertools.count()

    def launch() -> None:
        torch.cuda._sleep(CYCLES)
        if next(numbers) in late_at:
            time.sleep(late_s)

    GpuTimer().times_ms(lambda: torch.cuda._sleep(1000), 1)
    start = time.perf_counter()
    torch.cuda._sleep(CYCLES)
    torch.cuda.synchronize()
    whole_ms = (time.perf_counter() - start) * 1e3
    assert whole_ms > LATE_S * 1.5e3
    assert GpuTimer().times_ms(launch, 2) == pytest.approx([whole_ms] * 2, rel=0.2)
