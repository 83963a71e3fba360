"""Every transition of a request, and with it of its KV:

    submit -> waiting -> admit -> running -> finish -> (last launched step read) -> release
                 ^                   |
                 +----- retract -----+          abort: from any state to finish

Nothing else moves requests between states or changes the owner of pages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from sglang.srt.mem_cache.kv_audit import ReleaseAudit, ReleaseReport
from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV
from sglang.srt.messages.control import DEFAULT_WEIGHT_VERSION, TARGET_MODEL, version_field
from sglang.srt.messages.requests import FinishReason
from sglang.srt.scheduling.request import Req
from sglang.srt.step.worker import EndedText


@dataclass(frozen=True, slots=True)
class LifecycleCounts:
    """Counts of requests: `num_ended` includes the aborted ones, `num_ended_by_grammars` are those
    whose grammar had a problem."""

    num_ended: int = 0
    num_aborted: int = 0
    num_retracted: int = 0
    num_ended_by_grammars: int = 0


class RequestLifecycle:
    """The requests of one scheduler.

    Args:
        release_audit: gets a report of a request's KV slots after each release.
        weight_version: first label of the weights.
        clock: seconds, for the time that requests wait.

    Attributes:
        waiting: requests without KV; retracted ones first, then by arrival.
        running: requests with a row and KV.
        num_streams: requests, waiting or running, that stream.
        weight_versions: the clients' labels of the weights, by model.
        counts: counts of requests since the start.
    """

    def __init__(
        self,
        ledger: KVLedger,
        release_audit: Callable[[ReleaseReport], None] | None = None,
        weight_version: str = DEFAULT_WEIGHT_VERSION,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ledger = ledger
        self._clock = clock
        self._release_audit = release_audit
        self.waiting: list[Req] = []
        self.running: list[Req] = []
        self.num_streams = 0
        self._ending: list[Req] = []
        self._unready: set[Req] = set()
        self._ended_texts: list[EndedText] = []
        self.weight_versions = {TARGET_MODEL: weight_version}
        self.counts = LifecycleCounts()

    @property
    def holds_kv(self) -> bool:
        """Tells whether any request has KV, the ending ones included."""
        return bool(self.running or self._ending)

    @property
    def has_started_requests(self) -> bool:
        """Tells whether a request that has not ended has run, and so may have output."""
        return bool(self.running) or any(req.was_admitted for req in self.waiting)

    @property
    def awaits_finish(self) -> bool:
        """Tells whether a request that `mark_to_finish` has marked has not ended yet."""
        return any(req.must_finish for req in (*self.running, *self.waiting))

    @property
    def startable(self) -> list[Req]:
        """Waiting requests that need nothing but a place; not to be changed."""
        if not self._has_unready:
            return self.waiting
        return [req for req in self.waiting if req not in self._unready]

    @property
    def steppable(self) -> list[Req]:
        """Running requests that need nothing but room."""
        return [req for req in self.running if req.can_step]

    @property
    def _has_unready(self) -> bool:
        """Tells whether a waiting request's grammar is not ready."""
        if self._unready:
            self._unready = {
                req for req in self._unready if req.finish_reason is None and not req.can_step
            }
        return bool(self._unready)

    @property
    def awaits_grammars(self) -> bool:
        """Tells whether a request waits only for its grammar, and so may go on without a
        message."""
        return self._has_unready or any(not req.can_step for req in self.running)

    @property
    def is_idle(self) -> bool:
        return not (self.waiting or self.running or self._ending)

    def owners(self) -> Iterator[RequestKV]:
        """Yields the KV of every request that has some, the ending ones included."""
        for req in (*self.running, *self._ending):
            if req.kv is not None:
                yield req.kv

    def submit(self, req: Req) -> None:
        for model, version in self.weight_versions.items():
            req.begin_weight_span(version, model)
        self.num_streams += req.streams
        req.submitted_s = self._clock()
        self._add_waiting(req, len(self.waiting))

    @property
    def weight_version(self) -> str:
        """Returns the label of the weights that choose tokens."""
        return self.weight_versions[TARGET_MODEL]

    @property
    def named_versions(self) -> dict[str, str]:
        """Returns the labels by the names of fields that clients read."""
        return {version_field(model): label for model, label in self.weight_versions.items()}

    def set_weight_version(self, weight_version: str, model: str = TARGET_MODEL) -> None:
        """Labels all tokens from now on. Call it only without a step in flight."""
        self.weight_versions[model] = weight_version
        for req in (*self.running, *self.waiting):
            req.begin_weight_span(weight_version, model)

    def admit(self, req: Req) -> None:
        """Moves a request from waiting to running: it gets a row and its cached prefix."""
        self.waiting.remove(req)
        req.fill_ids = req.known_ids
        req.kv = self.ledger.admit(req.namespace, req.fill_ids[: req.max_cached_tokens + 1])
        req.committed = req.committed_bound = len(req.kv.pages) * self.ledger.page_size
        req.num_emitted_since_admission = 0
        req.row_is_new = True
        if not req.was_admitted:
            req.num_cached_tokens = req.committed
            req.queue_time_s = self._clock() - req.submitted_s
            req.was_admitted = True
        self.running.append(req)

    def retract(self, req: Req) -> None:
        """Moves a request from running to waiting, ahead of those never admitted; it keeps no
        private slot. Call it only without a step in flight: then all its tokens are known and can
        be fed again."""
        if req.num_inflight:
            raise RuntimeError(f"Request {req.rid!r} was retracted with a step in flight.")
        self._release(req, insert=False)
        self.running.remove(req)
        req.num_retractions += 1
        self.counts = replace(self.counts, num_retracted=self.counts.num_retracted + 1)
        place = next(
            (
                index
                for index, other in enumerate(self.waiting)
                if not other.was_admitted or other.arrival > req.arrival
            ),
            len(self.waiting),
        )
        self._add_waiting(req, place)

    def mark_to_finish(self, waiting_too: bool) -> None:
        """Marks running requests, and waiting ones that have run: they finish before others
        start."""
        for req in (*self.running, *self.waiting):
            req.must_finish |= req.kv is not None or (waiting_too and req.was_admitted)

    def unmark_to_finish(self) -> None:
        for req in (*self.running, *self.waiting):
            req.must_finish = False

    def retract_all(self) -> None:
        """Retracts every running request. Call it only without a step in flight."""
        for req in list(self.running):
            self.retract(req)
            req.must_finish = False

    def retract_unfed(self) -> None:
        """Retracts running requests that no step has fed since their admission: after a change of
        weights they get no cached prefix of the old ones. Call it only without a step in flight."""
        for req in [req for req in self.running if req.row_is_new]:
            self.retract(req)

    def finish(self, req: Req, reason: FinishReason) -> None:
        """Ends a request. Its KV is released once all launched steps that name it have been
        read."""
        req.finish_reason = reason
        self.num_streams -= req.streams
        if req.grammar is not None:
            req.grammar.close()
        self.counts = replace(
            self.counts,
            num_ended=self.counts.num_ended + 1,
            num_aborted=self.counts.num_aborted + (reason.type == "abort"),
            num_ended_by_grammars=self.counts.num_ended_by_grammars
            + (req.grammar is not None and req.grammar.problem is not None),
        )
        if req.kv is None:
            self.waiting.remove(req)
            return
        self.running.remove(req)
        self._ending.append(req)
        self.release_if_ended(req)

    def publish_prompts(self, reqs: Iterable[Req]) -> None:
        """Gives the prefix cache the prompts of requests whose last prompt step has been read."""
        for req in reqs:
            if req.kv is not None:
                self.ledger.publish(req.kv, req.fill_ids[: req.committed])

    def release_if_ended(self, req: Req) -> None:
        """Releases a finished request once its last launched step has been read."""
        if req.finish_reason is None or req.num_inflight or req.kv is None:
            return
        self._ending.remove(req)
        self._release(req, insert=req.finish_reason.type != "abort")

    def take_ended_texts(self) -> list[EndedText]:
        """Returns the texts of requests that have ended since the last call, for the next step."""
        taken, self._ended_texts = self._ended_texts, []
        return taken

    def _add_waiting(self, req: Req, place: int) -> None:
        self.waiting.insert(place, req)
        if not req.can_step:
            self._unready.add(req)

    def _release(self, req: Req, insert: bool) -> None:
        """Gives KV and row back. With `insert` the committed tokens, up to the stop, go to the
        prefix cache."""
        kv = req.kv
        if kv is None:
            raise RuntimeError(f"KV of request {req.rid!r} was released twice.")
        tokens = req.known_ids[: req.committed] if insert else None
        if insert:
            start, end = req.num_cached_tokens, len(req.known_ids)
            self._ended_texts.append(EndedText(kv.row, start, end, req.namespace))
        if self._release_audit is None:
            self.ledger.release(kv, tokens)
        else:
            width = req.width.decode_rows
            audit = ReleaseAudit(self.ledger, kv, req.committed, len(req.input_ids), width)
            self.ledger.release(kv, tokens)
            self._release_audit(audit.report(req.rid))
        req.kv = None
        req.committed = req.committed_bound = 0
        req.fill_ids = []
