"""Collects the scheduler's state for `/server_info`, `/metrics` and the load routes."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from sglang.srt.control.engine_state import EngineState
from sglang.srt.control.pause import PauseController
from sglang.srt.observability.draft_counts import DraftCounts
from sglang.srt.observability.throughput import Throughput
from sglang.srt.scheduling.invariants import InvariantChecker
from sglang.srt.scheduling.request import LaunchedRow, Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.scheduling.schedule_policy import NewTokenRatio

RECENT_STEPS = 256  # with decodes of requests that look ahead
# Names of the last counts of `DraftCounts`.
DRAFT_TOTALS = ("num_spec_verifications", "num_spec_drafts", "num_spec_confirmed_drafts")


class SchedulerStats:
    """Counters of the scheduler that clients can read.

    Attributes:
        num_draft_steps: drafts proposed for a request in the last step in which requests decoded;
            steps that only try another number do not count. For trees of one shape, their depth.
        num_tier_switches: how many times `num_draft_steps` became each number, also by a change of
            the batch size.
        num_step_drafts: drafts of all requests that were verified in the last step with decodes.
        drafts: counts of drafts since the start.
        by_drafter: of them those of each drafter, if there are several: its DRAFT_TOTALS.
        has_drafter: whether a drafter reports `num_draft_steps`.
        num_launched: steps launched since the start.
        forward_ct_decode: steps launched with at least one decode row, since start or flush.
        num_sat_out: how many times a request got no token from a step because its masks were late.

    Args:
        num_draft_steps: the first `num_draft_steps`; 0 where no drafter reports it.
        num_tree_tokens: tokens of a tree of drafts, with its root, where all have one shape;
            otherwise 0.
        tiers: the numbers that `num_draft_steps` may become.
        clock: seconds.
        drafters: names of drafters, where there are several.
    """

    def __init__(
        self,
        num_draft_steps: int = 0,
        num_tree_tokens: int = 0,
        tiers: Sequence[int] = (),
        clock: Callable[[], float] = time.monotonic,
        drafters: Sequence[str] = (),
    ) -> None:
        self._num_tree_tokens = num_tree_tokens
        self.num_draft_steps = num_draft_steps
        self.num_tier_switches = Counter[int](dict.fromkeys(tiers, 0))
        self.num_step_drafts = 0
        self._has_decoded = False
        self.has_drafter = num_draft_steps > 0
        self.num_launched = 0
        self.forward_ct_decode = 0
        self.num_sat_out = 0
        self._current_rows: Sequence[LaunchedRow] = ()
        self._last_rows: Sequence[LaunchedRow] = ()
        self.drafts = self._at_flush = self._at_last_take = DraftCounts()
        self.by_drafter = {name: dict.fromkeys(DRAFT_TOTALS, 0) for name in drafters}
        self._recent = deque([self.drafts], maxlen=RECENT_STEPS + 1)
        self._throughput = Throughput(clock)

    @property
    def num_draft_tokens(self) -> int:
        """Tokens that such a step verifies for a request, the certain one counted; 0 if no drafter
        reports them."""
        return (self._num_tree_tokens or 1 + self.num_draft_steps) if self.has_drafter else 0

    @property
    def gen_throughput(self) -> float:
        """Measures tokens of outputs per second, of the last seconds."""
        return self._throughput.tokens_per_s

    @property
    def since_flush(self) -> DraftCounts:
        """Counts since the last flush, or the start."""
        return self.drafts.since(self._at_flush)

    @property
    def recent(self) -> DraftCounts:
        """Counts of the last `RECENT_STEPS` steps since the last flush in which a request looked
        ahead."""
        return self.drafts.since(self._recent[0])

    def take_accept_length(self) -> float | None:
        """Returns the tokens per step since its last call; a flush does not reset it."""
        taken = self.drafts.since(self._at_last_take)
        self._at_last_take = self.drafts
        return taken.accept_length

    @property
    def current_batch(self) -> list[str] | None:
        """The rids of the step launched last; None when idle."""
        return _rids(row.req for row in self._current_rows) or None

    @property
    def last_batch(self) -> list[str] | None:
        """The rids of the step read last; None when idle."""
        return _rids(row.req for row in self._last_rows) or None

    def on_launch(self, rows: Sequence[LaunchedRow]) -> None:
        if not self._current_rows:
            self._throughput.begin()
        self.num_launched += 1
        self.forward_ct_decode += any(row.is_decode for row in rows)
        self._current_rows = rows

    def on_read(
        self,
        rows: Sequence[LaunchedRow],
        accept_lens: Sequence[int],
        num_drafts: Sequence[int],
        tier: int = 0,
        had_ended: Sequence[bool] = (),
        num_generated: int = 0,
        makers: Sequence[str] = (),
    ) -> None:
        """A step of R requests has been read.

        Args:
            num_drafts: R counts of drafts verified; empty where there were none.
            tier: see `StepPlan.draft_length`.
            had_ended: which of the R had ended before, so their tokens are dropped; empty if
                none had.
            num_generated: tokens of outputs since the start.
            makers: see `HostResult`.
        """
        self._last_rows = rows
        self._throughput.add(num_generated)
        if any(row.is_decode for row in rows):
            self.num_step_drafts = sum(num_drafts)
            if self.has_drafter:
                self.num_tier_switches[tier] += self._has_decoded and tier != self.num_draft_steps
                self.num_draft_steps = tier
                self._has_decoded = True
        self._count_drafts(rows, accept_lens, num_drafts, had_ended, makers)

    def _count_drafts(
        self,
        rows: Sequence[LaunchedRow],
        accept_lens: Sequence[int],
        num_drafts: Sequence[int],
        had_ended: Sequence[bool],
        makers: Sequence[str],
    ) -> None:
        num_steps = num_tokens = num_verifications = num_verified = num_confirmed = 0
        counts = num_drafts or [0] * len(rows)
        is_over_of = had_ended or [False] * len(rows)
        for index, (row, num_accepted, count, is_over) in enumerate(
            zip(rows, accept_lens, counts, is_over_of, strict=True)
        ):
            sits_out = not num_accepted and row.emits
            self.num_sat_out += sits_out
            if is_over or sits_out or not row.is_decode or row.req.width.decode_rows == 1:
                continue
            num_tokens += num_accepted
            num_steps += 1
            if count:
                num_verifications += 1
                num_verified += count
                num_confirmed += num_accepted - 1
                if makers:
                    nothing = dict.fromkeys(DRAFT_TOTALS, 0)
                    totals = self.by_drafter.setdefault(makers[index], nothing)
                    for name, more in zip(DRAFT_TOTALS, (1, count, num_accepted - 1), strict=True):
                        totals[name] += more
        if num_steps:
            step = DraftCounts(
                num_steps, num_tokens, num_verifications, num_verified, num_confirmed
            )
            self.drafts = self.drafts.plus(step)
            self._recent.append(self.drafts)

    def on_idle(self) -> None:
        self._current_rows = self._last_rows = ()

    def reset(self) -> None:
        """Restarts averages and the count of steps with decodes."""
        self.forward_ct_decode = 0
        self._at_flush = self.drafts
        self._recent.clear()
        self._recent.append(self.drafts)


def read_internal_state(
    *,
    lifecycle: RequestLifecycle,
    checker: InvariantChecker,
    ratio: NewTokenRatio,
    stats: SchedulerStats,
    state: EngineState,
    pause: PauseController,
) -> dict[str, Any]:
    """Returns `internal_states[0]` of `/server_info`; slots and lengths in tokens."""
    ledger, report = lifecycle.ledger, checker.summary()
    chunked = _rids(req for req in lifecycle.running if req.is_prefilling)
    return {
        "legacy_missing_tokens": report.legacy_missing_tokens,
        "orphan_token_count": report.orphan_token_count,
        "overlap_token_count": report.overlap_token_count,
        "ledger_repair_count": checker.num_repairs,
        **_drafts(stats),
        "last_gen_throughput": stats.gen_throughput,
        "num_retracted": lifecycle.counts.num_retracted,
        "running_batch_size": len(lifecycle.running),
        "running_batch_rids": _rids(lifecycle.running),
        "waiting_queue_size": len(lifecycle.waiting),
        "waiting_queue_rids": _rids(lifecycle.waiting),
        "chunked_req_rids": chunked,
        "chunked_req": chunked or None,
        "available_kv_tokens": ledger.num_free_tokens,
        "tree_cache_size": ledger.num_tree_tokens,
        "req_to_token_pool_used": ledger.num_used_rows,
        "forward_ct_decode": stats.forward_ct_decode,
        "new_token_ratio": ratio.value,
        "init_new_token_ratio": ratio.initial,
        "cur_batch": stats.current_batch,
        "cur_batch_is_none": stats.current_batch is None,
        "last_batch": stats.last_batch,
        "last_batch_is_none": stats.last_batch is None,
        "engine_paused": state.pause_mode is not None and not state.is_draining,
        "pause_mode": state.pause_mode,
        "pause_epoch": pause.pause_number,
        "num_ended_by_grammars": lifecycle.counts.num_ended_by_grammars,
        "num_sat_out": stats.num_sat_out,
        "num_lease_expiries": pause.num_lease_expiries,
        "stopped": state.stopped,
        "released_memory": sorted(state.released),
        **lifecycle.named_versions,
        "weight_epoch": ledger.weight_epoch,
        "in_weight_session": state.in_weight_session,
    }


def _drafts(stats: SchedulerStats) -> dict[str, Any]:
    """Returns counts and shares of drafts: `avg_` since the last flush, `recent_` in the last
    steps, `num_` since the start."""
    since_flush, recent = stats.since_flush, stats.recent
    return {
        "speculative_num_steps": stats.num_draft_steps,
        "speculative_num_draft_tokens": stats.num_draft_tokens,
        "speculative_tier_switches": {
            str(tier): count for tier, count in sorted(stats.num_tier_switches.items())
        },
        "avg_spec_accept_length": since_flush.accept_length,
        "avg_spec_accept_rate": since_flush.accept_rate,
        "avg_spec_verified_drafts": since_flush.drafts_per_step,
        "recent_spec_accept_length": recent.accept_length,
        "recent_spec_accept_rate": recent.accept_rate,
        "recent_spec_verified_drafts": recent.drafts_per_step,
        **dict(zip(DRAFT_TOTALS, stats.drafts[2:], strict=True)),
        "spec_by_drafter": {name: {**totals} for name, totals in stats.by_drafter.items()},
        "num_step_drafts": stats.num_step_drafts,
    }


def _rids(reqs: Iterable[Req]) -> list[str]:
    return [req.rid for req in reqs]
