"""Text of streamed outputs: stop strings, stop tokens, characters, failures."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving_utils import VOCAB_SIZE, make_model_dir
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.messages.control import HealthPing
from sglang.srt.messages.requests import (
    STOP_TOO_SLOW,
    BatchTokenIDOutput,
    DecodeOptions,
    FinishReason,
    ReqOutput,
)
from sglang.srt.stop_expressions import check_expression_list
from sglang.srt.stops import StopSet
from sglang.srt.tokenizer import StopFinder, Tokenizer, load_tokenizer

LENGTH = FinishReason(type="length", length=1)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(make_model_dir(tmp_path_factory.mktemp("model")))


class Harness:
    """A detokenizer and what it has sent."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.sent: list[Any] = []
        self.manager = DetokenizerManager(tokenizer, self.sent.append)

    def push(
        self,
        ids: list[int],
        reason: FinishReason | None = None,
        options: DecodeOptions | None = None,
        req_id: int = 1,
    ) -> None:
        output = ReqOutput(req_id, ids, reason, 1, len(ids), 0, 0, options)
        self.manager.handle(BatchTokenIDOutput(outputs=[output]))

    def pieces(self, req_id: int = 1) -> list[str]:
        outputs = [output for message in self.sent for output in message.outputs]
        return [output.text for output in outputs if output.req_id == req_id]

    def last(self) -> Any:
        return self.sent[-1].outputs[-1]


def stream(
    tokenizer: Tokenizer,
    ids: list[int],
    reason: FinishReason,
    stops: tuple[str, ...] = (),
    skip_special_tokens: bool = True,
    no_stop_trim: bool = False,
) -> list[str]:
    """The pieces of an output that comes token by token."""
    harness = Harness(tokenizer)
    options = DecodeOptions(skip_special_tokens, list(stops), no_stop_trim)
    for index, token_id in enumerate(ids):
        is_last = index == len(ids) - 1
        harness.push([token_id], reason if is_last else None, None if index else options)
    return harness.pieces()


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def test_streamed_text_never_shows_a_part_of_the_stop_string(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "hello <END")
    reason = FinishReason(type="stop", matched="<END")
    pieces = stream(tokenizer, ids, reason, stops=("<END",))
    shown = ""
    for piece in pieces:
        shown += piece
        assert "hello ".startswith(shown)
    assert shown == "hello "


def test_what_only_began_like_a_stop_string_is_shown_later(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "a <EN b <E")
    assert "".join(stream(tokenizer, ids, LENGTH, stops=("<END",))) == "a <EN b <E"


def test_no_stop_trim_keeps_stop_string_and_stop_token(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "hello <END")
    reason = FinishReason(type="stop", matched="<END")
    assert "".join(stream(tokenizer, ids, reason, ("<END",), no_stop_trim=True)) == "hello <END"
    ids = encode(tokenizer, "hello!")
    token = FinishReason(type="stop", matched=ids[-1])
    assert "".join(stream(tokenizer, ids, token, no_stop_trim=True)) == "hello!"


def test_matched_stop_token_is_not_shown(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "hello!")
    reason = FinishReason(type="stop", matched=ids[-1])
    assert "".join(stream(tokenizer, ids, reason)) == "hello"
    with_eos = [*ids, 1]
    eos = FinishReason(type="stop", matched=1)
    assert "".join(stream(tokenizer, with_eos, eos, skip_special_tokens=False)) == "hello!"


def test_characters_come_whole_and_an_unfinished_one_at_the_end(tokenizer: Tokenizer) -> None:
    ids = encode(tokenizer, "≠≠")
    assert len(ids) == 6
    assert stream(tokenizer, ids, LENGTH) == ["", "", "≠", "", "", "≠"]
    assert stream(tokenizer, ids[:5], LENGTH) == ["", "", "≠", "", "\ufffd"]


