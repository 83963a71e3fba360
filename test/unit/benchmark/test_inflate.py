"""The inflated model is the small one: transformers is the oracle; wrong numbers are seen."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmark.inflate import (
    CHECKED,
    NOISE_FACTOR,
    Filling,
    InflationError,
    compare,
    inflated_tensors,
    main,
    plan_inflation,
    problems_of,
    write_model,
)
from benchmark.random_model import LLAMA_8B
from sglang.srt.model_config import load_model_config
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.model_loader.weight_files import read_directory

DEMO = load_model_config("demo")
PLAN = plan_inflation(DEMO, CHECKED)
EXACT = Filling(dtype=torch.float32)
VISIBLE = 10  # how many times the bound a wrong number must exceed


def compared(path: Path, filling: Filling = EXACT, **changes: float) -> dict[str, float]:
    write_model(DEMO, path, replace(PLAN, **changes), filling)
    return compare(DEMO.path, path)


def tensors_of(**filling: Any) -> dict[str, torch.Tensor]:
    small = dict(read_directory(DEMO.path))
    return dict(inflated_tensors(small, PLAN, Filling(**filling)))


@pytest.mark.long_matrix
@pytest.mark.parametrize("silent_std", [0.0, 1e-12])
def test_the_inflated_model_computes_the_same_function(tmp_path: Path, silent_std: float) -> None:
    found = compared(tmp_path, replace(EXACT, silent_std=silent_std))
    assert not problems_of(found), found
    assert found["noise"] < 1e-4  # the bound is no loose one


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    "changes",
    [
        {"norm_scale": 1 / 4},  # d/D without the root
        {"eps": DEMO.rms_norm_eps},
        {"eps": DEMO.rms_norm_eps / 4},  # without what the spare channel adds
    ],
)
def test_a_wrong_scale_or_eps_is_seen(tmp_path: Path, changes: dict[str, float]) -> None:
    found = compared(tmp_path, **changes)
    assert [problem for problem in problems_of(found) if problem.startswith("logits")]
    assert found["logits"] > VISIBLE * NOISE_FACTOR * found["noise"]


def test_padded_tokens_without_the_spare_channel_are_seen(tmp_path: Path) -> None:
    problems = problems_of(compared(tmp_path, spare=0.0))
    assert {"probabilities", "padding"} <= {problem.split(":")[0] for problem in problems}


def test_the_check_of_the_command_line_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--check", "--num-layers", "4", "--vocab-size", "4500"]) == 0
    assert "the same function" in capsys.readouterr().out


def test_the_8b_geometry_has_the_numbers_of_the_design() -> None:
    plan = plan_inflation(DEMO, LLAMA_8B)
    assert (plan.norm_scale, plan.spare) == (1 / 4, 2**-5)
    assert plan.eps == pytest.approx((DEMO.rms_norm_eps * 256 - 2**-10) / 4096, rel=1e-12)


def test_norm_weights_are_exact_in_bfloat16() -> None:
    small, large = dict(read_directory(DEMO.path)), tensors_of()
    for name in (name for name in small if "norm" in name):
        assert torch.equal(large[name][: DEMO.hidden_size] * 2, small[name])


def test_filler_is_everywhere_but_on_the_ways_into_the_residual_stream() -> None:
    silent = {"o_proj", "down_proj", "embed_tokens"}
    for name, tensor in tensors_of(dtype=torch.float32).items():
        if "norm" in name:
            continue
        share = float((tensor == 0).float().mean())
        assert (share > 0.4) if name.split(".")[-2] in silent else (share < 0.001), name
    for name, tensor in tensors_of(dtype=torch.float32, silent_std=1e-12).items():
        assert float((tensor == 0).float().mean()) < 0.001, name


def test_filler_repeats_with_the_seed_and_differs_between_tensors() -> None:
    first, again, other = tensors_of(seed=1), tensors_of(seed=1), tensors_of(seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    gate = "model.layers.5.mlp.gate_proj.weight"
    assert not torch.equal(first[gate], other[gate])
    assert not torch.equal(first[gate], first["model.layers.5.mlp.up_proj.weight"])
    assert float(first[gate].float().std()) == pytest.approx(0.02, rel=0.01)


def test_the_runtime_loads_what_is_written_and_what_is_handed_over(tmp_path: Path) -> None:
    write_model(DEMO, tmp_path, PLAN, Filling())
    config = load_model_config(str(tmp_path))
    assert config.hf["mtp_mask_token_id"] == DEMO.hf["mtp_mask_token_id"]
    assert (config.eos_token_ids, config.context_len) == (DEMO.eos_token_ids, DEMO.context_len)
    assert config.rope == DEMO.rope
    written = load_model(config, "auto", 64, torch.bfloat16, "cpu")
    handed = load_model(config, "dummy", 64, torch.bfloat16, "cpu")
    places, names = WeightPlaces(handed, config), set()
    for name, tensor in tensors_of().items():
        place = places.place_of(name, tensor.shape)
        assert place is not None
        place.copy_(tensor)
        names.add(name)
    places.check_complete(names)
    for left, right in zip(written.parameters(), handed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_config_only_leaves_the_weights_out_and_weights_are_not_overwritten(tmp_path: Path) -> None:
    write_model(DEMO, tmp_path, PLAN, Filling(), config_only=True)
    assert not list(tmp_path.glob("*.safetensors*"))
    assert {"config.json", "tokenizer.json"} <= {file.name for file in tmp_path.iterdir()}
    assert json.loads((tmp_path / "config.json").read_text())["inflated_from"]["num_layers"] == 4
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InflationError, match=r"model\.safetensors"):
        write_model(DEMO, tmp_path, PLAN, Filling())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 512}, "powers of 4"),
        ({"hidden_size": 2304}, "powers of 4"),
        ({"hidden_size": 1000}, "powers of 4"),
        ({"hidden_size": 256}, "spare"),
        ({"head_dim": 256}, "head_dim"),
        ({"num_layers": 3}, "num_layers"),
        ({"vocab_size": 4000}, "vocab_size"),
        ({"num_kv_heads": 8}, "num_heads"),
        ({"num_heads": 9}, "num_heads"),
    ],
)
def test_targets_that_cannot_hold_the_model_are_refused(
    changes: dict[str, int], reason: str
) -> None:
    with pytest.raises(InflationError, match=reason):
        plan_inflation(DEMO, replace(CHECKED, **changes))


def test_other_ratios_are_taken_if_asked_for() -> None:
    plan = plan_inflation(DEMO, replace(CHECKED, hidden_size=512), allow_inexact=True)
    assert plan.norm_scale == math.sqrt(0.5)


def test_weights_that_a_llama_has_not_are_refused() -> None:
    small = dict(read_directory(DEMO.path))
    small["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(512)
    with pytest.raises(InflationError, match=r"q_proj\.bias"):
        next(inflated_tensors(small, PLAN, Filling()))
