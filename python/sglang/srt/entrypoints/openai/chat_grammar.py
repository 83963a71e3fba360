"""Grammars for the answers of a chat: calls of functions, content of a form, reasoning before them.

A client's own grammar is used as it is where it is all. Else a structural tag of the server's has
its parts, and errors that name a place in it are told in the client's terms.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.chat_messages import ToolUse
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.function_call.call_tags import (
    calls_in_text,
    calls_or_content,
    forced_calls,
    source_of_error,
)
from sglang.srt.function_call.formats import CallFormat
from sglang.srt.parser.reasoning_parser import Outset, ReasoningFormat
from sglang.srt.sampling.grammar import (
    EBNF,
    GRAMMAR_FIELDS,
    JSON_SCHEMA,
    REGEX,
    STRUCTURAL_TAG,
    Grammar,
)
from sglang.srt.sampling.sampling_params import SamplingParams

GAP = "\n\n"  # between reasoning and what a grammar holds


@dataclasses.dataclass(frozen=True)
class AnswerGrammar:
    """A structural tag of the server's for the answers of a chat.

    Attributes:
        tag: None: there is none, and a client's grammar is used as it is.
        is_free: an answer may be any text; only calls in it are held.
        source: the field that an error without a place in the tag is of.
        parts: what the client gave of the tag, by the client's name for it.
    """

    tag: dict[str, Any] | None = None
    is_free: bool = False
    source: str = ""
    parts: tuple[tuple[str, object], ...] = ()

    def in_place_of_others(self, params: SamplingParams) -> SamplingParams:
        """Sampling parameters with this grammar and no other."""
        grammars = dict.fromkeys(GRAMMAR_FIELDS) | {
            STRUCTURAL_TAG: msgspec.json.encode(self.tag).decode()
        }
        return msgspec.structs.replace(params, **grammars)

    def behind_reasoning(
        self, name: str, grammar: Grammar, form: ReasoningFormat, outset: Outset
    ) -> AnswerGrammar:
        """The tag of answers that may reason first, or have to; then this grammar holds.

        Args:
            name: the client's for the grammar.
            grammar: the client's, if there is no tag.
        """
        if self.tag is not None:
            content, parts = self.tag, self.parts
        else:
            content, part = format_of(name, grammar)
            parts = ((name, part),)
        begin = "" if outset.is_open else form.start
        thought = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": form.end}
        before = {"type": "sequence", "elements": [thought, _const(GAP)]}
        if not outset.is_open:
            before = {"type": "or", "elements": [before, _const("")]}
        whole = {"type": "sequence", "elements": [before, content]}
        tag = {"type": STRUCTURAL_TAG, "format": whole}
        return AnswerGrammar(tag, source=self.source or name, parts=parts)

    def translate(self, error: RequestError) -> RequestError:
        """An error of `/generate` without the name of the tag, which no client has sent."""
        if self.tag is None or STRUCTURAL_TAG not in error.message:
            return error
        found = source_of_error(error.message, self.tag, self.parts)
        if found is not None:
            return field_error(*found)
        field = error.field
        if field is not None and STRUCTURAL_TAG in field:
            field = self.source
        message = error.message.replace(f"sampling_params.{STRUCTURAL_TAG}", self.source)
        message = message.replace(STRUCTURAL_TAG, self.source)
        return error.in_terms(field, message)


def grammar_of_calls(
    form: CallFormat, tools: ToolUse, content: tuple[str, Grammar] | None
) -> AnswerGrammar:
    """Makes the grammar of answers that may have calls.

    Args:
        content: the form of an answer without calls, and the field that says so.

    Raises:
        RequestError: if calls cannot be held as the client wants them to be.
    """
    parts = tuple((held.place, held.schema) for held in tools.held)
    is_single = tools.max_calls == 1
    if not tools.held:
        return AnswerGrammar()
    if tools.must_call:
        return AnswerGrammar(
            forced_calls(form, tools.held, is_single), source="tool_choice", parts=parts
        )
    if content is not None:
        name, grammar = content
        answer, part = format_of(name, grammar)
        tag = calls_or_content(form, tools.held, is_single, answer)
        return AnswerGrammar(tag, source=name, parts=(*parts, (name, part)))
    if form.is_bare and tools.strict is not None:
        raise field_error(
            tools.strict,
            "needs a call that must be, as this form's calls begin with no mark of their own:"
            ' set tool_choice "required" or a function, or leave it out',
        )
    source = tools.strict or "tool_choice"
    return AnswerGrammar(calls_in_text(form, tools.held), True, source, parts)


def format_of(name: str, grammar: Grammar) -> tuple[dict[str, Any], object]:
    """A client's grammar as a format of a structural tag, and what in it is the client's own.

    Args:
        name: the client's for the grammar.

    Raises:
        RequestError: if its text is no JSON, where it has to be.
    """
    if grammar.kind == REGEX:
        return {"type": "regex", "pattern": grammar.text}, grammar.text
    if grammar.kind == EBNF:
        return {"type": "grammar", "grammar": grammar.text}, grammar.text
    try:
        value = msgspec.json.decode(grammar.text)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        raise field_error(name, "is not JSON, or is nested too deeply") from None
    if grammar.kind == JSON_SCHEMA:
        return {"type": JSON_SCHEMA, JSON_SCHEMA: value}, value
    if not isinstance(value, dict) or value.get("type") != STRUCTURAL_TAG:
        raise field_error(name, f'must be an object whose type is "{STRUCTURAL_TAG}"')
    return value, value


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
