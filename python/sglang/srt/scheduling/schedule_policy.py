"""Decides which requests run: order of the queue, admission by KV budget, choice of the request to
retract."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.scheduling.request import Req

MAX_ESTIMATED_NEW_TOKENS = 4096  # one long request must not reserve the whole pool
RATIO_AT_START = 0.7  # share of max_new_tokens that a request is expected to use
RATIO_FLOOR_FACTOR = 0.14
RATIO_DECAY_STEPS = 600
RETRACT_LOOKAHEAD_STEPS = 20
MAX_LPM_QUEUE = 128


class NewTokenRatio:
    """Share of max_new_tokens that admission sets aside for each running request.

    It falls while nothing is retracted. After a retraction it jumps to the share that the running
    requests really used. The constants are SGLang's published defaults.
    """

    def __init__(self, conservativeness: float) -> None:
        self.initial = min(RATIO_AT_START * conservativeness, 1.0)
        self._floor = self.initial * RATIO_FLOOR_FACTOR
        self._decay = (self.initial - self._floor) / RATIO_DECAY_STEPS
        self.value = self.initial

    def on_step(self) -> None:
        self.value = max(self.value - self._decay, self._floor)

    def on_retract(self, remaining: list[Req]) -> None:
        """Raises the share after a retraction; `remaining` are the requests that still run."""
        wished = sum(req.params.max_new_tokens for req in remaining)
        used = sum(len(req.output_ids) + RETRACT_LOOKAHEAD_STEPS for req in remaining)
        self.value = min(1.0, used / wished) if wished else self.initial

    def reset(self) -> None:
        self.value = self.initial


@dataclass(frozen=True, slots=True)
class AdmissionPolicy:
    """Decides whether a waiting request fits beside the running ones. All figures in tokens."""

    ledger: KVLedger
    ratio: NewTokenRatio

    def fits(self, req: Req, running: list[Req], num_freed: int = 0) -> bool:
        """Tells whether there is room with `num_freed` more free slots; if that is negative,
        -num_freed slots are kept for others. A request alone always fits: larger ones are refused
        on arrival."""
        if not running:
            return True
        set_aside = sum(self._still_needed(other) for other in running)
        return set_aside + self.needed(req) <= self.ledger.num_available_tokens + num_freed

    def needed(self, req: Req) -> int:
        """Returns the slots that a waiting request is expected to take."""
        tokens = req.known_ids
        # The part of a cached prefix that others have locked costs nothing. The rest counts as
        # available until it is locked, so it costs as much as new slots.
        cacheable = tokens[: req.max_cached_tokens + 1]
        _, num_already_locked = self.ledger.cached_prefix(req.namespace, cacheable)
        return len(tokens) - num_already_locked + self._growth(req)

    def _still_needed(self, req: Req) -> int:
        """Returns the slots that a running request is expected to take beyond those it has."""
        num_pages = len(req.kv.pages) if req.kv is not None else 0
        owned = num_pages * self.ledger.page_size
        expected = max(len(req.fill_ids), req.committed_bound) + self._growth(req)
        return max(0, expected - owned)

    def _growth(self, req: Req) -> int:
        new_tokens = min(max(req.num_remaining, 0), MAX_ESTIMATED_NEW_TOKENS)
        # Rows in flight twice under overlap, and a page that is not full.
        spare = 2 * req.width.decode_rows + self.ledger.page_size
        return int(new_tokens * self.ratio.value) + spare


def order_by_priority(waiting: list[Req]) -> list[Req]:
    """Largest priority first; within one, retracted requests, then by arrival."""
    return sorted(waiting, key=lambda req: (-req.priority, not req.was_admitted, req.arrival))


def order_waiting(waiting: list[Req], policy: str, ledger: KVLedger) -> list[Req]:
    """Candidates for admission, best first. Retracted requests come before all others.

    `fcfs` is the order of arrival; `lpm` puts the longest cached prefix first, as long as the queue
    is short enough to look every prompt up.
    """
    if policy == "fcfs" or len(waiting) > MAX_LPM_QUEUE:
        return list(waiting)
    retracted = [req for req in waiting if req.was_admitted]
    fresh = [req for req in waiting if not req.was_admitted]
    fresh.sort(key=lambda req: -ledger.cached_prefix(req.namespace, req.input_ids)[0])
    return retracted + fresh


def preemptible(running: list[Req], priority: int, threshold: int) -> list[Req]:
    """Returns the requests that one of `priority` may push aside, in this order: those whose
    priority is lower by more than `threshold`, the lowest first; among equals the one with the
    least output to redo."""
    lower = [req for req in running if req.priority + threshold < priority]
    return sorted(lower, key=lambda req: (req.priority, len(req.output_ids)))


def choose_victim(running: list[Req]) -> Req:
    """Chooses the request to retract: of the lowest priority the one with the least output to redo;
    among those the one with the longest prompt."""

    def cost(req: Req) -> tuple[int, int, int, int]:
        return req.priority, len(req.output_ids), -len(req.input_ids), -req.arrival

    return min(running, key=cost)
