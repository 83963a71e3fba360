"""Turns the raw bytes of a request's body into Python values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

import msgspec

from sglang.srt.frontend.errors import RequestError, field_error, shorten
from sglang.srt.frontend.large_bodies import NO_OBJECT, decode_body
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.unknown_fields import NOT_KNOWN, REFUSED, UnknownFields
from sglang.srt.garbage import paused_collections
from sglang.srt.sglang_surface import is_neutral

S = TypeVar("S", bound=msgspec.Struct)
MAX_EXPLAINED_BYTES = 262_144
MAX_EXACT = 2**53  # up to it a float represents each integer exactly
MISSING_FIELD = re.compile(r"Object missing required field `(\w+)`")
FLOAT_IN_FIELD = re.compile(r"got `float` - at `\$\.(\w+)")


def parse_json_object(raw: bytes, limits: RequestLimits | None = None) -> dict[str, Any]:
    """Parses a body that must be a JSON object.

    Args:
        limits: of the prompts that the body may have; a large one is counted before it is decoded.

    Raises:
        RequestError: saying what is wrong with it; NaN and Infinity are named with their field.
    """
    try:
        with paused_collections():
            return require_object(decode_body(raw, limits))
    except RecursionError:
        raise RequestError(None, "The body is nested too deeply.") from None
    except (UnicodeDecodeError, msgspec.DecodeError):  # by msgspec's version
        raise _malformed(raw) from None


def require_object(body: Any) -> dict[str, Any]:
    """Returns the body itself if it is a JSON object."""
    if not isinstance(body, dict):
        raise RequestError(None, NO_OBJECT)
    return body


def parse_struct(
    raw: bytes,
    struct: type[S],
    unsupported: Mapping[str, tuple[Any, ...]] | None = None,
    limits: RequestLimits | None = None,
) -> S:
    """Parses a body's bytes into a struct; see `parse_json_object` and `struct_of`."""
    return struct_of(parse_json_object(raw, limits), struct, unsupported or {})


def struct_of(
    body: Mapping[str, Any],
    struct: type[S],
    unsupported: Mapping[str, tuple[Any, ...]],
    unknown: UnknownFields = REFUSED,
) -> S:
    """Makes a parsed body into a struct; null stands for a field's default.

    Args:
        unsupported: fields without an effect here, each with its accepted values, those that ask
            for nothing.
        unknown: how unknown fields are handled.

    Raises:
        RequestError: naming the field that is unknown, not supported or of a wrong type.
    """
    check_known_fields(body, struct.__struct_fields__, unsupported, "", unknown)
    given = {k: v for k, v in body.items() if v is not None and k in struct.__struct_fields__}
    return convert_fields(given, struct)


def convert_fields(fields: Mapping[str, Any], struct: type[S], prefix: str = "") -> S:
    """Makes the struct of these fields. As in JSON Schema, 2.0 is an integer and means 2.

    Args:
        prefix: beginning of the client's names of the fields, such as `sampling_params.`.

    Raises:
        RequestError: naming the field that is missing, of a wrong type, out of its range or at
            odds with another.
    """
    try:
        with paused_collections():
            return _convert(fields, struct)
    except msgspec.ValidationError as error:
        if isinstance(error.__cause__, RequestError):  # raised by the struct's __post_init__
            raise error.__cause__ from None
        raise _type_error(error, prefix) from None
    except UnicodeEncodeError as error:  # JSON cannot hold such a text, callers in Python can
        holders = (
            name
            for name, value in fields.items()
            if error.object in (value if isinstance(value, list) else [value])
        )
        field = next(holders, "")
        raise field_error(
            f"{prefix}{field}".rstrip(".") or None, "half a surrogate pair is not text"
        ) from None


def _convert(fields: Mapping[str, Any], struct: type[S]) -> S:
    """`msgspec.convert`, and again with whole numbers in the field that has a float too many."""
    mended: set[str] = set()
    while True:
        try:
            return msgspec.convert(fields, struct)
        except msgspec.ValidationError as error:
            found = FLOAT_IN_FIELD.search(str(error))
            name = found and found[1]
            if name is None or name in mended or name not in fields:
                raise
            mended.add(name)
            fields = {**fields, name: _with_whole_numbers(fields[name])}


def _with_whole_numbers(value: Any) -> Any:
    """Returns a number, a list or a list of lists with integers in place of floats of integer
    value."""
    if isinstance(value, list):
        lists = (item if isinstance(item, list) else [item] for item in value)
        whole = [[_whole_number(number) for number in numbers] for numbers in lists]
        return [
            new if isinstance(old, list) else new[0] for old, new in zip(value, whole, strict=True)
        ]
    return _whole_number(value)


def _whole_number(value: Any) -> Any:
    is_whole = isinstance(value, float) and value.is_integer() and abs(value) <= MAX_EXACT
    return int(value) if is_whole else value


def _type_error(error: msgspec.ValidationError, prefix: str = "") -> RequestError:
    """Turns a msgspec error such as "Expected `int`, got `str` - at `$.n`" into a
    `RequestError`."""
    reason, _, path = str(error).partition(" - at ")
    # `[...]` stands for an entry of an object; the object's own name is enough.
    place = path.strip("`").rpartition("$")[2].removeprefix(".").replace("[...]", "")
    field = (prefix + place).rstrip(".")
    if missing := MISSING_FIELD.fullmatch(reason):
        return field_error(shorten(f"{field}.{missing[1]}".lstrip(".")), "is required")
    text = reason.replace("`", "").replace(" | ", " or ")
    return field_error(shorten(field) or None, text[:1].lower() + text[1:])


def check_known_fields(
    fields: Mapping[str, Any],
    handled: Collection[str],
    unsupported: Mapping[str, tuple[Any, ...]],
    prefix: str,
    unknown: UnknownFields = REFUSED,
    reason: Callable[[str], str] = lambda _: NOT_KNOWN,
) -> None:
    """Handles unknown fields, and refuses `unsupported` ones whose value asks for something; see
    `struct_of`.

    Args:
        reason: what is wrong with an unknown field of this name, as a predicate of it.
    """
    for name, value in fields.items():
        if name in handled:
            continue
        if name not in unsupported:
            unknown.meet(prefix + shorten(name), reason(name))
        elif not is_neutral(value, unsupported[name]):
            raise field_error(prefix + name, "is not supported here; leave it out")


def _malformed(raw: bytes) -> RequestError:
    """Returns why strict parsing failed. Python's own parser accepts the numbers that JSON does not
    have, and so finds them. It is slow, so a large body is not parsed again."""
    try:
        text = raw.decode()
    except UnicodeDecodeError:
        return RequestError(None, "The body is not valid UTF-8.")
    if len(raw) > MAX_EXPLAINED_BYTES:
        return RequestError(None, "The body is not valid JSON.")
    try:
        field = _find_non_finite(json.loads(text), "")
    except (ValueError, RecursionError):
        return RequestError(None, "The body is not valid JSON.")
    if field is None:
        return RequestError(None, "The body is not valid JSON.")
    return field_error(field or None, "must be a finite number")


def _find_non_finite(value: Any, path: str) -> str | None:
    """Returns the path of a NaN or an infinity, or None."""
    if isinstance(value, float):
        return None if math.isfinite(value) else path
    if isinstance(value, dict):
        entries = ((f"{path}.{shorten(key)}".lstrip("."), item) for key, item in value.items())
    elif isinstance(value, list):
        entries = ((f"{path}[{index}]", item) for index, item in enumerate(value))
    else:
        return None
    return next((hit for name, item in entries if (hit := _find_non_finite(item, name))), None)
