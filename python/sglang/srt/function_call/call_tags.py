"""Structural tags that hold calls of functions to a model's form and to the functions' schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from sglang.srt.function_call.formats import ARGUMENTS_MARK, CallFormat
from sglang.srt.sampling.grammar import STRUCTURAL_TAG

_PLACE = re.compile(rf"sampling_params\.{STRUCTURAL_TAG}: (format\S*\.json_schema): ")
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


def calls_in_text(form: CallFormat, functions: Sequence[HeldFunction]) -> dict[str, Any]:
    """The structural tag of outputs that are anything, with calls behind each marker. Not for a
    form whose calls need no marker."""
    assert not form.is_bare
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


def wrong_schema(
    message: str, tag: dict[str, Any], functions: Sequence[HeldFunction]
) -> tuple[HeldFunction, str] | None:
    """The function whose schema an error message names by its place in a tag, and the reason."""
    place = _PLACE.match(message)
    if place is None:
        return None
    found: Any = tag
    for index, name in _STEP.findall(place.group(1)):
        found = found[int(index)] if index else found[name]
    function = next(each for each in functions if each.schema is found)
    return function, message[place.end() :].removesuffix(".")


def _calls(form: CallFormat, functions: Sequence[HeldFunction], is_single: bool) -> dict[str, Any]:
    separator = "\n" if form.closing else ", " if form.in_list else f"{form.separator} "
    return {
        "type": "tags_with_separator",
        "tags": [_call(form, function) for function in functions],
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


def _opening(form: CallFormat) -> str:
    return form.marker + "[" * form.in_list


def _tag(begin: str, content: dict[str, Any], end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def _schema(function: HeldFunction) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": function.schema}


def _const(text: str) -> dict[str, Any]:
    return {"type": "const_string", "value": text}
