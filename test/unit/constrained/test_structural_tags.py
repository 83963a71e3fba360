"""Tests which texts a structural tag takes: by every text of some pieces, and by random walks."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from typing import Any

import pytest

from grammar_cases import matches_schema, structural_tag
from marked_texts import COMPILER, random_text, takes
from sglang.srt.constrained.matchers import GrammarError
from sglang.srt.sampling.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar

Structure = tuple[str, dict[str, Any], str]
NUMBER, WORD = {"type": "integer", "minimum": 0}, {"enum": ["a", "</f>"]}


def is_tagged(text: str, structures: list[Structure], triggers: list[str]) -> bool:
    """Tells by definition whether a tag takes a text: up to the first trigger all is free; there
    one structure stands, and behind it the rest is likewise."""
    starts = [text.find(trigger) for trigger in triggers if trigger in text]
    if not starts:
        return True
    rest = text[min(starts) :]
    for begin, wanted, end in structures:
        is_match = matches_schema(wanted)
        for size in range(len(rest) + 1):
            body = rest[len(begin) : size - len(end)]
            is_one = rest[:size] == begin + body + end and body == body.strip()
            if is_one and is_match(body) and is_tagged(rest[size:], structures, triggers):
                return True
    return False


TAGGED: dict[str, tuple[list[Structure], list[str], list[str]]] = {
    "text": (
        [("<f=1>", NUMBER, "</f>"), ("<f=2>", WORD, "</f>")],
        ["<f"],
        ["<f", "=1>", "=2>", "7", '"a"', '"</f>"', "</f>", "x"],
    ),
    "two triggers": (
        [("<f>", NUMBER, ""), ("!call ", {"type": "boolean"}, "!")],
        ["<f>", "!call"],
        ["<f>", "<", "30", "!call", " ", "true", "!", "f>"],
    ),
    "a special token": (
        [("<call>{", NUMBER, "}"), ("<call>[", {"const": None}, "]")],
        ["<call>"],
        ["<call>", "<think>", "{", "5", "}", "[", "null", "]"],
    ),
    "one byte, and nothing at the end": (
        [("{", NUMBER, ""), ("{=", WORD, "")],
        ["{"],
        ["{", "=", "5", "0", '"a"', '"</f>"', "x", "<think>"],
    ),
    "one byte and more": (
        [("{", NUMBER, ""), ("<f", NUMBER, "}"), ("!", {"type": "boolean"}, "")],
        ["{", "<f", "!"],
        ["{", "<", "<f", "f", "6", "}", "!", "true"],
    ),
    "one beginning for two": (
        [("[CALLS]", NUMBER, "."), ("[CALLS]", {"type": "null"}, ";")],
        ["[CALLS]"],
        ["[CALLS]", "4", "null", ".", ";", "<call>", " x"],
    ),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", TAGGED)
def test_free_text_is_free_and_what_a_trigger_begins_has_its_form(name: str) -> None:
    structures, triggers, pieces = TAGGED[name]
    keys = ("begin", "schema", "end")
    parts = [dict(zip(keys, structure, strict=True)) for structure in structures]
    grammar = structural_tag({"structures": parts, "triggers": triggers})
    tags = [
        {"begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}
        for begin, schema, end in structures
    ]
    form = {"type": "triggered_tags", "triggers": triggers, "tags": tags}
    same = structural_tag({"format": form})
    choice, num_taken = random.Random(3), [0, 0]
    short = itertools.chain.from_iterable(itertools.product(pieces, repeat=n) for n in range(4))
    long = (choice.choices(pieces, k=choice.randint(4, 8)) for _ in range(150))
    for text in {*map("".join, short), *map("".join, long), *good_texts(structures, choice)}:
        expected = is_tagged(text, structures, triggers)
        assert takes(grammar, text) == expected, text
        num_taken[expected] += 1
        if len(text) % 5 == 0:
            assert takes(same, text) == expected, text
    assert min(num_taken) > 40


PREFIXES: dict[str, tuple[str, list[tuple[str, str, str]]]] = {
    "nothing at the end": ("c", [("ca", "b", ""), ("cab", "d", "")]),
    "an end or more": ("b", [("b", "", " "), ("b", "  ", "")]),
    "one end in another": ("a", [("ab", "b", " "), ("ab", "b", " a")]),
    "a trigger of some bytes": ("ca", [("ca", "b", ""), ("ca", "b d", "")]),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", PREFIXES)
def test_tags_that_begin_others_take_nothing_wrong_and_never_fail(name: str) -> None:
    trigger, tags = PREFIXES[name]
    keys = ("begin", "content", "end")
    forms = [
        dict(zip(keys, (begin, {"type": "const_string", "value": value}, end), strict=True))
        for begin, value, end in tags
    ]
    form = {"type": "triggered_tags", "triggers": [trigger], "tags": forms}
    grammar = structural_tag({"format": form})
    anything = f"(?s:(?!{trigger}).)*"
    either = "|".join(map(re.escape, map("".join, tags)))
    expression = re.compile(f"{anything}(({either}){anything})*")
    num_right = [0, 0]
    for text in map("".join, itertools.product("abcd ", repeat=5)):
        is_right = expression.fullmatch(text) is not None
        num_right[is_right] += 1
        assert is_right or not takes(grammar, text), text
        assert trigger in text or takes(grammar, text), text
    assert min(num_right) > 40
    assert any(takes(grammar, "".join(tag)) for tag in tags)


def good_texts(structures: list[Structure], choice: random.Random) -> Iterator[str]:
    """Texts with structures in them."""
    samples = ["7", '"a"', '"</f>"', "true", "null"]
    for _ in range(60):
        text = ""
        for _ in range(choice.randint(1, 3)):
            begin, schema, end = choice.choice(structures)
            body = choice.choice([each for each in samples if matches_schema(schema)(each)])
            text += choice.choice(["", "hello ", "<think>", "</"]) + begin + body + end
        yield text + choice.choice(["", " bye", "<think>"])


def number_tag(begin: str) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": NUMBER}
    return {"type": "tag", "begin": begin, "content": content, "end": "}"}


NUMBERED = r"[ab]\{\d+\}"
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "tags with a separator": (
        {"type": "tags_with_separator", "separator": ", "},
        f"({NUMBERED}(, {NUMBERED})*)?",
    ),
    "one at least": (
        {"type": "tags_with_separator", "separator": ", ", "at_least_one": True},
        f"{NUMBERED}(, {NUMBERED})*",
    ),
    "one at most": (
        {"type": "tags_with_separator", "separator": ", ", "stop_after_first": True},
        f"({NUMBERED})?",
    ),
    "triggered, one at least": (
        {"type": "triggered_tags", "triggers": ["a{", "b{"], "at_least_one": True},
        rf"((?![ab]\{{)[^!])*{NUMBERED}(?s:((?![ab]\{{).)*({NUMBERED})?)*",
    ),
    "triggered, one at most": (
        {"type": "triggered_tags", "triggers": ["a{", "b{"], "stop_after_first": True},
        rf"(?s:((?![ab]\{{).)*)({NUMBERED})?",
    ),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", FORMATS)
def test_formats_say_how_many_tags_there_are(name: str) -> None:
    form, pattern = FORMATS[name]
    grammar = structural_tag({"format": {**form, "tags": [number_tag("a{"), number_tag("b{")]}})
    pieces, expression = ["a{", "b{", "12", "}", ", ", "x", "a{0}"], re.compile(pattern)
    num_taken = [0, 0]
    for count in range(5):
        for text in {"".join(each) for each in itertools.product(pieces, repeat=count)}:
            expected = expression.fullmatch(text) is not None
            assert takes(grammar, text) == expected, text
            num_taken[expected] += 1
    assert min(num_taken) > 1


def test_formats_may_stand_in_each_other() -> None:
    null = {"type": "json_schema", "json_schema": {"type": "null"}}
    either = {"type": "or", "elements": [number_tag("[CALLS]"), null]}
    begin = {"type": "const_string", "value": "<call>say "}
    grammar = structural_tag({"format": {"type": "sequence", "elements": [begin, either]}})
    for text in ("<call>say [CALLS]5}", "<call>say null"):
        assert takes(grammar, text)
    for text in ("", "<call>say 5}", "say null", "<call>say null null"):
        assert not takes(grammar, text)


NUMBER_FORM = {"type": "json_schema", "json_schema": NUMBER}
STRUCTURE = {"begin": "<f>", "schema": NUMBER, "end": ""}
ENDS = {
    "a text": ("<b>", ["<b>", "<", "b", ">", "x", "[CALLS]"]),
    "one byte": (";", [";", "x", " ", "[CALLS]", "<call>"]),
    "a special token": ("[CALLS]", ["[CALLS]", "x", "[", "<call>", "[ARGS]"]),
    "a token that is shown": ("<call>", ["<call>", "x", "<", "[CALLS]"]),
}
CONTENTS: dict[str, tuple[dict[str, Any], str, list[str]]] = {
    "json_schema": (NUMBER_FORM, r"0|[1-9]\d*", ["3", "0"]),
    "regex": ({"type": "regex", "pattern": r"\s?[ab]+"}, r"\s?[ab]+", ["a", " b", "\n"]),
    "grammar": (
        {"type": "grammar", "grammar": 'root ::= "a" root | "b"'},
        "a*b",
        ["a", "b"],
    ),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("mark", ENDS)
@pytest.mark.parametrize("content", CONTENTS)
def test_free_text_ends_where_its_tag_does_and_the_next_part_begins(
    mark: str, content: str
) -> None:
    end, pieces = ENDS[mark]
    form, pattern, others = CONTENTS[content]
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": end}
    elements = [free, {"type": "const_string", "value": "\n\n"}, form]
    grammar = structural_tag({"format": {"type": "sequence", "elements": elements}})
    expression = re.compile(f"(?s:((?!{re.escape(end)}).)*){re.escape(end)}\n\n({pattern})")
    choice, num_taken = random.Random(7), [0, 0]
    for _ in range(100):
        before = choice.choices(pieces, k=choice.randint(0, 2))
        gap = choice.choices(("", end, f"{end}\n\n"), (1, 1, 8))
        text = "".join([*before, *gap, *choice.choices(others, k=choice.randint(0, 2))])
        expected = expression.fullmatch(text) is not None
        assert takes(grammar, text) == expected, text
        num_taken[expected] += 1
    assert min(num_taken) > 4


def test_a_structural_tag_may_be_the_last_part_of_another_one() -> None:
    inner = {"type": "structural_tag", "triggers": ["<f"], "structures": [STRUCTURE]}
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "<call>"}
    grammar = structural_tag({"format": {"type": "sequence", "elements": [free, inner]}})
    for text in ("<f>x<call>", "<call><f>3", "a<call>b<f>3"):
        assert takes(grammar, text)
    for text in ("", "<f>3", "<call><f>x"):
        assert not takes(grammar, text)


@pytest.mark.parametrize("text", ["<call>", "a[CALLS]b", "</tool_call>"])
def test_json_may_have_texts_that_spell_special_tokens(text: str) -> None:
    """In ordinary tokens: a special one is no text."""
    grammars = [
        Grammar(JSON_SCHEMA, json.dumps({"const": {text: [text]}})),
        structural_tag({"format": {"type": "json_schema", "json_schema": {"const": [text]}}}),
        Grammar(REGEX, f"{re.escape(text)}!"),
        Grammar(EBNF, f'root ::= "{text}" "!"'),
        structural_tag({"format": {"type": "grammar", "grammar": f'root ::= "{text}" "!"'}}),
    ]
    for grammar in grammars:
        COMPILER.check(grammar)
        for seed in range(5):
            assert text in (random_text(grammar, seed) or "")


TRIGGERED = {"type": "triggered_tags", "triggers": ["a{"], "tags": [number_tag("a{")]}
ANY_TEXT = {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": ">"}
DEEP: dict[str, Any] = NUMBER_FORM
for _ in range(20):
    DEEP = {"type": "or", "elements": [DEEP]}
BAD: list[tuple[dict[str, Any], str]] = [
    ({}, "^triggers must be a list$"),
    ({"type": "json_schema", "format": {}}, '^type must be "structural_tag"$'),
    ({"structures": [], "triggers": ["<"]}, "^structures must have at least one entry$"),
    ({"structures": [5], "triggers": ["<"]}, r"^structures\[0\] must be an object$"),
    ({"structures": [STRUCTURE], "triggers": []}, "^triggers must be a list of texts"),
    ({"structures": [STRUCTURE], "triggers": [""]}, "^triggers must be a list of texts"),
    ({"structures": [STRUCTURE], "triggers": ["<", "<f"]}, r"^triggers\[1\] is in another one"),
    ({"structures": [STRUCTURE], "triggers": ["<f", "x"]}, "^triggers must each begin one"),
    ({"structures": [STRUCTURE], "triggers": ["<call>{"]}, r"^triggers\[0\] is a special token"),
    ({"structures": [STRUCTURE], "triggers": ["f"]}, r"^structures\[0\].begin begins with none"),
    ({"structures": [STRUCTURE], "triggers": ["<f"], "more": 1}, "^more is not there"),
    (
        {"structures": [STRUCTURE, {"begin": "<f>", "end": ""}], "triggers": ["<f"]},
        r"^structures\[1\].schema must be a JSON schema$",
    ),
    (
        {"structures": [{**STRUCTURE, "schema": {"uniqueItems": True}}], "triggers": ["<f"]},
        r"^structures\[0\].schema: .*uniqueItems",
    ),
    (
        {"structures": [{**STRUCTURE, "schema": False}], "triggers": ["<f"]},
        r"^structures\[0\].schema must be an object, or true",
    ),
    (
        {"format": {"type": "nobody"}},
        "^format.type is none of those that are there: const_string",
    ),
    ({"format": {"type": "any_text"}}, "^format.type any_text may only be the content of a tag"),
    (
        {"format": {**ANY_TEXT, "end": "<call>x"}},
        "^format.end is a special token and more",
    ),
    (
        {"format": {"type": "sequence", "elements": [TRIGGERED, NUMBER_FORM]}},
        r"^format.elements\[0\].type is free text with tags, which only the last part may be",
    ),
    (
        {"format": {"type": "sequence", "elements": [{"type": "regex", "pattern": "("}]}},
        r"^format.elements\[0\].pattern: .*unclosed",
    ),
    (
        {"format": {"type": "or", "elements": [{"type": "grammar", "grammar": "root ::= a"}]}},
        r"^format.elements\[0\].grammar: ",
    ),
    (
        {"format": {**ANY_TEXT, "content": {"type": "grammar", "grammar": "start: x"}}},
        r"^format.content.grammar: .*unknown name",
    ),
    ({"format": {**TRIGGERED, "excludes": ["x"]}}, "^format.excludes is not there"),
    ({"format": {**TRIGGERED, "at_least_one": 1}}, "^format.at_least_one must be true or false$"),
    ({"format": {**TRIGGERED, "tags": [NUMBER_FORM]}}, r'^format.tags\[0\].type must be "tag"$'),
    ({"format": {**number_tag("x"), "end": ["a", "b"]}}, "^format.end must be a text$"),
    (
        {"format": {**number_tag("x"), "content": {"type": "json_schema", "json_schema": []}}},
        "^format.content.json_schema must be a JSON schema$",
    ),
    ({"format": DEEP}, "nested more than 16 deep"),
]


@pytest.mark.parametrize(("value", "reason"), BAD)
def test_what_is_wrong_with_a_structural_tag_is_named(value: dict[str, Any], reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        COMPILER.check(structural_tag(value))


@pytest.mark.parametrize("text", ["{", "[]", '{"a":' * 5000 + "1" + "}" * 5000])
def test_a_structural_tag_is_a_json_object(text: str) -> None:
    with pytest.raises(GrammarError, match=r"JSON|object"):
        COMPILER.check(Grammar(STRUCTURAL_TAG, text))
