"""Several drafts of each request in one pass of a drafting model: by draft steps of one row per
request, each of which feeds what the one before gave, or by one step over mask tokens, causal or as
a block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.models.model import Model


class Drafts(NamedTuple):
    """The drafts of R requests from N draft steps, or from as many rows of one step.

    Attributes:
        token_ids: [R, N] int64; the best token after each step, as an id of the target. Of a block
            fewer than it has rows.
        logprobs: float32, as these; their log-probabilities among the model's tokens.
        fed_ids: [N, R] int64; the tokens that each step fed.
        slots: [N, R] int64; the slots of each step's K and V.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    fed_ids: torch.Tensor
    slots: torch.Tensor

    def of_first(self, count: int) -> Drafts:
        """Returns the drafts of the first `count` requests."""
        fed = self.fed_ids[:, :count], self.slots[:, :count]
        return Drafts(self.token_ids[:count], self.logprobs[:count], *fed)

    def batches_fed(self, first: ForwardBatch) -> list[ForwardBatch]:
        """Returns the batch of each step, without hidden states, which only the pass knew; `first`
        as for `DraftPass.run`."""
        return [
            replace(
                first,
                input_ids=self.fed_ids[index],
                positions=first.positions + index,
                slots=slots,
                kv_lens=first.kv_lens + index,
                kv_len_upper_bounds=[bound + index for bound in first.kv_len_upper_bounds],
                hidden=None,
            )
            for index, slots in enumerate(self.slots)
        ]


class DraftPass:
    """N draft steps of a model. They depend on no number that the host does not know at capture, so
    one graph holds all of them where the attention backend captures plans.

    Args:
        table: [rows, width] int32; the page table.
        num_steps: N, at least 1.
        forward: runs the model over a batch that is not planned yet; returns `ModelOutput.hidden`
            of all its rows.
    """

    def __init__(
        self,
        model: Model,
        layers: LayerRuntime,
        table: torch.Tensor,
        forward: Callable[[ForwardBatch], torch.Tensor],
        num_steps: int,
    ) -> None:
        assert num_steps >= 1, "A pass without a step."
        self._model = model
        self._layers = layers
        self._table = table
        self._forward = forward
        self._num_steps = num_steps
        self._choose = sampling_ops(table.device).argmax_logprob

    def run(self, first: ForwardBatch) -> Drafts:
        """
        Args:
            first: the first step, of one row per request, with `hidden` if the model reads any.
                Each further step is one position after the one before. Rows that write to the dummy
                slot are padding in all steps.
        """
        positions, slots, kv_lens = places_after(first, self._num_steps, self._table)
        token_ids, logprobs = [first.input_ids], []
        fed_hidden = first.hidden
        for index in range(self._num_steps):
            bounds = [bound + index for bound in first.kv_len_upper_bounds]
            batch = replace(
                first,
                input_ids=token_ids[-1],
                positions=positions[index],
                slots=slots[index],
                kv_lens=kv_lens[index],
                kv_len_upper_bounds=bounds,
                hidden=fed_hidden,
            )
            hidden = self._forward(batch)
            fed_hidden = hidden if self._model.draft_hidden_width else None
            best, _, logprob = self._choose(self._model.compute_logits(hidden, self._layers))
            token_ids.append(self._model.to_target_ids(best))
            logprobs.append(logprob)
        fed_ids = torch.stack(token_ids[:-1])
        return Drafts(torch.stack(token_ids[1:], 1), torch.stack(logprobs, 1), fed_ids, slots)


class MaskPass:
    """Drafts N tokens of each request in one step of a head that has mask tokens.

    A head without a block (P-EAGLE, arXiv 2602.01469, section 3) is fed N mask tokens, each in a
    row that gives the token after it. A head with a block of B rows (DFlash, arXiv 2602.06036) is
    fed the certain token and B - 1 mask tokens that all see each other, and the row of each gives
    the token of its own place.

    Args:
        head: one with a `mask_token_id`.
        table: [rows, width] int32; the page table.
        forward: runs the head over a batch that is not planned yet, with as many rows of each
            request; returns `ModelOutput.hidden` of the rows that are read.
        num_drafts: N, at least 1, below B.
    """

    def __init__(
        self,
        head: DraftHead,
        layers: LayerRuntime,
        table: torch.Tensor,
        forward: Callable[[ForwardBatch], torch.Tensor],
        num_drafts: int,
    ) -> None:
        assert num_drafts >= 1, "A pass without a draft."
        assert head.mask_token_id is not None, "A head without mask tokens."
        assert head.block_size is None or num_drafts < head.block_size, "The first row drafts none."
        self._head = head
        self._mask_token_id = head.mask_token_id
        self._layers = layers
        self._table = table
        self._forward = forward
        self._num_drafts = num_drafts
        self._choose = sampling_ops(table.device).argmax_logprob

    def run(self, first: ForwardBatch) -> Drafts:
        """
        Args:
            first: one row of each request: the place of its first mask token, whose token and
                hidden state are ignored, or of a block the certain token, of which the head has no
                KV yet. Rows that write to the dummy slot are padding.
        """
        count, size = len(first.positions), self._head.block_size or self._num_drafts
        positions, slots, _ = places_after(first, size, self._table)
        fed_ids = torch.full_like(positions, self._mask_token_id)
        batch = replace(
            first,
            positions=_by_request(positions),
            slots=_by_request(slots),
            q_lens=[size] * count,
            kv_lens=first.kv_lens + (size - 1),
            kv_len_upper_bounds=[bound + size - 1 for bound in first.kv_len_upper_bounds],
        )
        if self._head.block_size is None:
            hidden = self._head.mask_input(self._layers).expand(positions.numel(), -1)
            batch = replace(batch, hidden=hidden.contiguous())
        else:
            fed_ids[0] = first.input_ids
            drafted = torch.arange(1, 1 + self._num_drafts, device=slots.device)
            begins = torch.arange(0, count * size, size, device=slots.device)
            read = (begins[:, None] + drafted).flatten()
            batch = replace(batch, read_index=read, is_block=True)
        batch = replace(batch, input_ids=_by_request(fed_ids))
        logits = self._head.compute_logits(self._forward(batch), self._layers)
        best, _, logprobs = self._choose(logits, None)
        token_ids = self._head.to_target_ids(best).view(count, -1)
        return Drafts(token_ids, logprobs.view(count, -1), fed_ids, slots)


def _by_request(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers [N, R] of each row of each request as those of a batch, [R * N], side by side in
    memory: `flatten` alone gives every second number of padded rows if R is 1."""
    return numbers.T.contiguous().flatten()


def places_after(first: ForwardBatch, num_rows: int, table: torch.Tensor) -> torch.Tensor:
    """Gives the places of N rows of each request, one position after the other: [3, N, R] int64,
    positions, slots and lengths. Each row's numbers begin at a multiple of 16 bytes, which kernels
    are compiled for.

    Args:
        first: the first row of each request; where it writes to the dummy slot, so do all.
    """
    count, device = len(first.positions), first.positions.device
    shape = (3, num_rows, count + count % 2)
    places = torch.empty(shape, dtype=torch.int64, device=device)[:, :, :count]
    positions, slots, kv_lens = places
    ahead = torch.arange(num_rows, device=device)[:, None]
    torch.add(first.positions, ahead, out=positions)
    torch.add(first.kv_lens, ahead, out=kv_lens)
    slots.copy_(table[first.rows, positions])
    slots.mul_(first.slots > 0)
    return places
