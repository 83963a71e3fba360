"""Layers of weights that know how a checkpoint stores them, and which part of them a rank holds.

Ranks divide a layer's products so that it needs one sum over them for attention and one for the
feed-forward part: outputs of the first product (`FusedLinear`), inputs of the second (`SumLinear`).
"""

from __future__ import annotations

import torch
from torch import nn

from sglang.srt.layers.layer_runtime import Collectives, LayerRuntime
from sglang.srt.layers.scaled_weight import ALIGNMENT, CODES, ScaledWeight, Weight
from sglang.srt.shard import WHOLE, Cut, Shard
from sglang.srt.weight_format import WEIGHT, WeightFormat


class Linear(nn.Linear):
    """A linear layer whose product the runtime computes. Each rank has all of it.

    Attributes:
        form: of `weight` if it has 8 bits and `weight_scale`; None: it has its values.
    """

    form: WeightFormat | None = None

    def __init__(self, in_features: int, out_features: int, bias: bool = True) -> None:
        super().__init__(in_features, out_features, bias)
        self.register_parameter("weight_scale", None)

    def reset_parameters(self) -> None:
        """Leaves the weights unset; the loader fills them."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        return self.product(x, runtime, self.bias)

    def product(
        self, x: torch.Tensor, runtime: LayerRuntime, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """x [T, in_features] times what this rank has of the weight, plus a bias."""
        return runtime.linear(x, self.held, bias)

    def gated(self, x: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """silu of the first half of the outputs times the second: [T, out_features / 2]."""
        return runtime.gated_linear(x, self.held, self.bias)

    @property
    def held(self) -> Weight:
        """The part of the weight that this rank has, in its form."""
        if self.form is None:
            return self.weight
        return ScaledWeight(self.weight, self.weight_scale, self.form)

    def takes(self, form: WeightFormat) -> bool:
        """Tells whether what this rank has of the weight is made of whole blocks, and of features
        that GPUs multiply in 8 bits."""
        is_aligned = not any(size % ALIGNMENT for size in self.weight.shape)
        return is_aligned and form.divides(self.cut_of(WEIGHT))

    def hold_in(self, form: WeightFormat) -> None:
        """Takes a weight of 8 bits with scales instead of its values; it has no memory yet."""
        self.form, device, shape = form, self.weight.device, self.weight.shape
        codes, scales = (
            torch.empty(shape, dtype=CODES, device=device),
            torch.empty(form.scales_shape(shape), dtype=torch.float32, device=device),
        )
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.weight_scale = nn.Parameter(scales, requires_grad=False)

    def cut_of(self, parameter: str) -> Cut | None:
        """The part of `weight` or `bias` that this rank has; None: all."""
        return None

    def copy_rows(self, ids: torch.Tensor, out: torch.Tensor, ranks: Collectives | None) -> None:
        """Copies rows `ids` [H] int64 of the weight, whichever rank has them, to `out`
        [H, in_features] of every rank; all ranks do so together."""
        torch.index_select(self.weight, 0, ids, out=out)


class SumLinear(Linear):
    """A linear layer whose input features are divided among ranks: the output is the sum of what
    they compute, plus the bias, which each has as a whole."""

    def __init__(
        self, in_features: int, out_features: int, bias: bool, shard: Shard = WHOLE
    ) -> None:
        super().__init__(shard.part(in_features), out_features, bias)
        self._shard = shard
        self._num_inputs = in_features

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        if self._shard.is_whole:
            return self.product(x, runtime, self.bias)
        total = runtime.ranks.sum(self.product(x, runtime, None))
        return total if self.bias is None else total.add_(self.bias)

    def cut_of(self, parameter: str) -> Cut | None:
        is_cut = parameter == "weight" and not self._shard.is_whole
        return self._shard.cut(1, self._num_inputs) if is_cut else None


class VocabLinear(Linear):
    """An output head, whose tokens are divided among ranks: each gets the logits of all."""

    def __init__(self, in_features: int, num_tokens: int, shard: Shard = WHOLE) -> None:
        self._cut = shard.cut(0, num_tokens)
        super().__init__(in_features, self._cut.size, bias=False)
        self._is_whole = shard.is_whole

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        logits = runtime.linear(x, self.weight, None)
        return logits if self._is_whole else runtime.ranks.join(logits, self._cut.whole)

    def copy_rows(self, ids: torch.Tensor, out: torch.Tensor, ranks: Collectives | None) -> None:
        if self._is_whole:
            super().copy_rows(ids, out, ranks)
            return
        assert ranks is not None, "A part of a head, and no other ranks."
        own, is_elsewhere = _own_rows(ids, self._cut)
        torch.index_select(self.weight, 0, own, out=out)
        out.copy_(ranks.sum(out.masked_fill_(is_elsewhere[:, None], 0.0)))

    def cut_of(self, parameter: str) -> Cut | None:
        return None if self._is_whole else self._cut


class Embedding(nn.Embedding):
    """A table of tokens' hidden states, whose tokens are divided among ranks."""

    def __init__(self, num_tokens: int, size: int, shard: Shard = WHOLE) -> None:
        self._cut = shard.cut(0, num_tokens)
        super().__init__(self._cut.size, size)
        self._is_whole = shard.is_whole

    def reset_parameters(self) -> None:
        """Leaves the weights unset; the loader fills them. To draw random ones on the meta device
        torch would import its compiler, which takes seconds."""

    def forward(  # type: ignore[override]
        self, ids: torch.Tensor, runtime: LayerRuntime
    ) -> torch.Tensor:
        """[T, size] of token ids [T]."""
        if self._is_whole:
            return super().forward(ids)
        own, is_elsewhere = _own_rows(ids, self._cut)
        found = super().forward(own)
        return runtime.ranks.sum(found.masked_fill(is_elsewhere[:, None], 0.0))

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole table."""
        return self._cut.whole

    def cut_of(self, parameter: str) -> Cut | None:
        return None if self._is_whole else self._cut


def part_of(whole: torch.Tensor, cut: Cut) -> torch.Tensor:
    """Returns the entries of a weight that a rank holds."""
    pieces = [whole.narrow(cut.dim, *piece) for piece in cut.pieces]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=cut.dim)


def _own_rows(ids: torch.Tensor, cut: Cut) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the places of ids [T] int64 in a rank's part, any of those that other ranks have, and
    which these are: [T] bool."""
    own = ids - cut.start
    is_elsewhere = (own < 0) | (own >= cut.size)
    return own.masked_fill(is_elsewhere, 0), is_elsewhere


