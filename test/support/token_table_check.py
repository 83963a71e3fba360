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
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, Worker
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import SchedulerHarness, Setup

NUMBERS = ("num_tokens", "committed", "pending_lens")


@dataclass(frozen=True)
class _Rows:
    """The device rows as a launched step left them.

    Attributes:
        num_drafts: that the step fed of each request; empty where there were none.
    """

    rows: list[int]
    tokens: torch.Tensor
    numbers: dict[str, torch.Tensor]
    trees: _Trees | None
    num_drafts: list[int]


@dataclass(frozen=True)
class _Trees:
    """`DraftTrees`, copied."""

    parents: torch.Tensor
    depths: torch.Tensor
    ancestors: torch.Tensor


@dataclass(frozen=True)
class _Drafts:
    """Holds what a step proposed to a request.

    Attributes:
        num_known: tokens of the request then, without drafts.
        parents: of each draft the node that it follows; node 0 is the last known token.
    """

    num_known: int
    tokens: list[int]
    parents: list[int]

    def first(self, count: int) -> _Drafts:
        """Those that a step fed."""
        return _Drafts(self.num_known, self.tokens[:count], self.parents[:count])

    def confirmed(self, emitted: list[int]) -> int:
        """The node that is reached when all but the last of `emitted` are drafts: of equal
        siblings the first one."""
        node = 0
        for token in emitted[:-1]:
            node = self.child(node, token)
            assert node > 0, "Other drafts were confirmed."
        return node

    def child(self, node: int, token: int) -> int:
        """The first draft behind a node that is this token; 0 for none."""
        drafts = enumerate(zip(self.tokens, self.parents, strict=True), 1)
        return next((i for i, draft in drafts if draft == (token, node)), 0)


class TokenTableCheck:
    """A worker that looks at the device rows after every step of another one.

    Attributes:
        lifecycle: whose requests they are; set it before the first step.
        seen: what there was to check.

    Args:
        all_confirm: every request emits only what is confirmed, not those with `mtp_verify` alone.
        steps: steps all ranks, of which `worker` is the first one's; None: there is one.
    """

    def __init__(
        self, worker: TpModelWorker, all_confirm: bool = False, steps: Worker | None = None
    ) -> None:
        self._all_confirm = all_confirm
        self.lifecycle: RequestLifecycle | None = None
        self.seen: Counter[str] = Counter()
        self._worker = steps or worker
        self._state: RequestRows = worker._state
        self._unread: deque[_Rows] = deque()
        self._last = self._look([], [])
        self._drafts: dict[int, _Drafts] = {}

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self._worker.step_width(params)

    def observe(self, result: HostResult) -> None:
        self._worker.observe(result)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        result = self._worker.forward_batch_generation(batch)
        num_drafts = [] if result.num_drafts is None else result.num_drafts.tolist()
        before, after = self._last, self._look(batch.rows, num_drafts)
        untouched = torch.ones(len(after.tokens), dtype=torch.bool)
        untouched[[*batch.rows, *(new.row for new in batch.new_rows)]] = False
        assert before.tokens[untouched].equal(after.tokens[untouched]), "Tokens of another row."
        for name in NUMBERS:
            same = before.numbers[name][untouched].equal(after.numbers[name][untouched])
            assert same, f"{name} of another row."
        self._last = after
        self._unread.append(after)
        return result

    def _look(self, rows: list[int], num_drafts: list[int]) -> _Rows:
        numbers = {name: getattr(self._state, name).cpu().clone() for name in NUMBERS}
        trees = self._state.trees
        if trees is not None:
            shape = (trees.parents, trees.depths, trees.ancestors)
            trees = _Trees(*(values.cpu().clone() for values in shape))
        return _Rows(rows, self._state.tokens.cpu().clone(), numbers, trees, num_drafts)

    def on_step_read(self, requests: Sequence[RequestStep], result: HostResult) -> None:
        """Checks the rows of a step that has just been read."""
        assert self.lifecycle is not None
        reqs = {req.req_id: req for req in (*self.lifecycle.running, *self.lifecycle._ending)}
        after = self._unread.popleft()
        for step in requests:
            row = after.rows[step.index]
            numbers = [int(after.numbers[name][row]) for name in NUMBERS]
            known = after.tokens[row, : numbers[0]].tolist()
            parents = _parents(after.trees, row, numbers[2])
            if step.req_id in self._drafts:
                num_fed = after.num_drafts[step.index] if after.num_drafts else 0
                self._drafts[step.req_id] = self._drafts[step.req_id].first(num_fed)
            self._check(reqs[step.req_id], step, known, parents, *numbers)

    def _check(
        self,
        req: Req,
        step: RequestStep,
        known: list[int],
        parents: list[int],
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
        has_drafts = self._all_confirm or req.params.mtp_verify
        certain = known[: committed + 1] if has_drafts else known
        right = req.known_ids
        if step.finish_reason is None:
            assert certain == right, "Another sequence than the host's."
            self.seen["retracted before"] += req.num_retractions > 0
        else:
            assert certain[: len(right)] == right, "Another sequence than the host's."
            self.seen[step.finish_reason] += 1
            self.seen["clipped"] += len(certain) > len(right)
        self._check_drafts(req, step, right)
        drafts = known[len(certain) :]
        self._drafts[req.req_id] = _Drafts(len(right), drafts, parents[: len(drafts)])
        self.seen["drafts"] += len(drafts)
        self.seen["trees"] += parents != list(range(len(parents)))
        self.seen["context's end"] += num_tokens > req.params.max_new_tokens + len(req.input_ids)

    def _check_drafts(self, req: Req, step: RequestStep, known: list[int]) -> None:
        """Drafts that the step before left decide what the model may have confirmed of them."""
        drafts = self._drafts.get(req.req_id)
        if step.ends_prompt or drafts is None or not drafts.tokens:
            return
        emitted = known[drafts.num_known :]
        node = drafts.confirmed(emitted)
        if step.finish_reason is None:
            assert not drafts.child(node, emitted[-1]), "A right draft was rejected."
            self.seen["rejected"] += len(emitted) <= len(drafts.tokens)


def _parents(trees: _Trees | None, row: int, num_pending: int) -> list[int]:
    """The node that each draft of a row follows, the certain token being node 0."""
    if trees is None:
        return list(range(num_pending - 1))
    parents, depths, ancestors = (
        values[row, :num_pending].tolist()
        for values in (trees.parents, trees.depths, trees.ancestors)
    )
    assert (parents[0], depths[0], ancestors[0]) == (-1, 0, 1), "Node 0 is the root."
    for node, parent in enumerate(parents[1:], 1):
        assert 0 <= parent < node, "A node follows one before it."
        assert depths[node] == depths[parent] + 1, "Another depth than the path's."
        assert ancestors[node] == ancestors[parent] | 1 << node, "Other ancestors than the path's."
    return parents[1:]


def checked_harness(
    setup: Setup,
    worker: TpModelWorker,
    all_confirm: bool = False,
    steps: Worker | None = None,
    **more: Any,
) -> tuple[SchedulerHarness, TokenTableCheck]:
    """A scheduler whose worker's token table is checked after every step; `all_confirm` and `steps`
    as for `TokenTableCheck`, `more` as for `SchedulerHarness`."""
    check = TokenTableCheck(worker, all_confirm, steps)
    debug = SchedulerDebug(on_step_read=check.on_step_read)
    harness = SchedulerHarness(setup, check, debug=debug, **more)
    check.lifecycle = harness.scheduler.lifecycle
    return harness, check
