"""The bodies of calls that stop generation, end requests and give memory back; see `bodies.py`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from sglang.srt.frontend.errors import field_error
from sglang.srt.frontend.request_limits import check_encodable, check_short_text
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    LeaseEnd,
    MemoryOccupationReq,
    PauseGenerationReq,
    PauseMode,
)

MAX_WAIT_S = 3_600.0

PauseSeconds = Annotated[float, Meta(gt=0, le=86_400)]
AbortMessage = Annotated[str, Meta(max_length=512)]
MemoryTag = Literal["kv_cache", "weights", "cuda_graph"]


def check_printable(**texts: str | None) -> None:
    """Refuses texts, by their field's name, that have control characters or the like."""
    for field, text in texts.items():
        if text is not None:
            _check_printable(field, text)


def _check_printable(field: str, text: str) -> None:
    check_encodable(field, text)
    if not text.isprintable():
        raise field_error(field, "must have printable characters only")


# ---------------------------------------------------------------- pause, abort, flush


class PauseGenerationReqInput(msgspec.Struct, kw_only=True):
    """Body of `/pause_generation`.

    Attributes:
        mode: `abort` ends all requests with their partial output, `retract` makes running ones
            wait without KV, `in_place` (or `in-place`) freezes them, `drain` lets running ones
            finish first.
        lease_s: the pause ends by itself after that many seconds, unless it is asked for again.
        lease_end: at the end of the lease requests go on, or are aborted.
        drain_timeout_s: how long `drain` may take before it becomes `retract`; no limit if null.
    """

    mode: Literal[PauseMode, "in-place"] = "abort"
    lease_s: PauseSeconds | None = None
    lease_end: LeaseEnd = "continue"
    drain_timeout_s: PauseSeconds | None = None

    def __post_init__(self) -> None:
        if self.drain_timeout_s is not None and self.mode != "drain":
            raise field_error("drain_timeout_s", "goes with mode drain only")
        if self.lease_end != "continue" and self.lease_s is None:
            raise field_error("lease_end", "goes with lease_s only")

    def message(self) -> PauseGenerationReq:
        return PauseGenerationReq(
            mode="in_place" if self.mode == "in-place" else self.mode,
            lease_s=self.lease_s,
            lease_end=self.lease_end,
            drain_timeout_s=self.drain_timeout_s,
        )


class ContinueGenerationReqInput(msgspec.Struct, kw_only=True):
    """Body of `/continue_generation`."""

    def message(self) -> ContinueGenerationReq:
        return ContinueGenerationReq()


class AbortReqInput(msgspec.Struct, kw_only=True):
    """Body of `/abort_request`: a client's rid, or all requests. As in SGLang, no rid or an empty
    one names no request.

    Attributes:
        prefix: the rid names every request whose rid begins with it.
        abort_message, aborted_message: two names of the message in the finish reason of the ended
            requests.
    """

    rid: str | None = None
    abort_all: bool = False
    prefix: bool = False
    abort_message: AbortMessage | None = None
    aborted_message: AbortMessage | None = None

    @property
    def message(self) -> str | None:
        """Returns the message for the ended requests."""
        return self.abort_message if self.aborted_message is None else self.aborted_message

    def check(self, max_label_chars: int) -> None:
        """Checks the rules of several fields, and the length of the rid."""
        texts = {"abort_message": self.abort_message, "aborted_message": self.aborted_message}
        for name, text in texts.items():
            if text is not None:
                check_encodable(name, text)
        if len({*texts.values()} - {None}) > 1:
            raise field_error("aborted_message", "is another text than abort_message; give one")
        if self.abort_all or not (self.rid or self.prefix):
            return
        if not self.rid:
            raise field_error("rid", "give the beginning of a rid, or abort_all: true")
        check_short_text("rid", self.rid, max_label_chars)


def check_flush_timeout(value: str | float, field: str = "timeout") -> float:
    """Checks the seconds that a flush may wait for requests to end: 0 to `MAX_WAIT_S`."""
    try:
        seconds = math.nan if isinstance(value, bool) else float(value)
    except (ValueError, TypeError, OverflowError):
        seconds = math.nan
    if not 0 <= seconds <= MAX_WAIT_S:
        raise field_error(field, f"must be a number of seconds from 0 to {MAX_WAIT_S:g}")
    return seconds


# ---------------------------------------------------------------- memory


class MemoryOccupationReqInput(msgspec.Struct, kw_only=True):
    """Body of `/release_memory_occupation` and `/resume_memory_occupation`.

    Attributes:
        tags: the kinds of memory; null: all kinds. Graphs (`cuda_graph`) go with any other, and
            come back with the last of them.
    """

    tags: Annotated[list[MemoryTag], Meta(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if self.tags is not None and len(set(self.tags)) < len(self.tags):
            raise field_error("tags", "must name each kind of memory once")

    def release(self) -> MemoryOccupationReq:
        return MemoryOccupationReq(action="release", tags=self.tags)

    def resume(self) -> MemoryOccupationReq:
        return MemoryOccupationReq(action="resume", tags=self.tags)


# SGLang's names of it.
ReleaseMemoryOccupationReqInput = MemoryOccupationReqInput
ResumeMemoryOccupationReqInput = MemoryOccupationReqInput
