"""What `/server_info`, `/metrics` and the load routes show of the scheduler."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sglang.srt.control.engine_state import EngineState
from sglang.srt.control.pause import PauseController
from sglang.srt.scheduling.invariants import InvariantChecker
from sglang.srt.scheduling.request import Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.scheduling.schedule_policy import NewTokenRatio


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


def read_internal_state(
    lifecycle: RequestLifecycle,
    checker: InvariantChecker,
    ratio: NewTokenRatio,
    stats: SchedulerStats,
    state: EngineState,
    pause: PauseController,
) -> dict[str, Any]:
    """`internal_states[0]` of `/server_info`; slots and lengths in tokens."""
    ledger, report = lifecycle.ledger, checker.summary()
    return {
        "legacy_missing_tokens": report.legacy_missing_tokens,
        "orphan_token_count": report.orphan_token_count,
        "overlap_token_count": report.overlap_token_count,
        "ledger_repair_count": checker.num_repairs,
        "speculative_num_steps": 0,
        "avg_spec_accept_length": stats.avg_accept_length,
        "running_batch_size": len(lifecycle.running),
        "running_batch_rids": _rids(lifecycle.running),
        "waiting_queue_size": len(lifecycle.waiting),
        "waiting_queue_rids": _rids(lifecycle.waiting),
        "chunked_req_rids": _rids(req for req in lifecycle.running if req.is_prefilling),
        "available_kv_tokens": ledger.num_free_tokens,
        "tree_cache_size": ledger.num_tree_tokens,
        "req_to_token_pool_used": ledger.num_used_rows,
        "forward_ct_decode": stats.forward_ct_decode,
        "new_token_ratio": ratio.value,
        "init_new_token_ratio": ratio.initial,
        "cur_batch_is_none": not stats.has_current_batch,
        "last_batch_is_none": not stats.has_last_batch,
        "engine_paused": state.pause_mode is not None and not state.is_draining,
        "pause_mode": state.pause_mode,
        "pause_epoch": pause.pause_number,
        "num_lease_expiries": pause.num_lease_expiries,
        "stopped": state.stopped,
        "released_memory": sorted(state.released),
        "weight_version": lifecycle.weight_version,
        "weight_epoch": ledger.weight_epoch,
        "in_weight_session": state.in_weight_session,
    }


def _rids(reqs: Iterable[Req]) -> list[str]:
    return [req.rid for req in reqs]
