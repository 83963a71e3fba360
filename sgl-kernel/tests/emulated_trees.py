"""The ops of draft trees, with the kernels on emulated CUDA threads. Results hold poison before."""

from __future__ import annotations

import torch

from sgl_kernel import ConfirmedDrafts, RaggedTrees
from sgl_kernel._library import KernelLibrary
from sgl_kernel.build_ragged_trees import empty_results
from sgl_kernel.build_ragged_trees import launch as launch_ragged_build
from sgl_kernel.build_tree_kernel_efficient import launch as launch_build
from sgl_kernel.sample_trees import launch_ragged as launch_ragged_sampling
from sgl_kernel.sample_trees import launch_uniform as launch_sampling
from sgl_kernel.tree_mask_mode import TreeMaskMode
from sgl_kernel.verify_trees import empty_verdict
from sgl_kernel.verify_trees import launch_ragged as launch_ragged_verification
from sgl_kernel.verify_trees import launch_uniform as launch_verification

_CPU = torch.device("cpu")


class EmulatedTrees:
    """Methods named as the functions of sgl_kernel, and with their arguments."""

    def __init__(self, library: KernelLibrary) -> None:
        self._library = library

    def build_tree_kernel_efficient(self, *arguments: torch.Tensor | int) -> None:
        tensors, (topk, _, _, mode) = arguments[:8], arguments[8:]
        inputs, results = tensors[:3], tensors[3:]
        launch_build(self._library, inputs, results, topk, TreeMaskMode(mode), 0, None)

    def build_ragged_trees(self, *arguments: torch.Tensor | int) -> RaggedTrees:
        tensors, num_rows = arguments[:-1], arguments[-1]
        results = _poisoned(empty_results(len(tensors[4]), num_rows, _CPU))
        launch_ragged_build(self._library, tensors, results, 0, None)
        return results

    def verify_tree_greedy(self, *tensors: torch.Tensor) -> None:
        launch_verification(self._library, tensors[:3], tensors[3:7], tensors[7], 0, None)

    def verify_ragged_trees(self, *arguments: torch.Tensor | int) -> ConfirmedDrafts:
        tokens, targets, first_child, next_sibling, starts, max_kept = arguments
        result = _poisoned(empty_verdict(len(starts) - 1, max_kept, _CPU))
        trees = (tokens, first_child, next_sibling, starts)
        launch_ragged_verification(self._library, result, trees, targets, 0, None)
        return result

    def tree_speculative_sampling_target_only(
        self,
        *tensors: torch.Tensor | None,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
    ) -> None:
        probs = tuple(None if part is None else part.flatten(0, 1) for part in tensors[9:])
        launch_sampling(
            *(self._library, tensors[:3], tensors[3:7], tensors[7:9], probs),
            *((threshold_single, threshold_acc), 0, None),
        )

    def sample_ragged_trees(
        self,
        *arguments: torch.Tensor | int,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
    ) -> ConfirmedDrafts:
        trees, coins, (probs, max_kept) = arguments[:4], arguments[4:6], arguments[6:]
        result = _poisoned(empty_verdict(len(trees[3]) - 1, max_kept, _CPU))
        thresholds = (threshold_single, threshold_acc)
        launch_ragged_sampling(self._library, result, trees, coins, probs, thresholds, 0, None)
        return result


def _poisoned(results: RaggedTrees | ConfirmedDrafts) -> RaggedTrees | ConfirmedDrafts:
    for tensor in results:
        tensor.fill_(-7)
    return results
