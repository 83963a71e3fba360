"""The one shape of a forward pass: a ragged batch. Prompts, decodes and look-ahead differ only in
the number of rows that each request feeds."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import NamedTuple

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.mem_cache.memory_pool import SharedPrefix

DECODE, UNIFORM, RAGGED, MIXED = "decode", "uniform", "ragged", "mixed"
DRAFT_STEPS = "draft steps"


@dataclass(frozen=True, slots=True)
class GraphKey:
    """The key of the steps that a captured graph can replay. Graphs that differ in any number are
    planned differently, so plans are kept by the whole key.

    Attributes:
        tag: DECODE and UNIFORM: every request feeds `width` rows. RAGGED: up to `width`. MIXED:
            some may feed any number, as prompts do. DRAFT_STEPS: every request feeds one row in
            each of several steps, one after another.
        num_reqs: requests, padding included.
        width: the most rows of a request; in MIXED, of one that does not feed a prompt.
        num_tokens: rows in all, padding included.
        has_tree: steps with `ForwardBatch.ancestors` replay it, and no others.
        computes_all_rows: a drafter needs the last layer of all rows (`HiddenCapture`).
        hidden_width: width of `ForwardBatch.hidden`; 0 if the model reads tokens alone.
        reads_one_row: at most one row of each request is read, however many it feeds.
        num_steps: steps that the graph runs, one after another.
        shares_kv: steps with `ForwardBatch.shared_prefixes` replay it, and no others.
        fixed_orders: steps with `ForwardBatch.fixed_orders` replay it, and no others.
    """

    tag: str
    num_reqs: int
    width: int
    num_tokens: int
    has_tree: bool = False
    computes_all_rows: bool = False
    hidden_width: int = 0
    reads_one_row: bool = False
    num_steps: int = 1
    shares_kv: bool = False
    fixed_orders: bool = False

    @property
    def skips_unread_rows(self) -> bool:
        """Tells whether the graph's last layer computes only the rows of `ForwardBatch.read_index`,
        of which there may be `num_reqs`: this is so where at most one row of each request is read,
        as in steps with prompts of requests that do not look ahead."""
        reads_one_row = self.reads_one_row or (self.tag == MIXED and self.width == 1)
        return reads_one_row and not self.computes_all_rows

    @property
    def is_uniform(self) -> bool:
        """Tells whether every request, those of padding too, has `width` rows."""
        return self.tag in (DECODE, UNIFORM, DRAFT_STEPS)

    @property
    def is_packed(self) -> bool:
        """Tells whether the graph reads `ForwardBatch.q_starts`, and so serves packed batches too;
        for others they are filled in."""
        return self.tag in (RAGGED, MIXED) and self.width > 1


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """R requests that feed T tokens in all; request i feeds q_lens[i] consecutive tokens. If the
    batch is packed (`q_starts`), the device alone knows how many.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64; index of each token in its sequence.
        slots: [T] int64; KV slot that each token's K and V go to.
        rows: [R] int64; row of the request-to-token table.
        q_lens: host list of R; tokens fed by each request; in a packed batch, the most that each
            may feed.
        kv_lens: [R] int64; tokens with KV after this step's are written.
        kv_len_upper_bounds: host list of R; at least `kv_lens`, without reading the device.
        bounds_are_exact: whether the bounds equal `kv_lens`.
        graph_key: the graph that captures this batch's kernels or replays them; None for neither.
            With a key, the memory and grids that a plan gives to kernels must be those of that
            graph, and R and T may be less than the key's numbers: the rest is padding.
        read_index: [S] int64; places among the T rows of the rows whose hidden states are wanted;
            None: all rows.
        ancestors: [T] int64, for trees of draft tokens; None: all rows are causal. If bit j of a
            row is set, the row sees the j-th row that its request feeds in this step, unless that
            comes after it; its own bit is set. Every row sees all KV from before the step. -1 (all
            bits) is plain causal, and the only value allowed in requests that feed more than
            MAX_TREE_ROWS. "After" is by the order of the request's rows, not by `positions`. A
            batch with ancestors replays only graphs that were captured for them
            (`GraphKey.has_tree`).
        tree_starts: [R] int64; the KV position of bit 0 of `ancestors`: bit j means position
            tree_starts[i] + j, and everything before tree_starts[i] is seen. So the rows of a draft
            step see their own branch among the rows of earlier draft steps. None: bit 0 is the
            first row that the request feeds in this step. Only with `ancestors`. A tree ends after
            MAX_TREE_ROWS positions: if a request has more from there to `kv_lens`, all its rows are
            plain causal, so -1.
        q_starts: [R + 1] int64, not descending, for packed batches; None: `q_lens` is exact.
            Request i feeds the rows q_starts[i] to q_starts[i + 1] of the T, at most q_lens[i];
            `kv_lens` counts those. The rows from q_starts[R] on are padding: token 0 at position 0,
            written to the dummy slot, and their results are not read. A request may feed no row.
            Requests whose number of rows the host knows, such as prompts, come first, and so do all
            whose q_lens is above MAX_TREE_ROWS.
        is_block: every row sees all rows that its request feeds in this step, also those after it.
            All requests feed the same number of rows, and none is a tree.
        num_folded: rows that are given to attention as one, which has so many times the query
            heads: those of a KV head are next to each other, row by row. Each request then feeds
            one such row, and has no tree.
        hidden: [T, width], in the model's type; a further input of each row beside its token, such
            as a target's hidden states; None for models that read tokens alone.
        shared_prefixes: of requests that feed one row each, and only where all do; empty: none are
            known. They change no result.
        fixed_orders: all sums go in orders that depend on no other row, of a model that has such
            operations beside faster ones (`ExecutionConfig.has_both_orders`); others ignore it.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    q_lens: list[int]
    kv_lens: torch.Tensor
    kv_len_upper_bounds: list[int]
    bounds_are_exact: bool = False
    graph_key: GraphKey | None = None
    read_index: torch.Tensor | None = None
    ancestors: torch.Tensor | None = None
    tree_starts: torch.Tensor | None = None
    q_starts: torch.Tensor | None = None
    hidden: torch.Tensor | None = None
    is_block: bool = False
    num_folded: int = 1
    shared_prefixes: list[SharedPrefix] = field(default_factory=list)
    fixed_orders: bool = False


