"""Confirms drafts of a step: those equal to the target's own tokens, those that are probable
enough, or, for benchmarks, a chosen number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from sgl_kernel import ConfirmedDrafts, SamplingRows
from sglang.srt.layers.sampler import Sampler
from sglang.srt.layers.sampling_ops import sampling_ops
from sglang.srt.speculative.drafter_options import AcceptThresholds
from sglang.srt.step.step_ops import READ_START, LookaheadLayout, RowLayout


@dataclass(frozen=True, slots=True)
class TargetRows:
    """The target's tokens and probabilities in a step with look-ahead.

    Attributes:
        layout: with look-ahead.
        tokens: [S] int64; the target's own token after each row read.
        logits: [S, V]; what those were drawn from, after penalties and biases.
        sampling: how they were drawn; None where all rows are greedy.
    """

    layout: RowLayout
    tokens: torch.Tensor
    logits: torch.Tensor
    sampling: SamplingRows | None

    @property
    def lookahead(self) -> LookaheadLayout:
        assert self.layout.lookahead is not None, "A step with look-ahead is laid out as one."
        return self.layout.lookahead


class Confirm(Protocol):
    """Decides on the drafts of a step, on the device, and may not wait for it.

    Attributes:
        can_be_captured: nothing that it does on the host depends on the step.
    """

    can_be_captured: bool

    def __call__(
        self, target: TargetRows, max_rows: int
    ) -> tuple[ConfirmedDrafts, torch.Tensor | None]:
        """
        Args:
            max_rows: at least the pending rows of any request, and the tokens that it may accept.

        Returns:
            The drafts confirmed, and [S] int64: the token to emit after each row kept; None where
            these are the target's own.
        """


class ConfirmEqual:
    """Lossless: a draft is confirmed if the target, reading the row before it, gives that token."""

    can_be_captured = True

    def __init__(self, device: torch.device) -> None:
        self._ops = sampling_ops(device)

    def __call__(self, target: TargetRows, max_rows: int) -> tuple[ConfirmedDrafts, None]:
        layout, lookahead = target.layout, target.lookahead
        confirmed = self._ops.confirm_drafts(
            layout.input_ids,
            target.tokens,
            lookahead.parents,
            lookahead.q_starts,
            lookahead.num_pending,
            max_rows,
            layout.per_request[READ_START],
        )
        return confirmed, None


class ConfirmByThresholds:
    """Confirms drafts of sampled requests that are probable enough; all else as `ConfirmEqual`.

    Let p be the distribution that the target's token is drawn from after a row: after penalties,
    temperature and filters. The draft x that follows the row is confirmed if p(x) > 0, and coin <
    p(x) / acc or p(x) >= single. Of several drafts that follow a row the first such one is, where
    in place of p(x) / acc stands the sum of p over x and those before it, divided by acc. After
    the last row kept the token is drawn from p, without the drafts that were refused there. With
    thresholds below 1 tokens do not follow p.

    The coin of a draft depends on (seed, position) alone, and the number that the last token is
    drawn with on (seed, position of the first draft). Where no kernels can be had for a GPU, the
    reference of `sample_ragged_trees` waits for it.

    Args:
        thresholds: one is below 1; with both at 1 `ConfirmEqual` gives seeded requests the tokens
            that they have without drafts.
        banned_ids: tokens that are never emitted.
    """

    can_be_captured = False  # the reference may wait

    def __init__(
        self, thresholds: AcceptThresholds, banned_ids: Sequence[int], device: torch.device
    ) -> None:
        self._thresholds = thresholds
        self._sampler = Sampler(device, banned_ids)
        self._equal = ConfirmEqual(device)
        self._ops = sampling_ops(device)

    def __call__(
        self, target: TargetRows, max_rows: int
    ) -> tuple[ConfirmedDrafts, torch.Tensor | None]:
        equal, _ = self._equal(target, max_rows)
        if target.sampling is None:
            return equal, None
        layout, sampling, reads = target.layout, target.sampling, target.layout.reads
        lookahead, starts = target.lookahead, layout.per_request[READ_START]
        num_reads, num_pending = len(reads.index), lookahead.num_pending
        first = starts.clamp(max=num_reads - 1)
        # Without drafts a token is drawn as in a step in which no request has any.
        is_drafted = (sampling.temperature[first] > 0) & (num_pending > 1)
        is_node = is_drafted[reads.request] & (reads.offset < num_pending[reads.request])
        if lookahead.parents is None:
            has_draft = is_node & (reads.offset + 1 < num_pending[reads.request])
            first_child = torch.where(has_draft, reads.offset + 1, -1).to(torch.int32)
            next_sibling = torch.full_like(first_child, -1)
        else:
            parents = torch.where(is_node, lookahead.parents[reads.index], -1)
            first_child, next_sibling = tree_links(parents, reads.request, starts, max_rows)
        # Sampling has the noise of positions from 0 on: that of the others is used nowhere else.
        coins = self._ops.uniform_noise(sampling.seeds, ~sampling.positions, 2)
        fed = layout.input_ids[reads.index]
        drawn = self._ops.sample_ragged_trees(
            fed,
            first_child,
            next_sibling,
            torch.nn.functional.pad(starts, (0, 1), value=num_reads),
            coins[:, 0].contiguous(),
            coins[first, 1],
            self._sampler.probs(target.logits, sampling),
            max_rows,
            self._thresholds.single,
            self._thresholds.acc,
        )
        confirmed = ConfirmedDrafts(
            num_confirmed=torch.where(is_drafted, drawn.num_confirmed, equal.num_confirmed),
            path=torch.where(is_drafted[:, None], drawn.path, equal.path),
            next_token=torch.where(is_drafted, drawn.next_token, equal.next_token),
        )
        # After each row of the path its next draft, after the last the token that was drawn.
        following = torch.nn.functional.pad(drawn.path[:, 1:], (0, 1), value=-1).to(torch.int64)
        drafts = fed[(starts[:, None] + following).clamp(0, num_reads - 1)]
        tokens = torch.where(following >= 0, drafts, drawn.next_token[:, None])
        is_kept = (drawn.path >= 0) & is_drafted[:, None]
        places = torch.where(is_kept, starts[:, None] + drawn.path, num_reads)
        emitted = torch.nn.functional.pad(target.tokens, (0, 1))
        emitted[places.flatten()] = tokens.flatten()
        return confirmed, emitted[:num_reads]


def tree_links(
    parents: torch.Tensor, requests: torch.Tensor, starts: torch.Tensor, max_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The links of `sample_ragged_trees`, of the S rows read of R requests.

    Args:
        parents: [S] integers; by offset in its request, the row that each follows; -1: none.
        requests: [S] int64.
        starts: [R] int64; place of each request's first row among the S.
        max_rows: at least the rows of any request that follow one.

    Returns:
        Of each row its first child and its next sibling, by offset; -1 where there is none. Both
        [S] int32.
    """
    count, offsets = len(parents), torch.arange(max_rows, device=parents.device)
    places = starts[requests][:, None] + offsets  # [S, max_rows]; of the rows of its request
    known = places.clamp(max=count - 1)
    exists = (places < count) & (requests[known] == requests[:, None])
    parent_of = torch.where(exists, parents[known], -1)
    own = torch.arange(count, device=parents.device) - starts[requests]

    def first_of(is_one: torch.Tensor) -> torch.Tensor:
        found = torch.where(is_one, offsets, max_rows).amin(1)
        return torch.where(found < max_rows, found, -1).to(torch.int32)

    is_sibling = (parent_of == parents[:, None]) & (parents >= 0)[:, None]
    children = first_of(parent_of == own[:, None])
    return children, first_of(is_sibling & (offsets > own[:, None]))


