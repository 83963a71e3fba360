"""The id of an HTTP request: the client's `x-request-id`, or one that the server makes.

It goes with the context of the task that answers, so it need not be handed on.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

HEADER = b"x-request-id"
SAFE = re.compile(rb"[\w.:;,/|=+@#~-]+")  # ASCII that needs no escape in a log or a header


@dataclass(frozen=True, slots=True)
class RequestId:
    """Id of an HTTP request.

    Attributes:
        is_clients: the client has chosen it.
    """

    text: str
    is_clients: bool

    @classmethod
    def of(cls, headers: Iterable[tuple[bytes, bytes]], max_chars: int) -> RequestId:
        """Takes the id that a request brings, if it is one, short and safe; else a new one.

        Args:
            headers: names, in lower case, and values, as they were sent.
        """
        given = [value for name, value in headers if name == HEADER]
        if len(given) == 1 and len(given[0]) <= max_chars and SAFE.fullmatch(given[0]):
            return cls(given[0].decode("ascii"), True)
        return cls(new_id(), False)


CURRENT: ContextVar[RequestId | None] = ContextVar("request_id", default=None)


def new_id() -> str:
    """Makes an id that no other request has."""
    return uuid.uuid4().hex


def rids_for(given: Sequence[str | None]) -> list[str]:
    """Names the prompts of a body.

    A prompt without one gets the request's id. One that the client has chosen names a whole batch,
    as one `rid` does; from the server's own each prompt of a batch gets a name of its own.
    """
    request_id = CURRENT.get()
    if request_id is None:
        return [rid or new_id() for rid in given]
    shares = request_id.is_clients or len(given) == 1
    own = request_id.text
    return [rid or (own if shares else f"{own}-{index}") for index, rid in enumerate(given)]
