"""What all Triton kernels of the runtime share: how they are launched, and the interpreter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.platform import num_multiprocessors, supports_dependent_launch

# Decided where kernels are decorated: with TRITON_INTERPRET=1 they run on CPU tensors.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def begin(PDL: tl.constexpr, early, beside=0):
    """Waits for the kernel before (CUDA's programmatic dependent launch); `early` lets the one
    after start, which waits likewise. Not so one that runs `beside` the kernel before: that has
    waited for all that this one reads before it let it start. Then `finish` stands at each end.
    Both are numbers, 0 or 1: as constants they would make two kernels of one to compile."""
    if PDL:
        if beside == 0:
            gdc_wait()
        if early != 0:
            gdc_launch_dependents()


@triton.jit
def finish(PDL: tl.constexpr, beside):
    """The grid ends after the kernel that it runs beside: who waits for one has waited for both."""
    if PDL:
        is_last = tl.program_id(0) == tl.num_programs(0) - 1
        is_last = is_last & (tl.program_id(1) == tl.num_programs(1) - 1)
        if (beside != 0) & is_last & (tl.program_id(2) == tl.num_programs(2) - 1):
            gdc_wait()


@triton.jit
def report_outside(outside_ptr, column, is_outside):
    """Leaves a column outside of its row of the page table to `ReqToTokenPool.raise_if_outside`,
    if there is a place for it."""
    if outside_ptr is not None:
        tl.store(outside_ptr + column * 0, column.to(tl.int64), mask=is_outside)


def dependent_launch(device: torch.device, num_programs: int) -> dict[str, int]:
    """Options of a launch with a kernel that calls `begin`: where all its programs run at once, the
    next kernel may come beside them."""
    if INTERPRETED or not supports_dependent_launch(device):
        return {"PDL": False, "early": 0}
    early = int(num_programs <= num_multiprocessors(device))
    return {"PDL": True, "early": early, "launch_pdl": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class Neighbours:
    """The other attention kernel of a step, which goes over other items.

    Attributes:
        before: it is launched before this one, and this one runs beside it.
        after: it is launched after this one, and runs beside it.
    """

    before: bool = False
    after: bool = False

    def options(self, device: torch.device, num_programs: int) -> dict[str, int]:
        """Of a launch."""
        options = dependent_launch(device, num_programs)
        early = int(self.after or options["early"])
        return {**options, "early": early, "beside": int(self.before)}
