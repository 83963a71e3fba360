"""RoPE tables equal those of transformers, from either spelling of config.json."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from sglang.srt.layers.ops.torch_ops import TorchOps
from sglang.srt.layers.rotary_embedding import (
    attention_factor,
    inverse_frequencies,
    rotation_table,
)
from sglang.srt.rope_config import LinearScaling, RopeConfig, YarnScaling, parse_rope

HEAD_DIM, MAX_POSITIONS = 32, 700
BASE = {"max_position_embeddings": 512}
YARN = {"type": "yarn", "factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 128}
LLAMA3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {"type": "default"},
    "linear": {"type": "linear", "factor": 2.5},
    "linear, whole factor": {"type": "linear", "factor": 4},
    "llama3": {**LLAMA3, **ORIGINAL},
    "llama3, narrow": {**LLAMA3, **ORIGINAL, "low_freq_factor": 2, "high_freq_factor": 2.5},
    "yarn": {**YARN, **ORIGINAL},
    "yarn, original context not said": YARN,
    "yarn, factor not said": {**YARN, **ORIGINAL, "factor": None},
    "yarn, attention factor": {**YARN, **ORIGINAL, "attention_factor": 0.7},
    "yarn, mscale": {**YARN, **ORIGINAL, "mscale": 0.707, "mscale_all_dim": 1.0},
    "yarn, one mscale": {**YARN, **ORIGINAL, "mscale": 0.707},
    "yarn, betas": {**YARN, **ORIGINAL, "beta_fast": 16, "beta_slow": 2},
    "yarn, no truncation": {**YARN, **ORIGINAL, "truncate": False},
    "yarn, step": {**YARN, "original_max_position_embeddings": 4},
    "yarn, factor 1": {**YARN, **ORIGINAL, "factor": 1.0},
}


def reference(scaling: dict[str, Any], theta: float) -> tuple[torch.Tensor, float, torch.Tensor]:
    """transformers' frequencies, attention factor and [MAX_POSITIONS, 2, HEAD_DIM] cos and sin."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = {("rope_type" if key == "type" else key): item for key, item in scaling.items()}
    config = LlamaConfig(head_dim=HEAD_DIM, rope_parameters={**values, "rope_theta": theta}, **BASE)
    rotary = LlamaRotaryEmbedding(config)
    if values["rope_type"] != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[values["rope_type"]](config)
        assert torch.equal(frequencies, rotary.inv_freq)
        assert factor == rotary.attention_scaling
    cos, sin = rotary(torch.zeros(1), torch.arange(MAX_POSITIONS)[None])
    return rotary.inv_freq, rotary.attention_scaling, torch.stack((cos[0], sin[0]), dim=1)


@pytest.mark.long_matrix
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0, 1_000_000])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=list(SCALINGS))
def test_the_table_equals_that_of_transformers(scaling: dict[str, Any], theta: float) -> None:
    config = parse_rope({**BASE, "rope_theta": theta, "rope_scaling": scaling})
    frequencies, factor, table = reference(scaling, theta)
    ours = inverse_frequencies(HEAD_DIM, config)
    assert ours.dtype == torch.float32
    assert torch.equal(ours, frequencies)
    assert attention_factor(config.scaling) == pytest.approx(factor, rel=1e-12)
    rotation = rotation_table(HEAD_DIM, MAX_POSITIONS, config)
    assert rotation.dtype == torch.float32
    half = HEAD_DIM // 2
    unsigned = rotation.clone()
    unsigned[:, 1, :half] *= -1
    assert torch.equal(unsigned, table)


def test_each_scaling_changes_the_table() -> None:
    """Otherwise equality would show nothing."""
    tables = [
        inverse_frequencies(HEAD_DIM, parse_rope({**BASE, "rope_scaling": SCALINGS[name]}))
        for name in ("default", "linear", "llama3", "llama3, narrow", "yarn", "yarn, betas")
    ]
    for index, table in enumerate(tables):
        for other in tables[:index]:
            assert not torch.allclose(table, other, rtol=1e-2, atol=0)


