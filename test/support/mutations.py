"""Turns valid examples into hostile inputs: values of JSON at any place, and bytes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import msgspec

NASTY: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 0.5, -0.0, 1e-320, 1e308, float("nan"), float("inf")),
    *(255, 4096, 2**31 - 1, 2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 2**64, 10**400),
    *("", " ", "\0", "\n", "\ud800", "\u202eé😀", "null", "NaN", "1e999", "a" * 5000, "\\", "'"),
    *("../../etc/passwd", "/dev/zero", "/proc/self/mem", "file:///etc", "http://127.0.0.1:1/"),
    *("(a+)+$", "[" * 50, "(?<=a*)", "{{ 1/0 }}", "%n%s", "<mask>", "<bos>", "__class__"),
    *([], {}, [[]], [None], {"": None}, {"a": {}}, [0] * 2000, [""] * 300),
)
DEEPEST = 3000
MAX_BYTES = 1 << 18
SPLICES = (b"\0", b"\xff", b"\xc3", b'"', b"{", b"[", b"}", b"]", b",", b"\\u", b"-", b"1e999")


def nasty(chooser: random.Random) -> Any:
    """Draws a value that many do not expect."""
    return _copied(chooser.choice(NASTY))


def deep(chooser: random.Random) -> Any:
    """Makes objects or lists, one in the other."""
    value = nasty(chooser)
    for _ in range(chooser.choice([5, 70, 150])):
        value = [value] if chooser.random() < 0.5 else {"a": value}
    return value


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yields each container of a value with each of its keys."""
    match value:
        case dict():
            for key, part in value.items():
                yield value, key
                yield from places(part)
        case list():
            for key, part in enumerate(value):
                yield value, key
                yield from places(part)


def _copied(value: Any) -> Any:
    match value:
        case dict():
            return {key: _copied(part) for key, part in value.items()}
        case list():
            return [_copied(part) for part in value]
    return value


def mutated(chooser: random.Random, value: Any) -> Any:
    """Changes a copy of a value of JSON at a few places."""
    value = [_copied(value)]
    for _ in range(chooser.choice([1, 1, 1, 2, 3, 5])):
        found = list(places(value))
        if not found:
            break
        _mutate(chooser, *chooser.choice(found), found)
    return value[0] if value else None


def _mutate(chooser: random.Random, holder: Any, key: Any, others: list[tuple[Any, Any]]) -> None:
    part = holder[key]
    draw = chooser.random()
    if draw < 0.1:
        del holder[key]
    elif draw < 0.2 and isinstance(holder, dict):
        holder[chooser.choice(["", "no_such", "\ud800", "x" * 3000, f"{key} "])] = _copied(part)
    elif draw < 0.3:
        holder[key] = deep(chooser)
    elif draw < 0.45:
        donor, place = chooser.choice(others)
        if place in donor if isinstance(donor, dict) else place < len(donor):
            holder[key] = _copied(donor[place])
    elif draw < 0.7:
        holder[key] = _near(chooser, part)
    else:
        holder[key] = nasty(chooser)


def _near(chooser: random.Random, part: Any) -> Any:
    """A value of the same type that may be beyond a limit."""
    match part:
        case bool() | None:
            return chooser.choice([None, True, False, 0, "true"])
        case int() if abs(part) < 2**70:
            return chooser.choice(
                [part + 1, part - 1, -part, part * 1000, part + 0.5, str(part)[:9]]
            )
        case float():
            return chooser.choice([-part, part * 1e300, part + 1, part / 3, str(part)])
        case str():
            return spoilt(chooser, part.encode("utf-8", "surrogatepass")).decode("utf-8", "replace")
        case list():
            return chooser.choice([part * 2, part * 100, part[:-1], [part], part[::-1]])
        case int():
            return -part
        case dict():
            return chooser.choice([[part], {**part, "more": 1}, list(part), {}])


def as_json(chooser: random.Random, value: Any) -> bytes:
    """Writes a value of JSON, sometimes in another way than others do, or broken."""
    try:
        text = json.dumps(value, ensure_ascii=chooser.random() < 0.8)
    except RecursionError:
        text = "[" * DEEPEST
    raw = text.encode("utf-8", "surrogatepass")
    draw = chooser.random()
    if draw < 0.1:
        raw = spoilt(chooser, raw)
    elif draw < 0.12:
        raw = chooser.choice(
            [b"\xef\xbb\xbf" + raw, raw.decode("utf-8", "replace").encode("utf-16")]
        )
    elif draw < 0.13:
        raw = chooser.choice([b"[", b'{"a":']) * chooser.choice([100, DEEPEST, 50_000])
    elif draw < 0.15 and raw.startswith(b"{") and len(raw) > 2:
        raw = b"{" + raw[1:-1] + b"," + raw[1:]  # every key twice
    return raw


def spoilt(chooser: random.Random, raw: bytes) -> bytes:
    """Changes bytes at a few places: flips, cuts, repeats, inserts."""
    data = bytearray(raw[:MAX_BYTES])
    for _ in range(chooser.choice([1, 1, 2, 4, 16])):
        at = chooser.randrange(len(data) + 1)
        end = min(len(data), at + chooser.choice([1, 2, 8, 64]))
        draw = chooser.random()
        if draw < 0.35 and at < len(data):
            data[at] = chooser.choice([data[at] ^ 1 << chooser.randrange(8), 0, 255, 127])
        elif draw < 0.5:
            del data[at : chooser.choice([end, len(data)])]
        elif draw < 0.65:
            data[at:at] = data[at:end] * chooser.choice([1, 3, 200])
        elif draw < 0.8:
            data[at:at] = chooser.choice(SPLICES)
        else:
            data[at:at] = chooser.randbytes(chooser.choice([1, 4, 8]))
    return bytes(data[:MAX_BYTES])


def as_msgpack(chooser: random.Random, value: Any) -> bytes:
    """Writes a value of JSON as a frame; what msgpack cannot hold becomes text."""
    try:
        raw = msgspec.msgpack.encode(value)
    except (OverflowError, UnicodeEncodeError, RecursionError, ValueError):
        raw = msgspec.msgpack.encode(repr(value)[:1000].encode("utf-8", "replace"))
    return spoilt(chooser, raw) if chooser.random() < 0.5 else raw
