"""The search for earlier places of a request's last tokens, in Triton kernels: many programs go
over parts of its row and of the memory, then one of each request takes the best place. The most
frequent token takes two more rounds over all parts: one counts what follows the longest matches,
the next takes the best place by these counts."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from sglang.srt.layers.triton_launch import begin, dependent_launch
from sglang.srt.speculative import ngram_memory, ngram_ops
from sglang.srt.speculative.drafter_configs import NgramLimits
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_ops import Continuation
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.triton_commit_run import step_launch

_MERIT_SHIFT = tl.constexpr(ngram_ops.MERIT_SHIFT)
# Parts of a rank.
_SOURCE = tl.constexpr(3 << ngram_ops.SOURCE_SHIFT)
_OWN = tl.constexpr(ngram_ops.OWN << ngram_ops.SOURCE_SHIFT)
_SHARED = tl.constexpr(ngram_ops.SHARED << ngram_ops.SOURCE_SHIFT)
_CORPUS = tl.constexpr(ngram_ops.CORPUS << ngram_ops.SOURCE_SHIFT)
_PLACE = tl.constexpr((1 << ngram_ops.SOURCE_SHIFT) - 1)
_NOT_A_TOKEN = tl.constexpr(ngram_memory.NOT_A_TOKEN)
# What is done with places: the best one by the length of its match is looked for, tokens after the
# longest matches are counted, or the best place by these counts is looked for.
_BY_LENGTH, _COUNT, _BY_COUNT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit
def _is_taken(tokens, taken_ptr, num_taken):
    """Tells for each of tokens [BLOCK] whether it is one of those taken."""
    found = tokens != tokens
    for index in range(num_taken):
        found = found | (tokens == tl.load(taken_ptr + index))
    return found


@triton.jit
def _taken_up(
    best, length, order, behind, longest, counts_ptr, SOURCE: tl.constexpr, SHORTEST: tl.constexpr,
    DOES: tl.constexpr,
):  # fmt: skip
    """The best rank so far, and that of the best of places [BLOCK] with these match lengths, in
    front of the tokens `behind` [BLOCK]. Where they are counted the first one stays."""
    wins = length >= SHORTEST
    if DOES != _BY_LENGTH:
        wins = wins & (length == longest)
    if DOES == _COUNT:
        tl.atomic_add(counts_ptr + behind, 1, mask=wins, sem="relaxed")
    else:
        merit = length
        if DOES == _BY_COUNT:
            merit = tl.load(counts_ptr + behind, mask=wins, other=0)
        rank = (merit.to(tl.int64) << _MERIT_SHIFT) + SOURCE + order
        best = tl.maximum(best, tl.max(tl.where(wins, rank, 0), 0))
    return best


@triton.jit
def _in_own_row(
    best, sequence_ptr, num_tokens, part, taken_ptr, num_taken, longest_found, counts_ptr,
    SHORTEST: tl.constexpr, LONGEST: tl.constexpr, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr,
    DOES: tl.constexpr,
):  # fmt: skip
    """`_taken_up` of a part of a request's row."""
    last = num_tokens - 1
    for start in range(part * BLOCK, last, NUM_PARTS * BLOCK):
        place = start + tl.arange(0, BLOCK)
        counts = place < last
        behind = place
        if (DOES != _BY_LENGTH) | (num_taken > 0):
            behind = tl.load(sequence_ptr + place + 1, mask=counts, other=-1).to(place.dtype)
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
        best = _taken_up(
            best, length, place, behind, longest_found, counts_ptr, _OWN, SHORTEST, DOES
        )
    return best


