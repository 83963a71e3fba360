"""Converts weights in AWQ or GPTQ to plain ones, which is all that is served.

A quantized matrix is stored as integers of 4 or 8 bits, packed into int32, and for each group of
its inputs a zero and a scale for every output: weight = (integer - zero) * scale.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from sglang.srt.model_config import ModelPathError
from sglang.srt.model_families import CONVERTIBLE
from sglang.srt.model_files import CONFIG, weight_names
from sglang.srt.pickled_weights import copy_small_files, whole_folder
from sglang.srt.plain_files import UnreadableFileError, read_json

if TYPE_CHECKING:
    import torch

MAX_SHARD_BYTES = 1 << 31  # of a written file, but for one larger tensor
AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # the column that each 4 bits of an int32 are of
PARTS = ("qweight", "qzeros", "scales", "g_idx")
QUANTIZATION = "quantization_config"


class QuantizedWeightsError(ModelPathError):
    """Why a folder is not converted, in one line."""


def quantized_method(source: Path) -> str | None:
    """Names the method in a folder's config.json, if it can be converted from."""
    try:
        settings = read_json(source / CONFIG, dict).get(QUANTIZATION)
    except UnreadableFileError:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else None
    return method if method in CONVERTIBLE else None


def dequantize(source: Path, target: Path) -> None:
    """Writes `target`, with plain weights in the type of the scales, as a whole or not at all.

    Raises:
        QuantizedWeightsError: if the weights have a form that is not known, or are incomplete.
        ModelPathError: if `target` exists.
        OSError: if files cannot be read or written.
    """
    entries = read_json(source / CONFIG, dict)
    settings = entries.pop(QUANTIZATION)
    _check_settings(source, settings)
    names, _ = weight_names(source, [file.name for file in source.iterdir()])
    if not names:
        raise QuantizedWeightsError(
            f"{source} has no *.safetensors, which is all that quantized weights are read from"
        )
    with whole_folder(target) as folder, ExitStack() as stack:
        copy_small_files(source, folder)
        (folder / CONFIG).write_text(json.dumps(entries, indent=2))
        try:
            files = [stack.enter_context(safe_open(source / each, "pt")) for each in names]
            _write(Quantized(source, settings, files), folder)
        except SafetensorError as error:
            raise QuantizedWeightsError(f"{source} cannot be read: {error}") from None


def _check_settings(source: Path, settings: dict[str, Any]) -> None:
    """Raises QuantizedWeightsError for a form that is not known."""
    is_awq = settings["quant_method"] == "awq"
    form = settings.get("version" if is_awq else "checkpoint_format")
    bits = _bits_of(settings)
    known, sizes = (("gemm",), (4,)) if is_awq else (("gptq", "gptq_v2"), (4, 8))
    if str(form or known[0]).lower() not in known or bits not in sizes:
        said = f"{bits!r:.20} bits in the form {form!r:.20}"
        raise QuantizedWeightsError(
            f"{source / CONFIG} says {said}; known are {' and '.join(known)} with"
            f" {' or '.join(map(str, sizes))} bits"
        )


def _bits_of(settings: dict[str, Any]) -> Any:
    return settings.get("bits", settings.get("w_bit"))  # the second is AutoAWQ's name


class Quantized:
    """The tensors of a quantized checkpoint.

    Args:
        settings: `quantization_config`.
        files: open safetensors.
    """

    def __init__(self, source: Path, settings: dict[str, Any], files: list[Any]) -> None:
        self._source = source
        self._is_awq = settings["quant_method"] == "awq"
        self._bits = int(_bits_of(settings))
        # The first form stores zeros less one.
        self._adds_one = not self._is_awq and settings.get("checkpoint_format") != "gptq_v2"
        self._files = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    @property
    def names(self) -> list[str]:
        """Names the plain weights that there are to be."""
        modules = {name.removesuffix(".qweight") for name in self._files if _ends(name, "qweight")}
        plain = [
            name
            for name in self._files
            if not (name.rpartition(".")[0] in modules and _ends(name, *PARTS))
        ]
        return sorted([*plain, *(f"{module}.weight" for module in modules)])

    def read(self, name: str) -> torch.Tensor:
        """Returns a plain weight.

        Raises:
            QuantizedWeightsError: if parts of it are missing or do not fit together.
        """
        if name in self._files:
            stored: torch.Tensor = self._files[name].get_tensor(name)
            return stored
        module = name.removesuffix(".weight")
        parts: dict[str, torch.Tensor] = {}
        for part in PARTS:
            stored_as = f"{module}.{part}"
            if stored_as in self._files:
                parts[part] = self._files[stored_as].get_tensor(stored_as)
            elif part != "g_idx":
                raise QuantizedWeightsError(f"{self._source} lacks {stored_as}")
        try:
            return self._plain(parts)
        except (RuntimeError, IndexError, ValueError, TypeError, ArithmeticError) as error:
            raise QuantizedWeightsError(
                f"{self._source}: the parts of {module} do not fit together ({error})"
            ) from None

    def _plain(self, parts: dict[str, torch.Tensor]) -> torch.Tensor:
        """Computes a weight [out, in] of its parts."""
        import torch

        scales = parts["scales"]  # [groups, out]
        zeros = self._unpacked(parts["qzeros"])
        if self._adds_one:
            zeros = (zeros + 1) & (1 << self._bits) - 1
        packed = parts["qweight"]
        # GPTQ packs inputs, AWQ packs outputs.
        integers = self._unpacked(packed) if self._is_awq else self._unpacked(packed.T).T
        num_inputs, num_groups = len(integers), len(scales)
        if zeros.shape != scales.shape or num_inputs % num_groups:
            raise ValueError(f"{list(zeros.shape)} zeros, {list(scales.shape)} scales")
        group = parts.get("g_idx")
        if group is None:
            group = torch.arange(num_inputs) // (num_inputs // num_groups)
        weight = (integers - zeros[group]) * scales[group].float()
        return weight.T.to(scales.dtype).contiguous()

    def _unpacked(self, packed: torch.Tensor) -> torch.Tensor:
        """Splits each int32 of the last dimension into integers."""
        import torch

        values = packed[..., None] >> torch.arange(0, 32, self._bits) & (1 << self._bits) - 1
        if self._is_awq:
            values = values[..., torch.tensor(AWQ_COLUMNS).argsort()]
        return values.flatten(-2).int()


def _ends(name: str, *parts: str) -> bool:
    return name.rpartition(".")[2] in parts


def _write(weights: Quantized, folder: Path) -> None:
    """Writes files of a bounded size, one after the other."""
    from safetensors.torch import save_file

    shard: dict[str, torch.Tensor] = {}
    names = weights.names
    number = 0
    for name in names:
        shard[name] = weights.read(name)
        num_bytes = sum(weight.nbytes for weight in shard.values())
        if num_bytes >= MAX_SHARD_BYTES or name == names[-1]:
            number += 1
            save_file(shard, folder / f"model-{number:05}.safetensors", {"format": "pt"})
            shard = {}
