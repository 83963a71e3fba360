"""The activation of gated products, which several kernels compute at their end."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def silu_times(gate, up):
    """silu(gate) * up in their type; silu is computed in float32 and rounded before it is used."""
    wide = gate.to(tl.float32)
    return (wide / (1 + tl.exp(-wide))).to(up.dtype) * up
