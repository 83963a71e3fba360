"""Kernels of sampling and speculation for NVIDIA GPUs; elsewhere their torch references run."""

from __future__ import annotations

from sgl_kernel._errors import KernelUnavailableError
from sgl_kernel._library import warm_up
from sgl_kernel.argmax_logprob import argmax, argmax_logprob
from sgl_kernel.build_ragged_trees import build_ragged_trees
from sgl_kernel.build_tree_kernel_efficient import build_tree_kernel_efficient
from sgl_kernel.confirm_drafts import confirm_drafts
from sgl_kernel.confirmed_drafts import ConfirmedDrafts
from sgl_kernel.kv_addresses import KVAddresses
from sgl_kernel.move_kept_kv import move_kept_kv
from sgl_kernel.penalize_logits import penalize_logits
from sgl_kernel.ragged_trees import RaggedTrees
from sgl_kernel.sample_tokens import sample_tokens
from sgl_kernel.sample_trees import (
    sample_ragged_trees,
    tree_speculative_sampling_target_only,
)
from sgl_kernel.sampling_rows import SamplingRows
from sgl_kernel.topk_logprob import topk_logprob
from sgl_kernel.tree_mask_mode import TreeMaskMode
from sgl_kernel.uniform_noise import uniform_noise
from sgl_kernel.verify_trees import verify_ragged_trees, verify_tree_greedy

__all__ = [
    "ConfirmedDrafts",
    "KVAddresses",
    "KernelUnavailableError",
    "RaggedTrees",
    "SamplingRows",
    "TreeMaskMode",
    "argmax",
    "argmax_logprob",
    "build_ragged_trees",
    "build_tree_kernel_efficient",
    "confirm_drafts",
    "move_kept_kv",
    "penalize_logits",
    "sample_ragged_trees",
    "sample_tokens",
    "topk_logprob",
    "tree_speculative_sampling_target_only",
    "uniform_noise",
    "verify_ragged_trees",
    "verify_tree_greedy",
    "warm_up",
]
