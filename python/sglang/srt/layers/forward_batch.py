"""The one shape of a forward pass: a ragged batch. Prefill, decode and look-ahead rows differ only
in numbers (DESIGN section 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.device_copies import to_device

DECODE, UNIFORM, RAGGED, MIXED = "decode", "uniform", "ragged", "mixed"
MAX_TREE_ROWS = 64  # that a request may feed as a tree: one bit each


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured graph is good for. Never partial: two graphs that differ in any number differ
    in what was planned for them.

    Attributes:
        tag: DECODE and UNIFORM where every request feeds `width` rows, RAGGED where up to so many,
            MIXED where some may feed any number, as prompts do.
        num_reqs: requests, padding included.
        width: rows of a request (of one that is not a prompt), at most.
        num_tokens: rows in all, padding included.
    """

    tag: str
    num_reqs: int
    width: int
    num_tokens: int

    @property
    def leaves_rows(self) -> bool:
        """Whether it gives hidden states of `ForwardBatch.read_index` alone, and those must be one
        row of each request at most: steps with prompts, of requests that do not look ahead."""
        return self.tag == MIXED and self.width == 1

    @property
    def is_uniform(self) -> bool:
        """Whether every request, those of padding too, has `width` rows."""
        return self.tag in (DECODE, UNIFORM)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """R requests that feed T tokens in all; request i feeds q_lens[i] consecutive tokens.

    Attributes:
        input_ids: [T] int64.
        positions: [T] int64; index of each token in its sequence.
        slots: [T] int64; KV slot that each token's K and V go to.
        rows: [R] int64; row of the request-to-token table.
        q_lens: host list of R; tokens fed by each request.
        kv_lens: [R] int64; tokens with KV after this step's are written.
        kv_len_upper_bounds: host list of R; at least `kv_lens`, without reading the device.
        bounds_are_exact: the bounds are `kv_lens`.
        graph_key: the graph that captures this batch's kernels or replays them; None for neither.
            With one, what a plan hands to kernels must stay at the addresses and within the grids
            of that graph, and R and T may be less than the key's numbers: what lacks is padding.
        read_index: [S] int64; places among the T rows of those whose hidden states are wanted;
            None: all are.
        ancestors: [T] int64, for trees of draft tokens; None: all rows are causal. Bit j of a row:
            it sees the j-th row that its request feeds in this step, unless that comes after it;
            its own bit is set. All KV from before the step is seen. -1, all bits, is plain causal,
            and the one value in requests that feed more than MAX_TREE_ROWS. Attention goes by the
            order of a request's rows, whatever their positions. Such a batch replays no graph yet.
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


def dummy_step(q_lens: list[int], device: torch.device) -> ForwardBatch:
    """Prompts of these lengths over row 0 and the dummy slot, before there is a request: what they
    compute means nothing, and they leave a trace in the dummy page alone."""
    zeros = torch.zeros(sum(q_lens), dtype=torch.int64, device=device)
    positions = [position for q_len in q_lens for position in range(q_len)]
    return ForwardBatch(
        input_ids=zeros,
        positions=to_device(positions, device),
        slots=zeros,
        rows=zeros[: len(q_lens)],
        q_lens=q_lens,
        kv_lens=to_device(q_lens, device),
        kv_len_upper_bounds=q_lens,
        bounds_are_exact=True,
    )
