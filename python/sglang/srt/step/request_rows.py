"""Holds on the device the state of each running request that a step needs, so that a step can start
before the host has read the one before."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import torch

from sgl_kernel.sampling_rows import FLOATS, SamplingRows
from sglang.srt.device_copies import to_device
from sglang.srt.layers.logit_adjustments import LogitAdjustments
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.step.draft_trees import DraftTrees
from sglang.srt.step.worker import EndedText, NewRow

PRIOR_CONFIDENCE = 0.7  # of a draft whose drafter gives none


def confidence_of_scores(scores: torch.Tensor) -> torch.Tensor:
    """[R, D] float32; `RequestRows.confidence` whose products are these scores.

    Args:
        scores: [R, D] float32; 0 to 1, none greater than the one before it.
    """
    before = torch.nn.functional.pad(scores[:, :-1], (1, 0), value=1.0)
    return torch.where(before > 0, scores / before, 0.0)


class RequestRows:
    """One entry per row of the request-to-token table.

    The sequence of a request is its tokens at admission (its prompt and, after a retraction, its
    output so far) and then the tokens that steps have added. Before and after each step, for each
    running request:

    - tokens[r, : num_tokens[r]] is its sequence, as far as it is known. If it emits only what is
      confirmed, tokens[r, committed[r] + 1 : num_tokens[r]] are drafts; the rest is certain.
    - Until all tokens that it was admitted with are fed, that is its whole sequence, and
      committed[r] is less than num_tokens[r]: the next token of a chunk's last row is there.
    - From then on num_tokens[r] == committed[r] + pending_lens[r].
    - Tokens after num_tokens[r] are left over from rejected drafts and earlier requests. Code that
      reads tokens of the request must stop at num_tokens[r].

    Attributes:
        vocab_size: token ids are less.
        num_rows: rows that requests may have. N is one more: `padding_row` is after them, whose
            watermark is always 0 (`ReqToTokenPool`).
        tokens: [N, width] int32, the token table; as wide as the page table, which has room for all
            that steps can add at the end of the context.
        num_tokens: [N] int64; tokens that are known.
        committed: [N] int64; the watermark: tokens with KV.
        pending_lens: [N] int64; tokens without KV that the next decode step feeds, at least 1; 1
            while there is a prompt to read.
        max_pending: the most that can be pending.
        confidence: [N, max_pending - 1] float32; probability that a draft is confirmed if those
            before it are, 0 where the request was given fewer drafts than others. By it the device
            divides a step's rows among requests (`RowPacking`). None: nobody asks.
        trees: the shape of the pending tokens where they may be a tree; None: they are chains.
        num_admitted: host list of N; for each row, the number of requests that have had it so far.
        on_end: functions that get texts that have ended, while these are still in `tokens`.

    Args:
        page_table: has the same rows.
        has_trees: pending tokens may be trees.
        keeps_confidence: there is `confidence`.
    """

    def __init__(
        self,
        page_table: ReqToTokenPool,
        max_pending: int,
        vocab_size: int,
        has_trees: bool = False,
        keeps_confidence: bool = False,
    ) -> None:
        self._page_table = page_table
        self.vocab_size = vocab_size
        self._device = page_table.req_to_token.device
        self.max_pending = max_pending
        self.tokens = torch.zeros_like(page_table.req_to_token)
        self.num_rows, self.padding_row = page_table.num_rows, page_table.padding_row
        num_rows = self.num_rows + 1
        self.num_admitted = [0] * num_rows
        self.on_end: list[Callable[[list[EndedText]], None]] = []
        self.trees = DraftTrees(num_rows, max_pending, self._device) if has_trees else None
        self.confidence: torch.Tensor | None = None
        if keeps_confidence:
            shape = num_rows, max_pending - 1
            self.confidence = torch.full(shape, PRIOR_CONFIDENCE, device=self._device)
        # Each kind has an even number: kernels get addresses that are multiples of 16 bytes.
        shape = (5, num_rows + num_rows % 2)
        self._integers = torch.ones(shape, dtype=torch.int64, device=self._device)
        numbers = self._integers[:, :num_rows]
        self.committed, self.pending_lens, self.num_tokens, self._seeds, self._top_k = numbers
        self.committed[self.padding_row] = 0
        # The fields of SamplingParams that are floats of SamplingRows.
        self._floats = torch.zeros((len(FLOATS), num_rows), device=self._device)
        self.adjustments = LogitAdjustments(num_rows, vocab_size, str(self._device))

    @property
    def outside(self) -> torch.Tensor | None:
        """Returns where kernels report columns outside of a row: `ReqToTokenPool.outside`."""
        return self._page_table.outside

    def end(self, texts: list[EndedText]) -> None:
        """Gives texts that have ended to `on_end`. Call it before `initialize` overwrites them."""
        if texts:
            for listener in self.on_end:
                listener(texts)

    def initialize(self, new_rows: list[NewRow]) -> None:
        """Sets the state of requests that have just got a row."""
        if not new_rows:
            return
        integers, floats = [], []
        for new in new_rows:
            self.num_admitted[new.row] += 1
            self.adjustments.initialize(new.row, new.adjustments)
            params = new.params
            if params.is_greedy:
                params = msgspec.structs.replace(params, temperature=0.0)
            top_k = self.vocab_size if params.top_k == -1 else params.top_k
            integers.append((new.row, new.num_committed, 1, len(new.tokens), new.seed, top_k))
            floats.append([getattr(params, name) for name in FLOATS])
        values = to_device(integers, self._device, torch.int64)
        rows = values[:, 0]
        self._integers[:, rows] = values[:, 1:].T
        self._floats[:, rows] = to_device(floats, self._device, torch.float32).T
        self._fill([new.tokens for new in new_rows], rows)

    def _fill(self, sequences: list[np.ndarray], rows: torch.Tensor) -> None:
        """Writes one sequence [n] int32 to the beginning of each of `rows`: one copy, and a number
        of launches that does not depend on the number of rows."""
        width = self.tokens.shape[1]
        assert max(map(len, sequences)) <= width, "A sequence is longer than its row."
        packed = to_device(np.concatenate(sequences), self._device, torch.int32)
        lens = self.num_tokens[rows]
        sequence = torch.repeat_interleave(lens, output_size=len(packed))
        starts = lens.cumsum(0) - lens
        columns = torch.arange(len(packed), device=self._device) - starts[sequence]
        self.tokens[rows[sequence], columns] = packed

    def pending(self, rows: torch.Tensor, start: int = 0) -> torch.Tensor:
        """Returns the pending tokens of `rows`, each from its place `start` on.

        Returns:
            [len(rows), max_pending - start] int64; places past a row's last pending token hold
            tokens that mean nothing.
        """
        offsets = torch.arange(start, self.max_pending, device=self._device)
        columns = self.committed[rows][:, None] + offsets
        last = self.tokens.shape[1] - 1
        return self.tokens[rows[:, None], columns.clamp(max=last)].to(torch.int64)

    def write_drafts(
        self,
        rows: torch.Tensor,
        tokens: torch.Tensor,
        num_drafts: torch.Tensor | None = None,
        parents: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        """Writes drafts after the certain token, which is the only pending one until then. Here in
        plain torch; drafters call `StepOps.write_drafts`.

        Args:
            rows: [R] int64.
            tokens: [R, D] int64; D is less than `max_pending`.
            num_drafts: [R] int64; drafts of each request, from the first on; 0 leaves a request
                unchanged, as those that have not emitted. None: all drafts of each.
            parents: [R, D] int32, of trees: see `DraftTrees.write`. None: they are chains.
            confidence: [R, D] float32; see `self.confidence`. None: nothing is known.
        """
        width = tokens.shape[1]
        assert width < self.max_pending, "More drafts than may be pending."
        offsets = torch.arange(width, device=self._device)
        if num_drafts is None:
            num_drafts = torch.full_like(rows, width)
        self.write_trees(rows, tokens, parents)
        first = self.committed[rows][:, None] + 1
        # Where there are fewer drafts a column occurs twice; it keeps the token that it has.
        exists, has_drafts = offsets < num_drafts[:, None], num_drafts > 0
        if self.confidence is not None:
            told = self.confidence[rows, :width]
            new = PRIOR_CONFIDENCE if confidence is None else confidence
            new = torch.where(exists, new, 0.0)
            self.confidence[rows, :width] = torch.where(has_drafts[:, None], new, told)
        columns = first + torch.where(exists, offsets, -1)
        known = self.tokens[rows[:, None], columns]
        self.tokens[rows[:, None], columns] = torch.where(exists, tokens.to(torch.int32), known)
        pending = torch.where(has_drafts, 1 + num_drafts, self.pending_lens[rows])
        self.pending_lens[rows] = pending
        end = torch.where(has_drafts, self.committed[rows] + pending, self.num_tokens[rows])
        self.num_tokens[rows] = end

    def write_trees(
        self, rows: torch.Tensor, tokens: torch.Tensor, parents: torch.Tensor | None
    ) -> None:
        """Writes the shapes of drafts where they may be trees; arguments as for `write_drafts`."""
        if self.trees is None:
            assert parents is None, "Drafts are chains here (DrafterNeeds.has_trees)."
            return
        if parents is None:
            nodes = torch.arange(tokens.shape[1], dtype=torch.int32, device=self._device)
            parents = nodes.expand(tokens.shape)
        self.trees.write(rows, parents)

    def sampling(self, rows: torch.Tensor, positions: torch.Tensor) -> SamplingRows:
        """Returns the sampling parameters of `rows` [S], which draw the tokens at `positions`
        [S]."""
        floats = dict(zip(FLOATS, self._floats[:, rows], strict=True))
        top_k, seeds = self._top_k[rows], self._seeds[rows]
        return SamplingRows(top_k=top_k, seeds=seeds, positions=positions, **floats)
