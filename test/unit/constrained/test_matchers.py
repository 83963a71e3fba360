"""Tests what a grammar lets a request say, by walks over its masks."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
import tokenizers

from grammar_cases import CASES, DEMO, DEMO_EOS, DEMO_MASK, DEMO_VOCAB_SIZE, schema, structural_tag
from sglang.srt.constrained.matchers import GrammarCompiler, GrammarError, Matcher
from sglang.srt.sampling.grammar import EBNF, JSON_SCHEMA, REGEX, Grammar
from sglang.srt.sampling.json_schemas import KEPT_FORMATS
from sglang.srt.tokenizer import load_tokenizer, read_tokenizer_json

TEXT = read_tokenizer_json(DEMO)
COMPILER = GrammarCompiler(TEXT, DEMO_VOCAB_SIZE, [DEMO_EOS])
TOKENIZER = load_tokenizer(DEMO)


def allowed(mask: bytes) -> set[int]:
    bits = np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")
    return set(bits.nonzero()[0].tolist())


def walk(matcher: Matcher, seed: int) -> list[int]:
    """A random output, which ends as soon as it may after 40 tokens."""
    choice, output = random.Random(seed), list[int]()
    while True:
        tokens = allowed(matcher.masks())
        if tokens == {DEMO_EOS} or (len(output) > 40 and DEMO_EOS in tokens):
            return output
        output.append(choice.choice(sorted(tokens - {DEMO_EOS})))
        matcher.consume(output[-1:])


@pytest.mark.parametrize("name", CASES)
def test_all_that_may_be_said_matches_and_may_end_only_there(name: str) -> None:
    grammar, is_match = CASES[name]
    compiled = COMPILER.compile(grammar)
    texts = {TOKENIZER.decode(walk(compiled.copy(), seed)) for seed in range(25)}
    assert len(texts) > 10
    for text in texts:
        assert is_match(text), text


def test_a_token_is_allowed_if_its_text_continues_a_match() -> None:
    words = ["return", "returns", "retry", "while"]
    matcher = COMPILER.compile(Grammar(REGEX, "|".join(words)))
    texts = {i: TOKENIZER.decode([i], skip_special_tokens=False) for i in range(DEMO_VOCAB_SIZE)}
    for said in ("", "ret", "return"):
        matcher_there = matcher.copy()
        matcher_there.consume(TOKENIZER.encode(said, add_special_tokens=False) if said else [])
        expected = {
            i
            for i, text in texts.items()
            if text and any(word.startswith(said + text) for word in words)
        }
        if said in words:
            expected.add(DEMO_EOS)
        assert allowed(matcher_there.masks()) == expected


def test_masks_of_drafts_are_those_of_the_output_with_them() -> None:
    """In a tree; behind a draft that is not allowed anything is, as it will not be confirmed."""
    compiled = COMPILER.compile(CASES["json_schema"][0])
    choice, num_rejected = random.Random(5), 0
    for _ in range(20):
        output = walk(compiled.copy(), choice.randrange(10**6))
        start = choice.randrange(len(output))
        paths, drafts, parents = [output[:start]], list[int](), list[int]()
        for _ in range(8):
            parent = choice.randrange(len(paths))
            depth = len(paths[parent])
            goes_on = paths[parent] == output[:depth] and depth < len(output)
            draft = output[depth] if goes_on and choice.random() < 0.7 else choice.randrange(4096)
            parents.append(parent)
            drafts.append(draft)
            paths.append([*paths[parent], draft])
        matcher = compiled.copy()
        matcher.consume(output[:start])
        before = matcher.masks()
        rows = np.frombuffer(matcher.masks(drafts, parents), np.uint8).reshape(len(paths), -1)
        assert matcher.masks() == before
        for path, row in zip(paths, rows, strict=True):
            expected = compiled.copy()
            try:
                for token in path:
                    if token not in allowed(expected.masks()):
                        raise GrammarError
                    expected.consume([token])
            except GrammarError:
                num_rejected += 1
                assert row.all()
            else:
                assert row.tobytes() == expected.masks()
    assert 10 < num_rejected < 150


def test_what_follows_the_end_is_no_part_of_the_output() -> None:
    matcher = COMPILER.compile(Grammar(REGEX, "(ab)+"))
    matcher.consume([*TOKENIZER.encode("abab", add_special_tokens=False), DEMO_EOS, 5, 7])
    assert allowed(matcher.masks()) == {DEMO_EOS}


def test_every_end_of_text_id_ends_and_suppressed_ids_never_come() -> None:
    compiler = GrammarCompiler(TEXT, DEMO_VOCAB_SIZE + 5, [DEMO_EOS, 0], [DEMO_MASK, 4098])
    compiled = compiler.compile(Grammar(REGEX, "x?"))
    ends = allowed(compiled.masks())
    assert {DEMO_EOS, 0} < ends
    assert len(ends) == 3
    for token in (0, DEMO_EOS):
        matcher = compiled.copy()
        matcher.consume([token])
        assert allowed(matcher.masks()) == {0, DEMO_EOS}
    only_mask = compiler.compile(Grammar(EBNF, "start: <|mask|>"))
    with pytest.raises(GrammarError, match="no token"):
        only_mask.masks()


FEWER = DEMO_VOCAB_SIZE - 1001  # no multiple of the 32 tokens of a mask's words


@pytest.fixture(scope="module")
def fewer() -> GrammarCompiler:
    """Makes a compiler for a model that lacks the last tokens of its tokenizer."""
    return GrammarCompiler(TEXT, FEWER, [DEMO_EOS])


@pytest.mark.parametrize("name", CASES)
def test_tokens_that_the_model_does_not_have_are_never_allowed(
    fewer: GrammarCompiler, name: str
) -> None:
    grammar, is_match = CASES[name]
    compiled = fewer.compile(grammar)
    assert len(compiled.masks()) == -(-FEWER // 32) * 4
    outputs = [walk(compiled.copy(), seed) for seed in range(25)]
    assert max(map(max, outputs)) < FEWER
    for output in outputs:
        assert is_match(TOKENIZER.decode(output)), output


def test_masks_lack_nothing_but_the_tokens_that_the_model_does_not_have(
    fewer: GrammarCompiler,
) -> None:
    grammar = Grammar(REGEX, "(.|\n)*")
    of_all, of_fewer = (allowed(each.compile(grammar).masks()) for each in (COMPILER, fewer))
    assert of_fewer == {token for token in of_all if token < FEWER}
    assert of_fewer < of_all


def test_text_that_must_come_is_divided_into_tokens_that_the_model_has(
    fewer: GrammarCompiler,
) -> None:
    """All texts of a token that it lacks, each a grammar of its own."""
    lacking = [TOKENIZER.decode([token]) for token in range(FEWER, DEMO_VOCAB_SIZE, 50)]
    words = [text for text in lacking if text.strip() and "\ufffd" not in text]
    assert len(words) > 10
    for word in words:
        matcher = fewer.compile(Grammar(JSON_SCHEMA, json.dumps({"const": word})))
        output = walk(matcher, seed=1)
        assert max(output) < FEWER
        assert json.loads(TOKENIZER.decode(output)) == word


def test_special_tokens_that_the_model_does_not_have_are_spelled() -> None:
    backend = tokenizers.Tokenizer.from_str(TEXT)
    backend.add_special_tokens(["<call>"])
    assert backend.token_to_id("<call>") == DEMO_VOCAB_SIZE
    tag = {"begin": "<call>", "content": {"type": "const_string", "value": "x"}, "end": "!"}
    grammar = structural_tag({"format": {"type": "tag", **tag}})
    for vocab_size, is_one_token in ((DEMO_VOCAB_SIZE, False), (DEMO_VOCAB_SIZE + 1, True)):
        compiler = GrammarCompiler(backend.to_str(), vocab_size, [DEMO_EOS])
        compiler.check(grammar)
        output = walk(compiler.compile(grammar), seed=1)
        assert backend.decode(output, skip_special_tokens=False) == "<call>x!"
        assert (DEMO_VOCAB_SIZE in output) == is_one_token


def test_a_forbidden_token_is_an_error() -> None:
    matcher = COMPILER.compile(Grammar(REGEX, "a"))
    with pytest.raises(GrammarError):
        matcher.consume(TOKENIZER.encode("b", add_special_tokens=False))


BAD: list[tuple[str, Any, str]] = [
    (JSON_SCHEMA, "{", "JSON"),
    (JSON_SCHEMA, "[]", "object"),
    (JSON_SCHEMA, '{"items":' * 5000 + "{}" + "}" * 5000, "nested|recursion"),
    (JSON_SCHEMA, '{"type": "array", "uniqueItems": true}', "uniqueItems"),
    (JSON_SCHEMA, '{"$ref": "http://host/schema"}', "schema"),
    (JSON_SCHEMA, '{"const": "\\ud800"}', "hex escape"),
    (JSON_SCHEMA, "false", "schema"),
    (JSON_SCHEMA, '{"$ref": "#"}', "no text matches"),
    (REGEX, "a(?!b)", "look-ahead"),
    (REGEX, "(", "unclosed"),
    (REGEX, "(" * 5000 + "a" + ")" * 5000, "nest"),
    (EBNF, "root ::= nobody", "nobody"),
    (EBNF, "rule ::= [a]", "root"),
    (EBNF, "root ::= " + "(" * 5000, "recursion"),
    (EBNF, 'root ::= "a', "end of input"),
    (EBNF, 'start: start "x"', "no text matches"),
]


@pytest.mark.parametrize(("kind", "text", "reason"), BAD)
def test_a_bad_grammar_says_in_a_line_what_is_wrong(kind: str, text: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason) as caught:
        COMPILER.check(Grammar(kind, text))
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


WRONG_SCHEMA = {"type": "object", "properties": {"a": {"not": {}}}}
WITH_SCHEMA = [
    schema(WRONG_SCHEMA),
    structural_tag({"format": {"type": "json_schema", "json_schema": WRONG_SCHEMA}}),
]


@pytest.mark.parametrize("grammar", WITH_SCHEMA, ids=lambda grammar: grammar.kind)
def test_an_error_shows_nothing_of_a_grammar_that_nobody_sent(grammar: Grammar) -> None:
    with pytest.raises(GrammarError) as caught:
        COMPILER.check(grammar)
    reason = 'failed to compile JSON schema: Unimplemented keys: ["not"]'
    assert str(caught.value).removeprefix("format.json_schema: ") == reason


def test_an_error_shows_the_place_in_a_grammar_of_the_clients_own() -> None:
    with pytest.raises(GrammarError, match=r"^at 2\(4\): unknown name: .* x: nobody"):
        COMPILER.check(Grammar(EBNF, "start: x\nx: nobody"))


def test_a_failure_of_the_library_is_told_in_a_line_without_a_backtrace() -> None:
    """A number may go on where one byte would begin the next rule, which is lazy."""
    grammar = Grammar(EBNF, "start: number (next number)*\nnumber: /[0-9]+/\nnext[lazy]: /.*a/")
    matcher = COMPILER.compile(grammar)
    for char in "1a":
        matcher.consume(TOKENIZER.encode(char, add_special_tokens=False))
    with pytest.raises(GrammarError, match=r"^the library failed: assertion failed: [^<>]*$"):
        matcher.masks()


def test_white_space_between_parts_of_json_has_an_end() -> None:
    matcher = COMPILER.compile(schema({"type": "array", "items": {"type": "null"}}))
    matcher.consume(TOKENIZER.encode("[" + 32 * " ", add_special_tokens=False))
    assert not {i for i in allowed(matcher.masks()) if TOKENIZER.decode([i]).isspace()}


def test_formats_of_texts_are_kept_or_notes_wherever_a_schema_stands() -> None:
    """None is a refusal: JSON Schema lets those that are not known be notes."""
    names = [*KEPT_FORMATS, "password", "path", "binary", "byte", "uuid4", "regex", "iri", "int32"]
    for name in names:
        text = {"type": "string", "format": name}
        value = {"type": "object", "properties": {"a": text}, "required": ["a"]}
        tag = structural_tag({"format": {"type": "json_schema", "json_schema": value}})
        for grammar in (schema(value), tag):
            matcher = COMPILER.compile(grammar)
            matcher.consume(TOKENIZER.encode('{"a":"', add_special_tokens=False))
            (quote,) = TOKENIZER.encode("(", add_special_tokens=False)
            takes_anything = quote in allowed(matcher.masks())
            assert takes_anything == (name not in KEPT_FORMATS), name
    COMPILER.check(schema({"type": "object", "required": None, "additionalProperties": None}))


def in_tag(schema: dict[str, Any]) -> Grammar:
    return structural_tag({"format": {"type": "json_schema", "json_schema": schema}})


OPTIONS = [{"lenient": True, "item_separator": "x"}, {"unknown": 1}, 7, None]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [schema, in_tag], ids=["json_schema", "structural_tag"])
def test_options_of_the_library_in_a_schema_are_ignored(kind: Any, options: Any) -> None:
    """At the top and in schemas within; a property of that name is one like any other."""
    inner = {"type": "array", "items": {"type": "null"}}
    wide = {"type": "array", "items": inner, "maxItems": 2}
    matcher = COMPILER.compile(kind({**wide, "items": {**inner, "x-guidance": options}}))
    same = COMPILER.compile(kind({**wide, "x-guidance": options}))
    plain = COMPILER.compile(kind(wide))
    for char in "[[null,null],[]]":
        assert matcher.masks() == same.masks() == plain.masks()
        for each in (matcher, same, plain):
            each.consume(TOKENIZER.encode(char, add_special_tokens=False))
    for at_top, within in ((options, {}), ({}, {"x-guidance": options})):
        items = {"type": "array", "uniqueItems": True, **within}
        with pytest.raises(GrammarError, match="uniqueItems"):
            COMPILER.check(kind({"type": "array", "items": items, "x-guidance": at_top}))
    named = {"type": "object", "properties": {"x-guidance": {"const": 5}}}
    matcher = COMPILER.compile(kind(named))
    matcher.consume(TOKENIZER.encode('{"x-guidance":', add_special_tokens=False))
    assert {TOKENIZER.decode([i]).strip() for i in allowed(matcher.masks())} <= {"", "5"}


def test_a_part_that_is_too_large_once_it_is_met_is_refused_behind_free_text_too() -> None:
    """It compiles: only its masks are too much."""
    pattern = "(a?){3000}a{3000}"
    free = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": "</t>"}
    elements = [free, {"type": "regex", "pattern": pattern}]
    tag = structural_tag({"format": {"type": "sequence", "elements": elements}})
    for grammar, place in ((Grammar(REGEX, pattern), ""), (tag, r"format.elements\[1\].pattern: ")):
        COMPILER.compile(grammar)
        with pytest.raises(GrammarError, match=f"^{place}.*too many expressions"):
            COMPILER.check(grammar)
