"""Folders of draft heads: the published ones fit, and what is wrong with others is said in one line
that names it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draft_heads import (
    EAGLE,
    EAGLE3,
    FILE,
    Shapes,
    Sizes,
    eagle3_config,
    eagle3_shapes,
    eagle_config,
    eagle_shapes,
    write_eagle,
    write_eagle3,
)
from sglang.srt.head_config import load_head_config
from sglang.srt.model_config import ModelConfig, ModelPathError, load_model_config
from sglang.srt.model_loader.loader import WeightPlaces, load_model
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.platform import Platform
from sglang.srt.registry import HEADS
from sglang.srt.token_map import read_token_map
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from sglang.srt.weight_sync.weight_store import WeightStore
from utils import make_random_llama

WRITERS: dict[str, Callable[..., Path]] = {EAGLE: write_eagle, EAGLE3: write_eagle3}
CONFIGS = {EAGLE: eagle_config, EAGLE3: eagle3_config}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    folder = tmp_path_factory.mktemp("target")
    return load_model_config(str(make_random_llama(folder / "model", num_hidden_layers=8)))


def load(folder: Path, kind: str, target: ModelConfig) -> DraftHead:
    config = load_head_config(str(folder), kind, target)
    model = load_model(config, "auto", 64, torch.float32, "cpu")
    assert isinstance(model, DraftHead)
    return model


def refusal(folder: Path, kind: str, target: ModelConfig) -> str:
    with pytest.raises(ModelPathError) as error:
        load(folder, kind, target)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    assert str(folder) in message
    return message


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


# --- published checkpoints -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "shapes"),
    [
        (EAGLE, eagle_shapes(Sizes())),
        (EAGLE3, eagle3_shapes(Sizes())),
        (EAGLE3, eagle3_shapes(Sizes(), "layers.0.")),
    ],
)
def test_the_public_llama_3_1_8b_heads_fit_tensor_by_tensor(
    kind: str, shapes: Shapes, tmp_path: Path, target: ModelConfig
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind](Sizes())))
    big = replace(target, hidden_size=4096, vocab_size=128256, num_layers=32)
    config = load_head_config(str(tmp_path), kind, big)
    with torch.device("meta"):
        model = HEADS.load(kind)(config, 131072)
    places = WeightPlaces(model, config)
    read = {name for name, (_, shape) in shapes.items() if places.place_of(name, shape) is not None}
    assert shapes.keys() - read <= {"t2d", "embed_tokens.weight"}
    places.check_complete({places.own_name(name) for name in read})
    for name in read:
        dtype = shapes[name][0]
        assert places[name].dtype == dtype
    num_read = sum(torch.Size(shapes[name][1]).numel() for name in read)
    num_own = sum(each.numel() for each in model.state_dict().values())
    assert num_own - num_read == (4096 if kind == EAGLE else 0)  # the bias that is left out
    assert model.rotary.table.shape == (131072, 2, 128)


def test_a_head_of_a_tied_config_keeps_its_own_output_head(
    tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle3(tmp_path, tie_word_embeddings=True)
    head = load(folder, EAGLE3, target).get_parameter("lm_head.weight")
    assert torch.equal(head, load_file(folder / FILE)["lm_head.weight"])


@pytest.mark.parametrize("prefix", ["", "model."])
def test_what_equals_the_target_is_the_targets_under_either_name(
    tmp_path: Path, target: ModelConfig, prefix: str
) -> None:
    embedding = load_file(target.path / FILE)["model.embed_tokens.weight"]  # and output head
    folder = write_eagle(tmp_path / "head")
    names = (f"{prefix}embed_tokens.weight", f"{prefix}lm_head.weight")
    change_weights(folder, lambda head: head.update({name: embedding.clone() for name in names}))
    head = load(folder, EAGLE, target)
    assert (head.embed_tokens, head.lm_head) == (None, None)


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
def test_dummy_weights_need_no_file(kind: str, tmp_path: Path, target: ModelConfig) -> None:
    folder = WRITERS[kind](tmp_path)
    (folder / FILE).unlink()
    config = load_head_config(str(folder), kind, target)
    model = load_model(config, "dummy", 64, torch.float32, "cpu")
    assert isinstance(model, DraftHead)
    assert model.to_target_ids(torch.arange(9)).tolist() == list(range(9))


# --- layers of the target ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_layers", "ids", "expected"),
    [
        (32, None, (2, 16, 29)),
        (80, None, (2, 40, 77)),
        (7, None, (2, 3, 4)),
        (4, [0, 1, 2], (1, 2, 3)),
        (32, [1, 15, 28], (2, 16, 29)),
    ],
)
def test_layers_that_the_head_reads(
    num_layers: int,
    ids: list[int] | None,
    expected: tuple[int, ...],
    tmp_path: Path,
    target: ModelConfig,
) -> None:
    options = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    target = replace(target, num_layers=num_layers)
    head = load_head_config(str(write_eagle3(tmp_path, **options)), EAGLE3, target)
    assert head.taps is not None
    assert head.taps.layers == expected


@pytest.mark.parametrize(("num_layers", "ids"), [(4, None), (6, None), (4, [0, 1, 3]), (1, [0, 1])])
def test_layers_that_the_target_does_not_have(
    num_layers: int, ids: list[int] | None, tmp_path: Path, target: ModelConfig
) -> None:
    options = {} if ids is None else {"eagle_config": {"eagle_aux_hidden_state_layer_ids": ids}}
    folder, target = write_eagle3(tmp_path, **options), replace(target, num_layers=num_layers)
    with pytest.raises(ModelPathError, match=f"the last one of the {num_layers} layers"):
        load_head_config(str(folder), EAGLE3, target)


def test_as_many_layers_as_are_named_are_read(tmp_path: Path, target: ModelConfig) -> None:
    ids = {"eagle_aux_hidden_state_layer_ids": [1, 6]}
    folder = write_eagle3(tmp_path, eagle_config=ids)
    change_weights(folder, lambda each: each.update({"fc.weight": torch.ones(64, 128)}))
    assert load(folder, EAGLE3, target).hidden_width == 128


# --- refusals ------------------------------------------------------------------------------------

LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
BAD_CONFIGS: list[tuple[str, dict[str, Any], str]] = [
    (EAGLE, {"architectures": [EAGLE3]}, EAGLE3),
    (EAGLE3, {"architectures": [EAGLE]}, EAGLE),
    (EAGLE3, {"architectures": ["Qwen3ForCausalLM"]}, "Qwen3ForCausalLM"),
    (EAGLE3, {"hidden_size": 128}, "hidden_size is 128, but that of the target is 64"),
    (EAGLE, {"vocab_size": 319}, "vocab_size is 319, but that of the target is 320"),
    (EAGLE3, {"target_hidden_size": 128}, "target_hidden_size"),
    (EAGLE3, {"target_hidden_size": "64"}, "target_hidden_size"),
    (EAGLE3, {"draft_vocab_size": 0}, "draft_vocab_size"),
    (EAGLE3, {"draft_vocab_size": 321}, "draft_vocab_size is 321, more than vocab_size 320"),
    (EAGLE3, {"draft_vocab_size": True}, "draft_vocab_size"),
    (EAGLE3, {"draft_vocab_size": "96"}, "draft_vocab_size"),
    (EAGLE3, {"draft_vocab_size": 96.0}, "draft_vocab_size"),
    (EAGLE3, {"norm_output": "yes"}, "norm_output"),
    (EAGLE3, {"fc_norm": True}, "lacks 3 weights, such as 'fc_norm.0.weight'"),
    (EAGLE3, {"use_aux_norm": True}, "lacks 3 weights, such as 'fc_norm.0.weight'"),
    (
        EAGLE3,
        {"eagle_config": {"norm_before_fc": True}},
        "lacks 1 weight, such as 'input_norm.weight'",
    ),
    (EAGLE3, {"norm_before_residual": 1}, "norm_before_residual must be true or false"),
    (EAGLE3, {"norm_before_fc": True, "fc_norm": True}, "fc_norm and norm_before_fc are both"),
    (EAGLE3, {"use_sliding_window": True}, "sliding windows of heads are not supported"),
    (EAGLE3, {"layer_types": 5}, "layer_types must be a list, not 5"),
    (EAGLE, {"norm_before_residual": True}, "norm_before_residual is of heads of EAGLE-3"),
    (EAGLE, {"bias": True}, "lacks 1 weight, such as 'fc.bias'"),
    (EAGLE3, {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state is false"),
    (EAGLE3, {"eagle_config": {"use_aux_hidden_state": 1}}, "use_aux_hidden_state"),
    (EAGLE3, {"eagle_config": [1]}, "eagle_config must be an object"),
    (EAGLE3, {"eagle_config": {LAYER_IDS: [1]}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: [3, 1, 2]}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: [1, 1, 2]}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: [-1, 1, 2]}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: [True, 2, 3]}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: ["1", 2]}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: {"a": 1}}}, LAYER_IDS),
    (EAGLE3, {"eagle_config": {LAYER_IDS: [1, 2, 7]}}, "below the last one"),
    (EAGLE3, {"num_aux_hidden_states": 2}, "num_aux_hidden_states is 2, but 3 layers are read"),
    (EAGLE3, {"num_aux_hidden_states": 1}, "num_aux_hidden_states"),
    (EAGLE3, {"rope_theta": -1}, "rope_theta"),
    (EAGLE, {"head_dim": 15}, "head_dim"),
    (EAGLE, {"hidden_act": "gelu"}, "hidden_act"),
    (EAGLE, {"intermediate_size": 10**25}, "intermediate_size"),
    (EAGLE3, {"num_attention_heads": 1 << 13, "head_dim": 1 << 13}, "num_attention_heads * head"),
    (EAGLE3, {"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    (EAGLE3, {"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
]


@pytest.mark.parametrize(("kind", "changes", "named"), BAD_CONFIGS, ids=lambda value: str(value))
def test_a_config_that_cannot_be_met_is_refused(
    kind: str, changes: dict[str, Any], named: str, tmp_path: Path, target: ModelConfig
) -> None:
    assert named in refusal(WRITERS[kind](tmp_path, **changes), kind, target)


@pytest.mark.parametrize(("kind", "right"), [(EAGLE, EAGLE3), (EAGLE3, EAGLE)])
def test_a_published_head_of_the_other_kind_is_refused_with_the_flag(
    kind: str, right: str, tmp_path: Path, target: ModelConfig
) -> None:
    """Their configs do not say which kind they are."""
    message = refusal(WRITERS[right](tmp_path), kind, target)
    assert "--speculative-algorithm" in message


def test_a_head_that_does_not_fit_into_the_hosts_memory_is_refused(
    tmp_path: Path, target: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a byte of it is taken: systems hand out more memory than there is."""
    host = replace(Platform.probe(), available_host_bytes=(12 << 30) - 1)
    monkeypatch.setattr(Platform, "probe", lambda: host)
    folder = write_eagle(tmp_path, intermediate_size=1 << 24)
    assert "take 12 GiB, which this host does not have (11 GiB are free)" in refusal(
        folder, EAGLE, target
    )