class ConfirmSoMany:
    """Accepts a given number of drafts on average, right or wrong, and emits them: for benchmarks
    alone (`SGLANG_SIMULATE_ACC_LEN`), since outputs then mean nothing.

    Each request has the floor or the ceiling of the mean accepted, alternating over the requests of
    a step and over steps; all drafts where it has fewer.

    Args:
        mean: tokens per request and step, the target's own one counted; at least 1.
    """

    can_be_captured = True

    def __init__(self, mean: float, device: torch.device) -> None:
        self._num_drafts = mean - 1
        self._turn = torch.zeros(1, dtype=torch.float64, device=device)

    def __call__(self, target: TargetRows, max_rows: int) -> tuple[ConfirmedDrafts, torch.Tensor]:
        layout, lookahead = target.layout, target.lookahead
        assert lookahead.parents is None, "Chains alone."
        num_pending, reads = lookahead.num_pending, layout.reads
        device, num_reqs = num_pending.device, len(num_pending)
        turns = torch.arange(num_reqs + 1, dtype=torch.float64, device=device) + self._turn
        self._turn += 1
        wished = (turns * self._num_drafts).floor().diff().to(torch.int64)
        count = torch.minimum(wished, num_pending - 1).clamp(max=max_rows - 1)
        offsets = torch.arange(max_rows, device=device)
        path = torch.where(offsets <= count[:, None], offsets, -1).to(torch.int32)
        following = layout.input_ids[(reads.index + 1).clamp(max=len(layout.input_ids) - 1)]
        emitted = torch.where(reads.offset < count[reads.request], following, target.tokens)
        last = (layout.per_request[READ_START] + count).clamp(max=len(emitted) - 1)
        return ConfirmedDrafts(count, path, emitted[last]), emitted
