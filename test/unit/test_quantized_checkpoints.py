"""Quantized checkpoints become plain ones: each value is what its integers, zero and scale say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang.convert_checkpoint import main
from sglang.srt import quantized_weights
from sglang.srt.model_config import ModelPathError, load_model_config, resolve_model_path

Tensors = dict[str, torch.Tensor]
FORMS: dict[str, dict[str, Any]] = {
    "awq": {"quant_method": "awq", "bits": 4, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "gptq, 8 bits": {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq"},
    "gptq_v2, any order": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"},
}


def packed_rows(values: np.ndarray, bits: int, order: list[int]) -> torch.Tensor:
    """Packs the last dimension: the low bits of an int32 are of the first column in `order`."""
    count = 32 // bits
    found = np.zeros((len(values), values.shape[1] // count), np.uint32)
    for column in range(found.shape[1]):
        for place in range(count):
            part = values[:, column * count + order[place]].astype(np.uint32)
            found[:, column] += part << np.uint32(place * bits)
    return torch.from_numpy(found.view(np.int32))


def quantized(form: str, shape: torch.Size, seed: int) -> tuple[Tensors, torch.Tensor]:
    """Draws a matrix [out, in]: its parts, and its values, one by one."""
    bits, draw = FORMS[form]["bits"], np.random.default_rng(seed)
    num_out, num_in = shape
    num_groups, count = 4, 32 // bits
    integers = draw.integers(0, 1 << bits, (num_in, num_out))
    zeros = draw.integers(1, 1 << bits, (num_groups, num_out))
    scales = torch.from_numpy(draw.uniform(0.01, 0.1, (num_groups, num_out))).half()
    groups = np.arange(num_in) // (num_in // num_groups)
    plain, parts = list(range(count)), {"scales": scales}
    if form == "awq":
        order = [0, 2, 4, 6, 1, 3, 5, 7]
        parts |= {
            name: packed_rows(each, bits, order)
            for name, each in (("qweight", integers), ("qzeros", zeros))
        }
    else:
        stored = zeros if "v2" in form else zeros - 1
        parts["qweight"] = packed_rows(integers.T, bits, plain).T.contiguous()
        parts["qzeros"] = packed_rows(stored, bits, plain)
        if "any order" in form:
            groups = draw.permutation(groups)
            parts["g_idx"] = torch.from_numpy(groups.astype(np.int32))
    whole = torch.from_numpy(integers - zeros[groups]).float()
    values = (whole * scales[groups].float()).half().T.contiguous()
    return parts, values


def write_quantized(folder: Path, form: str) -> Tensors:
    """Writes a model with a quantized layer in two files; returns its plain weights."""
    plain = resolve_model_path("demo")
    folder.mkdir()
    expected, stored = {}, dict[str, torch.Tensor]()
    for seed, (name, tensor) in enumerate(load_file(plain / "model.safetensors").items()):
        if "layers.0.self_attn." in name:
            parts, expected[name] = quantized(form, tensor.shape, seed)
            stored |= {f"{name.removesuffix('.weight')}.{part}": parts[part] for part in parts}
        else:
            stored[name] = expected[name] = tensor
    halves = [dict(list(stored.items())[start::2]) for start in (0, 1)]
    for number, half in enumerate(halves):
        save_file(half, folder / f"model-{number}.safetensors")
    entries = json.loads((plain / "config.json").read_text())
    entries["quantization_config"] = FORMS[form]
    (folder / "config.json").write_text(json.dumps(entries))
    return expected


@pytest.mark.parametrize("form", FORMS)
def test_a_converted_model_has_the_values_that_were_stored(
    tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_weights, "MAX_SHARD_BYTES", 1 << 20)
    source, target = tmp_path / "source", tmp_path / "target"
    expected = write_quantized(source, form)
    with pytest.raises(ModelPathError, match="sglang convert-checkpoint SOURCE TARGET"):
        load_model_config(str(source))
    assert main([str(source), str(target)]) == 0
    files = list(target.glob("*.safetensors"))
    assert len(files) > 1
    found = {name: tensor for file in files for name, tensor in load_file(file).items()}
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert "quantization_config" not in load_model_config(str(target)).hf


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"version": "marlin"}, "in the form 'marlin'"),
        ({"bits": 3}, "3 bits"),
        ({"quant_method": "gptq", "bits": 3}, "known are gptq and gptq_v2 with 4 or 8 bits"),
        ({"bits": None}, "None bits"),
    ],
    ids=str,
)
def test_a_form_that_is_not_known_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, said: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_quantized(source, "awq")
    entries = json.loads((source / "config.json").read_text())
    entries["quantization_config"] |= changes
    (source / "config.json").write_text(json.dumps(entries))
    assert main([str(source), str(target)]) == 1
    assert said in capsys.readouterr().err
    assert not target.exists()


@pytest.mark.parametrize(("part", "said"), [("scales", "lacks"), ("qzeros", "fit together")])
def test_parts_that_are_missing_or_misshapen_are_refused_and_nothing_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, said: str
) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    write_quantized(source, "gptq")
    for file in source.glob("*.safetensors"):
        tensors = load_file(file)
        for name in [name for name in tensors if name.endswith(part)]:
            first = tensors.pop(name)
            if part == "qzeros":
                tensors[name] = first[:1].clone()
        save_file(tensors, file)
    assert main([str(source), str(target)]) == 1
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]


def test_quantized_weights_in_a_pickle_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "source"
    write_quantized(source, "gptq")
    for file in source.glob("*.safetensors"):
        file.rename(source / f"pytorch_{file.stem}.bin")
    assert main([str(source), str(tmp_path / "target")]) == 1
    assert "has no *.safetensors" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == [source]
