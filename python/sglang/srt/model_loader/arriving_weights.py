"""Turns weights as a source has them into those that a model holds: numbers of 8 bits with scales
into values, or values into numbers of 8 bits with scales."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from sglang.srt.layers.scaled_weight import CODES, ScaledWeight, scaled
from sglang.srt.model_loader.weight_checks import WeightMismatch
from sglang.srt.weight_format import SCALE, SCALES, WEIGHT

if TYPE_CHECKING:
    from sglang.srt.model_loader.loader import WeightPlaces


class ArrivingWeights:
    """The weights of one source, which gives numbers of 8 bits and their scales in any order.

    Args:
        device: where values and numbers of 8 bits are computed of each other; None: where they are.

    Raises:
        WeightMismatch: by every method, for weights that do not fit.
    """

    def __init__(self, places: WeightPlaces, device: torch.device | None = None) -> None:
        self._places, self._form, self._device = places, places.form, device
        # By module; of what a model holds in 8 bits nothing waits.
        self._codes: dict[str, torch.Tensor | None] = {}
        self._scales: dict[str, tuple[str, torch.Tensor | None]] = {}
        self._rounded: set[str] = set()

    def take(self, name: str, tensor: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        """Gives the weights that can be made now, by names of a checkpoint, with all values."""
        module, _, last = name.rpartition(".")
        weight = f"{module}.{WEIGHT}"
        place = None if self._places.may_be_ignored(weight) else self._places.find(weight)
        is_matrix = place is not None and place.dim() == 2
        if place is None or last not in (WEIGHT, *SCALES):
            yield from self._places.pieces_of(name, tensor)
        elif last in SCALES and (not is_matrix or module in self._rounded):
            self._scales[module] = name, None
        elif last in SCALES or (is_matrix and tensor.dtype == CODES):
            yield from self._take_part(module, name, tensor.detach(), holds=place.dtype == CODES)
        elif place.dtype == CODES:
            yield from self._round(module, name, tensor.detach())
        else:
            yield from self._places.pieces_of(name, tensor)

    def check_complete(self) -> None:
        """Checks that each weight of 8 bits has come with its scale, and each scale with one."""
        for module in self._codes.keys() - self._scales.keys():
            raise WeightMismatch(
                f"has a weight {f'{module}.{WEIGHT}'!r} of 8 bits, but no {f'{module}.{SCALE}'!r}",
                "is the download complete?",
                "send both in one call",
            )
        for module in self._scales.keys() - self._codes.keys():
            raise WeightMismatch(
                f"has {self._scales[module][0]!r}, but no weight of 8 bits that it belongs to",
                "do the files belong together?",
                "send both in one call, or no scale of a weight in 16 or 32 bits",
            )

    def _round(
        self, module: str, name: str, values: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        self._places.place_of(name, values.shape)
        self._places.check_values(name, values)
        self._rounded.add(module)
        made = scaled(self._moved(values), self._form)
        yield name, made.codes
        if module not in self._scales:
            yield f"{module}.{SCALE}", made.scales

    def _take_part(
        self, module: str, name: str, tensor: torch.Tensor, holds: bool
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Takes numbers of 8 bits or a scale.

        Args:
            holds: the model holds 8 bits; otherwise both are kept until its values can be made.
        """
        weight = f"{module}.{WEIGHT}"
        if module in (self._codes if name == weight else self._scales):
            raise WeightMismatch(
                f"has weight {name!r} twice", "which files belong to it?", "send it once"
            )
        if tensor.is_meta or tensor.layout != torch.strided:
            raise WeightMismatch(
                f"has a weight {name!r} without plain values", "is the file intact?"
            )
        if name == weight:
            self._places.place_of(name, tensor.shape)
            self._codes[module] = None if holds else tensor.clone()
        else:
            tensor = self._fitted(name, tensor, self._places.shape_of(weight))
            self._scales[module] = name, None if holds else tensor.clone()
        if holds:
            yield name, tensor
            return
        codes, (_, scales) = self._codes.get(module), self._scales.get(module, ("", None))
        if codes is not None and scales is not None:
            codes = self._moved(codes)
            made = ScaledWeight(codes, scales.to(codes.device), self._form)
            yield from self._places.pieces_of(weight, made.values(torch.float32))
            self._codes[module], self._scales[module] = None, (name, None)

    def _fitted(self, name: str, scales: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Gives scales the shape of the model's, of a weight of that shape."""
        problem = self._form.problem(scales.shape, shape)
        if not scales.dtype.is_floating_point or scales.itemsize == 1:
            problem = f"of type {scales.dtype}, but scales are float32 or bfloat16"
        elif problem is None and bool((scales < 0).any()):
            problem = "below 0"
        if problem is not None:
            raise WeightMismatch(
                f"has scales {name!r} {problem}",
                "does quantization_config in config.json belong to them?",
            )
        wanted = self._form.scales_shape(shape)
        values = scales.to(torch.float32)
        return values.reshape((1, 1) if values.numel() == 1 else wanted).expand(wanted)

    def _moved(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device is None else tensor.to(self._device)
