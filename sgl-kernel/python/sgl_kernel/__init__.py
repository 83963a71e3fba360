"""Sampling kernels for NVIDIA GPUs, with torch references for every other place."""

from __future__ import annotations

from sgl_kernel._errors import KernelUnavailableError
from sgl_kernel._library import warm_up
from sgl_kernel.argmax_logprob import argmax, argmax_logprob
from sgl_kernel.penalize_logits import penalize_logits
from sgl_kernel.sample_tokens import sample_tokens
from sgl_kernel.sampling_rows import SamplingRows
from sgl_kernel.uniform_noise import uniform_noise

__all__ = [
    "KernelUnavailableError",
    "SamplingRows",
    "argmax",
    "argmax_logprob",
    "penalize_logits",
    "sample_tokens",
    "uniform_noise",
    "warm_up",
]