class ModelOutput(NamedTuple):
    """The outputs of a model for a forward batch.

    Attributes:
        hidden: hidden states after the last norm; for a head, the input of its next step (see
            `DraftHead`). [S, hidden_size] for the rows `ForwardBatch.read_index`; [T, hidden_size]
            if that is None or `HiddenCapture.all_rows` is set.
        taps: [T, len(taps) * hidden_size]; for each row the inputs of `HiddenCapture.taps`, in that
            order; None where none are asked for.
    """

    hidden: torch.Tensor
    taps: torch.Tensor | None = None


def single_rows(batch: ForwardBatch, max_folded: int) -> ForwardBatch:
    """Returns the rows of blocks as requests of one row each, for attention: causal rows see the
    same, as the K and V of a layer are all in the pool before it is attended. As many of them are
    folded to one as may be, so that they share what they read."""
    count, size = len(batch.q_lens), batch.q_lens[0]
    assert batch.q_lens == [size] * count, "Blocks of different sizes."
    num_folded = max(each for each in range(1, 1 + max_folded) if size % each == 0)
    width = size // num_folded
    key, kv_lens = batch.graph_key, batch.kv_lens.repeat_interleave(width)
    if key is not None:
        key = replace(key, tag=DECODE, num_reqs=count * width, width=1)
    return replace(
        batch,
        positions=kv_lens - 1,
        rows=batch.rows.repeat_interleave(width),
        q_lens=[1] * (count * width),
        kv_lens=kv_lens,
        kv_len_upper_bounds=[it for it in batch.kv_len_upper_bounds for _ in range(width)],
        graph_key=key,
        is_block=False,
        num_folded=num_folded,
    )


def dummy_step(
    q_lens: list[int],
    row: int,
    device: torch.device,
    is_packed: bool = False,
    has_masks: bool = False,
    hidden: torch.Tensor | None = None,
    fixed_orders: bool = False,
) -> ForwardBatch:
    """Makes a step of prompts of these lengths that belong to no request. Its results mean nothing,
    and it writes only the dummy page.

    Args:
        row: a row of the request-to-token table that belongs to no request.
        has_masks: as beside trees.
    """
    q_starts = to_device(list(accumulate(q_lens, initial=0)), device) if is_packed else None
    zeros = torch.zeros(sum(q_lens), dtype=torch.int64, device=device)
    positions = [position for q_len in q_lens for position in range(q_len)]
    return ForwardBatch(
        input_ids=zeros,
        positions=to_device(positions, device),
        slots=zeros,
        rows=torch.full((len(q_lens),), row, dtype=torch.int64, device=device),
        q_lens=q_lens,
        kv_lens=to_device(q_lens, device),
        kv_len_upper_bounds=q_lens,
        bounds_are_exact=True,
        ancestors=torch.full_like(zeros, -1) if has_masks else None,
        q_starts=q_starts,
        hidden=hidden,
        fixed_orders=fixed_orders,
    )
