"""Layers and rotations of transformers' code that fused operations take the place of: the add of a
layer with the norm after it, and the rotation with the write of K and V.

As in `exchanged_modules.py`, what code computes is found out by running it on small tensors; the
first run, on the meta device, shows which tensor reaches which module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn

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
    """The names of a layer's parts in h = x + after_attention(attention(before_attention(x))) and
    y = h + after_mlp(mlp(before_mlp(h))); None where there is no norm.

    Attributes:
        dropped: arguments of the layer that attention does not get.
    """

    before_attention: str
    attention: str
    after_attention: str | None
    before_mlp: str
    mlp: str
    after_mlp: str | None
    dropped: frozenset[str]


class StepLayer(nn.Module):
    """A layer of a `LayerForm`. Its second add is fused with the norm that reads its output.

    Attributes:
        next_norm: that norm, once the first run has shown it; in a tuple, as it is no submodule.
        is_last: of rows that nobody reads it computes no more than attention.
    """

    def __init__(self, replaced: nn.Module, form: LayerForm, step: CurrentStep) -> None:
        super().__init__()
        for name, child in replaced.named_children():
            self.add_module(name, child)
        self._form, self._step = form, step
        self._names = [*inspect.signature(type(replaced).forward).parameters][2:]
        self.next_norm: tuple[StepNorm, ...] = ()
        self.is_last = False

    def forward(self, hidden_states: torch.Tensor, *more: Any, **named: Any) -> torch.Tensor:
        form, step = self._form, self._step
        given = {**dict(zip(self._names, more, strict=False)), **named}
        given = {name: value for name, value in given.items() if name not in form.dropped}
        x = self._part(form.before_attention, hidden_states)
        x, *_ = self._modules[form.attention](hidden_states=x, **given)  # type: ignore[misc]
        if self.is_last and step.wanted is not None:
            x, hidden_states = x[:, step.wanted], hidden_states[:, step.wanted]
        x = self._part(form.after_attention, x)
        norm = self._modules[form.before_mlp]
        assert isinstance(norm, StepNorm)
        x, total = norm.of_sum(x, hidden_states)
        x = self._part(form.after_mlp, self._part(form.mlp, x))
        if not self.next_norm:
            total = total + x
            step.output = LayerOutput(total, self._show_norm)
            return total
        normed, total = self.next_norm[0].of_sum(x, total)
        step.output = LayerOutput(total, self._show_norm, self.next_norm[0], normed)
        return total

    def _show_norm(self, norm: StepNorm) -> None:
        self.next_norm = (norm,)

    def _part(self, name: str | None, x: torch.Tensor) -> torch.Tensor:
        return x if name is None else self._modules[name](x)  # type: ignore[misc]


class StepRotations:
    """Leaves the rotation of queries and keys to the operation that stores K and V, in layers where
    attention gets just what the rotation has returned.

    Attributes:
        layers: those.
    """

    def __init__(self, step: CurrentStep) -> None:
        self._step = step
        self.layers = set[int]()
        self._returned: tuple[torch.Tensor, torch.Tensor] | None = None
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
        q, k = rotate(q, k, cos, sin, *more, **named)
        is_whole = not more and not named and cos.shape[-1] == q.shape[-1]
        self._returned = (q, k) if is_whole and cos.shape[0] == 1 else None
        return q, k

    def note(self, layer: int, q: torch.Tensor, k: torch.Tensor) -> None:
        """Notes in the first run what attention of a layer gets."""
        if self._returned is not None and q is self._returned[0] and k is self._returned[1]:
            self.layers.add(layer)
        self._returned = None

    def forget(self) -> None:
        """Forgets the rotations of a step."""
        self._made, self._angles = [], None

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
    """Returns the form of a layer, by the order in which its code calls its parts; None if it
    computes anything else."""
    parts = dict(layer.named_children())
    norms = [name for name, each in parts.items() if isinstance(each, StepNorm)]
    attention = [name for name, each in parts.items() if "layer_idx" in vars(each)]
    others = [
        name
        for name, each in parts.items()
        if name not in (*norms, *attention) and any(True for _ in each.parameters())
    ]
    has_own = any(True for _ in (*layer._parameters, *layer._buffers))
    if len(attention) != 1 or len(others) != 1 or has_own:
        return None
    probes = {name: _Probe(number) for number, name in enumerate((*norms, *attention, *others))}
    probes[attention[0]].gives_tuple = True
    calls = list[_Probe]()
    for probe in probes.values():
        probe.calls = calls
    names = [*inspect.signature(type(layer).forward).parameters][2:]
    given = {name: object() for name in names}
    own = {name: each for name, each in vars(layer).items() if not name.startswith("_")}
    x = sample(1, 3, 8)
    try:
        found = inspect.unwrap(type(layer).forward)(
            SimpleNamespace(**{**own, **parts, **probes}), x, **given
        )
    except WRONG_CODE:
        return None
    order = [name for call in calls for name, each in probes.items() if each is call]
    passed = probes[attention[0]].named
    is_passed_on = all(given.get(name) is value for name, value in passed.items())
    form = _form_by(order, attention[0], others[0], frozenset(given) - frozenset(passed))
    if form is None or not is_passed_on:
        return None
    return form if is_same(found, _compute(form, probes, x)) else None


def _form_by(
    order: list[str], attention: str, mlp: str, dropped: frozenset[str]
) -> LayerForm | None:
    """Reads a form off the order of calls; None if there is none of this order."""
    if len({*order}) < len(order) or attention not in order or mlp not in order:
        return None
    first, second = order.index(attention), order.index(mlp)
    before, between, after = order[:first], order[first + 1 : second], order[second + 1 :]
    if len(before) != 1 or len(between) not in (1, 2) or len(after) > 1:
        return None
    after_attention = between[0] if len(between) == 2 else None
    after_mlp = after[0] if after else None
    return LayerForm(before[0], attention, after_attention, between[-1], mlp, after_mlp, dropped)


def _compute(form: LayerForm, probes: Mapping[str, _Probe], x: torch.Tensor) -> torch.Tensor:
    """Computes a form's output."""
    for names in (
        (form.before_attention, form.attention, form.after_attention),
        (form.before_mlp, form.mlp, form.after_mlp),
    ):
        found = x
        for name in names:
            found = found if name is None else probes[name].compute(found)
        x = x + found
    return x


class _Probe:
    """Stands for a part of a layer: computes what no other part does, and notes how it is called.

    Attributes:
        calls: of all parts, in their order.
        gives_tuple: the result is the first of several, as that of attention is.
        named: what it was given beside its input.
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self.calls = list[_Probe]()
        self.gives_tuple = False
        self.named = dict[str, Any]()

    def compute(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x * (self._number + 1)) + self._number

    def __call__(self, hidden_states: torch.Tensor, **named: Any) -> Any:
        self.calls.append(self)
        self.named = named
        found = self.compute(hidden_states)
        return (found, None) if self.gives_tuple else found
