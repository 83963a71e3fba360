"""Several draft steps of a model, each of one row per request, in one pass: a step feeds the token
that the one before chose and, for a head over a target, its `ModelOutput.hidden`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.models.model import Model


class Drafts(NamedTuple):
    """The drafts of R requests from N draft steps.

    Attributes:
        token_ids: [R, N] int64; the best token after each step, as an id of the target.
        logprobs: [R, N] float32; their log-probabilities among the model's tokens.
        slots: [N, R] int64; the slots of each step's K and V.
    """

    token_ids: torch.Tensor
    logprobs: torch.Tensor
    slots: torch.Tensor

    def of_first(self, count: int) -> Drafts:
        """Returns the drafts of the first `count` requests."""
        return Drafts(self.token_ids[:count], self.logprobs[:count], self.slots[:, :count])

    def batches_fed(self, first: ForwardBatch) -> list[ForwardBatch]:
        """Returns the batch of each step, without hidden states, which only the pass knew; `first`
        as for `DraftPass.run`."""
        fed = [first.input_ids, *self.token_ids.unbind(1)]
        return [
            replace(
                first,
                input_ids=fed[index],
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
        positions, slots, kv_lens = self._places(first)
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
        return Drafts(torch.stack(token_ids[1:], dim=1), torch.stack(logprobs, dim=1), slots)

    def _places(self, first: ForwardBatch) -> torch.Tensor:
        """[3, N, R] int64: positions, slots and lengths of each step. Each step's numbers begin at
        a multiple of 16 bytes, which kernels are compiled for."""
        count, device = len(first.positions), first.positions.device
        shape = (3, self._num_steps, count + count % 2)
        places = torch.empty(shape, dtype=torch.int64, device=device)[:, :, :count]
        positions, slots, kv_lens = places
        ahead = torch.arange(self._num_steps, device=device)[:, None]
        torch.add(first.positions, ahead, out=positions)
        torch.add(first.kv_lens, ahead, out=kv_lens)
        slots.copy_(self._table[first.rows, positions])
        slots.mul_(first.slots > 0)
        return places
