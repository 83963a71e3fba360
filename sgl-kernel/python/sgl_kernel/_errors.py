"""The one error that says that no kernel can run here."""

from __future__ import annotations


class KernelUnavailableError(RuntimeError):
    """No compiled kernels for this GPU, and they cannot be compiled; the message has the remedy."""
