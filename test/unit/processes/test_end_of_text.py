"""The ids that end outputs: of the model's files, and of the folder of its tokenizer."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from serving_utils import BOS, EOS, MASK, VOCAB_SIZE, make_model_dir
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.end_of_text import NO_END_OF_TEXT, with_tokenizer_eos
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

BOS_ID, EOS_ID, MASK_ID = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("tokenizer")))


def found(
    folder: Path,
    tokenizer: Tokenizer,
    generation: dict[str, Any],
    vocab_size: int = VOCAB_SIZE,
    **files: Any,
) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The ids and the warnings of a model whose config.json names none.

    Args:
        files: what the tokenizer's folder has beside tokenizer.json, by name without `.json`.
    """
    model = make_model_dir(folder / "model")
    config = json.loads((model / "config.json").read_text())
    del config["eos_token_id"]
    (model / "config.json").write_text(json.dumps(config | {"vocab_size": vocab_size}))
    (model / "generation_config.json").write_text(json.dumps(generation))
    other = folder / "tokenizer"
    other.mkdir()
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (other / f"{name}.json").write_text(text)
    config = with_tokenizer_eos(load_model_config(str(model)), other, tokenizer)
    return config.eos_token_ids, config.warnings


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config": {"eos_token": MASK}},
        {"tokenizer_config": {"eos_token": {"content": MASK, "lstrip": False}}},
        {"tokenizer_config": {}, "special_tokens_map": {"eos_token": MASK}},
        {"special_tokens_map": {"eos_token": {"content": MASK}}},
        {"tokenizer_config": {"eos_token": None}, "special_tokens_map": {"eos_token": MASK}},
        {"tokenizer_config": {"eos_token": BOS}, "special_tokens_map": {"eos_token": MASK}},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({}, (MASK_ID,)),
        ({"eos_token_id": EOS_ID}, (EOS_ID, MASK_ID)),
        ({"eos_token_id": [MASK_ID, 3]}, (MASK_ID, 3)),
    ],
)
def test_the_tokenizers_eos_token_ends_outputs_beside_those_of_the_model(
    tmp_path: Path,
    tokenizer: Tokenizer,
    files: dict[str, Any],
    generation: dict[str, Any],
    expected: tuple[int, ...],
) -> None:
    assert found(tmp_path, tokenizer, generation, **files) == (expected, ())


def test_a_model_without_any_id_warns_once(tmp_path: Path, tokenizer: Tokenizer) -> None:
    assert found(tmp_path, tokenizer, {}) == ((), (NO_END_OF_TEXT,))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"eos_token": "<nowhere>"}, "the tokenizer does not know it"),
        ({"eos_token": EOS}, "its id 1 is outside of the model's vocab_size 1"),
        ("[", "is not valid JSON"),
    ],
)
def test_an_eos_token_that_cannot_be_drawn_is_named(
    tmp_path: Path, tokenizer: Tokenizer, content: Any, reason: str
) -> None:
    generation = {"eos_token_id": BOS_ID}
    ids, (warning,) = found(tmp_path, tokenizer, generation, 1, tokenizer_config=content)
    assert ids == (BOS_ID,)
    assert reason in warning
    assert "eos_token" in warning
    assert "\n" not in warning


def test_the_demo_models_own_tokenizer_adds_nothing() -> None:
    model = load_model_config("demo")
    assert with_tokenizer_eos(model, model.path, load_tokenizer(model.path)) == model


DECODER = {"2": {"content": MASK, "special": True}}


@pytest.mark.parametrize("in_map", [None, EOS])
@pytest.mark.parametrize(
    "config", [{}, {"eos_token": MASK}, {"eos_token": MASK, "added_tokens_decoder": DECODER}]
)
def test_transformers_finds_the_same_eos_token(
    tmp_path: Path, tokenizer: Tokenizer, config: dict[str, Any], in_map: str | None
) -> None:
    folder = make_model_dir(tmp_path / "model")
    entries = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(entries))
    if in_map is not None:
        (folder / "special_tokens_map.json").write_text(json.dumps({"eos_token": in_map}))
    theirs = AutoTokenizer.from_pretrained(str(folder)).eos_token_id
    plain = dataclasses.replace(load_model_config(str(folder)), eos_token_ids=())
    found = with_tokenizer_eos(plain, folder, tokenizer).eos_token_ids
    assert found == (() if theirs is None else (theirs,))
