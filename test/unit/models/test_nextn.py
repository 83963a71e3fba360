"""A model's own layer for multi-token prediction loads under each family's names, beside the target
or in a folder of its own, and computes what an oracle does; others are refused by name."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_heads import FILE, NEXTN, SMALL, Oracle, nextn_shapes, random_tensors
from head_feeding import Pair, make_pair, run_a_round
from head_layouts import QKV_BIASES, Tensors
from sglang.srt.head_config import load_head_config
from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.weight_sync.serving_weights import ServingWeights
from utils import make_random_llama, make_random_model

torch.set_num_threads(1)
NUM_LAYERS = 3


def named(prefix: str, layer: str, **own: str) -> Callable[[str], str]:
    """The file's name of a plain one: `own` are those outside of the layer, by plain names."""

    def rename(name: str) -> str:
        first, _, rest = name.partition(".")
        return f"{prefix}{own[first]}.{rest}" if first in own else f"{prefix}{layer}{rest[2:]}"

    return rename


MIMO = named(
    "model.mtp_layers.0.", "", fc="input_proj", embedding_norm="token_layernorm",
    hidden_norm="hidden_layernorm", norm="final_layernorm",
)  # fmt: skip
QWEN = named(
    "mtp.", "layers.0.", fc="fc", embedding_norm="pre_fc_norm_embedding",
    hidden_norm="pre_fc_norm_hidden", norm="norm",
)  # fmt: skip
DEEPSEEK = named(
    f"model.layers.{NUM_LAYERS}.", "", fc="eh_proj", embedding_norm="enorm",
    hidden_norm="hnorm", norm="shared_head.norm",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A target with its layer; `order` -1: the projection reads the hidden state first."""

    rename: Callable[[str], str]
    model_type: str = "llama"
    entries: dict[str, Any] = field(default_factory=dict)
    order: int = 1


CASES = {
    "MiMo": Case(MIMO, "qwen2", {
        "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "attention_bias": True,
        "num_nextn_predict_layers": 1}, -1),
    "Qwen3-Next": Case(QWEN),
    "DeepSeek": Case(DEEPSEEK, entries={"num_nextn_predict_layers": 1}),
}  # fmt: skip


def plain_tensors(case: Case, seed: int = 3) -> Tensors:
    biases = QKV_BIASES if case.model_type == "qwen2" else {}
    return random_tensors(nextn_shapes(SMALL) | biases, seed)


def write(folder: Path, case: Case, seed: int = 3) -> Path:
    """A target with a layer of its own, of random weights."""
    make_random_model(
        case.model_type, folder, vocab_size=SMALL.vocab, hidden_size=64, intermediate_size=96,
        num_hidden_layers=NUM_LAYERS, num_attention_heads=4, num_key_value_heads=2,
        tie_word_embeddings=False,
    )  # fmt: skip
    config = json.loads((folder / "config.json").read_text()) | case.entries
    (folder / "config.json").write_text(json.dumps(config))
    own = {case.rename(name): each for name, each in plain_tensors(case, seed).items()}
    save_file({**load_file(folder / FILE), **own}, folder / FILE, {"format": "pt"})
    return folder


def with_oracle(pair: Pair, case: Case, folder: Path, tensors: Tensors) -> Pair:
    config = json.loads((folder / "config.json").read_text())
    theta = (config.get("rope_parameters") or config)["rope_theta"]
    facts = {**config, "rope_theta": theta, "order": case.order}
    pair.oracle = Oracle(folder, pair.oracle.embedding, pair.oracle.output, facts, tensors)
    return pair


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_layer_beside_its_target_equals_the_oracle(
    case: Case, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also in draft steps that read its own output, and after an update of both from a folder."""
    folder = write(tmp_path / "model", case)
    with caplog.at_level(logging.INFO):
        pair = make_pair(folder, folder, NEXTN)
    tensors = plain_tensors(case)
    assert f"{len(tensors)} weights of {folder} are left to a drafter" in caplog.text
    assert "not read" not in caplog.text
    run_a_round(with_oracle(pair, case, folder, tensors), NEXTN)

    stores = [runner.weights for runner in pair.group.runners]
    weights = ServingWeights(*stores)
    newer = write(tmp_path / "newer", case, seed=4)
    staged = weights.reader("all").from_directory(str(newer))
    assert len(staged) == sum(len(store.names()) for store in stores)
    weights.apply(staged)
    run_a_round(with_oracle(pair, case, folder, plain_tensors(case, 4)), NEXTN)
    name = case.rename("fc.weight")
    found = weights.value_of(f"draft.{name}")
    assert found is not None
    assert torch.equal(found, plain_tensors(case, 4)["fc.weight"])

    for selector, seed in (("target", 4), ("draft", 3)):
        weights.apply(weights.reader(selector).from_directory(str(folder)))
        found = weights.value_of("draft.fc.weight")
        assert found is not None
        assert torch.equal(found, plain_tensors(case, seed)["fc.weight"])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target") / "model"
    return make_random_llama(
        folder, num_hidden_layers=NUM_LAYERS, tie_word_embeddings=False, hidden_size=64
    )


def write_alone(folder: Path, rename: Callable[[str], str], **config: Any) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    tensors = plain_tensors(CASES["Qwen3-Next"])
    save_file({rename(name): each for name, each in tensors.items()}, folder / FILE)
    return folder


SHAPE = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_hidden_layers": NUM_LAYERS, "vocab_size": SMALL.vocab,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "rope_theta": 500.0,
}  # fmt: skip
SPECULATORS = {
    "architectures": ["MTPDraftModel"],
    "speculators_model_type": "mtp",
    "transformer_layer_config": SHAPE,
}