@triton.jit
def _in_ended_texts(
    best, sequence_ptr, num_tokens, part, tag, tokens_ptr, tags_ptr, head, capacity,
    taken_ptr, num_taken, longest_found, counts_ptr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, DOES: tl.constexpr,
):  # fmt: skip
    """`_taken_up` of a part of the memory's ring."""
    last = num_tokens - 1
    longest = tl.minimum(LONGEST, capacity)
    for start in range(part * BLOCK, capacity, NUM_PARTS * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        token = tl.load(tokens_ptr + slot, mask=slot < capacity, other=-1)
        counts = token == tl.load(sequence_ptr + last)
        next_slot = tl.where(slot + 1 < capacity, slot + 1, 0)
        counts = counts & (tl.load(tags_ptr + next_slot, mask=counts, other=0) == tag)
        behind = token
        if (DOES != _BY_LENGTH) | (num_taken > 0):
            behind = tl.load(tokens_ptr + next_slot, mask=counts, other=-1)
            counts = counts & ~_is_taken(behind, taken_ptr, num_taken)
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
        age = tl.where(age < 0, age + capacity, age)
        best = _taken_up(
            best, length, age, behind, longest_found, counts_ptr, _SHARED, SHORTEST, DOES
        )
    return best


@triton.jit
def _in_corpus(
    best, sequence_ptr, num_tokens, part, corpus_ptr, corpus_len, taken_ptr, num_taken,
    longest_found, counts_ptr, SHORTEST: tl.constexpr, LONGEST: tl.constexpr,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, DOES: tl.constexpr,
):  # fmt: skip
    """`_taken_up` of a part of the corpus."""
    last = num_tokens - 1
    for start in range(part * BLOCK, corpus_len - 1, NUM_PARTS * BLOCK):
        slot = start + tl.arange(0, BLOCK)
        token = tl.load(corpus_ptr + slot, mask=slot < corpus_len - 1, other=-1)
        counts = token == tl.load(sequence_ptr + last)
        behind = tl.load(corpus_ptr + slot + 1, mask=counts, other=-1)
        counts = counts & (behind != _NOT_A_TOKEN)
        if num_taken > 0:
            counts = counts & ~_is_taken(behind, taken_ptr, num_taken)
        length = tl.zeros([BLOCK], tl.int32)
        back = 0
        while (back < LONGEST) & (tl.max(counts.to(tl.int32), 0) > 0):
            counts = counts & (slot >= back)
            own = tl.load(sequence_ptr + last - back, mask=back <= last, other=-2)
            before = tl.load(corpus_ptr + slot - back, mask=counts, other=-1)
            counts = counts & (before == own)
            length += counts.to(tl.int32)
            back += 1
        best = _taken_up(
            best, length, slot, behind, longest_found, counts_ptr, _CORPUS, SHORTEST, DOES
        )
    return best


@triton.jit(do_not_specialize=["num_taken", "early"])
def _search_kernel(
    rows_ptr, num_tokens_ptr, sequences_ptr, row_tags_ptr, tokens_ptr, tags_ptr, head_ptr,
    corpus_ptr, taken_ptr, found_ptr, counts_ptr, out_ptr, width, capacity, corpus_len, vocab_size,
    num_taken, SHORTEST: tl.constexpr, LONGEST: tl.constexpr, NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr, DOES: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests, NUM_PARTS).

    found_ptr: [R, NUM_PARTS] int64; the best ranks by length, unless this looks for them.
    counts_ptr: [R, vocab_size] int32; where tokens are counted, or counts are read.
    out_ptr: [R, NUM_PARTS] int64; the best ranks, if it looks for any.
    """
    begin(PDL, early)
    request, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows_ptr + request)
    num_tokens = tl.minimum(tl.maximum(tl.load(num_tokens_ptr + row), 1), width)
    sequence_ptr = sequences_ptr + row * width
    taken_ptr += request * num_taken
    best = request * 0
    longest_found = best
    if DOES != _BY_LENGTH:
        counts_ptr += request * vocab_size
        found = tl.load(found_ptr + request * NUM_PARTS + tl.arange(0, NUM_PARTS))
        longest_found = tl.max(found, 0) >> _MERIT_SHIFT
    best = _in_own_row(
        best, sequence_ptr, num_tokens, part, taken_ptr, num_taken, longest_found, counts_ptr,
        SHORTEST, LONGEST, NUM_PARTS, BLOCK, DOES,
    )  # fmt: skip
    best = _in_ended_texts(
        best, sequence_ptr, num_tokens, part, tl.load(row_tags_ptr + row), tokens_ptr, tags_ptr,
        tl.load(head_ptr), capacity, taken_ptr, num_taken, longest_found, counts_ptr,
        SHORTEST, LONGEST, NUM_PARTS, BLOCK, DOES,
    )  # fmt: skip
    best = _in_corpus(
        best, sequence_ptr, num_tokens, part, corpus_ptr, corpus_len, taken_ptr, num_taken,
        longest_found, counts_ptr, SHORTEST, LONGEST, NUM_PARTS, BLOCK, DOES,
    )  # fmt: skip
    if DOES != _COUNT:
        tl.store(out_ptr + request * NUM_PARTS + part, best)


@triton.jit(do_not_specialize=["num_drafts", "early"])
def _continue_kernel(
    found_ptr, best_ptr, rows_ptr, num_tokens_ptr, sequences_ptr, row_tags_ptr, tokens_ptr,
    tags_ptr, head_ptr, corpus_ptr, out_ptr, match_lens_ptr, in_corpus_ptr, width, capacity,
    corpus_len, num_drafts, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr, early,
):  # fmt: skip
    """Grid (requests). found_ptr, best_ptr: [R, NUM_PARTS]; the best ranks by length, and those of
    the places that win. out_ptr: [R, num_drafts], BLOCK at least."""
    begin(PDL, early)
    request = tl.program_id(0).to(tl.int64)
    row = tl.load(rows_ptr + request)
    num_tokens = tl.minimum(tl.maximum(tl.load(num_tokens_ptr + row), 1), width)
    sequence_ptr = sequences_ptr + row * width
    parts = request * NUM_PARTS + tl.arange(0, NUM_PARTS)
    match_len = tl.max(tl.load(found_ptr + parts), 0) >> _MERIT_SHIFT
    best = tl.max(tl.load(best_ptr + parts), 0)
    place = best & _PLACE
    offset = tl.arange(0, BLOCK)
    rank = best + tl.zeros([BLOCK], tl.int64)
    source = rank & _SOURCE
    is_draft, is_found = offset < num_drafts, rank != 0

    first = place + 1
    own = first + offset % tl.maximum(num_tokens - first, 1)
    token = tl.load(sequence_ptr + own, mask=is_draft & (source == _OWN), other=0)

    is_corpus = is_draft & is_found & (source == _CORPUS)
    following = tl.load(
        corpus_ptr + first + offset, mask=is_corpus & (first + offset < corpus_len), other=-1
    )
    length = tl.min(tl.where(following != _NOT_A_TOKEN, BLOCK, offset), 0)
    known = first + offset % tl.maximum(length, 1)
    token = tl.where(is_corpus, tl.load(corpus_ptr + known, mask=is_corpus, other=0), token)

    tag = tl.load(row_tags_ptr + row)
    first = tl.load(head_ptr) + place + 1
    is_shared = is_draft & (source == _SHARED)
    following = tl.load(tags_ptr + (first + offset) % capacity, mask=is_shared, other=0)
    length = tl.min(tl.where(is_shared & (following == tag), BLOCK, offset), 0)
    shared = (first + offset % tl.maximum(length, 1)) % capacity
    token = tl.where(is_shared, tl.load(tokens_ptr + shared, mask=is_shared, other=0), token)

    token = tl.where(is_found, token, tl.load(sequence_ptr + num_tokens - 1))
    tl.store(out_ptr + request * num_drafts + offset, token.to(tl.int64), mask=is_draft)
    tl.store(match_lens_ptr + request, match_len)
    in_corpus = (best != 0) & ((best & _SOURCE) == _CORPUS)
    tl.store(in_corpus_ptr + request, in_corpus.to(tl.int64))


class TritonNgramOps:
    """See `NgramOps`.

    Args:
        num_parts: programs that search for each request, a power of 2. A lone request keeps a GPU
            busy with that many; of many requests more programs than run at once cost little.
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
        self.find(rows, 1)  # compiles: row 0 is no request's yet
        self.find(rows, 1, rows[:, None])

    def find(
        self, rows: torch.Tensor, num_drafts: int, taken: torch.Tensor | None = None
    ) -> Continuation:
        state, memory, device = self._state, self._memory, rows.device
        num_reqs, shape = len(rows), (len(rows), self._num_parts)
        found = best = torch.empty(shape, dtype=torch.int64, device=device)
        self._search(rows, taken, found, found, found, _BY_LENGTH)
        if self._limits.by_frequency:
            counts = (num_reqs, state.vocab_size)
            counted = torch.zeros(counts, dtype=torch.int32, device=device)
            best = torch.empty_like(found)
            self._search(rows, taken, found, counted, best, _COUNT)
            self._search(rows, taken, found, counted, best, _BY_COUNT)
        tokens = torch.empty((num_reqs, num_drafts), dtype=torch.int64, device=device)
        match_lens = torch.empty(num_reqs, dtype=torch.int64, device=device)
        in_corpus = torch.empty_like(match_lens)
        _continue_kernel[(num_reqs,)](
            found, best, rows, state.num_tokens, state.tokens, memory.row_tags, memory.tokens,
            memory.tags, memory.head, memory.corpus, tokens, match_lens, in_corpus,
            state.tokens.shape[1], memory.capacity, len(memory.corpus), num_drafts,
            NUM_PARTS=self._num_parts, BLOCK=self._draft_block, num_warps=1, **step_launch(device),
        )  # fmt: skip
        return Continuation(tokens, match_lens, in_corpus)

    def _search(
        self,
        rows: torch.Tensor,
        taken: torch.Tensor | None,
        found: torch.Tensor,
        counts: torch.Tensor,
        out: torch.Tensor,
        does: tl.constexpr,
    ) -> None:
        """One round over all parts; see `_search_kernel`."""
        state, memory, num_reqs = self._state, self._memory, len(rows)
        _search_kernel[(num_reqs, self._num_parts)](
            rows, state.num_tokens, state.tokens, memory.row_tags, memory.tokens, memory.tags,
            memory.head, memory.corpus, rows if taken is None else taken, found, counts, out,
            state.tokens.shape[1], memory.capacity, len(memory.corpus), state.vocab_size,
            0 if taken is None else taken.shape[1],
            SHORTEST=self._limits.shortest, LONGEST=self._limits.longest, NUM_PARTS=self._num_parts,
            BLOCK=self._block, DOES=does.value, num_warps=4,
            **dependent_launch(rows.device, num_reqs * self._num_parts),
        )  # fmt: skip
