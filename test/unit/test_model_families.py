"""Families that people have: each is served, by the code that is said, or refused by the reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headers_of_models import SIZES, write_model
from sglang import check_model
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_families import (
    BY_TRANSFORMERS,
    EXPERTS,
    LATENT,
    NEEDED,
    QUANTIZED,
    RECURRENT,
    impl_of,
    why_not_computed,
)
from sglang.srt.registry import MODELS, OWN, TRANSFORMERS
from sglang.srt.tensor_headers import num_kv_values, read_headers

pytest.importorskip("transformers")

SHARED = "layers that share K and V"
# By transformers' model_type: what computes it, or all that it has and that nothing computes.
FAMILIES: dict[str, str | tuple[str, ...]] = {
    "llama": OWN,
    "mistral": OWN,
    "qwen2": OWN,
    "qwen3": OWN,
    "qwen3_moe": OWN,
    "mixtral": OWN,
    "cohere2": TRANSFORMERS,
    "gemma2": TRANSFORMERS,
    "gemma3_text": TRANSFORMERS,
    "glm4": TRANSFORMERS,
    "granite": TRANSFORMERS,
    "ministral": TRANSFORMERS,
    "olmo2": TRANSFORMERS,
    "olmo3": TRANSFORMERS,
    "phi3": TRANSFORMERS,
    "smollm3": TRANSFORMERS,
    "gpt_oss": (EXPERTS,),
    "llama4_text": (EXPERTS,),
    "glm4_moe": (EXPERTS,),
    "deepseek_v3": (LATENT, EXPERTS),
    "qwen3_next": (RECURRENT, EXPERTS),
    "qwen3_5_text": (RECURRENT,),
    "gemma4_text": ("layers with other sizes of heads",),
}
# Other ways in which models say that they have them.
OTHERS = {
    "falcon_h1": (RECURRENT,),
    "jamba": (RECURRENT, EXPERTS),
    "kimi_linear": (RECURRENT, LATENT, EXPERTS),
    "lfm2": (RECURRENT,),
    "mamba2": (RECURRENT,),
    "minicpm3": (LATENT,),
    "recurrent_gemma": (RECURRENT,),
    "rwkv": (RECURRENT,),
    "dbrx": (EXPERTS,),
    "ernie4_5_moe": (EXPERTS,),
    "gemma3n_text": (SHARED,),
}


def entries_of(model_type: str, **changes: Any) -> dict[str, Any]:
    """Makes the config.json of a family, as transformers writes it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    config = CONFIG_MAPPING[model_type](**changes)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]]
    entries: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return entries


def refusal(folder: Path, entries: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ModelPathError) as error:
        load_model_config(str(folder))
    text = str(error.value)
    assert text.startswith(f"{folder / 'config.json'} cannot be used: ")
    assert "\n" not in text
    return text


@pytest.mark.parametrize("model_type", FAMILIES)
def test_a_family_is_served_or_refused_by_its_true_reason(tmp_path: Path, model_type: str) -> None:
    entries, verdict = entries_of(model_type, **SIZES), FAMILIES[model_type]
    if isinstance(verdict, str):
        (tmp_path / "config.json").write_text(json.dumps(entries))
        assert why_not_computed(entries) is None
        assert impl_of(entries) == verdict == load_model_config(str(tmp_path)).impl
        known = {OWN: frozenset(MODELS.names), TRANSFORMERS: BY_TRANSFORMERS}
        assert entries["architectures"][0] in known[verdict]
        return
    text = refusal(tmp_path, entries)
    assert [name for name in (RECURRENT, LATENT, EXPERTS) if name in text] == [
        name for name in verdict if name in (RECURRENT, LATENT, EXPERTS)
    ]
    assert all(name in text for name in verdict)
    assert text.endswith(f"not supported; use {NEEDED}.")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
def test_experts_are_computed_by_files_of_our_own_alone(tmp_path: Path, model_type: str) -> None:
    entries = entries_of(model_type, **SIZES)
    assert EXPERTS in (why_not_computed(entries, TRANSFORMERS) or "")
    assert EXPERTS in (why_not_computed({**entries, "architectures": ["OtherForCausalLM"]}) or "")
    (tmp_path / "config.json").write_text(json.dumps(entries))
    with pytest.raises(ModelPathError, match=EXPERTS):
        load_model_config(str(tmp_path), impl=TRANSFORMERS)


@pytest.mark.parametrize("model_type", OTHERS)
def test_what_nothing_computes_is_known_by_the_entries_of_any_family(model_type: str) -> None:
    text = why_not_computed(entries_of(model_type)) or ""
    assert all(name in text for name in OTHERS[model_type])
    assert text.count(" says ") == len(OTHERS[model_type])


