"""Control messages: one typed message, one handler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.managers.batch_result_processor import BatchResultProcessor
from sglang.srt.managers.control_messages import (
    AbortReq,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthPing,
)
from sglang.srt.managers.invariants import InvariantChecker
from sglang.srt.managers.request_lifecycle import RequestLifecycle
from sglang.srt.managers.schedule_policy import NewTokenRatio

ABORT_MESSAGE = "The request was aborted."


class SchedulerStats:
    """Counters of the scheduler that clients can read.

    Attributes:
        forward_ct_decode: steps launched with at least one decode row, since start or flush.
        avg_accept_length: tokens per request and emitting step, since the start.
    """

    def __init__(self) -> None:
        self.forward_ct_decode = 0
        self.has_current_batch = False
        self.has_last_batch = False
        self._num_accepted = 0
        self._num_emits = 0

    @property
    def avg_accept_length(self) -> float | None:
        return self._num_accepted / self._num_emits if self._num_emits else None

    def on_launch(self, has_decode: bool) -> None:
        self.forward_ct_decode += has_decode
        self.has_current_batch = True

    def on_read(self, num_accepted: int, num_emits: int) -> None:
        self._num_accepted += num_accepted
        self._num_emits += num_emits
        self.has_last_batch = True

    def on_idle(self) -> None:
        self.has_current_batch = self.has_last_batch = False

    def reset(self) -> None:
        self.forward_ct_decode = 0


class Control:
    """Handlers of everything that is not a request to generate.

    Args:
        reply: sends a message to the front end.
        ping: passes a health ping on to the detokenizer.
    """

    def __init__(
        self,
        lifecycle: RequestLifecycle,
        processor: BatchResultProcessor,
        checker: InvariantChecker,
        ratio: NewTokenRatio,
        stats: SchedulerStats,
        reply: Callable[[Any], None],
        ping: Callable[[Any], None],
    ) -> None:
        self._lifecycle = lifecycle
        self._processor = processor
        self._checker = checker
        self._ratio = ratio
        self._stats = stats
        self._reply = reply
        self._ping = ping
        self.handlers: dict[type, Callable[[Any], None]] = {
            AbortReq: self._abort,
            FlushCacheReqInput: self._flush_cache,
            GetInternalStateReq: self._internal_state,
            HealthPing: self._ping,
        }

    def _abort(self, message: AbortReq) -> None:
        """Ends what the message names, with partial output; unknown names change nothing."""
        wanted = set(message.req_ids)
        for req in (*self._lifecycle.running, *self._lifecycle.waiting):
            is_named = req.req_id in wanted or (message.rid is not None and req.rid == message.rid)
            if message.abort_all or is_named:
                text = message.aborted_message or ABORT_MESSAGE
                self._processor.abort(req, text, status_code=None, err_type=None)
        self._processor.flush()

    def _flush_cache(self, message: FlushCacheReqInput) -> None:
        lifecycle = self._lifecycle
        if not lifecycle.is_idle:
            self._reply(
                FlushCacheReqOutput(
                    call_id=message.call_id,
                    success=False,
                    error_msg=(
                        f"{len(lifecycle.running)} requests are running and"
                        f" {len(lifecycle.waiting)} waiting; wait for them or abort them."
                    ),
                )
            )
            return
        flushed = lifecycle.ledger.flush()
        self._stats.reset()
        self._ratio.reset()
        self._reply(
            FlushCacheReqOutput(call_id=message.call_id, success=True, flushed_items=flushed)
        )

    def _internal_state(self, message: GetInternalStateReq) -> None:
        self._reply(
            GetInternalStateReqOutput(call_id=message.call_id, internal_state=self.internal_state())
        )

    def internal_state(self) -> dict[str, Any]:
        """`internal_states[0]` of `/server_info`; slots and lengths in tokens."""
        lifecycle, ledger = self._lifecycle, self._lifecycle.ledger
        report = self._checker.report()
        return {
            "legacy_missing_tokens": report.legacy_missing_tokens,
            "orphan_token_count": report.orphan_token_count,
            "overlap_token_count": report.overlap_token_count,
            "ledger_repair_count": self._checker.num_repairs,
            "speculative_num_steps": 0,
            "avg_spec_accept_length": self._stats.avg_accept_length,
            "running_batch_size": len(lifecycle.running),
            "running_batch_rids": _rids(lifecycle.running),
            "waiting_queue_size": len(lifecycle.waiting),
            "waiting_queue_rids": _rids(lifecycle.waiting),
            "chunked_req_rids": _rids(req for req in lifecycle.running if req.is_prefilling),
            "available_kv_tokens": ledger.num_free_tokens,
            "tree_cache_size": ledger.num_tree_tokens,
            "req_to_token_pool_used": ledger.num_used_rows,
            "forward_ct_decode": self._stats.forward_ct_decode,
            "new_token_ratio": self._ratio.value,
            "init_new_token_ratio": self._ratio.initial,
            "cur_batch_is_none": not self._stats.has_current_batch,
            "last_batch_is_none": not self._stats.has_last_batch,
            "engine_paused": False,
        }


def _rids(reqs: Any) -> list[str]:
    return [req.rid for req in reqs]
