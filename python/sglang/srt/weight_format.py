"""Forms in which the weights of linear layers are stored and held: numbers of 16 or 32 bits, or
numbers of 8 bits (fp8, e4m3) with scales; no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from sglang.srt.shard import Cut

FP8 = "fp8"  # a value of --quantization, and a `quant_method`
COMPRESSED = "compressed-tensors"
QUANTIZATION = ("quantization_config", "compression_config")  # entries of config.json
STORED_TYPE = "F8_E4M3"  # as safetensors has it
WEIGHT, SCALE = "weight", "weight_scale"  # last parts of names
SCALES = (SCALE, "weight_scale_inv")  # both are multiplied by
# Scales of inputs and of KV, which checkpoints may carry and nothing here reads.
UNREAD_SCALES = ("input_scale", "output_scale", "q_scale", "k_scale", "v_scale")


class WeightFormat(NamedTuple):
    """The form of a weight [out_features, in_features] of 8 bits: each value is the stored number
    times the scale of its block.

    Attributes:
        rows, columns: of a block, the last of which may be smaller; 0 columns: all.
        rounds_inputs: inputs are meant to be rounded to 8 bits too.
    """

    rows: int = 1
    columns: int = 0
    rounds_inputs: bool = True

    def scales_shape(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns the shape of the scales of a weight of that shape."""
        rows, columns = self.within(shape)
        return -(-shape[0] // rows), -(-shape[1] // columns)

    def within(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns rows and columns of a block that a weight of that shape has."""
        rows, columns = (max(1, size) for size in shape)
        return min(self.rows, rows), min(self.columns or columns, columns)

    def divides(self, cut: Cut | None) -> bool:
        """Tells whether parts of a weight of one size are made of whole blocks."""
        if cut is None or not cut.size or cut.whole % cut.size:
            return cut is None
        unit = (self.rows, self.columns or cut.size)[cut.dim]
        return all(size % unit == 0 for _, size in cut.pieces)

    def cut_of_scales(self, cut: Cut | None) -> Cut | None:
        """Returns the part of the scales that belongs to a part of the weight; None: all."""
        unit = 0 if cut is None else (self.rows, self.columns)[cut.dim]
        if cut is None or not unit:
            return None
        parts = tuple(part // unit for part in cut.parts)
        return Cut(cut.dim, cut.start // unit, cut.size // unit, -(-cut.whole // unit), parts)

    def problem(self, scales: Sequence[int], shape: Sequence[int]) -> str | None:
        """Says what is wrong with the shape of the stored scales of a weight of that shape; one
        value is the scale of all blocks, and a dimension of size 1 may be missing."""
        wanted = self.scales_shape(shape)
        without_ones = [size for size in scales if size != 1]
        if not without_ones or without_ones == [size for size in wanted if size != 1]:
            return None
        return (
            f"of shape {list(scales)}, but its weight of shape {list(shape)} takes 1 or"
            f" {list(wanted)}"
        )

    def __str__(self) -> str:
        if not self.columns:
            return "a scale for each output"
        return f"a scale for each block of {self.rows} x {self.columns}"


CHANNEL = WeightFormat()


def format_of(entries: Mapping[str, Any]) -> WeightFormat:
    """Returns the form of weights of 8 bits that a config.json says; without one a scale for each
    output, which one scale for all is too."""
    given = said_of_weights(entries)
    return CHANNEL if given is None else parse_format(given) or CHANNEL


def said_of_weights(entries: Mapping[str, Any]) -> Any:
    """Returns what a config.json says of quantized weights, of a model or of its part that writes
    text; None if it says nothing."""
    text = entries.get("text_config")
    parts = [entries, text] if isinstance(text, dict) else [entries]
    given = (part.get(name) for part in parts for name in QUANTIZATION)
    return next((each for each in given if each), None)


def parse_format(config: Any) -> WeightFormat | None:
    """Reads `quantization_config`; None for a form that is not read here."""
    if not isinstance(config, dict):
        return None
    if config.get("quant_method") == FP8:
        is_e4m3 = config.get("fmt") in (None, "e4m3", "float8_e4m3fn")
        return _blocks(config.get("weight_block_size")) if is_e4m3 else None
    if config.get("quant_method") != COMPRESSED or config.get("transform_config"):
        return None
    sparsity = config.get("sparsity_config") or {}
    groups = config.get("config_groups")
    if not (isinstance(sparsity, dict) and isinstance(groups, dict)):
        return None
    if sparsity.get("format") not in (None, "dense"):
        return None
    forms = set(_forms(groups))
    form = forms.pop() if len(forms) == 1 else None
    if form is None:
        return None
    return form._replace(rounds_inputs=all(map(_rounds_inputs, groups.values())))


def _rounds_inputs(group: Mapping[str, Any]) -> bool:
    return bool(group.get("input_activations"))


def _forms(groups: Mapping[str, Any]) -> Iterator[WeightFormat | None]:
    """Gives the form of each group of layers of compressed-tensors."""
    for group in groups.values():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            yield None
            continue
        kind = [weights.get(name) for name in ("type", "num_bits", "strategy")]
        if kind[:2] != ["float", 8] or weights.get("symmetric") is False:
            yield None
        elif kind[2] in ("tensor", "channel"):
            yield CHANNEL
        else:
            blocks = weights.get("block_structure")
            yield _blocks(blocks) if kind[2] == "block" and blocks else None


def _blocks(sizes: Any) -> WeightFormat | None:
    """Reads rows and columns of blocks; a scale for each output if there are none."""
    if sizes is None:
        return CHANNEL
    is_pair = isinstance(sizes, list) and len(sizes) == 2
    if not is_pair or any(type(size) is not int or size < 1 for size in sizes):
        return None
    return WeightFormat(*sizes)


def scale_names(weight: str) -> list[str]:
    """Returns the names that the scales of a weight may have."""
    module = weight.removesuffix(WEIGHT)
    return [module + name for name in SCALES]
