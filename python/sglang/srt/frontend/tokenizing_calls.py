"""Calls whose prompts are still being tokenized: aborts must reach them too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from sglang.srt.frontend.generate_body import CheckedRequest
from sglang.srt.messages.control import ABORT_MESSAGE
from sglang.srt.messages.requests import FinishReason
from sglang.srt.request_id import rids_for


@dataclass(frozen=True, slots=True)
class AbortSelector:
    """The requests that an abort ends: all, those of exactly this rid, or of this prefix."""

    rid: str | None = None
    abort_all: bool = False
    prefix: bool = False

    def selects(self, rid: str) -> bool:
        if self.abort_all or not self.rid:
            return self.abort_all
        return rid.startswith(self.rid) if self.prefix else rid == self.rid


class TokenizingCall:
    """One call before its samples exist; the scheduler does not know it yet.

    Attributes:
        rids: the name of each prompt's samples.
    """

    def __init__(self, request: CheckedRequest) -> None:
        self.rids = rids_for([prompt.rid for prompt in request.prompts])
        self._num_samples = [prompt.sampling_params.n for prompt in request.prompts]
        self._reasons: dict[int, FinishReason] = {}

    def abort(self, selector: AbortSelector, message: str | None) -> int:
        """Marks the selected prompts; returns how many samples they will have."""
        selected = [index for index, rid in enumerate(self.rids) if selector.selects(rid)]
        reason = FinishReason(type="abort", message=message or ABORT_MESSAGE)
        for index in selected:
            self._reasons.setdefault(index, reason)
        return sum(self._num_samples[index] for index in selected)

    def reason_of(self, index: int) -> FinishReason | None:
        """Returns why a prompt's samples end at once; None if they run."""
        return self._reasons.get(index)


class TokenizingCalls:
    """All calls that are being tokenized."""

    def __init__(self) -> None:
        self._calls: dict[int, TokenizingCall] = {}

    @contextmanager
    def registered(self, request: CheckedRequest) -> Iterator[TokenizingCall]:
        """Registers a call, so that aborts can reach it within the block."""
        call = TokenizingCall(request)
        self._calls[id(call)] = call
        try:
            yield call
        finally:
            del self._calls[id(call)]

    def abort(self, selector: AbortSelector, message: str | None) -> int:
        """Marks the selected prompts; returns how many samples they will have."""
        return sum(call.abort(selector, message) for call in self._calls.values())
