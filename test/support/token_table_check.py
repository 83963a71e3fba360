"""The token table after every step, against what the scheduler knows of each request once it has
read the step: the invariants that `RequestRows` states."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sglang.srt.managers.scheduler import SchedulerDebug
from sglang.srt.observability.request_step import RequestStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.request import Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, StepWidth
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import SchedulerHarness, Setup

NUMBERS = ("num_tokens", "committed", "pending_lens")


@dataclass(frozen=True)
class _Rows:
    """The device rows as a launched step left them."""

    rows: list[int]
    tokens: torch.Tensor
    numbers: dict[str, torch.Tensor]


class TokenTableCheck:
    """A worker that looks at the device rows after every step of another one.

    Attributes:
        lifecycle: whose requests they are; set it before the first step.
        seen: what there was to check.
    """

    def __init__(self, worker: TpModelWorker) -> None:
        self.lifecycle: RequestLifecycle | None = None
        self.seen: Counter[str] = Counter()
        self._worker = worker
        self._state: RequestRows = worker._state
        self._unread: deque[_Rows] = deque()
        self._last = self._look([])
        self._drafts: dict[
            int, tuple[int, list[int]]
        ] = {}  # of each request, behind how many tokens

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self._worker.step_width(params)

    def observe(self, result: HostResult) -> None:
        self._worker.observe(result)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        result = self._worker.forward_batch_generation(batch)
        before, after = self._last, self._look(batch.rows)
        untouched = torch.ones(len(after.tokens), dtype=torch.bool)
        untouched[[*batch.rows, *(new.row for new in batch.new_rows)]] = False
        assert before.tokens[untouched].equal(after.tokens[untouched]), "Tokens of another row."
        for name in NUMBERS:
            same = before.numbers[name][untouched].equal(after.numbers[name][untouched])
            assert same, f"{name} of another row."
        self._last = after
        self._unread.append(after)
        return result

    def _look(self, rows: list[int]) -> _Rows:
        numbers = {name: getattr(self._state, name).cpu().clone() for name in NUMBERS}
        return _Rows(rows, self._state.tokens.cpu().clone(), numbers)

    def on_step_read(self, requests: Sequence[RequestStep]) -> None:
        """Checks the rows of a step that has just been read."""
        assert self.lifecycle is not None
        reqs = {req.req_id: req for req in (*self.lifecycle.running, *self.lifecycle._ending)}
        after = self._unread.popleft()
        for step in requests:
            row = after.rows[step.index]
            numbers = [int(after.numbers[name][row]) for name in NUMBERS]
            known = after.tokens[row, : numbers[0]].tolist()
            self._check(reqs[step.req_id], step, known, *numbers)

    def _check(
        self,
        req: Req,
        step: RequestStep,
        known: list[int],
        num_tokens: int,
        committed: int,
        num_pending: int,
    ) -> None:
        assert committed == req.committed, "Another watermark than the host's."
        if not step.emits:
            assert known == req.fill_ids == req.known_ids, "Not what it was admitted with."
            assert committed < num_tokens, "A prompt that is read has a next token."
            assert num_pending == 1, "Nothing is pending while a prompt is read."
            self.seen["chunks"] += 1
            return
        assert num_pending >= 1, "A token is pending."
        assert num_tokens == committed + num_pending, "Known tokens end where pending ones do."
        has_drafts = req.params.mtp_verify
        certain = known[: committed + 1] if has_drafts else known
        right = req.known_ids
        if step.finish_reason is None:
            assert certain == right, "Another sequence than the host's."
            self.seen["retracted before"] += req.num_retractions > 0
        else:
            assert certain[: len(right)] == right, "Another sequence than the host's."
            self.seen[step.finish_reason] += 1
        self._check_drafts(req, step, right)
        self._drafts[req.req_id] = len(right), known[len(certain) :]
        self.seen["drafts"] += len(known) - len(certain)
        self.seen["context's end"] += num_tokens > req.params.max_new_tokens + len(req.input_ids)

    def _check_drafts(self, req: Req, step: RequestStep, known: list[int]) -> None:
        """Drafts that the step before left decide what the model may have confirmed of them."""
        num_before, drafts = self._drafts.get(req.req_id, (0, []))
        if step.ends_prompt or not drafts:
            return
        emitted = known[num_before:]
        num_confirmed = len(emitted) - 1
        assert emitted[:num_confirmed] == drafts[:num_confirmed], "Other drafts were confirmed."
        if step.finish_reason is None and num_confirmed < len(drafts):
            assert emitted[-1] != drafts[num_confirmed], "A right draft was rejected."
            self.seen["rejected"] += 1


def checked_harness(
    setup: Setup, worker: TpModelWorker, **more: Any
) -> tuple[SchedulerHarness, TokenTableCheck]:
    """A scheduler whose worker's token table is checked after every step; `more` as for
    `SchedulerHarness`."""
    check = TokenTableCheck(worker)
    debug = SchedulerDebug(on_step_read=check.on_step_read)
    harness = SchedulerHarness(setup, check, debug=debug, **more)
    check.lifecycle = harness.scheduler.lifecycle
    return harness, check