@pytest.mark.parametrize(
    ("stops", "expressions", "shown"),
    [
        (["ab"], [], "ab "),  # the first is within the minimum
        (["b a"], [], "a"),  # begins within it
        (["b"], [], "ab a"),
        ([], ["ab?"], "ab "),
        ([], ["b a"], "ab ab"),
    ],
)
@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_what_stops_an_output_ends_behind_min_new_tokens(
    tokenizer: Tokenizer, stops: list[str], expressions: list[str], shown: str, size: int
) -> None:
    ids, minimum = [token for char in "ab ab" for token in encode(tokenizer, char)], 2
    finder = StopFinder(tokenizer, StopSet(stops, expressions), True, min_new_tokens=minimum)
    runs = [ids[start : start + size] for start in range(0, len(ids), size)]
    harness = Harness(tokenizer)
    options: DecodeOptions | None = DecodeOptions(True, stops, False, expressions, minimum)
    for index, run in enumerate(runs):
        match = finder.push(run)
        reason = FinishReason(type="stop", matched=match.matched) if match else None
        is_last = index == len(runs) - 1
        kept = run[: match.num_tokens] if match else run
        harness.push(kept, reason or (LENGTH if is_last else None), options)
        options = None
        if match:
            break
    assert "".join(harness.pieces()) == shown


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_are_the_decode_of_what_is_shown(tokenizer: Tokenizer, data: st.DataObject) -> None:
    """Random ids and stops, ended as the scheduler ends them, in runs of any length."""
    ids = data.draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=1, max_size=40))
    full = tokenizer.decode(ids)
    start = data.draw(st.integers(0, max(0, len(full) - 1)))
    stops = [s for s in (full[start : start + 3], "ab") if s and "\ufffd" not in s]
    trim = data.draw(st.booleans())
    match = StopFinder(tokenizer, StopSet(stops), True).push(ids) if stops else None
    ids = ids[: match.num_tokens] if match else ids
    reason = FinishReason(type="stop", matched=match.matched) if match else LENGTH
    harness, options = Harness(tokenizer), DecodeOptions(True, stops, not trim)
    rest = list(ids)
    while rest:
        run = [rest.pop(0) for _ in range(min(len(rest), data.draw(st.integers(1, 4))))]
        harness.push(run, None if rest else reason, options)
        options = None
    expected = tokenizer.decode(ids)
    if match and trim:
        expected = expected[: expected.index(match.matched)]
    assert "".join(harness.pieces()) == expected