def _d2t_with(index: int, target_id: int) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["d2t"][index] = target_id - index

    return change


BAD_WEIGHTS: list[tuple[str, Callable[[dict[str, torch.Tensor]], Any], list[str]]] = [
    (EAGLE, lambda each: each.pop("fc.weight"), ["lack 'fc.weight'", "no head"]),
    (EAGLE3, lambda each: each.pop("midlayer.hidden_norm.weight"), ["hidden_norm.weight"]),
    (EAGLE3, lambda each: each.pop("d2t"), ["lacks 1 weight", "d2t"]),
    (EAGLE3, lambda each: each.pop("lm_head.weight"), ["lm_head.weight"]),
    (
        EAGLE3,
        lambda each: each.update({"d2t": torch.zeros(95).long()}),
        ["d2t names 95 tokens", "t2d marks 96"],
    ),
    (EAGLE, lambda each: each["fc.weight"][3].fill_(torch.nan), ["fc.weight", "NaN", FILE]),
    (EAGLE3, lambda each: each["fc.weight"][0].fill_(torch.inf), ["fc.weight", "infinite", FILE]),
    (EAGLE3, lambda each: each.update({"fc.weight": each["fc.weight"].short()}), ["int16", FILE]),
    (EAGLE3, _d2t_with(5, 320), ["'d2t'", "token 320", "draft token 5", "vocab_size is 320"]),
    (EAGLE3, _d2t_with(95, -1), ["'d2t'", "token -1", "draft token 95"]),
    (EAGLE3, _d2t_with(0, 2**63 - 1), ["'d2t'", "draft token 0"]),
    (EAGLE3, lambda each: each.update({"d2t": each["d2t"].half()}), ["'d2t'", "float16"]),
    (EAGLE3, lambda each: each.update({"d2t": each["d2t"] > 3}), ["'d2t'", "torch.bool"]),
    (
        EAGLE3,
        lambda each: each.update({"fc.weight": torch.ones(64, 256)}),
        ["'fc.weight'", "[64, 256]", "[64, 192]"],
    ),
    (
        EAGLE3,
        lambda each: each.update({"midlayer.self_attn.q_proj.weight": torch.ones(64, 64)}),
        ["q_proj", "[64, 64]", "[64, 128]"],
    ),
    (
        EAGLE3,
        lambda each: each.update({"layers.0.hidden_norm.weight": torch.ones(64)}),
        ["hidden_norm.weight' twice"],
    ),
    (
        EAGLE3,
        lambda each: each.update({"input_norm.weight": torch.ones(192)}),
        ["'input_norm.weight' that", "does not know"],
    ),
    (EAGLE, lambda each: each.update({"fc.bias": torch.ones(63)}), ["'fc.bias'", "[63]"]),
    (
        EAGLE,
        lambda each: each.update({"layers.0.input_layernorm.weight": torch.ones(64)}),
        ["input_layernorm", EAGLE],
    ),
    (EAGLE, lambda each: each.update({"d2t": torch.zeros(96).long()}), ["'d2t'", EAGLE]),
]


