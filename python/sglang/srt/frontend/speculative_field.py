"""Reads and checks `speculative`, with which a request says what is drafted for it."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.frontend.body_parsing import check_known_fields, convert_fields
from sglang.srt.frontend.errors import field_error, shorten
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.unknown_fields import UnknownFields
from sglang.srt.sampling.sampling_params import Speculative

SPECULATIVE = "speculative"
_NO_DRAFTER = (
    "the server has no drafter: leave it out, or start the server with --speculative-algorithm"
)


def read_speculative(fields: dict[str, Any], prefix: str, unknown: UnknownFields) -> None:
    """Makes the `speculative` object among the fields of a body into a `Speculative`; null stands
    for the default of a field.

    Args:
        prefix: beginning of the client's names of the fields.

    Raises:
        RequestError: naming the field that is unknown, of a wrong type or out of its range.
    """
    value = fields.get(SPECULATIVE)
    if value is None or isinstance(value, Speculative):
        return
    if not isinstance(value, dict):
        raise field_error(prefix + SPECULATIVE, 'must be an object, such as {"enabled": false}')
    known, inner = Speculative.__struct_fields__, f"{prefix}{SPECULATIVE}."
    reason = f"is none of {', '.join(known[:-1])} and {known[-1]}"
    check_known_fields(value, known, {}, inner, unknown, lambda _: reason)
    given = {name: value[name] for name in known if value.get(name) is not None}
    fields[SPECULATIVE] = convert_fields(given, Speculative, inner)


def check_speculative(choice: Speculative, limits: RequestLimits, prefix: str) -> Speculative:
    """Checks that the server has the drafter, and returns the choice with the server's own name of
    it; who wants no drafts may ask any server.

    Raises:
        RequestError: naming the field.
    """
    if choice.is_off or choice == Speculative():
        return choice
    if not limits.drafters:
        instead = "; for multi-token prediction give mtp_enabled" if limits.mtp_max_k else ""
        raise field_error(prefix + SPECULATIVE, _NO_DRAFTER + instead)
    if choice.drafter is None:
        return choice
    name = limits.drafters.get(choice.drafter.lower())
    if name is None:
        raise field_error(
            f"{prefix}{SPECULATIVE}.drafter",
            f"the server has no drafter {shorten(choice.drafter)!r}; name"
            f" {' or '.join(dict.fromkeys(limits.drafters.values()))}, or leave it out",
        )
    return msgspec.structs.replace(choice, drafter=name)