class FusedLinear(Linear):
    """Several linear layers over one input as one matrix product (q, k, v; gate, up). The output
    features of each are divided among ranks.

    Args:
        sizes: output features of each part, on all ranks together.

    Attributes:
        shards: names of the parts in the checkpoint, in order of their rows.
        shard_sizes: output features of each part that this rank has.
    """

    def __init__(
        self,
        in_features: int,
        shards: tuple[str, ...],
        sizes: tuple[int, ...],
        bias: bool,
        shard: Shard = WHOLE,
    ) -> None:
        own = tuple(shard.part(size) for size in sizes)
        super().__init__(in_features, sum(own), bias=bias)
        self.shards = shards
        self.shard_sizes = own
        self._sizes = dict(zip(shards, sizes, strict=True))
        self._shard = shard

    def without_first(self, x: torch.Tensor, runtime: LayerRuntime) -> torch.Tensor:
        """Computes all parts but the first one."""
        start, held = self.shard_sizes[0], self.held
        bias = None if self.bias is None else self.bias[start:]
        rows = held.rows_from(start) if isinstance(held, ScaledWeight) else held[start:]
        return runtime.linear(x, rows, bias)

    def takes(self, form: WeightFormat) -> bool:
        units = form.rows, ALIGNMENT  # `without_first` multiplies some of the parts alone
        is_divided = all(size % unit == 0 for size in self.shard_sizes for unit in units)
        return is_divided and super().takes(form)

    def shard_of(self, parameter: torch.Tensor, shard: str) -> torch.Tensor:
        """Returns the rows of `parameter` (weight, bias or scales) that belong to one part."""
        index, unit = self.shards.index(shard), sum(self.shard_sizes) // len(parameter)
        start = sum(self.shard_sizes[:index]) // unit
        return parameter.narrow(0, start, self.shard_sizes[index] // unit)

    def cut_of_shard(self, shard: str) -> Cut | None:
        """The rows of a part, of its weight or bias, that this rank has; None: all."""
        return None if self._shard.is_whole else self._shard.cut(0, self._sizes[shard])