@pytest.mark.parametrize(("kind", "change", "named"), BAD_WEIGHTS)
def test_weights_that_do_not_fit_are_named(
    kind: str,
    change: Callable[[dict[str, torch.Tensor]], Any],
    named: list[str],
    tmp_path: Path,
    target: ModelConfig,
) -> None:
    folder = WRITERS[kind](tmp_path)
    change_weights(folder, change)
    message = refusal(folder, kind, target)
    assert not [part for part in named if part not in message], message


def test_an_output_head_without_a_draft_vocabulary_is_refused(
    tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle3(tmp_path, draft_vocab_size=None)
    assert "that LlamaForCausalLMEagle3 does not know" in refusal(folder, EAGLE3, target)


@pytest.mark.parametrize(
    "change",
    [_d2t_with(5, 320), lambda each: each.update({"d2t": each["d2t"].float()})],
    ids=["out of range", "no integers"],
)
def test_an_update_with_a_wrong_map_changes_nothing(
    change: Callable[[dict[str, torch.Tensor]], Any], tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle3(tmp_path / "head")
    model = load(folder, EAGLE3, target)
    before = model.get_buffer("d2t").clone()
    other = write_eagle3(tmp_path / "other", seed=2)
    change_weights(other, change)
    config = load_head_config(str(folder), EAGLE3, target)
    with pytest.raises(WeightUpdateError, match="'d2t'"):
        WeightStore(model, config).reader.from_directory(str(other))
    assert torch.equal(model.get_buffer("d2t"), before)


def test_pickled_weights_are_refused_with_the_script_that_converts_them(
    tmp_path: Path, target: ModelConfig
) -> None:
    folder = write_eagle(tmp_path)
    for name in ("pytorch_model.bin", "model.pt"):
        (folder / FILE).unlink(missing_ok=True)
        (folder / name).write_bytes(b"x")
        message = refusal(folder, EAGLE, target)
        assert "sglang convert-checkpoint" in message
        assert name in message
        (folder / name).unlink()


# --- token maps ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("map.json", "[]", "no list of token ids"),
        ("map.json", '{"a": 1}', "must hold JSON with a list"),
        ("map.json", "[1, 2", "is not valid JSON"),
        ("map.json", "[" * 100000, "nested too deeply"),
        ("map.json", "[1, 2, 320]", "has 320, but token ids"),
        ("map.json", "[1, -2]", "has -2, but token ids"),
        ("map.json", "[1, true]", "has True, but token ids"),
        ("map.json", "[1, 2.0]", "has 2.0, but token ids"),
        ("map.json", '[1, "2"]', "has '2', but token ids"),
        ("map.json", "[3, 4, 3]", "twice"),
        ("map.safetensors", "nonsense", "cannot be read"),
        ("map.pt", "", "give a .json file"),
        ("missing.json", None, "cannot be read"),
    ],
)
def test_a_token_map_that_cannot_be_used(
    name: str, content: str | None, named: str, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match="--speculative-token-map") as error:
        read_token_map(tmp_path / name, 320)
    assert named in str(error.value)


@pytest.mark.parametrize(
    "tensors",
    [
        {"a": torch.tensor([1]), "b": torch.tensor([2])},
        {"a": torch.tensor([[1, 2]])},
        {"a": torch.tensor([1.0])},
        {"a": torch.tensor([1], dtype=torch.bfloat16)},
        {"a": torch.tensor([True])},
    ],
    ids=["two", "2D", "float", "bfloat16", "bool"],
)
def test_a_safetensors_file_that_is_no_token_map(
    tensors: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    save_file(tensors, tmp_path / "map.safetensors")
    with pytest.raises(ValueError, match="--speculative-token-map"):
        read_token_map(tmp_path / "map.safetensors", 320)


def test_a_head_with_tokens_of_its_own_takes_no_token_map(
    tmp_path: Path, target: ModelConfig
) -> None:
    (tmp_path / "map.json").write_text("[1]")
    with pytest.raises(ModelPathError, match="remove --speculative-token-map"):
        load_head_config(str(write_eagle3(tmp_path)), EAGLE3, target, str(tmp_path / "map.json"))
