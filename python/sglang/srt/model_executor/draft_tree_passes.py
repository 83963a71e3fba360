"""Trees of drafts by a head over a target (EAGLE-2, arXiv 2406.16858), in one pass: each draft step
feeds the beam, the best K nodes found by the step before, and finds K children of each. The nodes
with the most probable paths make the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.step.draft_shapes import TreeShape


class DraftedTrees(NamedTuple):
    """Trees of R requests, and the inputs of their N draft steps.

    Attributes:
        token_ids: [R, D] int64; the target's ids of nodes 1 to D. No node is better than one before
            it, so the first n nodes of a tree are a tree too, for any n.
        parents: [R, D] int32; node that each follows, 0 is the root.
        scores: [R, D] float32; the head's probability of the path to each node.
        fed_ids, ancestors, slots: [N, R, K] int64; for the rows of each step.
    """

    token_ids: torch.Tensor
    parents: torch.Tensor
    scores: torch.Tensor
    fed_ids: torch.Tensor
    ancestors: torch.Tensor
    slots: torch.Tensor

    def of_first(self, count: int) -> DraftedTrees:
        """Returns the trees of the first `count` requests."""
        of_requests = (values[:count] for values in self[:3])
        return DraftedTrees(*of_requests, *(values[:, :count] for values in self[3:]))

    def batches_fed(self, first: ForwardBatch) -> list[ForwardBatch]:
        """Returns the batch of each step, without hidden states, which only the pass knew; `first`
        as for `DraftTreePass.run`."""
        fed = zip(self.fed_ids, self.ancestors, self.slots, strict=True)
        return [_batch(first, index, *each) for index, each in enumerate(fed)]


class TreeSearch(Protocol):
    """Finds the trees of one pass. Each implementation finds the same, and none waits for the
    device.

    Row r of step i is in column watermark + i K + r of the page table, at position watermark + i.
    It sees all KV before the watermark, and its own branch.
    """

    def __init__(
        self,
        shape: TreeShape,
        table: torch.Tensor,
        target_ids: torch.Tensor | None,
        first: ForwardBatch,
    ) -> None:
        """
        Args:
            table: [rows, width] int32; the page table.
            target_ids: result of `DraftHead.target_ids`.
            first: as for `DraftTreePass.run`.
        """

    def grow(
        self, token_ids: torch.Tensor, logprobs: torch.Tensor, hidden: torch.Tensor
    ) -> ForwardBatch | None:
        """Takes the children of the rows fed last; in the first call those of the one row of each
        request.

        Args:
            token_ids: [rows, K] int64; the head's, the best first.
            logprobs: [rows, K] float32.
            hidden: [rows, hidden_size]; the head's output at those rows.

        Returns:
            The next draft step, which feeds the K best nodes; None if there is none.
        """

    def trees(self) -> DraftedTrees:
        """Returns the best of all nodes found, after the last step."""


class DraftTreePass:
    """Drafts a tree for each request. It depends on no number that the host does not know at
    capture, so one graph holds all of it where the attention backend captures plans.

    Args:
        table: [rows, width] int32; the page table.
        forward: runs the head over a batch that is not planned yet, K rows of each request, and
            gives `ModelOutput.hidden` of all rows.
        search: makes a `TreeSearch`.
    """

    def __init__(
        self,
        head: DraftHead,
        layers: LayerRuntime,
        table: torch.Tensor,
        forward: Callable[[ForwardBatch], torch.Tensor],
        shape: TreeShape,
        search: Callable[..., TreeSearch],
    ) -> None:
        self._head = head
        self._layers = layers
        self._table = table
        self._forward = forward
        self._shape = shape
        self._search = search
        self._best_of = sampling_ops(table.device).topk_logprob

    def run(self, first: ForwardBatch) -> DraftedTrees:
        """
        Args:
            first: one row of each request, at its watermark; `hidden` [R, hidden_size] is the
                head's output at the row before. Its tokens are ignored. Rows that write to the
                dummy slot are padding in all steps.
        """
        assert first.hidden is not None, "A head drafts from its own output."
        search = self._search(self._shape, self._table, self._head.target_ids(), first)
        step = search.grow(*self._children(first.hidden), first.hidden)
        while step is not None:
            hidden = self._forward(step)
            step = search.grow(*self._children(hidden), hidden)
        return search.trees()

    def _children(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the K best tokens after each row of hidden [rows, hidden_size], the best first:
        the head's ids [rows, K] int64 and log-probabilities, float32."""
        logits = self._head.compute_logits(hidden, self._layers)
        token_ids, logprobs = self._best_of(logits, self._shape.topk)
        return token_ids, logprobs


