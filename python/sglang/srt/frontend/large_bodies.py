"""Large bodies: counts their contents before decoding, and decodes them field by field.

Decoding blocks every other thread, the event loop's too. So a field that asks for too much is
refused by its bytes, and lists of token ids are decoded one by one.
"""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.frontend.request_limits import RequestLimits, check_batch_size, check_num_tokens

COUNTED_BYTES = 65_536  # a smaller body or field takes some milliseconds at most
MAX_FIELDS = 1000
MAX_VALUES = 1_000_000  # of a field other than prompts; this many take 0.1 s
PROMPT_FIELDS = frozenset(("text", "input_ids", "prompt", "tokens"))
ENTRIES = "the number of entries"
NO_OBJECT = "The body must be a JSON object."
NOT_IDS = "must be token ids, or a list of lists of token ids"


def decode_body(raw: bytes, limits: RequestLimits | None) -> Any:
    """Decodes a JSON text.

    Args:
        limits: limits of the prompts in it; None for a body without prompts.

    Raises:
        RequestError: if a large body is no object, or has too many prompts, tokens in a prompt,
            values or fields.
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: if it is no JSON.
    """
    if len(raw) <= COUNTED_BYTES:
        return msgspec.json.decode(raw)
    if not raw.lstrip().startswith(b"{"):
        raise RequestError(None, NO_OBJECT)
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    if len(fields) > MAX_FIELDS:
        raise field_error(None, f"The body has more than {MAX_FIELDS} fields")
    return {name: _decode_field(name, value, limits) for name, value in fields.items()}


def _decode_field(name: str, field: msgspec.Raw, limits: RequestLimits | None) -> Any:
    view = memoryview(field)
    if len(view) <= COUNTED_BYTES or bytes(view[:1]) == b'"':  # one text is quick
        return msgspec.json.decode(view)
    raw = bytes(view)
    marks = _without_strings(name, raw)
    if limits is None or name not in PROMPT_FIELDS or not raw.startswith(b"["):
        _check_num_values(name, sum(map(marks.count, (b",", b"[", b"{"))))
        return msgspec.json.decode(raw)
    num_commas, num_lists = marks.count(b","), marks.count(b"[") - 1
    if b'"' in raw:
        check_batch_size(name, num_commas + 1, limits, ENTRIES)
        return msgspec.json.decode(raw)
    if num_lists == 0:
        check_num_tokens(name, num_commas + 1, limits)
        return msgspec.json.decode(raw)
    check_batch_size(name, num_lists, limits, ENTRIES)
    return _decode_id_lists(name, raw, limits)


def _without_strings(name: str, raw: bytes) -> bytes:
    """Returns the parts of a JSON text outside of its strings."""
    if b'"' not in raw:
        return raw
    if b"\\" in raw:
        raw = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    _check_num_values(name, raw.count(b'"') // 2)
    return b"".join(raw.split(b'"')[::2])


def _check_num_values(name: str, num_values: int) -> None:
    if num_values > MAX_VALUES:
        raise field_error(name, f"has more than {MAX_VALUES} values")


def _decode_id_lists(name: str, raw: bytes, limits: RequestLimits) -> list[Any]:
    """Decodes the lists of a list, none of which holds a string. Other threads run between two of
    them."""
    lists: list[Any] = []
    end = 0
    while (start := raw.find(b"[", end + 1)) > 0:
        field = f"{name}[{len(lists)}]"
        if raw[end + 1 : start].strip() != (b"," if lists else b""):
            raise field_error(name, NOT_IDS)
        end = raw.find(b"]", start)
        check_num_tokens(field, raw.count(b",", start, end) + 1, limits)
        try:
            lists.append(msgspec.json.decode(raw[start : end + 1]))
        except msgspec.DecodeError:  # the body is JSON, so these are lists in lists
            raise field_error(field, "must be a list of token ids") from None
    if raw[end + 1 :].strip() != b"]":
        raise field_error(name, NOT_IDS)
    return lists
