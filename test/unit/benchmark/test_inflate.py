"""The inflated model is the small one: transformers is the oracle; wrong numbers are seen."""

from __future__ import annotations

import copy
import inspect
import json.decoder
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmark.inflate import (
    Filling,
    InflationError,
    inflated_tensors,
    plan_inflation,
    write_model,
)
from benchmark.random_model import LLAMA_8B, Geometry
from sglang.srt.model_config import load_model_config
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.model_loader.weight_files import read_directory

NUM_TOKENS, NUM_MASKS, NUM_GREEDY = 400, 16, 64  # of a comparison
NOISE_FACTOR, LIMITS = 4.0, {"probabilities": 1e-6, "padding": -50.0, "greedy": 0.0}
CHECKED = Geometry(1024, 1024, 6, 8, 4, 128, 5000)
DEMO = load_model_config("demo")
PLAN = plan_inflation(DEMO, CHECKED)
EXACT = Filling(dtype=torch.float32)
VISIBLE = 10  # how many times the bound a wrong number must exceed


@torch.no_grad()
def compare(source: Path, inflated: Path) -> dict[str, float]:
    """Measures the distance of two checkpoints in transformers, float32, on source and masks.

    Returns:
        logits: largest difference of a logit of the real vocabulary, at any position.
        noise: largest difference of the small model's logits to those that float64 gives.
        probabilities: largest difference between softmax over all and over the real vocabulary.
        padding: logarithm of the odds of all padded tokens together.
        greedy: 1 if greedy continuations differ.
    """
    from transformers import AutoTokenizer, LlamaForCausalLM

    small, large = (
        LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for path in (source, inflated)
    )
    ids = AutoTokenizer.from_pretrained(source)(inspect.getsource(json.decoder))["input_ids"]
    masked = ids[: NUM_TOKENS // 2] + [small.config.mtp_mask_token_id] * NUM_MASKS
    rows = [torch.tensor([tokens]) for tokens in (ids[:NUM_TOKENS], masked)]
    greedy = [
        model.generate(rows[0], do_sample=False, max_new_tokens=NUM_GREEDY).tolist()
        for model in (small, large)
    ]
    expected, logits, exact = (
        torch.cat([model(row).logits[0] for row in rows])
        for model in (small, large, copy.deepcopy(small).double())
    )
    v = expected.shape[1]
    real, padding = logits[:, :v], logits[:, v:]
    return {
        "logits": float((real - expected).abs().max()),
        "noise": float((exact - expected).abs().max()),
        "probabilities": float((logits.softmax(1)[:, :v] - real.softmax(1)).abs().max()),
        "padding": float((padding.logsumexp(1) - real.logsumexp(1)).max()),
        "greedy": float(greedy[0] != greedy[1]),
    }


def problems_of(found: Mapping[str, float]) -> list[str]:
    """Lists what in a comparison is more than rounding.

    `noise` is what float32 costs the small model. The large one sums in other orders and has noise
    of its own, of that size; so the two are within twice the noise, and the bound is four times.
    """
    limits = {"logits": NOISE_FACTOR * found["noise"], **LIMITS}
    return [
        f"{name}: {found[name]:.3g}, at most {limit:.3g}"
        for name, limit in limits.items()
        if not found[name] <= limit
    ]


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


@pytest.mark.long_matrix
def test_padded_tokens_without_the_spare_channel_are_seen(tmp_path: Path) -> None:
    problems = problems_of(compared(tmp_path, spare=0.0))
    assert {"probabilities", "padding"} <= {problem.split(":")[0] for problem in problems}


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


def test_weights_are_not_overwritten(tmp_path: Path) -> None:
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(InflationError, match=r"model\.safetensors"):
        write_model(DEMO, tmp_path, PLAN, Filling())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": 512}, "power of 4"),
        ({"hidden_size": 2304}, "power of 4"),
        ({"hidden_size": 1000}, "power of 4"),
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


def test_weights_that_a_llama_has_not_are_refused() -> None:
    small = dict(read_directory(DEMO.path))
    small["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(512)
    with pytest.raises(InflationError, match=r"q_proj\.bias"):
        next(inflated_tensors(small, PLAN, Filling()))