class TorchTreeSearch:
    """Searches in torch: for a CPU, and for shapes that no kernel takes. The oracle of all
    others."""

    def __init__(
        self,
        shape: TreeShape,
        table: torch.Tensor,
        target_ids: torch.Tensor | None,
        first: ForwardBatch,
    ) -> None:
        self._shape = shape
        self._table = table
        self._target_ids = target_ids
        self._first = first
        self._found: list[_Found] = []
        self._beam: _Beam | None = None
        self._fed: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def grow(
        self, token_ids: torch.Tensor, logprobs: torch.Tensor, hidden: torch.Tensor
    ) -> ForwardBatch | None:
        topk, count, level = self._shape.topk, len(self._first.positions), len(self._found)
        ids = token_ids if self._target_ids is None else self._target_ids[token_ids]
        ids, scores = ids.view(count, -1), logprobs.exp().view(count, -1)
        parents = torch.full_like(ids, -1)
        if self._beam is not None:
            scores = self._beam.scores.repeat_interleave(topk, 1) * scores
            parents = self._beam.numbers.repeat_interleave(topk, 1)
        num_before = sum(each.token_ids.shape[1] for each in self._found)
        self._found.append(_Found(ids, scores, parents))
        if level == self._shape.num_steps:
            return None
        chosen = _descending(scores)[:, :topk]
        self._beam = _Beam(ids.gather(1, chosen), scores.gather(1, chosen), chosen + num_before)
        above = chosen // topk
        own_bits = torch.ones_like(chosen) << self._numbers(topk) + level * topk
        ancestors = own_bits if level == 0 else self._fed[-1][1].gather(1, above) | own_bits
        self._fed.append((self._beam.token_ids, ancestors, self._slots(level)))
        rows = above + (len(token_ids) // count) * self._numbers(count)[:, None]
        return replace(_batch(self._first, level, *self._fed[-1]), hidden=hidden[rows.flatten()])

    def trees(self) -> DraftedTrees:
        return DraftedTrees(*_best_nodes(self._found, self._shape.num_drafts), *self._stacked())

    def _slots(self, index: int) -> torch.Tensor:
        """[R, K] int64; of the rows of step `index`."""
        topk, first = self._shape.topk, self._first
        columns = first.positions[:, None] + self._numbers(topk) + index * topk
        slots = self._table[first.rows[:, None], columns].to(torch.int64)
        return slots * (first.slots > 0)[:, None]

    def _stacked(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Stacks the inputs of all steps: each of the three, [N, R, K]."""
        if not self._fed:
            shape = 0, len(self._first.positions), self._shape.topk
            empty = self._table.new_empty(shape, dtype=torch.int64)
            return empty, empty, empty
        token_ids, ancestors, slots = zip(*self._fed, strict=True)
        return torch.stack(token_ids), torch.stack(ancestors), torch.stack(slots)

    def _numbers(self, count: int) -> torch.Tensor:
        return torch.arange(count, device=self._table.device)


class _Beam(NamedTuple):
    """The nodes that a step feeds; `numbers` are their indices among all nodes found of a request.

    Attributes:
        token_ids, numbers: [R, K] int64.
        scores: [R, K] float32.
    """

    token_ids: torch.Tensor
    scores: torch.Tensor
    numbers: torch.Tensor


class _Found(NamedTuple):
    """Nodes of one depth, in the order of their numbers.

    Attributes:
        token_ids: [R, n] int64.
        scores: [R, n] float32.
        parents: [R, n] int64; numbers of the parents, -1: the root.
    """

    token_ids: torch.Tensor
    scores: torch.Tensor
    parents: torch.Tensor


def _batch(
    first: ForwardBatch,
    index: int,
    token_ids: torch.Tensor,
    ancestors: torch.Tensor,
    slots: torch.Tensor,
) -> ForwardBatch:
    """Step `index`, without hidden states; the tensors are [R, K]."""
    count, topk = token_ids.shape
    end = (index + 1) * topk
    return replace(
        first,
        input_ids=token_ids.flatten(),
        positions=(first.positions + index).repeat_interleave(topk),
        slots=slots.flatten(),
        q_lens=[topk] * count,
        kv_lens=first.kv_lens + (end - 1),
        kv_len_upper_bounds=[bound + end - 1 for bound in first.kv_len_upper_bounds],
        ancestors=ancestors.flatten(),
        tree_starts=first.positions,
        hidden=None,
    )


def _best_nodes(
    found: list[_Found], num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the first three fields of `DraftedTrees`. A parent has a lower number than its
    children and no lower score. So among equal scores the parent comes first, and every draft's
    parent is in the tree."""
    token_ids, scores, parents = (torch.cat(each, dim=1) for each in zip(*found, strict=True))
    scores = scores.nan_to_num(0.0)
    order = _descending(scores)
    places = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place_of = torch.empty_like(order).scatter_(1, order, places)
    best = order[:, :num_drafts]
    above = parents.gather(1, best)
    nodes = torch.where(above < 0, 0, 1 + place_of.gather(1, above.clamp(min=0)))
    return token_ids.gather(1, best), nodes.to(torch.int32), scores.gather(1, best)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """[R, n] int64; indices into [R, n], the best first, equal ones in order."""
    return scores.sort(dim=1, descending=True, stable=True).indices
