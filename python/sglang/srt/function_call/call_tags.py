"""Structural tags that hold calls of functions to a model's form and to the functions' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.function_call.formats import ARGUMENTS_MARK, CallFormat
from sglang.srt.sampling.grammar import JSON_WHITESPACE, STRUCTURAL_TAG

_PLACE = re.compile(rf"sampling_params\.{STRUCTURAL_TAG}: (format[\w.\[\]]*)")
_STEP = re.compile(r"\[(\d+)\]|(\w+)")


class HeldFunction(NamedTuple):
    """A function whose calls are held to a schema.

    Attributes:
        schema: of the arguments, which are an object.
        place: where the client says so.
    """

    name: str
    schema: dict[str, Any]
    place: str


def forced_calls(
    form: CallFormat, functions: Sequence[HeldFunction], is_single: bool
) -> dict[str, Any]:
    """The structural tag of outputs that are calls, one at least, and nothing else."""
    calls = _calls(form, functions, is_single)
    if not form.closing and not form.is_bare:
        calls = {
            "type": "sequence",
            "elements": [_const(_opening(form)), calls, _const("]" if form.in_list else "")],
        }
    return {"type": STRUCTURAL_TAG, "format": calls}


def calls_or_content(
    form: CallFormat, functions: Sequence[HeldFunction], is_single: bool, content: dict[str, Any]
) -> dict[str, Any]:
    """The structural tag of outputs that are calls alone, or JSON of this format alone."""
    if form.is_bare:
        tags = [_spaced_call(form, function) for function in functions]
        calls = _separated(form, tags, is_single)
    else:
        calls = forced_calls(form, functions, is_single)
    return {"type": STRUCTURAL_TAG, "format": {"type": "or", "elements": [calls, content]}}


def calls_in_text(form: CallFormat, functions: Sequence[HeldFunction]) -> dict[str, Any]:
    """The structural tag of outputs that are anything, with calls after each marker."""
    if form.closing:
        tags = [_call(form, function) for function in functions]
    else:
        calls = _calls(form, functions, is_single=False)
        tags = [_tag(_opening(form), calls, "]" if form.in_list else "")]
    for function in functions if form.named else ():
        for mark in ("", ARGUMENTS_MARK):
            tags.append(_tag(f"{form.marker}{function.name}{mark}", _schema(function), ""))
    triggered = {"type": "triggered_tags", "triggers": [form.marker], "tags": tags}
    return {"type": STRUCTURAL_TAG, "format": triggered}


def source_of_error(
    message: str, tag: dict[str, Any], sources: Sequence[tuple[str, object]]
) -> tuple[str, str] | None:
    """Finds what an error message means that names a place in a structural tag.

    Args:
        sources: parts of the tag, each with the client's name for it.

    Returns:
        The name of the part that the place is in, and what the message says of the part.
    """
    place = _PLACE.match(message)
    if place is None:
        return None
    found: Any = tag
    for step in _STEP.finditer(message, place.start(1), place.end(1)):
        index, key = step.groups()
        if index is None and key not in found:
            return None
        found = found[key] if index is None else found[int(index)]
        for name, part in sources:
            if found is part:
                return name, message[step.end() :].lstrip(".: ").removesuffix(".")
    return None


def _calls(form: CallFormat, functions: Sequence[HeldFunction], is_single: bool) -> dict[str, Any]:
    return _separated(form, [_call(form, function) for function in functions], is_single)


def _separated(form: CallFormat, tags: list[dict[str, Any]], is_single: bool) -> dict[str, Any]:
    separator = "\n" if form.closing else ", " if form.in_list else f"{form.separator} "
    return {
        "type": "tags_with_separator",
        "tags": tags,
        "separator": separator,
        "at_least_one": True,
        "stop_after_first": is_single,
    }


def _call(form: CallFormat, function: HeldFunction) -> dict[str, Any]:
    """A call; between its marks, where each call has its own."""
    begin = f'{{"name": {json.dumps(function.name)}, "{form.arguments}": '
    if not form.closing:
        return _tag(begin, _schema(function), "}")
    return _tag(f"{form.marker}\n{begin}", _schema(function), f"}}\n{form.closing}")


def _spaced_call(form: CallFormat, function: HeldFunction) -> dict[str, Any]:
    """A call without a mark, in the pieces that other JSON has too, so that the grammar library
    need not know from the first on which of both it is."""
    words = ['"name"', ":", json.dumps(function.name), ",", json.dumps(form.arguments), ":"]
    space = {"type": "regex", "pattern": JSON_WHITESPACE}
    pieces = [part for word in words for part in (space, _const(word))]
    elements = [*pieces, space, _schema(function), space]
    return _tag("{", {"type": "sequence", "elements": elements}, "}")


def _opening(form: CallFormat) -> str:
    return form.marker + "[" * form.in_list


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema(function: HeldFunction) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": function.schema}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
