"""Kernels of sampling and speculation for NVIDIA GPUs; elsewhere their torch references run."""

from __future__ import annotations

from sgl_kernel._errors import KernelUnavailableError
from sgl_kernel._library import warm_up
from sgl_kernel.argmax_logprob import argmax, argmax_logprob
from sgl_kernel.confirm_drafts import confirm_drafts
from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sgl_kernel.kv_addresses import KVAddresses
from sgl_kernel.move_kept_kv import move_kept_kv
from sgl_kernel.penalize_logits import penalize_logits
from sgl_kernel.sample_tokens import sample_tokens
from sgl_kernel.sampling_rows import SamplingRows
from sgl_kernel.uniform_noise import uniform_noise

__all__ = [
    "ConfirmedDrafts",
    "KVAddresses",
    "KernelUnavailableError",
    "SamplingRows",
    "argmax",
    "argmax_logprob",
    "confirm_drafts",
    "move_kept_kv",
    "penalize_logits",
    "sample_tokens",
    "uniform_noise",
    "warm_up",
]
