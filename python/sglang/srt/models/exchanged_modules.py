"""Modules that take the place of transformers' own where these compute what `LayerOps` does.

Whether they do is found out by running their code on small tensors, not by their names.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import FusedLinear, Linear

WRONG_CODE = (TypeError, ValueError, AttributeError, RuntimeError)


class CurrentStep:
    """Hands the runtime of the step that runs to modules which transformers' code calls.

    Attributes:
        runtime: None while there is no step: modules then compute in plain torch.
    """

    def __init__(self) -> None:
        self.runtime: LayerRuntime | None = None


class StepLinear(Linear):
    """A linear layer of transformers' code, of inputs [..., in_features]."""

    def __init__(self, replaced: nn.Linear, step: CurrentStep) -> None:
        super().__init__(replaced.in_features, replaced.out_features, replaced.bias is not None)
        self.weight, self.bias = replaced.weight, replaced.bias
        self._step = step

    def forward(self, x: torch.Tensor, runtime: LayerRuntime | None = None) -> torch.Tensor:
        runtime = runtime or self._step.runtime
        if runtime is None:
            return F.linear(x, self.weight, self.bias)
        return runtime.linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


class StepNorm(nn.Module):
    """An RMSNorm over the last dimension."""

    def __init__(self, replaced: nn.Module, eps: float, step: CurrentStep) -> None:
        super().__init__()
        weight = replaced.get_parameter("weight")
        self.weight = weight
        self.eps = eps
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        runtime = self._step.runtime
        if runtime is None:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        normed, _ = runtime.add_rms_norm(x.flatten(0, -2), None, self.weight, self.eps)
        return normed.unflatten(0, x.shape[:-1])


class StepGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with one product for gate and up."""

    def __init__(self, gate: nn.Linear, up: nn.Linear, down: nn.Module, step: CurrentStep) -> None:
        super().__init__()
        sizes = (gate.out_features, up.out_features)
        has_bias = gate.bias is not None
        self.gate_up_proj = FusedLinear(gate.in_features, ("gate_proj", "up_proj"), sizes, has_bias)
        self.down_proj = down
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        runtime, gate_up = self._step.runtime, self.gate_up_proj
        if runtime is None:
            gate, up = F.linear(x, gate_up.weight, gate_up.bias).chunk(2, dim=-1)
            gated = F.silu(gate) * up
        else:
            gated = runtime.gated_linear(x.flatten(0, -2), gate_up.weight, gate_up.bias)
            gated = gated.unflatten(0, x.shape[:-1])
        out: torch.Tensor = self.down_proj(gated)
        return out


def exchange(model: nn.Module, step: CurrentStep) -> None:
    """Exchanges what it knows among the modules below a model, which has no memory yet."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            found: nn.Module | None = None
            if type(module) is nn.Linear:
                found = StepLinear(module, step)
            elif (eps := eps_of_rms_norm(module)) is not None:
                found = StepNorm(module, eps, step)
            if found is not None:
                setattr(parent, name, found)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if is_gated_mlp(module):
                parts = (module.get_submodule(each) for each in ("gate_proj", "up_proj"))
                gate, up = parts
                assert isinstance(gate, nn.Linear)
                assert isinstance(up, nn.Linear)
                down = module.get_submodule("down_proj")
                setattr(parent, name, StepGatedMLP(gate, up, down, step))


def eps_of_rms_norm(module: nn.Module) -> float | None:
    """Returns the eps of a module that normalizes by the root mean square and multiplies by its
    weight; None for any other."""
    if [*dict(module.named_parameters())] != ["weight"] or [*module.buffers()]:
        return None
    floats = {name: each for name, each in vars(module).items() if isinstance(each, float)}
    if len(floats) != 1 or module.get_parameter("weight").dim() != 1:
        return None
    (eps,) = floats.values()
    x, weight = _sample(3, 8), _sample(8)
    try:
        found = type(module).forward(SimpleNamespace(weight=weight, **floats), x)
    except WRONG_CODE:
        return None
    return eps if _is_same(found, F.rms_norm(x, weight.shape, weight, eps)) else None


def is_gated_mlp(module: nn.Module) -> bool:
    """Tells whether a module computes down(silu(gate(x)) * up(x)) by linear layers of these
    names."""
    parts = dict(module.named_children())
    linears = [parts.pop(name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    if not all(type(each) is StepLinear for each in linears):
        return False
    gate, up, _ = linears
    assert isinstance(gate, StepLinear)
    assert isinstance(up, StepLinear)
    if (gate.bias is None) != (up.bias is None) or gate.in_features != up.in_features:
        return False
    if any(True for each in parts.values() for _ in each.parameters()):
        return False
    x, weight = _sample(3, 8), _sample(3, 8, 8)
    own = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    names = ("gate_proj", "up_proj", "down_proj")
    products = {name: _Product(weight[index]) for index, name in enumerate(names)}
    try:
        found = type(module).forward(SimpleNamespace(**{**own, **parts, **products}), x)
    except WRONG_CODE:
        return False
    gated = F.silu(x @ weight[0]) * (x @ weight[1])
    return _is_same(found, gated @ weight[2])


class _Product:
    """Stands for a linear layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weight


def _sample(*shape: int) -> torch.Tensor:
    """Returns values between -1 and 1 that follow no pattern, on the host."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32, device="cpu")
    return torch.sin(count * count).view(shape)


def _is_same(found: object, expected: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
