"""Modules that take the place of transformers' own where these compute what `LayerOps` does.

Whether they do is found out by running their code on small tensors, not by their names.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.linear import FusedLinear, Linear
from sglang.srt.shard import WHOLE, Cut, Shard

QKV = ("q_proj", "k_proj", "v_proj")
GATED_MLPS = ("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "down_proj")
COLUMNS, ROWS = "colwise", "rowwise"  # styles of transformers' plans: outputs, inputs are divided
WRONG_CODE = (
    *(TypeError, ValueError, AttributeError, RuntimeError, LookupError, AssertionError),
    ArithmeticError,
)


class CurrentStep:
    """Hands the runtime of the step that runs to modules which transformers' code calls.

    Attributes:
        runtime: None while there is no step: modules then compute in plain torch.
        wanted: [S] int64, the only rows whose output is read; None: all are.
        output: of the layer that ran last.
        normed: norms without a runtime since the last call of attention, and their results.
    """

    def __init__(self) -> None:
        self.runtime: LayerRuntime | None = None
        self.wanted: torch.Tensor | None = None
        self.output: LayerOutput | None = None
        self.normed = list[tuple[StepNorm, torch.Tensor]]()


class LayerOutput(NamedTuple):
    """The output of a layer.

    Attributes:
        total: [1, T, hidden_size].
        next_norm: the norm that reads it, if it is known.
        normed: its result.
    """

    total: torch.Tensor
    next_norm: list[StepNorm]
    normed: torch.Tensor | None


class StepLinear(Linear):
    """A linear layer of transformers' code, of inputs [..., in_features].

    Args:
        cut: the part of its outputs (dimension 0 of the weight) or of its inputs (dimension 1) that
            this rank has; None: all. Of inputs, the output is the sum of what ranks compute.
    """

    def __init__(self, replaced: nn.Linear, step: CurrentStep, cut: Cut | None = None) -> None:
        sizes = [replaced.out_features, replaced.in_features]
        if cut is not None:
            sizes[cut.dim] = cut.size
        super().__init__(sizes[1], sizes[0], replaced.bias is not None)
        if cut is None:  # it may be another module's weight too
            self.weight, self.bias = replaced.weight, replaced.bias
        self.cut, self._step = cut, step

    @property
    def num_outputs(self) -> int:
        """Output features on all ranks together."""
        is_cut = self.cut is not None and self.cut.dim == 0
        return self.cut.whole if is_cut and self.cut is not None else self.out_features

    def forward(self, x: torch.Tensor, runtime: LayerRuntime | None = None) -> torch.Tensor:
        runtime = runtime or self._step.runtime
        if runtime is None:
            return F.linear(x, self.weight, self.bias)
        is_sum = self.cut is not None and self.cut.dim == 1
        out = self.product(x.flatten(0, -2), runtime, None if is_sum else self.bias)
        if is_sum:
            out = runtime.ranks.sum(out)
            out = out if self.bias is None else out.add_(self.bias)
        return out.unflatten(0, x.shape[:-1])

    def cut_of(self, parameter: str) -> Cut | None:
        is_whole = self.cut is None or (self.cut.dim == 1 and parameter == "bias")
        return None if is_whole else self.cut


class StepNorm(nn.Module):
    """An RMSNorm over the last dimension.

    Attributes:
        is_left: to attention; see `StepRotations`.

    Args:
        cut: the part of its features that this rank has, of inputs, outputs and weight; None: all.
    """

    def __init__(
        self, replaced: nn.Module, eps: float, step: CurrentStep, cut: Cut | None = None
    ) -> None:
        super().__init__()
        weight = replaced.get_parameter("weight")
        self.weight = weight
        self.eps, self.cut, self.is_left = eps, cut, False
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        runtime, output = self._step.runtime, self._step.output
        if output is not None and output.total is x:
            if runtime is None:
                output.next_norm[:] = [self]
            elif output.normed is not None and output.next_norm[0] is self:
                return output.normed
        if runtime is None:
            normed = F.rms_norm(x, self.weight.shape, self.weight, self.eps)
            self._step.normed.append((self, normed))
            return normed
        if self.is_left:
            return x
        if self.cut is not None:
            wide = x.to(torch.float32)
            squares = runtime.ranks.sum(wide.square().sum(-1, keepdim=True))
            factors = torch.rsqrt(squares / self.cut.whole + self.eps)
            return (wide * factors * self.weight).to(x.dtype)
        normed, _ = runtime.add_rms_norm(x.flatten(0, -2), None, self.weight, self.eps)
        return normed.unflatten(0, x.shape[:-1])

    def cut_of(self, parameter: str) -> Cut | None:
        return self.cut

    def of_sum(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the norm of x + residual, both [1, T, hidden_size], and the sum."""
        runtime = self._step.runtime
        if runtime is None:
            total = x + residual
            return self(total), total
        rows = x[0], residual[0].contiguous()
        normed, total = runtime.add_rms_norm(*rows, self.weight, self.eps)
        return normed[None], total[None]


class StepGatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), with one product for gate and up.

    Args:
        first: gate and up, or one layer that checkpoints hold for both.
    """

    def __init__(
        self, first: Sequence[StepLinear], down: StepLinear, step: CurrentStep, shard: Shard
    ) -> None:
        super().__init__()
        gate, size = first[0], first[0].num_outputs
        if len(first) > 1:
            own_shard, has_bias = WHOLE if gate.cut is None else shard, gate.bias is not None
            names, sizes = GATED_MLPS[0][:2], (size, first[1].num_outputs)
            joined: Linear = FusedLinear(gate.in_features, names, sizes, has_bias, own_shard)
        elif shard.is_whole:
            joined = gate
        else:
            half = size // 2
            joined = StepLinear(gate, step, shard.cut(0, size, (half, half)))
            down = StepLinear(down, step, shard.cut(1, half))
        self.gate_up_proj, self.down_proj = joined, down
        self._step = step

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        runtime, gate_up = self._step.runtime, self.gate_up_proj
        if runtime is None:
            gate, up = F.linear(x, gate_up.weight, gate_up.bias).chunk(2, dim=-1)
            gated = F.silu(gate) * up
        else:
            gated = gate_up.gated(x.flatten(0, -2), runtime)
            gated = gated.unflatten(0, x.shape[:-1])
        out: torch.Tensor = self.down_proj(gated)
        return out


class JoinedProducts:
    """The products of several linear layers over one input, computed as one when the first of them
    is called, and kept until each has been given."""

    def __init__(self, joined: FusedLinear, step: CurrentStep) -> None:
        self._joined, self._step = joined, step
        self._input: torch.Tensor | None = None
        self._left = list[torch.Tensor | None]()

    def part(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """Returns the product of one of the layers with x [..., in_features]."""
        joined, runtime = self._joined, self._step.runtime
        if x is not self._input or self._left[index] is None:
            if runtime is None:
                out = F.linear(x, joined.weight, joined.bias)
            else:
                out = joined.product(x.flatten(0, -2), runtime, joined.bias)
                out = out.unflatten(0, x.shape[:-1])
            self._input, self._left = x, [*out.split(joined.shard_sizes, dim=-1)]
        found, self._left[index] = self._left[index], None
        assert found is not None
        if not any(each is not None for each in self._left):
            self._input = None
        return found


class StepPart(nn.Module):
    """One of several linear layers over one input. The module that joins them has its weight."""

    def __init__(self, products: JoinedProducts, index: int) -> None:
        super().__init__()
        self._products, self._index = products, index

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._products.part(self._index, x)


def exchange(
    model: nn.Module,
    step: CurrentStep,
    shard: Shard,
    plan: Mapping[str, str],
    cuts: Mapping[nn.Module, Cut],
) -> None:
    """Exchanges what it knows among the modules below a model, which has no memory yet.

    Args:
        shard: the part that this rank has.
        plan: transformers' plan of how ranks divide linear layers, by names in which `*` stands for
            a number. Layers that it divides in other ways than COLUMNS and ROWS stay whole.
        cuts: the parts of modules that have been made in the sizes of this rank.
    """
    for path, parent in list(model.named_modules()):
        for name, module in list(parent.named_children()):
            found: nn.Module | None = None
            if type(module) is nn.Linear:
                style = style_of(f"{path}.{name}", plan)
                found = StepLinear(module, step, cuts.get(module) or _cut(module, style, shard))
            elif (eps := eps_of_rms_norm(module)) is not None:
                found = StepNorm(module, eps, step, cuts.get(module))
            if found is not None:
                setattr(parent, name, found)
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            if parts := parts_of_gated_mlp(module):
                *first, down = parts
                setattr(parent, name, StepGatedMLP(first, down, step, shard))
        _join(parent, step, shard)


def _join(parent: nn.Module, step: CurrentStep, shard: Shard) -> None:
    """Joins the layers of queries, keys and values, if a module has them."""
    children = dict(parent.named_children())
    found = [each for name in QKV if isinstance(each := children.get(name), StepLinear)]
    forms = {(each.in_features, each.bias is None, each.cut is None) for each in found}
    if len(found) < len(QKV) or len(forms) > 1:
        return
    size, has_no_bias, is_whole = forms.pop()
    sizes, own_shard = tuple(each.num_outputs for each in found), WHOLE if is_whole else shard
    joined = FusedLinear(size, QKV, sizes, not has_no_bias, own_shard)
    parent.add_module("qkv_proj", joined)
    products = JoinedProducts(joined, step)
    for index, name in enumerate(QKV):
        setattr(parent, name, StepPart(products, index))


def style_of(path: str, plan: Mapping[str, str]) -> str | None:
    """Returns the style of a plan by which ranks divide a module."""
    return plan.get(re.sub(r"\b\d+\b", "*", path))


def _cut(module: nn.Linear, style: str | None, shard: Shard) -> Cut | None:
    """Returns the part of a linear layer that a rank has, by a style of transformers' plans."""
    if shard.is_whole or style not in (COLUMNS, ROWS):
        return None
    return (
        shard.cut(0, module.out_features) if style == COLUMNS else shard.cut(1, module.in_features)
    )