ENDS = {
    "length": LENGTH,
    "abort": FinishReason(type="abort", message="over"),
    "grammar": FinishReason(type="abort", message="over", status_code=400),
    "too slow": STOP_TOO_SLOW,
    "token": FinishReason(type="stop", matched=5),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("has_tokens", [True, False], ids=["last tokens", "no last tokens"])
@pytest.mark.parametrize("text", ["a <EN", "<", "a ≠", "b 12"])
def test_an_end_without_a_stop_text_shows_all_that_was_held_back(
    tokenizer: Tokenizer, text: str, has_tokens: bool, end: str
) -> None:
    """A beginning of a stop string or expression, and the bytes of half a character."""
    ids = encode(tokenizer, text)
    ids = ids[:-1] if "≠" in text else ids
    harness, rest = Harness(tokenizer), ids if has_tokens else []
    options = DecodeOptions(True, ["<END"], False, ["[0-9]{3}"])
    harness.push([] if has_tokens else ids, None, options)
    assert harness.pieces() != [tokenizer.decode(ids)]
    harness.push(rest + [5] * (end == "token"), ENDS[end])
    assert "".join(harness.pieces()) == tokenizer.decode(ids)


def test_a_search_that_takes_too_long_leaves_the_text_before_it(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler has found no stop there; where it has, the text ends before it, unseen."""
    harness, options = Harness(tokenizer), DecodeOptions(True, ["<END"], False)
    for req_id in (1, 2):
        harness.push(encode(tokenizer, "a <E"), None, options, req_id)

    def too_slow(*args: object) -> None:
        raise TimeoutError

    monkeypatch.setattr(StopSet, "find", too_slow)
    harness.push(encode(tokenizer, "x b"), None, None, req_id=1)
    harness.push(encode(tokenizer, "ND"), FinishReason(type="stop", matched="<END"), None, req_id=2)
    assert "".join(harness.pieces(1)) == "a <Ex b"
    assert "".join(harness.pieces(2)) == "a "
    assert harness.last().finish_reason == STOP_TOO_SLOW
    assert not harness.manager._texts


def test_empty_output_is_answered(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    harness.push([], LENGTH, DecodeOptions(True, [], False))
    assert harness.last().finish_reason == LENGTH
    assert harness.pieces() == [""]


def test_one_failing_request_is_answered_and_others_go_on(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    harness = Harness(tokenizer)
    options = DecodeOptions(True, [], False)
    harness.push(["no id"], None, options, req_id=1)  # type: ignore[list-item]
    reason = harness.last().finish_reason
    assert (reason.type, reason.status_code, reason.err_type) == ("abort", 500, "DetokenizerError")
    num_sent = len(harness.sent)
    harness.push([5], None, None, req_id=1)
    assert len(harness.sent) == num_sent, "a failed request is answered once"
    harness.push(encode(tokenizer, "hello"), LENGTH, options, req_id=2)
    assert harness.pieces(req_id=2) == ["hello"]


def test_ping_goes_round(tokenizer: Tokenizer) -> None:
    harness = Harness(tokenizer)
    harness.manager.handle(HealthPing(call_id=3))
    assert harness.sent == [HealthPing(call_id=3)]


def test_finished_requests_leave_no_state(tokenizer: Tokenizer, tmp_path: Path) -> None:
    harness = Harness(tokenizer)
    for req_id in range(5):
        harness.push([5], None, DecodeOptions(True, [], False), req_id)
        harness.push([6], LENGTH, None, req_id)
    assert not harness.manager._texts


EXPRESSIONS = ["a+b", "[0-9]{2}", "€.€", "b$", "(ab|ba)c?"]


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_stop_expressions_end_at_the_first_match_and_are_never_shown(
    tokenizer: Tokenizer, data: st.DataObject
) -> None:
    """Against `re` on the decode of every prefix; strings and expressions together. Of the first
    min_new_tokens tokens a string may have all but its end, an expression nothing."""
    text = data.draw(st.text("ab1€ c", min_size=1, max_size=25))
    expressions = data.draw(st.lists(st.sampled_from(EXPRESSIONS), min_size=1, max_size=2))
    strings = data.draw(st.lists(st.text("abc ", min_size=1, max_size=3), max_size=1))
    ids = encode(tokenizer, text)
    minimum = data.draw(st.integers(0, len(ids)) | st.just(0))

    def shown(num_ids: int) -> str:
        return tokenizer.decode(ids[:num_ids]).rstrip("\ufffd")

    def first_match(num_ids: int) -> int | None:
        text, exempt = shown(num_ids), len(shown(minimum))
        starts = [m.start() for e in expressions if (m := re.compile(e).search(text, exempt))]
        starts += [
            m.start()
            for s in strings
            for m in re.finditer(f"(?={re.escape(s)})", text)
            if m.start() + len(s) > exempt
        ]
        return min(starts, default=None)

    counts = range(minimum + 1, len(ids) + 1)
    end = next((n for n in counts if first_match(n) is not None), None)
    match = StopFinder(tokenizer, StopSet(strings, expressions), True, min_new_tokens=minimum).push(
        ids
    )
    assert (match.num_tokens if match else None) == end
    kept = ids[:end]
    reason = FinishReason(type="stop", matched=match.matched) if match else LENGTH
    harness = Harness(tokenizer)
    options = DecodeOptions(True, strings, False, expressions, minimum)
    expected = tokenizer.decode(kept)
    if end is not None:
        expected = expected[: first_match(end)]
    rest, pieces = list(kept), ""
    while rest:
        run = [rest.pop(0) for _ in range(min(len(rest), data.draw(st.integers(1, 4))))]
        harness.push(run, None if rest else reason, options)
        options = None
        pieces = "".join(harness.pieces())
        assert expected.startswith(pieces), "nothing of a stop is shown"
    assert pieces == expected


def test_a_stop_expression_that_takes_too_long_is_stopped(tokenizer: Tokenizer) -> None:
    finder = StopFinder(tokenizer, StopSet([], ["(a|aa)+$x"]), True)
    start = time.monotonic()
    with pytest.raises(TimeoutError):
        finder.push(encode(tokenizer, "a" * 200))
    assert time.monotonic() - start < 5.0


@pytest.mark.parametrize("expression", ["(", "[", "x*", "", "(?P<n>a)(?P=m)"])
def test_useless_expressions_are_refused(expression: str) -> None:
    with pytest.raises(ValueError):
        check_expression_list([expression])
