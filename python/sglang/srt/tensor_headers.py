"""Reads what the safetensors of a folder hold, but no values: names, types, shapes; no torch."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError, safe_open

from sglang.srt.head_layouts import numbered_on
from sglang.srt.model_config import ModelPathError
from sglang.srt.model_families import ORIGINAL
from sglang.srt.model_files import weight_names, why_no_weights
from sglang.srt.weight_format import (
    SCALES,
    STORED_TYPE,
    UNREAD_SCALES,
    WEIGHT,
    WeightFormat,
    scale_names,
)

BITS = re.compile(r"\d+")  # the first number in the name of a type; BOOL takes a byte
READ_TYPES = frozenset({"F64", "F32", "BF16", "F16"})  # of weights that models have
WEIGHTS = ("weight", "qweight", "weight_packed")  # last parts of names; the others are quantized
LAYERS = re.compile(
    r"(?:(?:model|language_model)\.)*layers\.(\d+)\."
    r"self_attn\.(k_proj|v_proj|qkv_proj|o_proj)\.weight"
)


class TensorHeader(NamedTuple):
    """Describes a tensor of a file.

    Attributes:
        dtype: as safetensors has it, such as BF16.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Gives the number of its values."""
        return math.prod(self.shape)


Headers = dict[str, TensorHeader]


def read_headers(folder: Path) -> Headers:
    """Returns the header of each tensor in a folder's safetensors; nothing where there are none or
    one is missing, such as before they are fetched or converted.

    Raises:
        ModelPathError: if a file is broken.
    """
    names, missing = _files(folder)
    return {} if missing else _read(folder, names)


def read_all_headers(folder: Path) -> tuple[Headers, int]:
    """Returns the header of each tensor, and the number of files.

    Raises:
        ModelPathError: if a file is missing or broken, or there is none.
    """
    names, missing = _files(folder)
    if missing:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ModelPathError(f"{folder} lacks {missing[0]}{more}; is the download complete?")
    if not names:
        why = why_no_weights([file.name for file in folder.iterdir()])
        raise ModelPathError(f"{folder} has no *.safetensors file with weights; {why}.")
    return _read(folder, names), len(names)


def bytes_by_type(headers: Mapping[str, TensorHeader]) -> dict[str, int]:
    """Counts bytes by type, most first."""
    bits: Counter[str] = Counter()
    for header in headers.values():
        number = BITS.search(header.dtype)
        bits[header.dtype] += header.size * (int(number[0]) if number else 8)
    return {name: count // 8 for name, count in bits.most_common()}


def num_kv_values(headers: Mapping[str, TensorHeader]) -> int | None:
    """Counts the values of K and V of one token in all layers, by the projections' shapes; None
    where layers have other names."""
    drafting, sums = numbered_on(headers), Counter[str]()
    for name, (_, shape) in headers.items():
        found = LAYERS.fullmatch(name)
        if found is not None and len(shape) == 2 and int(found[1]) not in drafting:
            sums[found[2]] += shape[1] if found[2] == "o_proj" else shape[0]
    fused = sums["qkv_proj"]
    # It has the queries too, which are as wide as the input of the output's projection.
    return sums["k_proj"] + sums["v_proj"] + (fused and fused - sums["o_proj"]) or None


def unread_weight(headers: Mapping[str, TensorHeader], form: WeightFormat) -> str | None:
    """Describes a weight that no model here reads, by its type or its scales; None if there is
    none.

    Args:
        form: of weights of 8 bits, by config.json.
    """
    for name, header in headers.items():
        module, _, last = name.rpartition(".")
        scales = [headers[each] for each in scale_names(name) if each in headers]
        if last == WEIGHT and header.dtype == STORED_TYPE and len(header.shape) == 2:
            if not scales:
                return f"has a weight {name!r} of 8 bits, but no scale of it; is it complete?"
            if scales[0].dtype not in READ_TYPES:
                return f"has scales of {name!r} of type {scales[0].dtype}, which is not read"
            if problem := form.problem(scales[0].shape, header.shape):
                return f"has scales of {name!r} {problem}"
        elif last in WEIGHTS and header.dtype not in READ_TYPES:
            said = f"has a weight {name!r} of type {header.dtype}, which is not read"
            return f"{said}; use {ORIGINAL}, or fp8 with scales."
        elif last in SCALES and not _has_8_bits(headers, f"{module}.{WEIGHT}"):
            return f"has {name!r}, but no weight of 8 bits that it belongs to"
    return None


def count_values(headers: Mapping[str, TensorHeader]) -> tuple[int, int]:
    """Counts the values of weights: those of 8 bits, but of experts, and all."""
    ends = tuple(f".{each}" for each in (*SCALES, *UNREAD_SCALES))
    weights = {name: each for name, each in headers.items() if not name.endswith(ends)}
    short = sum(
        header.size
        for name, header in weights.items()
        if header.dtype == STORED_TYPE and ".experts." not in name
    )
    return short, sum(header.size for header in weights.values())


def _has_8_bits(headers: Mapping[str, TensorHeader], name: str) -> bool:
    return name in headers and headers[name].dtype == STORED_TYPE


def _files(folder: Path) -> tuple[list[str], list[str]]:
    """Returns the names of a folder's safetensors, and those among them that are not there."""
    present = {file.name for file in folder.iterdir() if file.is_file()}
    names, _ = weight_names(folder, present)
    return names, [name for name in names if name not in present]


def _read(folder: Path, names: list[str]) -> Headers:
    headers: Headers = {}
    for file in (folder / name for name in names):
        try:
            with safe_open(file, framework="np") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (safe_open is no mapping)
                    part = tensors.get_slice(name)
                    headers[name] = TensorHeader(part.get_dtype(), tuple(part.get_shape()))
        except (SafetensorError, OSError) as error:
            raise ModelPathError(f"{file} is not a readable safetensors file: {error}.") from None
    return headers