def eps_of_rms_norm(module: nn.Module) -> float | None:
    """Returns the eps of a module that normalizes by the root mean square and multiplies by its
    weight; None for any other."""
    if [*dict(module.named_parameters())] != ["weight"] or [*module.buffers()]:
        return None
    floats = {name: each for name, each in vars(module).items() if isinstance(each, float)}
    if len(floats) != 1 or module.get_parameter("weight").dim() != 1:
        return None
    (eps,) = floats.values()
    x, weight = sample(3, 8), sample(8)
    try:
        found = type(module).forward(SimpleNamespace(weight=weight, **floats), x)
    except WRONG_CODE:
        return None
    return eps if is_same(found, F.rms_norm(x, weight.shape, weight, eps)) else None


def parts_of_gated_mlp(module: nn.Module) -> list[StepLinear]:
    """Returns the linear layers, of names in GATED_MLPS, by which a module computes
    down(silu(gate(x)) * up(x)); none if it computes anything else."""
    children = dict(module.named_children())
    names = next((each for each in GATED_MLPS if children.keys() >= {*each}), ())
    found = [each for name in names if type(each := children.pop(name)) is StepLinear]
    has_others = any(True for each in children.values() for _ in each.parameters())
    if has_others or not found or len(found) < len(names):
        return []
    if len({(each.bias is None, each.cut) for each in found[:-1]}) > 1:
        return []
    x, weight = sample(3, 8), sample(3, 8, 8)
    own = {name: each for name, each in vars(module).items() if not name.startswith("_")}
    weights = weight.split([1] * 3 if len(names) == len(weight) else [2, 1])
    products = {
        name: _Product(torch.cat([*each], dim=1)) for name, each in zip(names, weights, strict=True)
    }
    try:
        found_out = type(module).forward(SimpleNamespace(**{**own, **children, **products}), x)
    except WRONG_CODE:
        return []
    gated = F.silu(x @ weight[0]) * (x @ weight[1])
    return found if is_same(found_out, gated @ weight[2]) else []


class _Product:
    """Stands for a linear layer."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self._weight


def sample(*shape: int) -> torch.Tensor:
    """Returns values between -1 and 1 that follow no pattern, on the host."""
    count = torch.arange(1, 1 + torch.Size(shape).numel(), dtype=torch.float32, device="cpu")
    return torch.sin(count * count).view(shape)


def is_same(found: object, expected: torch.Tensor) -> bool:
    if not isinstance(found, torch.Tensor) or found.shape != expected.shape:
        return False
    if found.device != expected.device:  # it has read something without memory
        return False
    return torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
