"""Grammars of tests, and what their outputs must match by other libraries."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema_rs

from sglang.srt.constrained.grammar_messages import GrammarSetup
from sglang.srt.model_config import resolve_model_path
from sglang.srt.sampling.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar

DEMO = resolve_model_path("demo")
DEMO_VOCAB_SIZE, DEMO_EOS, DEMO_MASK = 4096, 1, 2
SETUP = GrammarSetup(
    tokenizer_path=str(DEMO),
    vocab_size=DEMO_VOCAB_SIZE,
    eos_token_ids=[DEMO_EOS],
    never_allowed=[DEMO_MASK],
)

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "next": {"anyOf": [{"type": "null"}, {"type": "boolean"}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
}
PATTERN = r"[a-c]{2,4}(-\d{2})?|é+x"
CALCULATION = 'root ::= number (" + " number){0,3}\nnumber ::= [0-9] | [1-9] [0-9]'


def schema(value: Any) -> Grammar:
    return Grammar(JSON_SCHEMA, json.dumps(value))


def structural_tag(value: Any) -> Grammar:
    return Grammar(STRUCTURAL_TAG, json.dumps({"type": STRUCTURAL_TAG, **value}))


def matches_schema(value: dict[str, Any]) -> Callable[[str], bool]:
    validator = jsonschema_rs.Draft202012Validator(value)

    def is_match(text: str) -> bool:
        try:
            return validator.is_valid(json.loads(text))
        except ValueError:
            return False

    return is_match


def full_match(pattern: str) -> Callable[[str], bool]:
    expression = re.compile(pattern)
    return lambda text: expression.fullmatch(text) is not None


CASES: dict[str, tuple[Grammar, Callable[[str], bool]]] = {
    "json_schema": (schema(PERSON), matches_schema(PERSON)),
    "regex": (Grammar(REGEX, PATTERN), full_match(PATTERN)),
    "ebnf": (Grammar(EBNF, CALCULATION), full_match(r"[1-9]?\d( \+ [1-9]?\d){0,3}")),
}
# Each compiles for half a minute, or uses up all of the stack, unless somebody ends it.
ENDLESS = Grammar(EBNF, "start: A\nA: " + " & ".join(f"/(.*a.{{{i}}}b)*/" for i in range(1, 12)))
RULES = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(3000))
BOTTOMLESS = Grammar(EBNF, f'start: r0\n{RULES}\nr3000: "x"')
