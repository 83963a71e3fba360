"""Reads calls from JSON objects: the keys that models use, and arguments that are nearly right."""

from __future__ import annotations

import re
from typing import NamedTuple

import msgspec

from sglang.srt.function_call.json_scanner import Found, JsonScanner

_FENCED = re.compile(r"```(?:json)?\s*(.*?)\s*```", re.DOTALL)


class FunctionCall(NamedTuple):
    """A call; the arguments are a JSON object as text, as the model wrote them where they are
    right."""

    name: str
    arguments: str


class CallObject(NamedTuple):
    """A call, and whether its object is rather the definition of a function."""

    call: FunctionCall
    is_definition: bool


class _Object(msgspec.Struct):
    name: str = ""
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()
    description: msgspec.Raw = msgspec.Raw()
    function: msgspec.Raw = msgspec.Raw()


def call_object(text: str) -> CallObject | None:
    """The call that a JSON object is; None: it is none."""
    try:
        found = msgspec.json.decode(text, type=_Object)
        if not found.name and found.function:
            found = msgspec.json.decode(found.function, type=_Object)
        arguments = _arguments_of(found)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
    if not found.name or arguments is None:
        return None
    return CallObject(FunctionCall(found.name, arguments), bool(found.description))


def _arguments_of(found: _Object) -> str | None:
    """The text of the arguments, which are an object, or the text of one, or nothing."""
    for raw in (found.arguments, found.parameters):
        text = bytes(raw).decode().strip()
        if text.startswith('"'):
            text = msgspec.json.decode(text, type=str).strip()
            return _object_in(text) if text else "{}"
        if text not in ("", "null"):
            return text if text.startswith("{") else None
    return "{}"


def _object_in(text: str) -> str | None:
    """The JSON object that a text is, in a fence or not."""
    fenced = _FENCED.fullmatch(text)
    text = fenced.group(1) if fenced else text
    scanner = JsonScanner()
    is_object = scanner.read(text) is Found.END and scanner.place == len(text)
    return scanner.mended(text) if is_object else None
