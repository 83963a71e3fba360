"""Steps of a model that several ranks hold.

The first rank decides, and runs its part of each step like the others. What it sends them is the
batch and the plan. Tokens are never sent: every rank has the logits of all tokens and draws with
the same noise, so all move their device rows alike.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.token_constraint import AllowedTokens, DraftedTokens, TokenConstraint
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch
from sglang.srt.workers.step_frames import (
    AllowedFrame,
    CallFrame,
    Frame,
    StepFrame,
    decoded,
    encoded,
)
from sglang.srt.workers.tp_worker import TpModelWorker

Send = Callable[[bytes], None]
Receive = Callable[[], bytes]


class BroadcastWorker:
    """The worker of the first rank.

    Args:
        worker: runs this rank's part.
        send: to all other ranks.
    """

    def __init__(self, worker: TpModelWorker, send: Send) -> None:
        self._worker = worker
        self._send = send

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self._worker.step_width(params)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        record = self._worker.begin(batch)
        sent, restricted = batch, None
        if batch.constraint is not None:
            sent = replace(batch, constraint=None)
            restricted = list(batch.constraint.requests)
            batch = replace(batch, constraint=_SentConstraint(batch.constraint, self._send))
        self._send(encoded(StepFrame(sent, record.plan, restricted)))
        return self._worker.run(batch, record)

    def observe(self, result: HostResult) -> None:
        self._worker.observe(result)


class _SentConstraint:
    """A constraint whose answer goes to the other ranks too (`TokenConstraint`)."""

    def __init__(self, constraint: TokenConstraint, send: Send) -> None:
        self.requests: Sequence[int] = constraint.requests
        self._constraint = constraint
        self._send = send

    def ask(self, drafted: list[DraftedTokens]) -> None:
        self._constraint.ask(drafted)

    def allowed(self, is_computed: Callable[[], bool]) -> AllowedTokens:
        allowed = self._constraint.allowed(is_computed)
        self._send(encoded(AllowedFrame(allowed)))
        return allowed


class _ReceivedConstraint:
    """The same on another rank."""

    def __init__(self, requests: Sequence[int], receive: Receive) -> None:
        self.requests = requests
        self._receive = receive

    def ask(self, drafted: list[DraftedTokens]) -> None:
        return

    def allowed(self, is_computed: Callable[[], bool]) -> AllowedTokens:
        frame = decoded(self._receive())
        assert isinstance(frame, AllowedFrame), "The first rank sends it in the middle of a step."
        return frame.allowed


class Calls(Protocol):
    """Runs a call between steps on all ranks; see `RankCalls`."""

    def __call__(self, name: str, *arguments: str) -> None: ...


def follow(
    worker: TpModelWorker, receive: Receive, calls: Mapping[str, Callable[..., None]]
) -> None:
    """Runs this rank's part of every step and call that the first rank sends, for ever.

    Args:
        calls: by name.
    """
    while True:
        frame: Frame = decoded(receive())
        if isinstance(frame, CallFrame):
            calls[frame.name](*frame.arguments)
            continue
        assert isinstance(frame, StepFrame), "An answer belongs to a step."
        batch = frame.batch
        if frame.restricted is not None:
            batch = replace(batch, constraint=_ReceivedConstraint(frame.restricted, receive))
        worker.follow(batch, frame.plan)
