"""Muon for the matrices, AdamW for embedding and norms, under one learning-rate factor.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): Nesterov momentum whose
matrix is replaced by its nearest semi-orthogonal one, approximated by five Newton-Schulz steps.
AdamW: Loshchilov & Hutter 2019.
"""

from __future__ import annotations

import torch
from torch import nn

from training.own_muon import OwnMuon


class TorchMuon:
    """torch.optim.Muon of some matrices. It updates one matrix after the other, not compiled."""

    def __init__(
        self, matrices: list[nn.Parameter], momentum: float, weight_decay: float, compiled: bool
    ) -> None:
        self._muon = torch.optim.Muon(
            matrices, weight_decay=weight_decay, momentum=momentum, adjust_lr_fn="original"
        )

    def step(self, lr: float) -> None:
        """Updates all matrices from their gradients."""
        for group in self._muon.param_groups:
            group["lr"] = lr
        self._muon.step()


MUONS: dict[str, type[OwnMuon] | type[TorchMuon]] = {"own": OwnMuon, "torch": TorchMuon}


class MuonAdamW:
    """Both optimisers of a model; `step(factor)` scales both base learning rates by `factor`.

    A matrix of `out` x `in` moves by muon_lr * sqrt(max(1, out / in)) times a matrix of unit
    singular values. Weight decay is decoupled: weight *= 1 - lr * decay, per step.

    Args:
        muon: whose Muon, a name in MUONS.
    """

    def __init__(
        self,
        model: nn.Module,
        muon_lr: float = 0.02,
        adam_lr: float = 3e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.01,
        compiled: bool = False,
        muon: str = "own",
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and "embed" not in name
            (matrices if is_matrix else others).append(parameter)
        self._parameters = [*matrices, *others]
        self._muon_lr, self._adam_lr = muon_lr, adam_lr
        self._muon = MUONS[muon](matrices, momentum, weight_decay, compiled)
        self._adam = torch.optim.AdamW(
            others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=others[0].is_cuda
        )

    def step(self, factor: float) -> None:
        """One update from the gradients at hand; factor 0 leaves the weights as they are."""
        self._muon.step(self._muon_lr * factor)
        for group in self._adam.param_groups:
            group["lr"] = self._adam_lr * factor
        self._adam.step()

    def zero_grad(self) -> None:
        """Forgets the gradients of every parameter."""
        for parameter in self._parameters:
            parameter.grad = None

    def warm_up(self) -> None:
        """Compiles and allocates what a step needs, and changes neither weight nor momentum."""
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
