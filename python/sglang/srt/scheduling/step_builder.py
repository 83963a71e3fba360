"""A step while requests are added to it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sglang.srt.layers.logit_adjustments import RowAdjustments
from sglang.srt.lookahead.prompt_budget import PromptAllowance
from sglang.srt.mem_cache.kv_ledger import KVLedger, PageTableWrites, RequestKV
from sglang.srt.mem_cache.memory_pool import SharedPrefix
from sglang.srt.scheduling.logprobs_and_hidden import hidden_rows, logprob_plan, scored_rows
from sglang.srt.scheduling.request import LaunchedRow, Req
from sglang.srt.step.worker import BatchRequest, EndedText, NewRow, ScheduleBatch

# Share of a step's prompt tokens that is kept, while a long prompt is read, for prompts that end in
# the step. The long one takes a third longer at most, and short ones do not wait for it.
ENDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step to launch: the batch for the worker, and the rows that the scheduler remembers.

    Attributes:
        price_ms: its expected time; None where the budget of prompts needs no prices, or where the
            step returns log-probabilities or hidden states of prompts, which have no price, or has
            fixed orders where prices are those of the usual ones.
    """

    batch: ScheduleBatch
    rows: list[LaunchedRow]
    price_ms: float | None = None


@dataclass(slots=True)
class StepBuilder:
    """A step while requests are added to it, whose slots are reserved.

    Attributes:
        has_both_orders: see `PlannerConfig`.
        price_ms: see `PlannedStep`.
        shared_prefixes: see `ScheduleBatch`.
    """

    has_both_orders: bool = False
    price_ms: float | None = None
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)
    _prompts: list[LaunchedRow] = field(default_factory=list)
    _decodes: list[LaunchedRow] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not (self._prompts or self._decodes)

    @property
    def decoded_kv(self) -> list[RequestKV]:
        """The KV of its requests in their order, if each feeds one row of its output; else none."""
        if self._prompts or any(row.batch_request.max_q_len > 1 for row in self._decodes):
            return []
        return [row.req.kv for row in self._decodes if row.req.kv is not None]

    def add_decode(self, req: Req) -> None:
        """Adds a request that feeds its pending tokens."""
        width = req.width
        self._decodes.append(_row(req, 0, width.decode_rows, width.max_kept, emits=True))

    def add_prompt(self, req: Req, count: int, num_lookahead: int, is_last: bool) -> None:
        """Adds a request that feeds the next `count` tokens of its prompt, and look-ahead rows."""
        self._prompts.append(_row(req, count, count + num_lookahead, count, emits=is_last))

    def build(self, table_writes: PageTableWrites, ended_texts: list[EndedText]) -> PlannedStep:
        """Builds the step of all requests added. Those that feed a prompt come first: the host
        knows how many rows they feed, and so where they begin."""
        rows = self._prompts + self._decodes
        params = [row.req.params for row in rows if row.emits]
        batch = ScheduleBatch(
            requests=[row.batch_request for row in rows],
            new_rows=[_new_row(row.req) for row in rows if row.req.row_is_new],
            table_writes=table_writes,
            all_greedy=all(each.is_greedy for each in params),
            adjusts_logits=any(each.adjusts_logits for each in params),
            logprobs=logprob_plan(rows),
            hidden_rows=[(index, each) for index, row in enumerate(rows) for each in row.hidden],
            ended_texts=ended_texts,
            shared_prefixes=self.shared_prefixes,
            fixed_orders=any(row.req.params.deterministic for row in rows),
        )
        returns_prompts = batch.logprobs is not None and bool(batch.logprobs.prompt_rows)
        lacks_prices = self.has_both_orders and batch.fixed_orders
        is_priced = not (returns_prompts or batch.hidden_rows or lacks_prices)
        return PlannedStep(batch, rows, self.price_ms if is_priced else None)


