"""Tests what a model directory says of its model, in the spellings of old and new checkpoints; and
what is said when it is broken."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.model_config import (
    DEMO_DRAFTS,
    DEMO_HEADS,
    DEMO_MODELS,
    ModelConfig,
    ModelPathError,
    load_model_config,
    resolve_model_path,
)
from sglang.srt.rope_config import RopeConfig

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
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
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
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
        rope=RopeConfig(theta=500000.0),
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
    assert config.rope == RopeConfig(theta=10000.0)
    assert not config.tie_word_embeddings
    assert config.dtype == "float32"
    assert config.eos_token_ids == ()


def test_a_null_entry_counts_as_missing(tmp_path: Path) -> None:
    config = load(tmp_path, head_dim=None, num_key_value_heads=None, rope_scaling=None)
    assert (config.head_dim, config.num_kv_heads, config.rope.scaling) == (16, 4, None)


@pytest.mark.parametrize(
    ("entries", "expected"),
    [({"dtype": "float16"}, "float16"), ({"torch_dtype": "float16"}, "float16"), ({}, "float32")],
    ids=str,
)
def test_spellings_of_the_dtype(tmp_path: Path, entries: dict[str, Any], expected: str) -> None:
    assert load(tmp_path, without=("torch_dtype",), **entries).dtype == expected


@pytest.mark.parametrize(
    ("rope", "expected"),
    [
        ({}, 512),
        ({"rope_type": "linear", "factor": 4.0}, 2048),
        ({"rope_type": "yarn", "factor": 2.5}, 1280),
        (
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
            512,
        ),
        (LLAMA3, 512),
    ],
    ids=str,
)
def test_the_context_grows_where_max_position_embeddings_is_the_original(
    tmp_path: Path, rope: dict[str, Any], expected: int
) -> None:
    assert load(tmp_path, rope_scaling=rope).context_len == expected


def test_flags_and_integers_of_a_family(tmp_path: Path) -> None:
    config = load(tmp_path, yes=True, no=False, null=None, five=5)
    assert [config.flag(name) for name in ("yes", "no", "null", "none")] == [
        True,
        False,
        False,
        False,
    ]
    assert config.integer("five", 7, minimum=5) == 5
    assert config.integer("missing", 7, minimum=1) == 7
    assert config.integer("null", 7, minimum=1) is None


@pytest.mark.parametrize("value", [4, True, 5.5, "5", [5]], ids=str)
def test_an_integer_of_a_family_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    config = load(tmp_path, five=value)
    with pytest.raises(ModelPathError, match="five must be an integer of at least 5"):
        config.integer("five", 7, minimum=5)


@pytest.mark.parametrize("value", [0, 1, "true", []], ids=str)
def test_a_flag_of_a_family_that_is_none_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises(ModelPathError, match="it must be true or false"):
        load(tmp_path, it=value).flag("it")


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"num_experts": 8}, "use a dense checkpoint"),
        ({"num_local_experts": 8}, "use a dense checkpoint"),
        ({"quantization_config": {"quant_method": "awq"}}, "in bfloat16"),
        ({"hidden_act": "gelu"}, "silu"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "remove the scaling"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "one of default, linear, llama3, yarn"),
        ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "share one RoPE"),
    ],
    ids=str,
)
def test_what_would_be_computed_wrongly_is_refused_with_the_remedy(
    tmp_path: Path, changes: dict[str, Any], remedy: str
) -> None:
    message = refusal(tmp_path, **changes)
    assert "not supported" in message
    assert remedy in message


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


@pytest.mark.parametrize(
    ("in_config", "generation", "expected", "ignored"),
    [
        (320, None, (), ["320"]),
        (-1, None, (), ["-1"]),
        (2**70, None, (), [str(2**70)]),
        ([1, 320, -1], None, (1,), ["320", "-1"]),
        (1, {"eos_token_id": [999, 1000]}, (1,), ["999", "1000"]),
        (1, {"eos_token_id": [319, 999]}, (319,), ["999"]),
        ([999, 5], {"eos_token_id": 999}, (5,), ["999"]),
    ],
    ids=str,
)
def test_end_of_text_ids_outside_the_vocabulary_are_ignored_with_one_warning(
    tmp_path: Path, in_config: Any, generation: Any, expected: tuple[int, ...], ignored: list[str]
) -> None:
    loaded = load(tmp_path, generation=generation, eos_token_id=in_config)
    assert loaded.eos_token_ids == expected
    (warning,) = loaded.warnings
    file = "config.json" if generation is None else "generation_config.json"
    assert str(tmp_path / file) in warning
    assert "vocab_size 320" in warning
    assert all(token_id in warning for token_id in ignored)
    assert "\n" not in warning


def test_known_end_of_text_ids_warn_of_nothing(tmp_path: Path) -> None:
    generation = {"eos_token_id": [0, 319], "pad_token_id": -1, "bos_token_id": 999}
    assert load(tmp_path, generation=generation, eos_token_id=999).warnings == ()


@pytest.mark.parametrize("name", ["architectures", "rms_norm_eps", "max_position_embeddings"])
def test_an_entry_without_a_default_of_its_family_is_named(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, without=(name,), model_type="unknown")
    assert repr(name) in message


def test_a_default_that_does_not_fit_is_said_to_be_one(tmp_path: Path) -> None:
    """Mistral's number of heads of keys and values is 8, whatever the number of heads."""
    message = refusal(tmp_path, without=("num_key_value_heads",), model_type="mistral")
    assert "num_attention_heads 4 is no multiple of num_key_value_heads 8" in message
    assert "num_key_value_heads is missing" in message


@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_entry_is_named(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, without=(name,))
    assert repr(name) in message
    assert "config.json" in message


GEMMA = {"model_type": "gemma", "architectures": ["GemmaForCausalLM"]}  # of transformers


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
        {"num_key_value_heads": 0},
        {**GEMMA, "num_key_value_heads": 0},
        {**GEMMA, "num_attention_heads": 0, "head_dim": None},
        {"num_hidden_layers": 0},
        {"num_hidden_layers": 1025},
        {"head_dim": 15},
        {"hidden_size": 2, "head_dim": None},
        {"max_position_embeddings": -1},
        {"architectures": []},
        {"architectures": None},
        {"architectures": 7},
        {"architectures": [""]},
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


@pytest.mark.parametrize(
    "value", ["end", [1, "end"], {"id": 1}, 1.5, [None], [[1]], True, [1, False]], ids=str
)
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


@pytest.mark.parametrize(
    "path", ["no/such/directory", "meta-llama/Llama-3.1-8B", "\0", "", "~nobody/x"]
)
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


@pytest.mark.parametrize("name", [*DEMO_MODELS, *DEMO_HEADS, *DEMO_DRAFTS])
def test_demo_names_are_bundled_models(name: str) -> None:
    assert resolve_model_path(name).parent.name == "demo_models"


@pytest.mark.parametrize("value", [None, "x", [1], {}], ids=str)
@pytest.mark.parametrize("name", ["rms_norm_eps", "vocab_size", "num_hidden_layers"])
def test_an_entry_that_is_no_number_is_named(tmp_path: Path, name: str, value: Any) -> None:
    with pytest.raises(ModelPathError, match=f"{name} must be a number"):
        load(tmp_path, **{name: value})
