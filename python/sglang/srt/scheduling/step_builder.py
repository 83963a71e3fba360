"""A step while requests are added to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from sglang.srt.layers.logit_adjustments import RowAdjustments
from sglang.srt.lookahead.prompt_budget import PromptAllowance
from sglang.srt.mem_cache.kv_ledger import KVLedger, PageTableWrites
from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenPlan
from sglang.srt.scheduling.request import LaunchedRow, Req
from sglang.srt.step.worker import EndedText, NewRow, ScheduleBatch

# Share of a step's prompt tokens that is kept, while a long prompt is read, for prompts that end in
# the step. The long one takes a third longer at most, and short ones do not wait for it.
ENDING_SHARE = 0.25


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A step to launch: the batch for the worker, and the rows that the scheduler remembers.

    Attributes:
        price_ms: its expected time; None where the budget of prompts needs no prices, or where the
            step returns log-probabilities or hidden states of prompts, which have no price.
    """

    batch: ScheduleBatch
    rows: list[LaunchedRow]
    price_ms: float | None = None


class _Added(NamedTuple):
    """A request of a step; the arguments of `StepBuilder.add`."""

    req: Req
    num_prompt: int
    q_len: int
    max_kept: int
    emits: bool


@dataclass(slots=True)
class StepBuilder:
    """A step while requests are added to it.

    Attributes:
        price_ms: see `PlannedStep`.
    """

    price_ms: float | None = None
    _added: list[_Added] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self._added

    def add(self, req: Req, num_prompt: int, q_len: int, max_kept: int, emits: bool) -> None:
        """Adds a request, whose slots are reserved.

        Args:
            num_prompt: how many of the next tokens of its prompt it feeds; 0 for a decode row.
            q_len: rows that have slots, look-ahead included.
            max_kept: tokens by which the step may move the watermark, at most.
        """
        assert req.kv is not None
        self._added.append(_Added(req, num_prompt, q_len, max_kept, emits))

    def build(self, table_writes: PageTableWrites, ended_texts: list[EndedText]) -> PlannedStep:
        """Builds the step of all requests added. Those that feed a prompt come first: the host
        knows how many rows they feed, and so where they begin."""
        added = sorted(self._added, key=lambda entry: entry.num_prompt == 0)
        wanted, launched = LogprobsAndHiddenPlan(), list[LaunchedRow]()
        rows, new_rows, kv_lens = list[int](), list[NewRow](), list[int]()
        for req, num_prompt, _, max_kept, emits in added:
            assert req.kv is not None
            if req.row_is_new:
                new_rows.append(_new_row(req, req.kv.row))
                req.row_is_new = False
            num_scored, num_hidden = wanted.add(req, num_prompt, max_kept, emits)
            rows.append(req.kv.row)
            kv_lens.append(req.committed_bound)
            ends_prompt = emits and num_prompt > 0
            launched.append(
                LaunchedRow(
                    req=req,
                    max_kept=max_kept,
                    emits=emits,
                    ends_prompt=ends_prompt,
                    num_scored=num_scored,
                    num_hidden=num_hidden,
                )
            )
        params = [entry.req.params for entry in added if entry.emits]
        batch = ScheduleBatch(
            rows=rows,
            max_q_lens=[entry.q_len for entry in added],
            num_prompt_tokens=[entry.num_prompt for entry in added],
            emits=[entry.emits for entry in added],
            kv_lens_before=kv_lens,
            new_rows=new_rows,
            table_writes=table_writes,
            all_greedy=all(each.is_greedy for each in params),
            adjusts_logits=any(each.adjusts_logits for each in params),
            logprobs=wanted.logprob_plan(),
            hidden_rows=wanted.hidden_rows,
            ended_texts=ended_texts,
        )
        returns_prompts = batch.logprobs is not None and bool(batch.logprobs.prompt_rows)
        is_priced = not (returns_prompts or batch.hidden_rows)
        return PlannedStep(batch, launched, self.price_ms if is_priced else None)


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
        self._step.add(req, count, count + lookahead, count, emits=is_last)
        self._allowance.take(start, count, lookahead)
        return count


def _new_row(req: Req, row: int) -> NewRow:
    adjustments = None
    if req.params.adjusts_logits:
        adjustments = RowAdjustments(
            req.params, list(req.output_ids), len(req.input_ids), sorted(req.stop_token_ids)
        )
    tokens = np.fromiter(req.fill_ids, np.int32, len(req.fill_ids))
    return NewRow(
        row=row,
        num_committed=req.committed,
        tokens=tokens,
        params=req.params,
        seed=req.seed,
        adjustments=adjustments,
        namespace=req.namespace,
    )
