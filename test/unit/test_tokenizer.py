"""Encoding, incremental decoding and stop strings."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from sentencepiece_models import make_sentencepiece_tokenizer
from serving_utils import TEXT, VOCAB_SIZE, make_model_dir, make_tokenizer
from sglang.srt import tokenizer as tokenizer_module
from sglang.srt.stops import StopSet
from sglang.srt.tokenizer import (
    StopFinder,
    Tokenizer,
    TokenizerError,
    load_tokenizer,
)

BOS_ID, EOS_ID, MASK_ID = 0, 1, 2


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


def save(backend: tokenizers.Tokenizer, directory: Path) -> Path:
    backend.save(str(directory / "tokenizer.json"))
    return directory


def test_encode_adds_bos_once(tokenizer: Tokenizer) -> None:
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.bos_token_id == BOS_ID
    assert tokenizer.encode("hello") == [BOS_ID, *plain]
    assert tokenizer.encode("<bos>hello") == [BOS_ID, *plain]
    assert tokenizer.encode("<bos>hello", add_special_tokens=False) == [BOS_ID, *plain]


def test_tokenizer_without_bos_adds_none(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(make_tokenizer(add_bos=False), tmp_path))
    assert tokenizer.bos_token_id is None
    twice = tokenizer.encode("<eos><eos>")
    assert twice == [EOS_ID, EOS_ID]


def test_decode_shows_special_tokens_only_when_asked(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("hello"), EOS_ID]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>hello<eos>"


def test_decode_ignores_ids_beyond_the_tokenizer(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode([VOCAB_SIZE + 100_000]) == ""


def test_min_num_tokens_is_a_lower_bound(tokenizer: Tokenizer) -> None:
    for text in ("hello", "<mask>" * 50, "😀" * 50, "the quick brown fox " * 20):
        assert tokenizer.min_num_tokens(text) <= len(tokenizer.encode(text, False))
    assert tokenizer.min_num_tokens("x" * 1_000_000) > 10_000


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_pieces_of_stream_are_the_full_text(
    tokenizer: Tokenizer, data: st.DataObject, skip_special_tokens: bool
) -> None:
    """For any ids, also such that are no text, cut into any runs."""
    ids = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=60))
    stream, pieces, rest = tokenizer.decode_stream(skip_special_tokens), [], list(ids)
    while rest:
        count = data.draw(st.integers(1, 4))
        pieces.append(stream.push(rest[:count]))
        del rest[:count]
    pieces.append(stream.flush())
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=30))
def test_stream_of_a_text_never_shows_half_a_character(tokenizer: Tokenizer, text: str) -> None:
    text = text.replace("\ufffd", "")
    stream, shown = tokenizer.decode_stream(), ""
    for token_id in tokenizer.encode(text, add_special_tokens=False):
        shown += stream.push([token_id])
        assert text.startswith(shown)
    assert shown + stream.flush() == text


def test_stream_shows_a_character_of_byte_tokens_when_it_ends(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(make_sentencepiece_tokenizer(), tmp_path))
    ids = tokenizer.encode("hello world€😀 fox!")
    stream = tokenizer.decode_stream()
    pieces = [stream.push([token_id]) for token_id in ids]
    assert pieces == ["", "hello", " world", "", "", "€", "", "", "", "😀", " fox", "!"]
    assert stream.flush() == ""


def test_long_run_of_broken_bytes_is_not_held_back(tokenizer: Tokenizer) -> None:
    broken = [make_tokenizer().token_to_id("ð")]  # the first byte of a 4-byte character
    stream = tokenizer.decode_stream()
    shown = "".join(stream.push(broken) for _ in range(100))
    assert len(shown) >= 97


def test_stop_string_across_tokens_clips_the_run(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hello world the end", add_special_tokens=False)
    finder = StopFinder(tokenizer, StopSet(["world", "xyz"]), True)
    match = finder.push(ids)
    assert match is not None
    assert match.matched == "world"
    assert "world" in tokenizer.decode(ids[: match.num_tokens])
    assert "world" not in tokenizer.decode(ids[: match.num_tokens - 1])


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_stop_is_found_at_the_first_token_that_completes_it(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    text = data.draw(st.text("ab€ ", min_size=1, max_size=30))
    stops = data.draw(st.lists(st.text("ab€ ", min_size=1, max_size=4), min_size=1, max_size=3))
    ids = tokenizer.encode(text, add_special_tokens=False)
    ends = [
        i
        for i in range(1, len(ids) + 1)
        if any(stop in tokenizer.decode(ids[:i]) for stop in stops)
    ]
    finder, found, seen = StopFinder(tokenizer, StopSet(stops), True), None, 0
    while found is None and seen < len(ids):
        run = ids[seen : seen + data.draw(st.integers(1, 5))]
        found = finder.push(run)
        seen += len(run) if found is None else found.num_tokens
    assert (seen if found else None) == (ends[0] if ends else None)


def test_missing_tokenizer_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match="--tokenizer-path") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


# The library panics at it: the prefix is longer than the token.
PANICS = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
PANICS |= {"continuing_subword_prefix": "#" * 10}


# It panics when it encodes: the template's token is not among its special ones.
TEMPLATE = {"type": "TemplateProcessing", "pair": [], "special_tokens": {}}
TEMPLATE |= {"single": [{"SpecialToken": {"id": "<x>", "type_id": 0}}]}
PANICS_LATER = {"type": "BPE", "vocab": {"a": 0}, "merges": []}


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"version": "1.0", "model": PANICS},
        {"version": "1.0", "model": PANICS_LATER, "post_processor": TEMPLATE},
    ],
    ids=["empty", "panics", "panics later"],
)
def test_broken_tokenizer_is_one_clear_line(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match="can be read") as error:
        load_tokenizer(tmp_path)
    assert "\n" not in str(error.value)


def test_other_files_without_transformers_name_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(TokenizerError, match="pip install"):
        load_tokenizer(tmp_path)


def test_other_files_are_read_by_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=make_tokenizer())
    fast.save_pretrained(str(tmp_path / "full"))
    tokenizer = tokenizer_module._load_with_transformers(tmp_path / "full")
    assert tokenizer.decode(tokenizer.encode("hello world")) == "hello world"


def test_many_ids_decode_as_few_do(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = tokenizer.encode(TEXT) * 3
    expected = tokenizer.decode(ids)
    monkeypatch.setattr("sglang.srt.tokenizer.DECODE_ALONE_IDS", 5)
    assert tokenizer.decode(ids) == expected