def test_the_text_model_of_several_models_is_judged() -> None:
    text = {"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"]}
    inner = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": text}
    assert RECURRENT in (why_not_computed(inner) or "")


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("phi3", SIZES), ("gemma3_text", {**SIZES, "head_dim": 6})],
)
def test_kv_is_counted_by_the_tensors_of_a_family_without_a_file_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model_type: str, sizes: dict[str, Any]
) -> None:
    """Checks that KV is counted right for Phi-3, where queries, keys and values are one tensor."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    entries = entries_of(model_type, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**entries))
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    folder = write_model(tmp_path, entries, shapes)
    assert num_kv_values(read_headers(tmp_path)) == 2 * 4 * 2 * sizes.get("head_dim", 8)
    assert check_model.main([folder]) == 0
    assert "by transformers' own modelling code" in capsys.readouterr().out


def test_code_that_does_not_run_here_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checks GPT-J, of which only the code says that it cannot be served."""
    folder = write_model(tmp_path, entries_of("gptj", **SIZES), {})
    load_model_config(folder)
    assert check_model.main([folder]) == 1
    assert "PROBLEM: " in (text := capsys.readouterr().out)
    assert "transformers' code does not run here" in text


LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}


def of_groups(**weights: Any) -> dict[str, Any]:
    """compressed-tensors of one group of layers."""
    kind = {"num_bits": 8, "type": "float", "strategy": "channel", **weights}
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": kind}}}


@pytest.mark.parametrize(
    "form",
    [
        {"quant_method": "awq"},
        {"quant_method": "gptq"},
        {"quant_method": "mxfp4"},
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"quant_method": "fp8", "weight_block_size": [128]},
        {"quant_method": "fp8", "weight_block_size": [128, 0]},
        {"quant_method": "compressed-tensors"},
        of_groups(type="int"),
        of_groups(num_bits=4),
        of_groups(strategy="group"),
        of_groups(strategy="block"),
        of_groups(symmetric=False),
        {**of_groups(), "sparsity_config": {"format": "sparse-24-bitmask"}},
        {**of_groups(), "transform_config": {"config_groups": {}}},
        {"quant_method": "compressed-tensors", "config_groups": {"a": 1}},
    ],
    ids=str,
)
def test_a_form_of_quantized_weights_is_refused_by_its_name(
    tmp_path: Path, form: dict[str, Any]
) -> None:
    text = refusal(tmp_path, {**LLAMA, "quantization_config": form})
    assert f"says {QUANTIZED[form['quant_method']]}" in text
    assert "use the checkpoint in bfloat16, float16 or float32" in text


def test_what_a_model_has_comes_before_the_form_of_its_weights(tmp_path: Path) -> None:
    entries = entries_of("deepseek_v3", **SIZES)
    text = refusal(tmp_path, {**entries, "quantization_config": {"quant_method": "awq"}})
    assert LATENT in text
    assert "AWQ" not in text


@pytest.mark.parametrize(
    "changes",
    [
        {"quantization_config": "awq"},
        {"quantization_config": [1]},
        {"quantization_config": {"quant_method": ["\n"] * 50}},
        {"quantization_config": {"bits": 4}},
        {"architectures": ["Unknown\nForCausalLM" * 9], "model_type": "\n" * 9},
        {"architectures": [["LlamaForCausalLM"]]},
        {"architectures": [{}]},
        {"architectures": 7},
        {"architectures": {"0": "LlamaForCausalLM"}},
        {"architectures": [], "model_type": None},
        {"num_experts": "\n8"},
        {"num_experts": 1e300},
        {"kv_lora_rank": [512]},
        {"layer_types": [["mamba"], {}, "mamba"]},
        {"layers_block_type": ["mamba"]},
        {"text_config": {"num_local_experts": 4}},
        {"is_encoder_decoder": True},
        {"model_type": ["llama"], "architectures": ["Olmo2ForCausalLM"]},
        {"dtype": [1], "architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2"},
        {"hidden_size": 10**400},
        {"hidden_size": "\n"},
    ],
    ids=repr,
)
def test_a_hostile_entry_is_refused_in_one_line(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert len(refusal(tmp_path, {**LLAMA, **changes})) < len(str(tmp_path)) + 400


@pytest.mark.parametrize(
    "changes", [{"num_experts": None}, {"num_experts": 0}, {"num_experts": 1}, {"text_config": 3}]
)
def test_entries_that_say_nothing_are_ignored(changes: dict[str, Any]) -> None:
    assert why_not_computed({**LLAMA, **changes}) is None
