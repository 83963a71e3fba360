"""Checkpoints with weights of 8 bits and scales, and the same weights as plain values, made without
the code that reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
BLOCK = [16, 32]
FP8 = torch.float8_e4m3fn


def _compressed(strategy: str, is_dynamic: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": True, **more}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": is_dynamic}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    groups, ignored = {"config_groups": {"group_0": group}}, {"ignore": ["lm_head"]}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", **groups, **ignored
    }  # fmt: skip


# What config.json says; rows and columns of a block (0: all); shape and type of stored scales.
FORMS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "channel": (_compressed("channel"), (1, 0)),
    "tensor": (_compressed("tensor", is_dynamic=False), (0, 0)),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, (0, 0)),
    "block": ({"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": BLOCK}, (16, 32)),
    "compressed block": (_compressed("block", block_structure=BLOCK), (16, 32)),
}


def rounded(weight: torch.Tensor, form: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes, scales as the form stores them, and the values that they mean in float32; block by
    block."""
    rows, columns = (
        size or whole for size, whole in zip(FORMS[form][1], weight.shape, strict=True)
    )
    codes, values = torch.empty(weight.shape, dtype=FP8), torch.empty(weight.shape)
    scales = []
    for top in range(0, weight.shape[0], rows):
        for left in range(0, weight.shape[1], columns):
            place = slice(top, top + rows), slice(left, left + columns)
            largest = float(weight[place].abs().max())
            scale = torch.tensor(largest / 448 if largest else 1.0)
            codes[place] = (weight[place].float() / scale).to(FP8)
            values[place] = codes[place].float() * scale
            scales.append(scale)
    shape = -(-weight.shape[0] // rows), -(-weight.shape[1] // columns)
    kept = {"tensor": (1,), "fp8 tensor": ()}.get(form, shape)
    return codes, torch.stack(scales).view(kept), values


def is_rounded(name: str, tensor: torch.Tensor) -> bool:
    """Tells whether a checkpoint has a tensor in 8 bits."""
    kept = ("embed_tokens", "lm_head", ".gate.weight")
    return tensor.dim() == 2 and not any(each in name for each in kept)


def fp8_tensors(plain: Tensors, form: str) -> tuple[Tensors, Tensors]:
    """The tensors of a checkpoint in 8 bits, and all values that they mean."""
    stored, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in plain.items():
        if not is_rounded(name, tensor):
            stored[name] = values[name] = tensor
            continue
        stored[name], scales, values[name] = rounded(tensor, form)
        module = name.removesuffix(".weight")
        is_deepseek = form == "block"
        stored[f"{module}.weight_scale{'_inv' if is_deepseek else ''}"] = scales
        if "tensor" in form:
            stored[f"{module}.input_scale"] = torch.tensor(0.5)
    return stored, values


def tensors_of(path: Path) -> Tensors:
    """All tensors of a folder."""
    return {
        name: tensor
        for file in path.glob("*.safetensors")
        for name, tensor in load_file(file).items()
    }


def write_fp8(source: Path, path: Path, form: str) -> tuple[Path, Path]:
    """Writes a plain folder's weights in 8 bits, and what they mean as a plain folder again."""
    stored, values = fp8_tensors(tensors_of(source), form)
    made = write_folder(source, path / "fp8", stored, form)
    return made, write_folder(source, path / "values", values)


def write_folder(source: Path, path: Path, tensors: Tensors, form: str | None = None) -> Path:
    """Writes a folder with the files of another one, but other tensors."""
    path.mkdir(parents=True)
    for file in source.glob("*.json"):
        (path / file.name).write_bytes(file.read_bytes())
    (path / "model.safetensors.index.json").unlink(missing_ok=True)
    if form is not None:
        config = json.loads((path / "config.json").read_text())
        config["quantization_config"] = FORMS[form][0]
        (path / "config.json").write_text(json.dumps(config))
    save_file(
        {name: each.contiguous() for name, each in tensors.items()}, path / "model.safetensors"
    )
    return path
