"""SGLang's path of what trainers call before they serialize tensors of a GPU for a server."""

from __future__ import annotations


def monkey_patch_torch_reductions() -> None:
    """Does nothing: `MultiprocessingSerializer` names a GPU by its UUID, since another process may
    number the GPUs otherwise (CUDA_VISIBLE_DEVICES)."""
