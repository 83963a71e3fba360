"""Our own Muon: matrices of one shape are updated together, in one compiled function."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

# Quintic whose iteration drives singular values from (0, 1] to about 1 (Jordan et al. 2024).
NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)


def orthogonalise(matrices: Tensor, steps: int = 5) -> Tensor:
    """About U V^T of each of [N, rows, cols], rows <= cols; in bfloat16 inside on a GPU."""
    a, b, c = NEWTON_SCHULZ
    x = matrices.to(torch.bfloat16) if matrices.is_cuda else matrices
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.to(matrices.dtype)


def _momentum_update(momentum: Tensor, gradients: list[Tensor], beta: float) -> Tensor:
    """Advances momentum [N, rows, cols] in place; the orthogonalised Nesterov update."""
    gradient = torch.stack(gradients)
    momentum.lerp_(gradient, 1 - beta)
    return orthogonalise(gradient.lerp(momentum, beta))


@dataclass
class _Stack:
    """Matrices of one shape after turning tall ones on their side; momentum [N, rows, cols]."""

    weights: list[nn.Parameter]
    momentum: Tensor


class OwnMuon:
    """Muon of some matrices; see `optim.MuonAdamW`."""

    def __init__(
        self, matrices: list[nn.Parameter], momentum: float, weight_decay: float, compiled: bool
    ) -> None:
        self._momentum, self._weight_decay = momentum, weight_decay
        self._update: Callable[[Tensor, list[Tensor], float], Tensor] = _momentum_update
        if compiled:
            self._update = torch.compile(_momentum_update, dynamic=False)
        by_shape: dict[tuple[int, int], list[nn.Parameter]] = {}
        for weight in matrices:
            by_shape.setdefault((min(weight.shape), max(weight.shape)), []).append(weight)
        self._stacks = [
            _Stack(weights, weights[0].new_zeros(len(weights), *shape).detach())
            for shape, weights in by_shape.items()
        ]

    @torch.no_grad()
    def step(self, lr: float) -> None:
        """Updates all matrices from their gradients."""
        for stack in self._stacks:
            gradients = [_lying(weight.grad) for weight in stack.weights]
            updates = self._update(stack.momentum, gradients, self._momentum)
            for weight, update in zip(stack.weights, updates.unbind(), strict=True):
                rows, cols = weight.shape
                weight.mul_(1 - lr * self._weight_decay)
                turned = update.mT if rows > cols else update
                weight.add_(turned, alpha=-lr * math.sqrt(max(1.0, rows / cols)))


def _lying(gradient: Tensor | None) -> Tensor:
    """The gradient with rows <= cols, transposed where it is taller."""
    if gradient is None:
        raise RuntimeError("A matrix has no gradient: call backward() before step().")
    return gradient.mT if gradient.shape[0] > gradient.shape[1] else gradient
