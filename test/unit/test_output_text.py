"""The text of an output is what its ids add to the text of its prompt, in every layout.

The oracle is transformers: decode(prompt + output) without decode(prompt).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from sentencepiece_models import LAYOUTS, METASPACE, make_sentencepiece_tokenizer
from serving_utils import make_tokenizer
from sglang.srt.managers.detokenizer_manager import RequestText
from sglang.srt.messages.requests import DecodeOptions, FinishReason
from sglang.srt.stops import StopSet
from sglang.srt.tokenizer import StopFinder, Tokenizer, TokenizerError, load_tokenizer

OWN_DECODER = "metaspace with its own decoder"
LENGTH = FinishReason(type="length", length=1)
TEXTS = st.text("ab <>é漢😀\n", max_size=20)


class Layout:
    """A tokenizer, and transformers' of the same file."""

    def __init__(self, directory: Path, name: str) -> None:
        backend = make_sentencepiece_tokenizer(name) if name in LAYOUTS else make_tokenizer()
        if name == OWN_DECODER:
            backend = make_sentencepiece_tokenizer(METASPACE)
            backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
        file = directory / "tokenizer.json"
        backend.save(str(file))
        from transformers import PreTrainedTokenizerFast

        self.is_byte_level = name == "bytes"
        self.tokenizer = load_tokenizer(directory)
        self.num_ids = backend.get_vocab_size()
        self.special_ids = [*backend.get_added_tokens_decoder()]
        special = {f"extra_{i}": backend.id_to_token(i) for i in self.special_ids}
        self._oracle = PreTrainedTokenizerFast(
            tokenizer_file=str(file), extra_special_tokens=special
        )

    def decode(self, ids: list[int], skip: bool = True) -> str:
        found = self._oracle.decode(
            ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False
        )
        assert isinstance(found, str)
        return found

    def text_of_output(self, prompt: list[int], output: list[int], skip: bool = True) -> str:
        """A character that begins in the prompt and ends in the output belongs to the output."""
        while "\ufffd" in (before := self.decode(prompt, skip)):
            prompt, output = prompt[:-1], [prompt[-1], *output]
        text = self.decode([*prompt, *output], skip)
        assert text.startswith(before)
        return text[len(before) :]


@pytest.fixture(scope="module", params=["bytes", *LAYOUTS, OWN_DECODER])
def layout(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Layout:
    return Layout(tmp_path_factory.mktemp(request.param), request.param)


def divided(data: st.DataObject, ids: list[int]) -> list[list[int]]:
    """Any division of a list into runs."""
    runs, rest = [], list(ids)
    while rest:
        count = data.draw(st.integers(1, 6))
        runs.append(rest[:count])
        del rest[:count]
    return runs


def text_in_runs(
    tokenizer: Tokenizer, prompt: list[int], runs: list[list[int]], skip: bool = True
) -> str:
    stream = tokenizer.decode_stream(skip, prompt)
    return "".join(map(stream.push, runs)) + stream.flush()


@settings(max_examples=40, deadline=None)
@given(st.data(), st.booleans())
def test_text_is_what_the_output_adds_to_its_prompt(
    layout: Layout, data: st.DataObject, skip: bool
) -> None:
    """Special tokens anywhere, prompts that end anywhere, also within a character, any runs."""
    ids = layout.tokenizer.encode(data.draw(TEXTS))
    for place in data.draw(st.lists(st.integers(0, len(ids)), max_size=3)):
        ids.insert(place, data.draw(st.sampled_from(layout.special_ids)))
    if "\ufffd" in layout.decode(ids, skip):  # a special token within a character
        return
    end = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:end], ids[end:]
    is_empty = skip and not set(output).difference(layout.special_ids)
    expected = "" if is_empty else layout.text_of_output(prompt, output, skip)
    assert text_in_runs(layout.tokenizer, prompt, divided(data, output), skip) == expected


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_text_of_any_ids_does_not_depend_on_the_runs_they_come_in(
    layout: Layout, data: st.DataObject
) -> None:
    ids = data.draw(st.lists(st.integers(0, layout.num_ids - 1), max_size=40))
    end = data.draw(st.integers(0, len(ids)))
    prompt, output = ids[:end], ids[end:]
    whole = text_in_runs(layout.tokenizer, prompt, [output])
    assert text_in_runs(layout.tokenizer, prompt, divided(data, output)) == whole
    if layout.is_byte_level and not prompt:
        assert whole == layout.decode(output)


