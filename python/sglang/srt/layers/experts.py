"""Weights of experts: gated feed-forward parts of which each row goes through a few."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from sglang.srt.shard import Cut, Shard

GATE_UP, DOWN = "gate_up_proj", "down_proj"


class ExpertNames(NamedTuple):
    """Names that a checkpoint gives the three weights of an expert."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


PLAIN_NAMES = ExpertNames()


class Experts(nn.Module):
    """The experts of a layer. Each rank has a part of the intermediate features of all of them.

    A checkpoint holds a tensor for each weight of each expert, or the parameters as they are here.

    Args:
        size: intermediate features of an expert, on all ranks together.

    Attributes:
        gate_up_proj: [num_experts, 2 * own part of size, hidden_size], gate first.
        down_proj: [num_experts, hidden_size, own part of size].
    """

    def __init__(
        self, num_experts: int, hidden_size: int, size: int, names: ExpertNames, shard: Shard
    ) -> None:
        super().__init__()
        own = shard.part(size)
        self.gate_up_proj = nn.Parameter(torch.empty(num_experts, 2 * own, hidden_size))
        self.down_proj = nn.Parameter(torch.empty(num_experts, hidden_size, own))
        self._names, self._shard, self._size = names, shard, size

    def places(self) -> dict[str, torch.Tensor]:
        """The tensor that each weight of each expert fills; no autograd."""
        return {
            name: place
            for parameter in (GATE_UP, DOWN)
            for name, place in self.split(parameter, self.get_parameter(parameter).data)
        }

    def cuts(self) -> dict[str, Cut | None]:
        """The part of each of these weights, and of each parameter, that this rank has; None:
        all."""
        if self._shard.is_whole:
            return {}
        rows, columns = self._shard.cut(0, self._size), self._shard.cut(1, self._size)
        weights = (
            (name, columns if parameter == DOWN else rows)
            for parameter in (GATE_UP, DOWN)
            for name, _ in self.split(parameter, self.get_parameter(parameter))
        )
        return {GATE_UP: rows, DOWN: columns, **dict(weights)}

    def split(self, parameter: str, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives the names of what one parameter holds, behind the module's, and views of values
        [num_experts, ...] that are in its form."""
        names = self._names
        for expert, own in enumerate(values):
            if parameter == DOWN:
                yield f"{expert}.{names.down}.weight", own
                continue
            gate, up = own.chunk(2)
            yield f"{expert}.{names.gate}.weight", gate
            yield f"{expert}.{names.up}.weight", up

    def shape_of(self, parameter: str) -> list[int]:
        """The shape of a parameter on all ranks together."""
        num_experts, hidden_size, _ = self.down_proj.shape
        wide = (2 * self._size, hidden_size) if parameter == GATE_UP else (hidden_size, self._size)
        return [num_experts, *wide]


class ExpertStack(NamedTuple):
    """A parameter of experts, which a checkpoint may hold as it is.

    Attributes:
        module_name: the model's name of the experts.
    """

    experts: Experts
    module_name: str
    parameter: str

    @property
    def own_part(self) -> torch.Tensor:
        """The values that this rank has; no autograd."""
        return self.experts.get_parameter(self.parameter).data

    @property
    def shape(self) -> list[int]:
        """The parameter's shape on all ranks together."""
        return self.experts.shape_of(self.parameter)

    def split(self, values: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives the weights of which it is made, by the model's names, as views of its values."""
        pieces = self.experts.split(self.parameter, values)
        return ((f"{self.module_name}.{name}", piece) for name, piece in pieces)
