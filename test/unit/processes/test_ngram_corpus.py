"""The file of a corpus: which texts it holds, and why it is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from serving_utils import VOCAB_SIZE, make_model_dir
from sglang.srt.model_config import load_model_config
from sglang.srt.processes.ngram_corpus import corpus_from_flags
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_configs import NgramConfig
from sglang.srt.speculative.ngram_texts import NOT_A_TOKEN
from sglang.srt.tokenizer import load_tokenizer
from speculation_flags_cases import refusal, resolved

PATH = "--speculative-ngram-external-corpus-path"
MOST = "--speculative-ngram-external-corpus-max-tokens"
TEXTS = ["The first text.", "zweite, mit Umlaut: ä\nund Zeile", "third"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def corpus_of(model: Path, content: str | bytes, folder: Path, **flags: Any) -> np.ndarray:
    path = folder / "corpus.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    config = resolved(
        model, algorithm="NGRAM", ngram_external_corpus_path=str(path), **flags
    ).drafter
    assert config is not None
    assert isinstance(config.options, NgramConfig)
    assert config.options.corpus is not None
    return config.options.corpus


def said_of(
    model: Path, content: str | bytes, folder: Path, is_early: bool = False, **flags: Any
) -> str:
    """The refusal, which comes before any process starts for a first line alone."""
    path = folder / "corpus.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    given = {"algorithm": "NGRAM", "ngram_external_corpus_path": str(path), **flags}
    return refusal(model, is_early, **given)


def lines(values: list[Any]) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


@pytest.mark.parametrize(
    "content",
    [
        lines(TEXTS),
        lines([{"text": text, "id": 3} for text in TEXTS]),
        lines([TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]),
        "\n" + lines(TEXTS).replace("\n", "\r\n\r\n"),
        lines(TEXTS).rstrip("\n"),
        "\n".join(json.dumps(text, ensure_ascii=False) for text in TEXTS),
    ],
)
def test_each_line_is_a_text(model: Path, content: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(model)
    expected: list[int] = []
    for text in TEXTS:
        expected += [*tokenizer.encode(text, add_special_tokens=False), NOT_A_TOKEN]
    corpus = corpus_of(model, content, tmp_path)
    assert corpus.dtype == np.int32
    assert corpus.tolist() == expected


def test_a_corpus_may_have_as_many_tokens_as_the_flag_says(model: Path, tmp_path: Path) -> None:
    size = int((corpus_of(model, lines(TEXTS), tmp_path) != NOT_A_TOKEN).sum())
    flag = {"ngram_external_corpus_max_tokens": size}
    assert len(corpus_of(model, lines(TEXTS), tmp_path, **flag)) == size + len(TEXTS)
    said = said_of(model, lines(TEXTS), tmp_path, ngram_external_corpus_max_tokens=size - 1)
    assert said.startswith(f"{MOST} {size - 1} is exceeded: ")
    assert f"has {size} tokens in its first {len(TEXTS)} texts; raise it" in said


def test_of_a_file_that_is_too_large_no_more_is_read_than_need_be(
    model: Path, tmp_path: Path
) -> None:
    """Its last line is no text, which nobody gets to."""
    said = said_of(model, lines(TEXTS) + "\n3\n", tmp_path, ngram_external_corpus_max_tokens=2)
    assert said.startswith(f"{MOST} 2 is exceeded: ")


@pytest.mark.parametrize("budget", [0, 1, 63])
def test_a_budget_of_nothing_is_no_bound(model: Path, tmp_path: Path, budget: int) -> None:
    path = tmp_path / "corpus.jsonl"
    path.write_text(lines(TEXTS))
    flags = {"ngram_external_corpus_path": str(path), "ngram_external_sam_budget": budget}
    drafter = resolved(model, algorithm="NGRAM", **flags).drafter
    assert drafter is not None
    assert drafter.options.corpus_budget == (budget or None)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "has no text of two tokens"),
        ("\n \n", "has no text of two tokens"),
        ('""\n', "has no text of two tokens"),
        ("just text\n", 'line 1 must be a JSON string, or an object with a string "text"'),
        ('"a b"\n\n3\n', "line 3 must be a JSON string"),
        ('{"txt": "a b"}', "line 1 must be a JSON string"),
        ('{"text": null}', "line 1 must be a JSON string"),
        ('["a b"]', "line 1 must be a JSON string"),
        (b'"a\xff b"', "line 1 must be a JSON string"),
        ('"a b\\ud800"', "line 1 must be a JSON string"),
        ("[" * 100_000, "line 1 must be a JSON string"),
        ('{"a": ' * 100_000, "line 1 must be a JSON string"),
    ],
)
def test_what_is_no_corpus_is_refused(
    model: Path, content: str | bytes, said: str, tmp_path: Path
) -> None:
    text = said_of(model, content, tmp_path, is_early="line 1" in said)
    assert text.startswith(f"{PATH} '{tmp_path / 'corpus.jsonl'}'")
    assert said in text


def test_files_that_cannot_be_read_are_refused(model: Path, tmp_path: Path) -> None:
    for path in (tmp_path / "none", tmp_path, tmp_path / ("x" * 300)):
        said = refusal(model, algorithm="NGRAM", ngram_external_corpus_path=str(path))
        assert said.startswith(f"{PATH} {str(path)!r} cannot be read: ")
        assert "name a file with a JSON string in each line" in said
    for path in ("", "a\0b", 5):
        said = refusal(model, algorithm="NGRAM", ngram_external_corpus_path=path)
        assert said.startswith(f"{PATH} {path!r} cannot be read: ")


@pytest.mark.parametrize(
    ("flag", "value", "said"),
    [
        ("ngram_external_sam_budget", -1, "sam-budget -1 must be a whole number from 0 to 63"),
        ("ngram_external_sam_budget", 64, "sam-budget 64 must be a whole number from 0 to 63"),
        ("ngram_external_corpus_max_tokens", 1, "max-tokens 1 must be a whole number from 2 to"),
    ],
)
def test_numbers_that_mean_nothing_are_refused(
    model: Path, flag: str, value: int, said: str, tmp_path: Path
) -> None:
    assert said in said_of(model, lines(TEXTS), tmp_path, True, **{flag: value})


def test_a_model_without_a_tokenizer_can_have_no_corpus(target: Path, tmp_path: Path) -> None:
    said = said_of(target, lines(TEXTS), tmp_path)
    assert said.startswith(PATH)
    assert "--tokenizer-path" in said


def test_ids_that_the_model_does_not_have_are_refused(model: Path, tmp_path: Path) -> None:
    small = tmp_path / "small"
    make_model_dir(small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps({**config, "vocab_size": 60}))
    said = said_of(small, lines(["zzz zzz"]), tmp_path)
    assert ", and the model has 60 tokens; name the model's own tokenizer" in said


def test_no_path_is_no_corpus(model: Path) -> None:
    args = ServerArgs(model_path=str(model))
    assert corpus_from_flags(args, load_model_config(str(model))) is None
    assert load_model_config(str(model)).vocab_size == VOCAB_SIZE