def test_a_first_space_stays_behind_many_special_tokens(layout: Layout) -> None:
    prompt = [*layout.tokenizer.encode("hello"), *layout.special_ids[:1] * 40]
    output = layout.tokenizer.encode(" hello", add_special_tokens=False)[-1:]
    expected = layout.text_of_output(prompt, output)
    assert text_in_runs(layout.tokenizer, prompt, [output]) == expected


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_that_the_prompt_begins_is_the_outputs_only_if_it_ends_there(
    layout: Layout, cut: int
) -> None:
    ids = layout.tokenizer.encode("a𝄞", add_special_tokens=False)  # each byte is a token
    prompt, rest = ids[: -4 + cut], ids[-4 + cut :]
    assert text_in_runs(layout.tokenizer, prompt, [rest]) == "𝄞"
    other = layout.tokenizer.encode("b", add_special_tokens=False)[-1:]
    assert text_in_runs(layout.tokenizer, prompt, [other]) == layout.decode(other)
    assert text_in_runs(layout.tokenizer, prompt, []) == ""


def test_an_output_that_ends_within_a_character_says_so_as_transformers_does(
    layout: Layout,
) -> None:
    prompt, ids = map(layout.tokenizer.encode, ("hello", "hello b𝄞"))
    for count in (1, 2, 3):
        runs = [[token_id] for token_id in ids[len(prompt) : -count]]
        expected = layout.decode(ids[:-count]).removeprefix("hello")
        assert text_in_runs(layout.tokenizer, prompt, runs) == expected


def test_what_was_shown_stays_when_a_broken_byte_follows(layout: Layout) -> None:
    ids = layout.tokenizer.encode("é漢😀", add_special_tokens=False)
    assert text_in_runs(layout.tokenizer, [], [[*ids, ids[-4]]]).strip() == "é漢😀\ufffd"


def test_bytes_of_tokens_are_the_text(layout: Layout) -> None:
    text = "def f(x):\n    return 'é漢😀'  # hello world"
    ids = layout.tokenizer.encode(text, add_special_tokens=False)
    pieces = [layout.tokenizer.token_bytes.of(token_id) for token_id in ids]
    assert b"".join(pieces).decode().removeprefix("" if layout.is_byte_level else " ") == text
    assert all(pieces)


def test_texts_of_tokens_have_their_space(layout: Layout) -> None:
    ids = layout.tokenizer.encode("hello world", add_special_tokens=False)
    texts = [layout.tokenizer.token_text(token_id) for token_id in ids]
    assert "".join(texts).strip() == "hello world"
    assert texts[-1] == " world" or layout.is_byte_level


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_stops_are_found_and_cut_in_the_text_behind_the_prompt(
    layout: Layout, data: st.DataObject
) -> None:
    tokenizer = layout.tokenizer
    prompt = tokenizer.encode(data.draw(TEXTS))
    output = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False)
    stops = data.draw(st.lists(st.text(" ab漢", min_size=1, max_size=3), min_size=1, max_size=2))
    stops.append(" b")

    def text_of(count: int) -> str:
        return text_in_runs(tokenizer, prompt, [output[:count]])

    counts = range(1, len(output) + 1)
    end = next((n for n in counts if any(stop in text_of(n) for stop in stops)), None)
    match = StopFinder(tokenizer, StopSet(stops), True, prompt).push(output)
    assert (match and match.num_tokens) == end
    request = RequestText(tokenizer, DecodeOptions(True, stops, False, context_ids=prompt))
    *runs, last = divided(data, output[:end]) or [[]]
    reason = FinishReason(type="stop", matched=match.matched) if match else LENGTH
    text = "".join(map(request.push, runs)) + request.finish(last, reason)
    whole = layout.text_of_output(prompt, output[:end])
    assert text == (whole[: whole.index(match.matched)] if match else whole)


@pytest.mark.parametrize("decoder", [decoders.BPEDecoder(), decoders.CTC()])
def test_a_tokenizer_whose_tokens_have_no_text_of_their_own_is_refused(
    tmp_path: Path, decoder: decoders.Decoder
) -> None:
    backend = make_tokenizer()
    backend.decoder = decoder
    backend.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(TokenizerError, match=f"{type(decoder).__name__}.*Use a tokenizer"):
        load_tokenizer(tmp_path)