class PromptFeed:
    """Adds prompts to a step in their order, further ones within their allowance (`comes_along` of
    `PromptAllowance.room_for`). A prompt that cannot end in the step is held back: later ones that
    can end get ENDING_SHARE of the step's prompt tokens, and it gets the rest. If a later one could
    end with more than this share, the share is saved for it from step to step.

    Args:
        allowance: of the step.
        splits_prompts: prompts may be fed in parts; if not, none is held back.
        num_saved: tokens saved in the steps before.
    """

    def __init__(
        self,
        step: StepBuilder,
        ledger: KVLedger,
        allowance: PromptAllowance,
        splits_prompts: bool,
        num_saved: int,
    ) -> None:
        self._step = step
        self._ledger = ledger
        self._allowance = allowance
        self._splits_prompts = splits_prompts
        self._num_saved = num_saved
        self._held: Req | None = None
        self._held_comes_along = False
        self._num_for_ending = 0
        self._saves = False

    @property
    def num_for_newcomer(self) -> int | None:
        """Limit of the tokens that a prompt added from now on may feed; None: no limit."""
        if self._held is not None:
            return 0 if self._saves else self._num_for_ending
        comes_along = self._allowance.num_taken > 0
        return None if self._allowance.room_for(0, 1, comes_along=comes_along) > 0 else 0

    @property
    def num_saved(self) -> int:
        """Tokens of the share that are saved for the next step."""
        return self._num_for_ending if self._saves else 0

    def saves_for(self, req: Req, position: int, num_left: int) -> bool:
        """Saves the share for a prompt that needs more, if the whole step could feed it to its end.
        From then on no prompt gets any of the share, or it would never be enough."""
        room = self._allowance.room_for(position, num_left, req.width.lookahead_rows)
        self._saves = self._saves or room == num_left
        return self._saves

    def offer(self, req: Req) -> None:
        """Feeds a prompt to its end if there is room, else holds it back or leaves it out."""
        num_left = len(req.fill_ids) - req.committed_bound
        if self._held is not None:
            if self._saves:
                return
            if num_left > self._num_for_ending:
                self.saves_for(req, req.committed_bound, num_left)
            elif self._room_for(req) == num_left:
                self._num_for_ending -= self._add(req, num_left)
            return
        comes_along = self._allowance.num_taken > 0
        room = self._room_for(req, comes_along)
        if room == num_left:
            self._add(req, num_left)
        elif room > 0 and self._splits_prompts:
            self._held, self._held_comes_along = req, comes_along
            num_ending = self._allowance.num_taken
            share = int(ENDING_SHARE * (num_ending + room))
            self._num_for_ending = max(0, share - num_ending) + self._num_saved

    def finish(self) -> None:
        """Feeds the prompt that was held back."""
        if self._held is not None:
            self._add(self._held, self._room_for(self._held, self._held_comes_along))

    def _room_for(self, req: Req, comes_along: bool = False) -> int:
        start = req.committed_bound
        num_left = len(req.fill_ids) - start
        lookahead = req.width.lookahead_rows
        return self._allowance.room_for(start, num_left, lookahead, comes_along)

    def _add(self, req: Req, count: int) -> int:
        """Adds the next `count` tokens of a prompt if the pool has slots; returns how many."""
        start, end = req.committed_bound, req.committed_bound + count
        is_last = end == len(req.fill_ids)
        lookahead = req.width.lookahead_rows if is_last else 0
        assert req.kv is not None
        if count == 0 or not self._ledger.reserve(req.kv, end + lookahead):
            return 0
        self._step.add_prompt(req, count, lookahead, is_last)
        self._allowance.take(start, count, lookahead)
        return count


def _row(req: Req, num_prompt: int, q_len: int, max_kept: int, emits: bool) -> LaunchedRow:
    assert req.kv is not None
    return LaunchedRow(
        req,
        BatchRequest(req.kv.row, q_len, num_prompt, emits, req.committed_bound),
        max_kept,
        scored_rows(req, num_prompt),
        hidden_rows(req, num_prompt, max_kept, emits),
    )


def _new_row(req: Req) -> NewRow:
    assert req.kv is not None
    adjustments = None
    if req.params.adjusts_logits:
        adjustments = RowAdjustments(
            req.params, list(req.output_ids), len(req.input_ids), sorted(req.stop_token_ids)
        )
    tokens = np.fromiter(req.fill_ids, np.int32, len(req.fill_ids))
    return NewRow(
        row=req.kv.row,
        num_committed=req.committed,
        tokens=tokens,
        params=req.params,
        seed=req.seed,
        adjustments=adjustments,
        namespace=req.namespace,
    )
