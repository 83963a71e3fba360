"""What all Triton kernels of the runtime share: how they are launched, and the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sglang.srt.platform import num_multiprocessors, supports_dependent_launch

# Decided where kernels are decorated: with TRITON_INTERPRET=1 they run on CPU tensors.
INTERPRETED = bool(triton.knobs.runtime.interpret)


@triton.jit
def begin(PDL: tl.constexpr, EARLY: tl.constexpr):
    """Waits for the kernel before (CUDA's programmatic dependent launch); `EARLY` lets the one
    after start, which waits likewise."""
    if PDL:
        gdc_wait()
        if EARLY:
            gdc_launch_dependents()


def dependent_launch(device: torch.device, num_programs: int) -> dict[str, bool]:
    """Options of a launch with a kernel that calls `begin`: where all its programs run at once, the
    next kernel may come beside them."""
    if INTERPRETED or not supports_dependent_launch(device):
        return {"PDL": False, "EARLY": False}
    return {"PDL": True, "EARLY": num_programs <= num_multiprocessors(device), "launch_pdl": True}
