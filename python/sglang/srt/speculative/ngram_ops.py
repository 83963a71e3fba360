"""Finds where a request's last tokens stood before, and what followed them there.

A place is a token that equals the request's last one, and its match is how many tokens up to the
place equal those up to the last one, as far as `NgramLimits.longest`. Places are in the request's
own row of the token table, or in the memory (`NgramMemory`), there of its own namespace only. The
longest match wins; of equal ones a place of its own, then the latest one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sglang.srt.speculative.ngram_memory import NOT_A_TOKEN, NgramMemory
from sglang.srt.step.request_rows import RequestRows

# The rank of a place, larger for better ones: match length, own or not, how late it is.
OWN_BIT, LENGTH_SHIFT = 32, 33
NO_PLACE = 0
NOBODYS = -2  # stands where a request has no token, and equals none


@dataclass(frozen=True, slots=True)
class NgramLimits:
    """How long a match must be, at least 1, and may be; what is beyond is not compared."""

    shortest: int
    longest: int


@dataclass(frozen=True, slots=True)
class Continuation:
    """What followed the best place of each of R requests.

    Attributes:
        tokens: [R, D] int64. At the end of the text that is known behind a place it begins again
            there: so a request that repeats itself goes on doing so. Without a place it is the
            request's last token.
        match_lens: [R] int64; 0 without a place.
    """

    tokens: torch.Tensor
    match_lens: torch.Tensor


class NgramOps(Protocol):
    """Each implementation does the same, bit for bit, and none waits for the device."""

    def __init__(self, state: RequestRows, memory: NgramMemory, limits: NgramLimits) -> None: ...

    def find(
        self, rows: torch.Tensor, num_drafts: int, taken: torch.Tensor | None = None
    ) -> Continuation:
        """
        Args:
            rows: [R] int64, contiguous; rows of the token table, of which `RequestRows.num_tokens`
                tokens are looked at.
            num_drafts: D, at least 1.
            taken: [R, B] int64, contiguous; places that one of these tokens follows do not count.
                None: all do.
        """


class TorchNgramOps:
    """For a CPU; the oracle of all others."""

    def __init__(self, state: RequestRows, memory: NgramMemory, limits: NgramLimits) -> None:
        self._state = state
        self._memory = memory
        self._limits = limits

    def find(
        self, rows: torch.Tensor, num_drafts: int, taken: torch.Tensor | None = None
    ) -> Continuation:
        state, memory = self._state, self._memory
        sequences, width = state.tokens[rows], state.tokens.shape[1]
        num_tokens = state.num_tokens[rows].clamp(1, width)[:, None]
        columns = (
            num_tokens
            - self._limits.longest
            + torch.arange(self._limits.longest, device=rows.device)
        )
        last = torch.where(columns < 0, NOBODYS, sequences.gather(1, columns.clamp(min=0)))
        own = self._own_ranks(sequences, num_tokens, last, taken)
        shared = self._shared_ranks(memory.row_tags[rows], last, taken)
        best = torch.maximum(own, shared)
        offsets = torch.arange(num_drafts, device=rows.device)

        place = (best & ((1 << OWN_BIT) - 1))[:, None]
        first = (place + 1).clamp(max=width - 1)
        column = first + offsets % (num_tokens - first).clamp(min=1)
        from_own = sequences.gather(1, column.clamp(max=width - 1))
        from_shared = self._shared_tokens(memory.row_tags[rows], place, offsets)
        is_own = (best >> OWN_BIT) & 1 == 1
        tokens = torch.where(is_own[:, None], from_own, from_shared)
        tokens = torch.where(best[:, None] == NO_PLACE, last[:, -1:], tokens)
        return Continuation(tokens.to(torch.int64), best >> LENGTH_SHIFT)

    def _own_ranks(
        self,
        sequences: torch.Tensor,
        num_tokens: torch.Tensor,
        last: torch.Tensor,
        taken: torch.Tensor | None,
    ) -> torch.Tensor:
        """[R]; of the best place in each of sequences [R, width], or NO_PLACE."""
        places = torch.arange(sequences.shape[1], device=sequences.device)
        counts = places < num_tokens - 1
        if taken is not None:
            counts &= ~(sequences.roll(-1, 1)[:, :, None] == taken[:, None]).any(2)
        before = torch.full_like(last[:, 1:], NOT_A_TOKEN)
        lens = _match_lens(torch.cat((before, sequences), 1), last)
        lens = torch.where(counts, lens, 0)
        return self._best(lens, (1 << OWN_BIT) + places)

    def _shared_ranks(
        self, row_tags: torch.Tensor, last: torch.Tensor, taken: torch.Tensor | None
    ) -> torch.Tensor:
        """[R]; of the best slot of the memory, or NO_PLACE."""
        memory = self._memory
        slots = torch.arange(memory.capacity, device=row_tags.device)
        is_mine = memory.tags == row_tags[:, None]
        counts = is_mine.roll(-1, 1)
        if taken is not None:
            counts = counts & ~(memory.tokens.roll(-1)[None, :, None] == taken[:, None]).any(2)
        mine = torch.where(is_mine, memory.tokens, NOT_A_TOKEN)
        backwards = torch.arange(1 - last.shape[1], 0, device=slots.device)
        before = mine[:, backwards % memory.capacity]
        lens = _match_lens(torch.cat((before, mine), 1), last)
        lens = torch.where(counts, lens.clamp(max=memory.capacity), 0)
        return self._best(lens, (slots - memory.head) % memory.capacity)

    def _best(self, lens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
        ranks = torch.where(lens >= self._limits.shortest, (lens << LENGTH_SHIFT) + order, NO_PLACE)
        return ranks.amax(1)

    def _shared_tokens(
        self, row_tags: torch.Tensor, age: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """[R, D]; what follows slots, which `age` [R, 1] counts from the oldest one on."""
        memory = self._memory
        first = memory.head + age + 1
        is_mine = memory.tags[(first + offsets) % memory.capacity] == row_tags[:, None]
        length = is_mine.int().cumprod(1).sum(1, keepdim=True).clamp(min=1)
        return memory.tokens[(first + offsets % length) % memory.capacity]


def _match_lens(sequences: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[R, n]; how many of `last` [R, L], from its end on, equal the tokens of sequences
    [R, L - 1 + n] that end at each of its last n places."""
    longest = last.shape[1]
    differs = sequences.unfold(1, longest, 1) != last[:, None]
    places = torch.arange(1, longest + 1, dtype=torch.uint8, device=last.device)
    return longest - (differs.to(torch.uint8) * places).amax(2).to(torch.int64)
