"""What a model directory says of its model, in the spellings of old and new checkpoints; and what
is said when it is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.model_config import (
    DEMO_MODELS,
    ModelConfig,
    ModelPathError,
    load_model_config,
    resolve_model_path,
)

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "rms_norm_eps": 1e-6,
    "rope_theta": 500000.0,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "eos_token_id": 1,
}
REQUIRED = (
    "architectures",
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "rms_norm_eps",
    "max_position_embeddings",
)


def load(
    path: Path, without: tuple[str, ...] = (), generation: Any = None, **changes: Any
) -> ModelConfig:
    """Reads a directory with CONFIG, changed."""
    config = {key: value for key, value in CONFIG.items() if key not in without}
    (path / "config.json").write_text(json.dumps({**config, **changes}))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(str(path))


def refusal(path: Path, **changes: Any) -> str:
    with pytest.raises(ModelPathError) as error:
        load(path, **changes)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_entry_arrives_where_it_belongs(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config == ModelConfig(
        path=tmp_path,
        architecture="LlamaForCausalLM",
        model_type="llama",
        vocab_size=320,
        hidden_size=64,
        intermediate_size=96,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=24,
        rms_norm_eps=1e-6,
        rope_theta=500000.0,
        rope_scaling=None,
        context_len=512,
        tie_word_embeddings=True,
        dtype="bfloat16",
        eos_token_ids=(1,),
        hf=CONFIG,
    )


def test_defaults_of_old_checkpoints(tmp_path: Path) -> None:
    optional = tuple(set(CONFIG) - set(REQUIRED))
    config = load(tmp_path, without=optional)
    assert config.num_kv_heads == config.num_heads == 4
    assert config.head_dim == 16
    assert config.rope_theta == 10000.0
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()


def test_a_null_entry_counts_as_missing(tmp_path: Path) -> None:
    config = load(tmp_path, head_dim=None, num_key_value_heads=None, rope_scaling=None)
    assert (config.head_dim, config.num_kv_heads, config.rope_scaling) == (16, 4, None)


def test_new_spellings_of_rope_and_dtype(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        without=("rope_theta", "torch_dtype"),
        rope_parameters={"rope_theta": 77.0, "rope_type": "default"},
        dtype="float16",
    )
    assert (config.rope_theta, config.rope_scaling, config.dtype) == (77.0, None, "float16")


@pytest.mark.parametrize("scaling", [{"rope_type": "default"}, {"type": "default"}, {}], ids=str)
def test_default_rope_scaling_is_none(tmp_path: Path, scaling: dict[str, Any]) -> None:
    assert load(tmp_path, rope_scaling=scaling).rope_scaling is None


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["rope_type", "type"])
def test_real_rope_scaling_is_kept(tmp_path: Path, key: str, name: str) -> None:
    scaling: Any = {name: "linear", "factor": 2.0}
    assert load(tmp_path, **{key: scaling}).rope_scaling == scaling


@pytest.mark.parametrize(
    ("in_config", "generation", "expected"),
    [
        (1, None, (1,)),
        ([1, 2], None, (1, 2)),
        (None, None, ()),
        (0, None, (0,)),
        (1, {"eos_token_id": [3, 4]}, (3, 4)),
        (1, {"eos_token_id": 0}, (0,)),
        (1, {"eos_token_id": None}, (1,)),
        (1, {}, (1,)),
        (None, {"eos_token_id": 5}, (5,)),
    ],
)
def test_end_of_text_ids_come_from_generation_config_first(
    tmp_path: Path, in_config: Any, generation: Any, expected: tuple[int, ...]
) -> None:
    loaded = load(tmp_path, generation=generation, eos_token_id=in_config)
    assert loaded.eos_token_ids == expected


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_entry_is_named(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, without=(name,))
    assert repr(name) in message
    assert "config.json" in message


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_size": "many"},
        {"vocab_size": None},
        {"vocab_size": 0},
        {"hidden_size": [64]},
        {"hidden_size": float("inf")},
        {"hidden_size": float("nan")},
        {"num_attention_heads": 0},
        {"num_attention_heads": 0, "head_dim": None},
        {"num_attention_heads": -4},
        {"num_key_value_heads": 3},
        {"num_hidden_layers": 0},
        {"head_dim": 15},
        {"hidden_size": 2, "head_dim": None},
        {"max_position_embeddings": -1},
        {"architectures": []},
        {"architectures": None},
        {"architectures": 7},
        {"rope_parameters": [1]},
        {"rope_scaling": "linear"},
        {"rms_norm_eps": "small"},
    ],
    ids=str,
)
def test_a_nonsense_entry_is_refused_in_one_line_that_names_the_file(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    assert str(tmp_path / "config.json") in refusal(tmp_path, **changes)


@pytest.mark.parametrize("value", ["end", [1, "end"], {"id": 1}, 1.5, [None]], ids=str)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_nonsense_end_of_text_ids_are_refused_with_their_file(
    tmp_path: Path, file: str, value: Any
) -> None:
    if file == "config.json":
        message = refusal(tmp_path, eos_token_id=value)
    else:
        message = refusal(tmp_path, generation={"eos_token_id": value})
    assert f"eos_token_id in {tmp_path / file}" in message


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"text"', "\ud800"], ids=repr)
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_file_without_a_json_object_is_named(tmp_path: Path, file: str, text: str) -> None:
    load(tmp_path)
    (tmp_path / file).write_bytes(text.encode("utf-8", errors="surrogatepass"))
    with pytest.raises(ModelPathError) as error:
        load_model_config(str(tmp_path))
    assert str(tmp_path / file) in str(error.value)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelPathError, match=r"config\.json cannot be read"):
        load_model_config(str(tmp_path))


@pytest.mark.parametrize("path", ["no/such/directory", "meta-llama/Llama-3.1-8B", "\0"])
def test_a_path_that_is_no_directory_is_refused_with_the_remedy(path: str) -> None:
    with pytest.raises(ModelPathError, match="--model-path") as error:
        load_model_config(path)
    assert "`demo`" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_is_no_model_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("{}")
    with pytest.raises(ModelPathError, match="is not a directory"):
        resolve_model_path(str(tmp_path / "file"))


def test_a_home_directory_is_expanded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model_path("~/model") == tmp_path / "model"


@pytest.mark.parametrize("name", DEMO_MODELS)
def test_demo_names_are_bundled_models(name: str) -> None:
    assert resolve_model_path(name).parent.name == "demo_models"
