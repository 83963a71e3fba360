"""The search for earlier places of a request's last tokens, in two Triton kernels: many programs go
over parts of its row and of the memory, then one of each request takes the best place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, dependent_launch
from sglang.srt.speculative import ngram_ops
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_ops import Continuation, NgramLimits
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.triton_commit_run import step_launch

_OWN = tl.constexpr(1 << ngram_ops.OWN_BIT)
_LENGTH_SHIFT = tl.constexpr(ngram_ops.LENGTH_SHIFT)


@triton.jit
def _is_taken(tokens, taken_ptr, num_taken):
    """Whether each of tokens [BLOCK] is one of those."""
    found = tokens != tokens
    for index in range(num_taken):
        found = found | (tokens == tl.load(taken_ptr + index))
    return found


@triton.jit
def _own_best(
    sequence_ptr, num_tokens, part, taken_ptr, num_taken, SHORTEST: tl.constexpr,
    LONGEST: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rank of the best place in a part of a request's row; 0 for none."""
    last = num_tokens - 1
    best = last * 0
    for start in range(part * BLOCK, last, NUM_PARTS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        counts = place < last
        if num_taken > 0:
            behind = tl.load(sequence_ptr + place + 1, mask=counts, other=-1)
            counts = counts & ~_is_taken(behind, taken_ptr, num_taken)
        length = tl.zeros([BLOCK], tl.int32)
        back = 0
        while (back < LONGEST) & (tl.max(counts.to(tl.int32), 0) > 0):
            counts = counts & (place >= back)
            before = tl.load(sequence_ptr + place - back, mask=counts, other=-1)
            own = tl.load(sequence_ptr + last - back, mask=back <= last, other=-2)
            counts = counts & (before == own)
            length += counts.to(tl.int32)
            back += 1
        rank = (length.to(tl.int64) << _LENGTH_SHIFT) + _OWN + place
        best = tl.maximum(best, tl.max(tl.where(length >= SHORTEST, rank, 0), 0))
    return best


@triton.jit
def _shared_best(
    sequence_ptr, num_tokens, part, tag, tokens_ptr, tags_ptr, head, capacity,
    taken_ptr, num_taken, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The rank of the best slot in a part of the memory; 0 for none."""
    last = num_tokens - 1
    longest = tl.minimum(LONGEST, capacity)
    best = last * 0
    for start in range(part * BLOCK, capacity, NUM_PARTS * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + slot, mask=slot < capacity, other=-1)
        counts = token == tl.load(sequence_ptr + last)
        behind = tl.where(slot + 1 < capacity, slot + 1, 0)
        counts = counts & (tl.load(tags_ptr + behind, mask=counts, other=0) == tag)
        if num_taken > 0:
            following = tl.load(tokens_ptr + behind, mask=counts, other=-1)
            counts = counts & ~_is_taken(following, taken_ptr, num_taken)
        length = tl.zeros([BLOCK], tl.int32)
        back = 0
        while (back < longest) & (tl.max(counts.to(tl.int32), 0) > 0):
            before = slot - back
            before = tl.where(before < 0, before + capacity, before)
            own = tl.load(sequence_ptr + last - back, mask=back <= last, other=-2)
            counts = counts & (tl.load(tags_ptr + before, mask=counts, other=0) == tag)
            counts = counts & (tl.load(tokens_ptr + before, mask=counts, other=-1) == own)
            length += counts.to(tl.int32)
            back += 1
        age = slot - head
        age = tl.where(age < 0, age + capacity, age).to(tl.int64)
        rank = (length.to(tl.int64) << _LENGTH_SHIFT) + age
        best = tl.maximum(best, tl.max(tl.where(length >= SHORTEST, rank, 0), 0))
    return best


@triton.jit(do_not_specialize=["num_taken", "early"])
def _search_kernel(
    rows_ptr, num_tokens_ptr, sequences_ptr, row_tags_ptr, tokens_ptr, tags_ptr, head_ptr,
    taken_ptr, out_ptr, width, capacity, num_taken, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, NUM_PARTS). out_ptr: [R, NUM_PARTS] int64."""
    begin(PDL, early)
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + request)
    num_tokens = tl.minimum(tl.maximum(tl.load(num_tokens_ptr + row), 1), width)
    sequence_ptr = sequences_ptr + row * width
    taken_ptr += request * num_taken
    own = _own_best(
        sequence_ptr, num_tokens, part, taken_ptr, num_taken, SHORTEST, LONGEST, NUM_PARTS, BLOCK
    )
    shared = _shared_best(
        sequence_ptr, num_tokens, part, tl.load(row_tags_ptr + row), tokens_ptr, tags_ptr,
        tl.load(head_ptr), capacity, taken_ptr, num_taken, SHORTEST, LONGEST, NUM_PARTS, BLOCK,
    )  # fmt: skip
    tl.store(out_ptr + request * NUM_PARTS + part, tl.maximum(own, shared))


@triton.jit(do_not_specialize=["num_drafts", "early"])
def _continue_kernel(
    best_ptr, rows_ptr, num_tokens_ptr, sequences_ptr, row_tags_ptr, tokens_ptr, tags_ptr, head_ptr,
    out_ptr, match_lens_ptr, width, capacity, num_drafts,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests). best_ptr: [R, NUM_PARTS]; out_ptr: [R, num_drafts], BLOCK at least."""
    begin(PDL, early)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    num_tokens = tl.minimum(tl.maximum(tl.load(num_tokens_ptr + row), 1), width)
    sequence_ptr = sequences_ptr + row * width
    best = tl.max(tl.load(best_ptr + request * NUM_PARTS + tl.arange(0, NUM_PARTS)), 0)
    place = best & (_OWN - 1)
    offset = tl.arange(0, BLOCK)
    rank = best + tl.zeros([BLOCK], tl.int64)
    is_draft, is_found, is_own = offset < num_drafts, rank != 0, (rank & _OWN) != 0

    first = place + 1
    own = first + offset % tl.maximum(num_tokens - first, 1)
    token = tl.load(sequence_ptr + own, mask=is_draft & is_own, other=0)

    tag = tl.load(row_tags_ptr + row)
    first = tl.load(head_ptr) + place + 1
    is_shared = is_draft & is_found & (is_own == 0)
    following = tl.load(tags_ptr + (first + offset) % capacity, mask=is_shared, other=0)
    length = tl.min(tl.where(is_shared & (following == tag), BLOCK, offset), 0)
    shared = (first + offset % tl.maximum(length, 1)) % capacity
    token = tl.where(is_shared, tl.load(tokens_ptr + shared, mask=is_shared, other=0), token)

    token = tl.where(is_found, token, tl.load(sequence_ptr + num_tokens - 1))
    tl.store(out_ptr + request * num_drafts + offset, token.to(tl.int64), mask=is_draft)
    tl.store(match_lens_ptr + request, best >> _LENGTH_SHIFT)


class TritonNgramOps:
    """See `NgramOps`.

    Args:
        num_parts: programs that search for each request, a power of 2. A lone request keeps a GPU
            busy with so many; of many requests more programs than run at once cost little.
        block: places that a program looks at together, a power of 2.
    """

    def __init__(
        self,
        state: RequestRows,
        memory: NgramMemory,
        limits: NgramLimits,
        num_parts: int = 64,
        block: int = 1024,
    ) -> None:
        self._state = state
        self._memory = memory
        self._limits = limits
        self._num_parts, self._block = num_parts, block
        self._draft_block = max(2, triton.next_power_of_2(state.max_pending))
        rows = torch.zeros(1, dtype=torch.int64, device=state.tokens.device)
        self.find(rows, 1)  # compiles: row 0 is nobody's yet
        self.find(rows, 1, rows[:, None])

    def find(
        self, rows: torch.Tensor, num_drafts: int, taken: torch.Tensor | None = None
    ) -> Continuation:
        state, memory, device = self._state, self._memory, rows.device
        num_reqs, width, parts = len(rows), state.tokens.shape[1], self._num_parts
        best = torch.empty((num_reqs, parts), dtype=torch.int64, device=device)
        shared = (state.num_tokens, state.tokens, memory.row_tags, memory.tokens, memory.tags)
        _search_kernel[(num_reqs, parts)](
            rows, *shared, memory.head, rows if taken is None else taken, best, width,
            memory.capacity, 0 if taken is None else taken.shape[1],
            SHORTEST=self._limits.shortest, LONGEST=self._limits.longest, NUM_PARTS=parts,
            BLOCK=self._block, num_warps=4, **dependent_launch(device, num_reqs * parts),
        )  # fmt: skip
        tokens = torch.empty((num_reqs, num_drafts), dtype=torch.int64, device=device)
        match_lens = torch.empty(num_reqs, dtype=torch.int64, device=device)
        _continue_kernel[(num_reqs,)](
            best, rows, *shared, memory.head, tokens, match_lens, width, memory.capacity,
            num_drafts, NUM_PARTS=parts, BLOCK=self._draft_block,
            num_warps=1, **step_launch(device),
        )  # fmt: skip
        return Continuation(tokens, match_lens)
