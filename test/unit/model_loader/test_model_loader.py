"""Loading weights: whatever the layout of the files the model is the same, and what is wrong with
them is said in one line."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from sglang.srt.model_config import ModelPathError, load_model_config
from sglang.srt.model_loader.loader import load_model
from utils import make_random_llama

torch.set_num_threads(1)
INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
SHARD = "model-00001-of-00001.safetensors"
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("models") / "single")


@pytest.fixture
def model_dir(pristine: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(pristine, tmp_path / "model"))


@pytest.fixture
def shard_dir(model_dir: Path) -> Path:
    """A copy whose weights are in a shard, so that an index counts."""
    (model_dir / WEIGHTS).rename(model_dir / SHARD)
    return model_dir


def load(path: Path, load_format: str = "auto", dtype: torch.dtype = torch.float32) -> nn.Module:
    return load_model(load_model_config(str(path)), load_format, 64, dtype, "cpu")


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters(remove_duplicate=False))


def change_weights(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(path / WEIGHTS)
    change(tensors)
    save_file(tensors, path / WEIGHTS)


def change_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def refusal(path: Path) -> str:
    """The one line that says why the weights cannot be loaded."""
    with pytest.raises(ModelPathError) as error:
        load(path)
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 500
    return message


def assert_same_model(one: nn.Module, other: nn.Module) -> None:
    first, second = weights_of(one), weights_of(other)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


# --- layouts -------------------------------------------------------------------------------------


def test_every_weight_is_the_checkpoints(pristine: Path) -> None:
    tensors = load_file(pristine / WEIGHTS)
    loaded = weights_of(load(pristine))
    layer = "model.layers.1."
    attention, mlp = layer + "self_attn.", layer + "mlp."
    qkv = torch.cat([tensors[f"{attention}{name}_proj.weight"] for name in "qkv"])
    gate_up = torch.cat([tensors[f"{mlp}{name}_proj.weight"] for name in ("gate", "up")])
    assert torch.equal(loaded[f"{attention}qkv_proj.weight"], qkv)
    assert torch.equal(loaded[f"{mlp}gate_up_proj.weight"], gate_up)
    for name in (NORM, "model.embed_tokens.weight", f"{mlp}down_proj.weight"):
        assert torch.equal(loaded[name], tensors[name])


def test_sharded_files_give_the_same_model(pristine: Path, tmp_path: Path) -> None:
    sharded = make_random_llama(tmp_path / "sharded", num_shards=3)
    assert (sharded / INDEX).exists()
    assert len(list(sharded.glob("*.safetensors"))) > 1
    assert_same_model(load(sharded), load(pristine))


def test_several_files_without_an_index_give_the_same_model(pristine: Path, tmp_path: Path) -> None:
    sharded = make_random_llama(tmp_path / "sharded", num_shards=3)
    (sharded / INDEX).unlink()
    assert_same_model(load(sharded), load(pristine))


def test_files_that_the_index_does_not_name_are_not_read(pristine: Path, tmp_path: Path) -> None:
    sharded = make_random_llama(tmp_path / "sharded", num_shards=3)
    (sharded / "adapter.safetensors").write_bytes(b"something else")
    assert_same_model(load(sharded), load(pristine))


def test_tied_embeddings_share_memory(pristine: Path) -> None:
    loaded = weights_of(load(pristine))
    head, embedding = loaded["lm_head.weight"], loaded["model.embed_tokens.weight"]
    assert head.data_ptr() == embedding.data_ptr()


def test_an_untied_head_is_loaded_from_its_own_weights(tmp_path: Path) -> None:
    path = make_random_llama(tmp_path / "untied", tie_word_embeddings=False)
    tensors, loaded = load_file(path / WEIGHTS), weights_of(load(path))
    assert torch.equal(loaded["lm_head.weight"], tensors["lm_head.weight"])
    assert not torch.equal(loaded["lm_head.weight"], loaded["model.embed_tokens.weight"])


def test_computed_rotary_tensors_in_a_checkpoint_are_named_and_not_read(
    model_dir: Path, pristine: Path, caplog: pytest.LogCaptureFixture
) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_weights(model_dir, lambda tensors: tensors.update({name: torch.ones(8)}))
    with caplog.at_level(logging.INFO, "sglang"):
        assert_same_model(load(model_dir), load(pristine))
    assert caplog.messages == [f"1 weight of {model_dir} is not read, that is {name}."]


def test_weights_are_converted_but_the_rotary_table_stays_float32(pristine: Path) -> None:
    model = load(pristine, dtype=torch.bfloat16)
    assert {weight.dtype for weight in weights_of(model).values()} == {torch.bfloat16}
    reference = load_file(pristine / WEIGHTS)[NORM].bfloat16()
    assert torch.equal(weights_of(model)[NORM], reference)
    table = model.get_buffer("model.rotary.table")
    assert table.dtype == torch.float32
    assert torch.equal(table, load(pristine).get_buffer("model.rotary.table"))


def test_a_loaded_model_wants_no_gradients(pristine: Path) -> None:
    model = load(pristine)
    assert not model.training
    assert not any(weight.requires_grad for weight in model.parameters())


# --- dummy ---------------------------------------------------------------------------------------


def test_dummy_needs_config_json_alone_and_repeats(model_dir: Path) -> None:
    for file in model_dir.iterdir():
        if file.name != "config.json":
            file.unlink()
    one = load(model_dir, "dummy")
    assert_same_model(one, load(model_dir, "dummy"))
    weights = weights_of(one)
    assert float(weights["model.embed_tokens.weight"].std()) == pytest.approx(0.02, rel=0.05)
    assert bool((weights[NORM] == 1).all())
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())


def test_dummy_ignores_the_weights_that_are_there(model_dir: Path) -> None:
    before = load(model_dir, "dummy")
    (model_dir / WEIGHTS).write_bytes(b"garbage")
    assert_same_model(before, load(model_dir, "dummy"))


# --- refusals ------------------------------------------------------------------------------------


def test_a_missing_weight_is_named(model_dir: Path) -> None:
    change_weights(model_dir, lambda tensors: tensors.pop(NORM))
    message = refusal(model_dir)
    assert "1 weight," in message
    assert NORM in message


def test_a_missing_part_of_a_fused_weight_is_named_as_in_the_checkpoint(model_dir: Path) -> None:
    name = "model.layers.0.self_attn.k_proj.weight"
    change_weights(model_dir, lambda tensors: tensors.pop(name))
    assert name in refusal(model_dir)


def test_a_missing_untied_head_is_named(tmp_path: Path) -> None:
    path = make_random_llama(tmp_path / "untied", tie_word_embeddings=False)
    change_weights(path, lambda tensors: tensors.pop("lm_head.weight"))
    assert "lm_head.weight" in refusal(path)


def test_an_unexpected_weight_is_named(model_dir: Path) -> None:
    name = "model.layers.7.mlp.down_proj.weight"
    change_weights(model_dir, lambda tensors: tensors.update({name: torch.ones(2)}))
    message = refusal(model_dir)
    assert name in message
    assert "LlamaForCausalLM" in message


@pytest.mark.parametrize(
    ("name", "shape", "wanted"),
    [
        (NORM, [32], [64]),
        ("model.layers.0.self_attn.k_proj.weight", [64, 64], [32, 64]),
        ("model.embed_tokens.weight", [64, 320], [320, 64]),
        (NORM, [1], [64]),  # no broadcasting
        ("lm_head.weight", [321, 64], [320, 64]),
    ],
)
def test_a_misshapen_weight_is_named_with_both_shapes(
    model_dir: Path, name: str, shape: list[int], wanted: list[int]
) -> None:
    change_weights(model_dir, lambda tensors: tensors.update({name: torch.ones(shape)}))
    message = refusal(model_dir)
    assert name in message
    assert str(shape) in message
    assert str(wanted) in message


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", [NORM, "model.layers.1.self_attn.v_proj.weight"])
def test_values_that_are_not_finite_are_counted_with_their_file(
    shard_dir: Path, name: str, value: float
) -> None:
    tensors = load_file(shard_dir / SHARD)
    tensors[name].view(-1)[[3, 63]] = value
    save_file(tensors, shard_dir / SHARD)
    size = tensors[name].numel()
    said = f"{SHARD} has a weight {name!r} with 2 of {size} values NaN or infinite as float32;"
    assert said in refusal(shard_dir)


def test_values_that_the_type_of_the_model_cannot_hold_are_refused(model_dir: Path) -> None:
    change_weights(model_dir, lambda tensors: tensors[NORM].__setitem__(0, 65520.0))
    load(model_dir)
    with pytest.raises(
        ModelPathError, match=f"{WEIGHTS} has a weight '{NORM}'.* as float16.*dtype"
    ):
        load(model_dir, dtype=torch.float16)


@pytest.mark.parametrize(
    "dtype", [torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str
)
def test_weights_that_are_no_floating_point_values_of_16_bits_are_refused(
    model_dir: Path, dtype: torch.dtype
) -> None:
    change_weights(model_dir, lambda tensors: tensors.update({NORM: torch.ones(64).to(dtype)}))
    message = refusal(model_dir)
    assert f"{WEIGHTS} has a weight '{NORM}' of type {dtype}" in message
    assert "floating point" in message


@pytest.mark.parametrize(
    "spoil",
    [
        lambda data: data[: len(data) // 2],
        lambda data: data[:5],
        lambda data: b"",
        lambda data: b"not safetensors at all" * 10,
        lambda data: b"\xff" * 8 + data[8:],
        lambda data: data[:8] + b"{" * 100 + data[108:],
    ],
    ids=["half", "header cut", "empty", "text", "huge header", "broken JSON"],
)
def test_a_broken_file_is_named(model_dir: Path, spoil: Callable[[bytes], bytes]) -> None:
    file = model_dir / WEIGHTS
    file.write_bytes(spoil(file.read_bytes()))
    assert WEIGHTS in refusal(model_dir)


def test_a_directory_without_safetensors_says_what_to_do(model_dir: Path) -> None:
    (model_dir / WEIGHTS).rename(model_dir / "pytorch_model.bin")
    message = refusal(model_dir)
    assert "*.safetensors" in message
    assert "--load-format dummy" in message


def write_index(path: Path, weight_map: Any) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


@pytest.mark.parametrize(
    "place", ["../outside.safetensors", "{absolute}", "sub/../../outside.safetensors"]
)
def test_an_index_does_not_reach_files_outside_its_directory(model_dir: Path, place: str) -> None:
    outside = model_dir.parent / "outside.safetensors"
    (model_dir / WEIGHTS).rename(outside)
    write_index(model_dir, {NORM: place.format(absolute=outside)})
    assert str(model_dir / "outside.safetensors") in refusal(model_dir)


def test_a_file_that_the_index_names_and_that_is_missing_is_named(shard_dir: Path) -> None:
    write_index(shard_dir, {NORM: SHARD, "model.embed_tokens.weight": "second.safetensors"})
    assert "second.safetensors" in refusal(shard_dir)


@pytest.mark.parametrize(
    "weight_map",
    [[], "text", None, {NORM: 5}, {NORM: [1]}, {NORM: None}, {NORM: ".."}, {NORM: ""}],
    ids=str,
)
def test_a_nonsense_index_is_refused(shard_dir: Path, weight_map: Any) -> None:
    write_index(shard_dir, weight_map)
    refusal(shard_dir)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"metadata": {}}', "\x00"], ids=repr)
def test_an_index_that_is_no_index_is_named(shard_dir: Path, text: str) -> None:
    (shard_dir / INDEX).write_text(text)
    assert INDEX in refusal(shard_dir)


def test_an_unreadable_index_is_named(shard_dir: Path) -> None:
    (shard_dir / INDEX).mkdir()
    assert INDEX in refusal(shard_dir)


def test_an_unknown_architecture_is_refused_with_the_known_ones(model_dir: Path) -> None:
    change_config(model_dir, architectures=["SomethingForCausalLM"])
    with pytest.raises(ValueError, match=r"SomethingForCausalLM.*known.*LlamaForCausalLM"):
        load(model_dir)