def of_speculators(name: str) -> str:
    return MIMO(name).removeprefix("model.")


@pytest.mark.parametrize(
    ("rename", "config"),
    [(QWEN, {**SHAPE, "architectures": [NEXTN]}), (of_speculators, SPECULATORS)],
)
def test_a_layer_in_a_folder_of_its_own_equals_the_oracle(
    rename: Callable[[str], str], config: dict[str, Any], target: Path, tmp_path: Path
) -> None:
    folder = write_alone(tmp_path / "head", rename, **config)
    pair = make_pair(target, folder, NEXTN)
    (tmp_path / "config.json").write_text(json.dumps(SHAPE))
    case = CASES["Qwen3-Next"]
    run_a_round(with_oracle(pair, case, tmp_path, plain_tensors(case)), NEXTN)


@pytest.mark.parametrize(
    ("extra", "entries", "named"),
    [
        ("mtp.layers.0.mlp.experts.0.up_proj.weight", {}, "'llama' has a mixture of experts"),
        ("mtp.layers.0.self_attn.kv_a_proj_with_mqa.weight", {}, "latent attention (MLA)"),
        ("mtp.layers.0.linear_attn.in_proj.weight", {}, "linear attention"),
        ("", {"model_type": "qwen3_next"}, "family 'qwen3_next' has a form of its own"),
        ("mtp.layers.1.input_layernorm.weight", {}, "2 layers for multi-token prediction"),
    ],
)
def test_a_layer_of_a_family_that_is_not_here_is_refused_by_name(
    extra: str, entries: dict[str, Any], named: str, target: Path, tmp_path: Path
) -> None:
    folder = write_alone(tmp_path / "head", QWEN, **{**SHAPE, "architectures": [NEXTN], **entries})
    if extra:
        save_file({**load_file(folder / FILE), extra: torch.ones(1)}, folder / FILE)
    with pytest.raises(ModelPathError) as error:
        load_head_config(str(folder), NEXTN, load_model_config(str(target)))
    assert named in str(error.value)


def test_a_model_without_such_a_layer_says_so(target: Path) -> None:
    with pytest.raises(ModelPathError, match="the files have no layer for multi-token prediction"):
        load_head_config(str(target), NEXTN, load_model_config(str(target)))
