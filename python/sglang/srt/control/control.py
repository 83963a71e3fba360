"""Control messages: one typed message, one handler."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang.srt.control.cache_flush import CacheFlusher
from sglang.srt.control.engine_state import BetweenStepsQueue, EngineState
from sglang.srt.control.internal_state import SchedulerStats, read_internal_state
from sglang.srt.control.memory_control import MemoryControl, MemoryPart
from sglang.srt.control.pause import PauseController
from sglang.srt.control.profile_control import ProfileControl, Profiler
from sglang.srt.control.weight_control import POLL_S, ModelWeights, WeightControl
from sglang.srt.control.weight_inspection import WeightInspection
from sglang.srt.messages.control import (
    ABORT_MESSAGE,
    DRAFT_MODEL,
    AbortReq,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthPing,
)
from sglang.srt.scheduling.batch_result_processor import BatchResultProcessor
from sglang.srt.scheduling.invariants import InvariantChecker
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.scheduling.schedule_policy import NewTokenRatio

GRAMMAR_POLL_S = 0.002  # interval at which a waiting scheduler checks for ready grammars


@dataclass(frozen=True, kw_only=True)
class ModelResources:
    """The parts below the scheduler that control calls change.

    Attributes:
        memory: the parts that can be given back, by tag.
        profiler: profiles the steps; None: there is none.
    """

    weights: ModelWeights
    memory: Mapping[str, MemoryPart]
    profiler: Profiler | None = None


class Control:
    """Handlers of all messages but requests to generate.

    Args:
        reply: sends a message to the front end.
        ping: passes a health ping on to the detokenizer.
        clock: seconds, for deadlines.
    """

    def __init__(
        self,
        *,
        lifecycle: RequestLifecycle,
        processor: BatchResultProcessor,
        checker: InvariantChecker,
        ratio: NewTokenRatio,
        stats: SchedulerStats,
        resources: ModelResources,
        reply: Callable[[Any], None],
        ping: Callable[[Any], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lifecycle = lifecycle
        self._processor = processor
        self._checker = checker
        self._ratio = ratio
        self._stats = stats
        self._reply = reply
        self._clock = clock
        if resources.weights.has_draft:
            lifecycle.set_weight_version(lifecycle.weight_version, DRAFT_MODEL)
        self.state = EngineState(lifecycle, reply)
        self._between_steps = BetweenStepsQueue()
        shared = (self.state, lifecycle, self._between_steps)
        self._pause = PauseController(*shared, self._abort_all, reply, clock)
        self._flusher = CacheFlusher(*shared, self._reset_counters, reply, clock)
        self._weights = WeightControl(resources.weights, *shared, self._abort_all, reply)
        memory = MemoryControl(resources.memory, *shared, reply)
        inspection = WeightInspection(resources.weights, *shared, reply)
        self._profile = ProfileControl(resources.profiler, stats, self._between_steps, reply)
        self.handlers: dict[type, Callable[[Any], None]] = {
            AbortReq: self._abort,
            GetInternalStateReq: self._internal_state,
            HealthPing: ping,
            **self._pause.handlers,
            **self._flusher.handlers,
            **self._weights.handlers,
            **memory.handlers,
            **inspection.handlers,
            **self._profile.handlers,
        }

    @property
    def may_launch(self) -> bool:
        return self.state.may_launch and not self._between_steps

    @property
    def has_work(self) -> bool:
        """Tells whether a turn of the loop would do something without a message or a deadline."""
        if self._between_steps:
            return True
        if not self.state.may_launch:
            return False
        lifecycle, admits = self._lifecycle, self.state.admits
        can_start = any(admits or req.must_finish for req in lifecycle.startable)
        return can_start or bool(lifecycle.steppable)

    @property
    def wait_s(self) -> float | None:
        """Returns how long the scheduler may wait for a message, with nothing to do; None for any
        time."""
        if self._weights.is_busy:
            return POLL_S
        if self._lifecycle.awaits_grammars:
            return GRAMMAR_POLL_S
        if self.has_work:  # it may have come a moment ago
            return 0.0
        deadline = min(self._pause.next_deadline, self._flusher.next_deadline)
        return None if deadline == math.inf else max(0.0, deadline - self._clock())

    def tick(self) -> None:
        """Looks at deadlines and at the work of threads."""
        self._pause.tick()
        self._weights.tick()
        self._flusher.tick()
        self._profile.tick()

    def between_steps(self) -> None:
        """With no step in flight, does the work that has waited for that, and what follows from
        it."""
        self.tick()
        while self._between_steps:
            self._between_steps.run()
            self.tick()
        if not self.state.may_launch:
            self._stats.on_idle()
        self._processor.flush()

    def _abort(self, message: AbortReq) -> None:
        """Ends the requests that the message names, with partial output; unknown names change
        nothing."""
        wanted = set(message.req_ids)
        for req in (*self._lifecycle.running, *self._lifecycle.waiting):
            is_named = req.req_id in wanted or (message.rid is not None and req.rid == message.rid)
            if message.abort_all or is_named:
                text = message.aborted_message or ABORT_MESSAGE
                self._processor.abort(req, text, status_code=None, err_type=None)
        self._processor.flush()

    def _abort_all(self, text: str) -> None:
        self._abort(AbortReq(abort_all=True, aborted_message=text))

    def _reset_counters(self) -> None:
        self._stats.reset()
        self._ratio.reset()

    def _internal_state(self, message: GetInternalStateReq) -> None:
        self._reply(
            GetInternalStateReqOutput(call_id=message.call_id, internal_state=self.internal_state())
        )

    def internal_state(self) -> dict[str, Any]:
        """`internal_states[0]` of `/server_info`."""
        return read_internal_state(
            lifecycle=self._lifecycle,
            checker=self._checker,
            ratio=self._ratio,
            stats=self._stats,
            state=self.state,
            pause=self._pause,
        )