@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=list(SCALINGS))
def test_both_spellings_mean_the_same(scaling: dict[str, Any]) -> None:
    renamed = {("rope_type" if key == "type" else key): item for key, item in scaling.items()}
    old = parse_rope({**BASE, "rope_theta": 77.0, "rope_scaling": scaling})
    assert parse_rope({**BASE, "rope_theta": 77.0, "rope_scaling": renamed}) == old
    assert parse_rope({**BASE, "rope_parameters": {**renamed, "rope_theta": 77.0}}) == old
    assert parse_rope({**BASE, "rope_parameters": renamed, "rope_theta": 77.0}) == old
    assert old.theta == 77.0


@pytest.mark.parametrize(
    "entries",
    [{}, {"rope_scaling": None}, {"rope_parameters": {}}, {"rope_parameters": None}],
    ids=str,
)
def test_nothing_said_is_the_plain_form(entries: dict[str, Any]) -> None:
    assert parse_rope({**BASE, **entries}) == RopeConfig(theta=10_000.0)


def test_an_outer_original_context_goes_first() -> None:
    outer = {"original_max_position_embeddings": 64}
    config = parse_rope({**BASE, **outer, "rope_scaling": {**YARN, **ORIGINAL}})
    assert isinstance(config.scaling, YarnScaling)
    assert config.scaling.original_context_len == 64


def test_linear_is_parsed() -> None:
    config = parse_rope({**BASE, "rope_scaling": {"type": "linear", "factor": 2}})
    assert config == RopeConfig(scaling=LinearScaling(factor=2.0), context_factor=2.0)


@pytest.mark.parametrize(
    ("scaling", "said"),
    [
        ({"type": "linear"}, "factor"),
        ({"type": "linear", "factor": "2"}, "factor"),
        ({"type": "linear", "factor": -1}, "factor"),
        ({"type": "linear", "factor": True}, "factor"),
        ({"type": "linear", "factor": float("nan")}, "factor"),
        ({"type": "llama3", "factor": 2.0, "high_freq_factor": 4.0}, "low_freq_factor"),
        ({**LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor"),
        ({**YARN, "original_max_position_embeddings": 0}, "original_max_position_embeddings"),
        ({**YARN, "beta_fast": "x"}, "beta_fast"),
        ({**YARN, "truncate": 1}, "truncate"),
        ({"type": "dynamic", "factor": 2.0}, "'dynamic' is not supported"),
        ({"rope_type": "su"}, "'su' is not supported"),
        ({"rope_type": ["yarn"]}, "not supported"),
        ({"type": "default", "rope_theta": 1.0}, "rope_theta"),
        ({"type": "default", "rope_theta": "x"}, "rope_theta"),
        ("linear", "rope_scaling must be an object"),
        ({"type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ],
    ids=str,
)
def test_nonsense_is_refused_by_name(scaling: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_rope({**BASE, "rope_scaling": scaling})


def test_rotation_equals_that_of_transformers() -> None:
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    _, _, table = reference(SCALINGS["yarn"], 10_000.0)
    config = parse_rope({**BASE, "rope_scaling": SCALINGS["yarn"]})
    rotations = rotation_table(HEAD_DIM, MAX_POSITIONS, config)
    positions = torch.tensor([0, 3, 699])
    heads = torch.randn(3, 8, HEAD_DIM, generator=torch.Generator().manual_seed(0))
    cos, sin = table[positions].unbind(1)
    q, k = apply_rotary_pos_emb(heads[:, :4], heads[:, 4:6], cos, sin, unsqueeze_dim=1)
    kv = torch.zeros(5, 4, HEAD_DIM)
    slots = torch.tensor([4, 1, 2])
    ops = TorchOps(torch.device("cpu"))
    rotation = ops.rotation(rotations, positions)
    ours = ops.rotate_and_store(heads, rotation, positions, kv, slots)
    torch.testing.assert_close(ours, q, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(kv[slots, :2], k, rtol=1e-4, atol=1e-4)
    assert torch.equal(kv[slots, 2:], heads[:, 6:])
    assert not kv[[0, 3]].any(), "a slot that nobody named was written"
