"""SGLANG_MTP_KV_LEAK_DEBUG: the state of each KV slot of a request after the release."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV, SlotState


@dataclass(frozen=True, slots=True)
class ReleaseReport:
    """The slots of one request right after their release, in tokens. The names are the fields of a
    log line that clients' checks read.

    Attributes:
        curr_step_token_count: slots after the watermark that the widest step may have written.
        freed_by_tail_cleanup_count: how many of those are free now.
        freed_by_overalloc_range_count: slots reserved beyond them that are free now.
        retained_as_committed_count: slots before the watermark that the prefix cache has now.
        freed_committed_count: slots before the watermark that are free now (a page that was not
            full, a copy of what the cache had, an aborted or retracted request).
        missing_from_terminal_release_count: slots that are neither free nor cached; 0 unless there
            is a leak.
        seed_anchor_old_loc: slot of the last prompt token.
        seed_anchor_old_loc_state: the state of that slot.
    """

    rid: str
    curr_step_token_count: int
    freed_by_tail_cleanup_count: int
    freed_by_overalloc_range_count: int
    retained_as_committed_count: int
    freed_committed_count: int
    missing_from_terminal_release_count: int
    seed_anchor_old_loc: int
    seed_anchor_old_loc_state: SlotState


class ReleaseAudit:
    """Remembers a request's slots before a release and reports on them after it.

    Args:
        width: rows of the request's widest step.
    """

    def __init__(
        self,
        ledger: KVLedger,
        kv: RequestKV,
        num_committed: int,
        num_prompt_tokens: int,
        width: int,
    ) -> None:
        self._ledger = ledger
        size = ledger.page_size
        self._slots = [page * size + offset for page in kv.pages for offset in range(size)]
        self._num_committed = num_committed
        self._anchor = min(num_prompt_tokens, len(self._slots)) - 1
        self._width = width

    def report(self, rid: str) -> ReleaseReport:
        """To be called once the slots are released."""
        states = self._ledger.slot_states(self._slots)
        committed = self._num_committed
        step_end = committed + self._width
        has_slots = self._anchor >= 0
        return ReleaseReport(
            rid=rid,
            curr_step_token_count=len(states[committed:step_end]),
            freed_by_tail_cleanup_count=states[committed:step_end].count("free"),
            freed_by_overalloc_range_count=states[step_end:].count("free"),
            retained_as_committed_count=states[:committed].count("cached"),
            freed_committed_count=states[:committed].count("free"),
            missing_from_terminal_release_count=states.count("missing"),
            seed_anchor_old_loc=self._slots[self._anchor] if has_slots else -1,
            seed_anchor_old_loc_state=states[self._anchor] if has_slots else "free",
        )
