"""Muon for the matrices, AdamW for embedding and norms, under one learning-rate factor.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/): Nesterov momentum whose
matrix is replaced by its nearest semi-orthogonal one, approximated by five Newton-Schulz steps.
AdamW: Loshchilov & Hutter 2019.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Quintic whose iteration drives singular values from (0, 1] to about 1 (Jordan et al. 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """[N, rows, cols] with rows <= cols -> about U V^T of each; bf16 inside on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)


def _momentum_update(momentum: Tensor, gradients: list[Tensor], beta: float) -> Tensor:
    """Advance momentum [N, rows, cols] in place and return the orthogonalised Nesterov update."""
    gradient = torch.stack(gradients)
    momentum.lerp_(gradient, 1 - beta)
    return orthogonalise(gradient.lerp(momentum, beta))


@dataclass
class _Stack:
    """Matrices of one shape after turning tall ones on their side; momentum [N, rows, cols]."""

    weights: list[nn.Parameter]
    momentum: Tensor


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
        compiled: bool = False,
    ) -> None:
        matrices: list[nn.Parameter] = []
        others: list[nn.Parameter] = []
        for name, parameter in model.named_parameters():
            is_matrix = parameter.dim() == 2 and "embed" not in name
            (matrices if is_matrix else others).append(parameter)
        self.muon_lr, self.adam_lr = muon_lr, adam_lr
        self.beta, self.weight_decay = momentum, weight_decay
        self.stacks = self._stack(matrices)
        on_gpu = others[0].is_cuda
        self.adam = torch.optim.AdamW(
            others, lr=adam_lr, betas=(0.9, 0.95), weight_decay=0.0, fused=on_gpu
        )
        self.update: Callable[[Tensor, list[Tensor], float], Tensor] = _momentum_update
        if compiled:
            self.update = torch.compile(_momentum_update, dynamic=False)

    @staticmethod
    def _stack(matrices: list[nn.Parameter]) -> list[_Stack]:
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for weight in matrices:
            by_shape.setdefault((min(weight.shape), max(weight.shape)), []).append(weight)
        return [
            _Stack(weights, weights[0].new_zeros(len(weights), *shape).detach())
            for shape, weights in by_shape.items()
        ]

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """One update from the gradients at hand; factor 0 leaves the weights as they are."""
        lr = self.muon_lr * factor
        for stack in self.stacks:
            gradients = [_lying(self._gradient(weight)) for weight in stack.weights]
            updates = self.update(stack.momentum, gradients, self.beta)
            for weight, update in zip(stack.weights, updates.unbind(), strict=True):
                rows, cols = weight.shape
                weight.mul_(1 - lr * self.weight_decay)
                turned = update.mT if rows > cols else update
                weight.add_(turned, alpha=-lr * math.sqrt(max(1.0, rows / cols)))
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * factor
        self.adam.step()

    @staticmethod
    def _gradient(weight: nn.Parameter) -> Tensor:
        if weight.grad is None:
            raise RuntimeError("A matrix has no gradient: call backward() before step().")
        return weight.grad

    def zero_grad(self) -> None:
        """Forget the gradients of every parameter."""
        self.adam.zero_grad(set_to_none=True)
        for stack in self.stacks:
            for weight in stack.weights:
                weight.grad = None


def _lying(matrix: Tensor) -> Tensor:
    """The matrix with rows <= cols, transposed where needed (square ones stay as they are)."""
    return matrix.mT if matrix.shape[0] > matrix.shape[1] else matrix


def warm_constant_linear(step: int, progress: float, warm_up: int, hold: float) -> float:
    """Learning-rate factor: linear over `warm_up` steps, 1 until `hold`, then linear to 0.02.

    `progress` is the share of the time budget that is used, in 0..1.
    """
    decay = min(1.0, max(0.0, (progress - hold) / (1.0 - hold)))
    return min(1.0, (step + 1) / warm_up) * (1.0 - 0.98 * decay)
