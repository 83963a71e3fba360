"""The parts that all Triton kernels of the runtime share: their launch, and the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.platform import num_multiprocessors, supports_dependent_launch

# Decided where kernels are decorated: with TRITON_INTERPRET=1 they run on CPU tensors.
INTERPRETED = bool(triton.knobs.runtime.interpret)

Launch = Callable[[int], dict[str, int]]
"""Gives the launch options of a kernel of so many programs that calls `begin`."""


@triton.jit
def begin(PDL: tl.constexpr, early, beside=0):
    """Begins a kernel, as its first line: waits until the kernel before it has ended, whose writes
    can then be read. Kernels A, B and C, launched in this order, over time (a dot is waiting):

        A is early     A |--------|          A is early,     A |--------|
                       B |........|----|     B is beside     B |----....|
                       C               |--|                  C          |--|

    Args:
        PDL: whether the kernel was launched by CUDA's programmatic dependent launch, that is while
            the one before it may still run; without, there is nothing to wait for.
        early: 1 lets the next kernel start now, before this one has ended; else 0.
        beside: 1 waits for nothing here, else 0. Only for a kernel B that reads nothing that A
            writes, and only if A is `early`: then A has waited for all older kernels itself. B must
            call `finish` at each end: that waits for A, and so C, which waits for B, has both.
            C may be `beside` B in turn if B is `early` too and C reads nothing that A or B write:
            B starts after A has waited, and C after B has started, so older kernels have ended.
            C's `finish` waits for B, whose `finish` has waited for A.

    `early` and `beside` are plain numbers: as constants, each value would compile a kernel anew.
    """
    if PDL:
        if beside == 0:
            gdc_wait()
        if early != 0:
            gdc_launch_dependents()


@triton.jit
def read_ahead(PDL: tl.constexpr, pointers):
    """Has the cache lines of `pointers` read into the GPU's L2 cache, before `begin`: the memory is
    then busy while the kernel before this one still runs. Nothing is waited for, and nothing
    becomes known of what the lines hold, so any kernel may write them."""
    if PDL:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers.to(tl.int64)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def finish(PDL: tl.constexpr, beside):
    """The last line of a kernel that may run `beside` the one before it, at each of its ends: the
    last program waits for that kernel. So whoever waits for this one has waited for both."""
    if PDL:
        is_last = tl.program_id(0) == tl.num_programs(0) - 1
        is_last = is_last & (tl.program_id(1) == tl.num_programs(1) - 1)
        if (beside != 0) & is_last & (tl.program_id(2) == tl.num_programs(2) - 1):
            gdc_wait()


@triton.jit
def report_outside(outside_ptr, column, is_outside):
    """Stores a column that is outside of its row of the page table, for
    `ReqToTokenPool.raise_if_outside`; without `outside_ptr` it does nothing."""
    if outside_ptr is not None:
        tl.store(outside_ptr + column * 0, column.to(tl.int64), mask=is_outside)


def dependent_launch(device: torch.device, num_programs: int) -> dict[str, int]:
    """Launch options of a kernel that calls `begin`. If all its programs run at once, the next
    kernel may start early."""
    if INTERPRETED or not supports_dependent_launch(device):
        return {"PDL": False, "early": 0}
    early = int(num_programs <= num_multiprocessors(device))
    return {"PDL": True, "early": early, "launch_pdl": True}


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelLaunch:
    """Tells whether an attention kernel runs at the same time as others of the step, for other
    items.

    Attributes:
        with_previous: at the same time as the kernel launched just before it.
        with_next: at the same time as the kernel launched just after it.
    """

    with_previous: bool = False
    with_next: bool = False

    def options(self, device: torch.device, num_programs: int) -> dict[str, int]:
        """Returns the launch options of this kernel."""
        options = dependent_launch(device, num_programs)
        early = int(self.with_next or options["early"])
        return {**options, "early": early, "beside": int(self.with_previous)}


def beside_each_other(count: int) -> list[ParallelLaunch]:
    """Returns the launches of `count` kernels, one right after the other."""
    return [
        ParallelLaunch(with_previous=index > 0, with_next=index + 1 < count)
        for index in range(count)
    ]
