"""Layers and rotations of transformers' code that fused operations take the place of: the add of a
layer with the norm after it, and the norms of heads with their rotation and the write of K and V.

As in `exchanged_modules.py`, what code computes is found out by running it on small tensors; the
first run, on the meta device, shows which tensor reaches which module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

from sglang.srt.layers.layer_runtime import HeadNorms
from sglang.srt.models.exchanged_modules import (
    WRONG_CODE,
    CurrentStep,
    LayerOutput,
    StepNorm,
    is_same,
    sample,
)

Rotate = Callable[..., tuple[torch.Tensor, torch.Tensor]]


class LayerForm(NamedTuple):
    """The parts of a layer that computes h = x + first(x), then h + second(h), part by part.

    Attributes:
        first: has attention.
        second: begins with a norm.
    """

    first: tuple[str, ...]
    attention: str
    second: tuple[str, ...]


class StepLayer(nn.Module):
    """A layer of a `LayerForm`. Its adds are fused with the norms that read the sums.

    Attributes:
        next_norm: the one that reads the layer's output, once the first run has shown it.
        is_last: of rows that nobody reads it computes no more than `first`.
    """

    def __init__(self, replaced: nn.Module, form: LayerForm, step: CurrentStep) -> None:
        super().__init__()
        for name, child in replaced.named_children():
            self.add_module(name, child)
        self._form, self._step, self._names = form, step, _names_of(replaced)
        self.next_norm = list[StepNorm]()
        self.is_last = False

    def forward(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        x = residual = hidden_states
        for name in self._form.first:
            part = self.get_submodule(name)
            if name == self._form.attention:
                x, *_ = part(x, **dict(zip(self._names, more, strict=False)), **named)
            else:
                x = part(x)
        if self.is_last and self._step.wanted is not None:
            x, residual = x[:, self._step.wanted], residual[:, self._step.wanted]
        norm, *others = (self.get_submodule(name) for name in self._form.second)
        assert isinstance(norm, StepNorm)
        x, residual = norm.of_sum(x, residual)
        for part in others:
            x = part(x)
        if self.next_norm:
            normed, total = self.next_norm[0].of_sum(x, residual)
        else:
            normed, total = None, x + residual
        self._step.output = LayerOutput(total, self.next_norm, normed)
        return total


class StepRotations:
    """Leaves the rotation of queries and keys to the operation that stores K and V, in layers where
    attention gets just what the rotation has returned. The norms of their heads are left to it too
    if the rotation gets just what these have returned.

    Attributes:
        layers: those.
        norms: of queries and of keys in layers where they are left.
    """

    def __init__(self, step: CurrentStep) -> None:
        self._step = step
        self.layers = set[int]()
        self.norms = dict[int, tuple[StepNorm, StepNorm]]()
        self._returned: tuple[torch.Tensor, torch.Tensor] | None = None
        self._normed_by: tuple[StepNorm | None, StepNorm | None] = (None, None)
        self._angles: tuple[torch.Tensor, torch.Tensor] | None = None
        self._made = list[tuple[torch.Tensor | None, torch.Tensor]]()

    def exchange_in(self, attention: nn.Module, layer: int) -> None:
        """Has the code of an attention module call this object where it calls a function that
        rotates in Llama's form."""
        code = inspect.unwrap(type(attention).forward)
        known = code.__globals__
        found = [name for name in code.__code__.co_names if is_half_rotation(known.get(name))]
        if not found:
            return
        instead = {name: partial(self._rotate, layer, known[name]) for name in found}
        own = FunctionType(
            code.__code__, {**known, **instead}, code.__name__, code.__defaults__, code.__closure__
        )
        own.__kwdefaults__ = code.__kwdefaults__
        vars(attention)["forward"] = MethodType(own, attention)

    def _rotate(
        self,
        layer: int,
        rotate: Rotate,
        q: torch.Tensor,
        k: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *more: Any,
        **named: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._step.runtime is not None and layer in self.layers:
            self._angles = cos, sin
            return q, k
        self._normed_by = self._norm_of(q), self._norm_of(k)
        q, k = rotate(q, k, cos, sin, *more, **named)
        is_whole = not more and not named and cos.shape[-1] == q.shape[-1]
        self._returned = (q, k) if is_whole and cos.shape[0] == 1 else None
        return q, k

    def _norm_of(self, heads: torch.Tensor) -> StepNorm | None:
        """Returns the norm of the first run whose result heads [1, num_heads, T, head_dim] are."""
        for norm, normed in self._step.normed:
            if normed.dim() != 4 or norm.cut is not None:
                continue
            turned = normed.transpose(1, 2)
            is_turned = (heads.shape, heads.stride()) == (turned.shape, turned.stride())
            if heads is normed or (heads._base is normed and is_turned):
                return norm
        return None

    def note(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Notes in the first run what attention of a layer gets."""
        if self._returned is not None and q is self._returned[0] and k is self._returned[1]:
            self.layers.add(layer)
            of_q, of_k = self._normed_by
            is_value = self._norm_of(v) is not None
            if of_q and of_k and of_q.eps == of_k.eps and not is_value:
                self.norms[layer] = of_q, of_k
                of_q.is_left = of_k.is_left = True
        self._returned = None
        self._step.normed.clear()

    def forget(self) -> None:
        """Forgets the rotations of a step."""
        self._made, self._angles = [], None

    def norms_of(self, layer: int) -> HeadNorms | None:
        """Returns the norms that a layer leaves."""
        if layer not in self.norms:
            return None
        of_q, of_k = self.norms[layer]
        return HeadNorms(of_q.weight, of_k.weight, of_q.eps)

    def take(self, q: torch.Tensor) -> torch.Tensor:
        """Returns what is left to do of the rotation of q [1, num_heads, T, head_dim], for each
        token as in `RotaryEmbedding.table`: [T, 2, head_dim]. It turns nothing if the layer's code
        has rotated q, or does not rotate."""
        angles, self._angles = self._angles, None
        key = None if angles is None else angles[0]
        for seen, rotation in self._made:
            if seen is key:
                return rotation
        shape, dtype = (q.shape[2], 2, q.shape[3]), q.dtype if key is None else key.dtype
        rotation = q.new_zeros(shape, dtype=dtype)
        if angles is None:
            rotation[:, 0] = 1.0
        else:
            rotation[:, 0], rotation[:, 1] = angles[0][0], angles[1][0]
            rotation[:, 1, : q.shape[3] // 2].neg_()
        self._made.append((key, rotation))
        return rotation


def is_half_rotation(function: object) -> bool:
    """Tells whether f(q, k, cos, sin) rotates dimension d of each head with d + head_dim / 2."""
    if not isinstance(function, FunctionType):
        return False
    q, k, angles = sample(1, 2, 3, 8), sample(1, 1, 3, 8), sample(2, 1, 3, 4)
    cos, sin = torch.cat((angles, angles), dim=-1)
    try:
        found = function(q, k, cos, sin)
    except WRONG_CODE:
        return False
    expected = [x * cos + torch.cat((-x[..., 4:], x[..., :4]), dim=-1) * sin for x in (q, k)]
    is_pair = isinstance(found, tuple) and len(found) == len(expected)
    return is_pair and all(is_same(*each) for each in zip(found, expected, strict=True))


def exchange_layers(model: nn.Module, step: CurrentStep) -> None:
    """Exchanges the layers below a model that have a `LayerForm`."""
    for parent in list(model.modules()):
        for name, module in list(parent.named_children()):
            form = form_of(module)
            if form is not None:
                setattr(parent, name, StepLayer(module, form, step))


def form_of(layer: nn.Module) -> LayerForm | None:
    """Returns the form of a layer; None if it computes anything else."""
    children = dict(layer.named_children())
    parts = [name for name, each in children.items() if any(True for _ in each.parameters())]
    attention = [name for name in parts if "layer_idx" in vars(children[name])]
    if len(attention) != 1 or layer._parameters or layer._buffers:
        return None
    given = {name: object() for name in _names_of(layer)}
    order = list[str]()

    def compute(names: Sequence[str], x: torch.Tensor) -> torch.Tensor:
        """Computes what each part computes, and no other does."""
        for number in map(parts.index, names):
            x = torch.tanh(x * (number + 1)) + number
        return x

    def call(name: str, hidden_states: torch.Tensor, **passed: object) -> object:
        if passed != (given if name in attention else {}):
            raise ValueError("attention gets other arguments than the layer")
        order.append(name)
        found = compute([name], hidden_states)
        return (found, None) if name in attention else found

    own = {name: each for name, each in vars(layer).items() if not name.startswith("_")}
    stand_ins = {name: partial(call, name) for name in parts}
    x = sample(1, 3, 8)
    try:
        code = inspect.unwrap(type(layer).forward)
        found = code(SimpleNamespace(**{**own, **children, **stand_ins}), x, **given)
    except WRONG_CODE:
        return None
    for cut, begin in enumerate(order):
        first, second = tuple(order[:cut]), tuple(order[cut:])
        if attention[0] in first and isinstance(children[begin], StepNorm):
            middle = x + compute(first, x)
            if is_same(found, middle + compute(second, middle)):
                return LayerForm(first, attention[0], second)
    return None


def _names_of(layer: nn.Module) -> list[str]:
    """Returns the names of what a layer's code gets beside hidden states."""
    names = inspect.signature(type(layer).forward).parameters.values()
    return [each.name for each in [*names][2:] if each.kind is not each.VAR_KEYWORD]
