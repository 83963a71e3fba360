"""Muon for the matrices, AdamW for embedding, output head and norms, under one factor of the rates.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): Nesterov momentum whose
matrix is replaced by its nearest semi-orthogonal one, approximated by five Newton-Schulz steps.
AdamW: Loshchilov & Hutter 2019.
"""

from __future__ import annotations

import torch
from torch import nn


class MuonAdamW:
    """Both optimisers of a model; `step(factor)` scales both base learning rates by `factor`.

    A matrix of `out` x `in` moves by muon_lr * sqrt(max(1, out / in)) times a matrix of unit
    singular values. Weight decay is decoupled: weight *= 1 - lr * decay, per step.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float = 0.02,
        adam_lr: float = 3e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_vocabulary = "embed" in name or "lm_head" in name
            is_matrix = parameter.dim() == 2 and not is_vocabulary
            (matrices if is_matrix else others).append(parameter)
        self._parameters = [*matrices, *others]
        muon = torch.optim.Muon(
            matrices,
            lr=muon_lr,
            momentum=momentum,
            weight_decay=weight_decay,
            adjust_lr_fn="original",
        )
        adam = torch.optim.AdamW(
            others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda
        )
        self._base_lrs: dict[torch.optim.Optimizer, float] = {muon: muon_lr, adam: adam_lr}

    def step(self, factor: float) -> None:
        """One update from the gradients at hand; factor 0 leaves the weights as they are."""
        for optimizer, lr in self._base_lrs.items():
            for group in optimizer.param_groups:
                group["lr"] = lr * factor
            optimizer.step()

    def zero_grad(self) -> None:
        """Forgets the gradients of every parameter."""
        for parameter in self._parameters:
            parameter.grad = None

    def warm_up(self) -> None:
        """Allocates what a step needs, and changes neither weight nor momentum."""
        for parameter in self._parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        self.step(0.0)
        self.zero_grad()


def warm_constant_linear(step: int, progress: float, warm_up: int, hold: float) -> float:
    """Learning-rate factor: rises over `warm_up` steps, is 1 until `hold`, then falls to 0.02.

    Args:
        progress: the share of the time budget that is used, in 0..1, as is `hold`.
    """
    decay = min(1.0, max(0.0, (progress - hold) / (1.0 - hold)))
    return min(1.0, (step + 1) / warm_up) * (1.0 - 0.98 * decay)
