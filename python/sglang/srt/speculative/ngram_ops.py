"""Finds where a request's last tokens stood before, and what followed them there.

A place is a token that equals the request's last one, and its match is how many tokens up to the
place equal those up to the last one, as far as `NgramLimits.longest`. Places are in the request's
own row of the token table, or in the memory (`NgramMemory`): in texts of its own namespace, or in
the corpus. The longest match wins. Of equally long ones (`NgramLimits.by_frequency`)

- the best place wins: one of its own before one in texts before one in the corpus, then the latest;
- or the token wins that follows most of them, and of those the best place. Of tokens that follow
  equally many the one with the best place wins.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from sglang.srt.speculative.drafter_configs import NgramLimits
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_texts import NOT_A_TOKEN
from sglang.srt.step.request_rows import RequestRows

# The rank of a place, larger for better ones: its merit, which is the length of its match or how
# many places its token follows, then whose text it is in, then how late it is there.
SOURCE_SHIFT, MERIT_SHIFT = 32, 34
CORPUS, SHARED, OWN = 0, 1, 2
NO_PLACE = 0
NOBODYS = -2  # stands where a request has no token, and equals none
PIECE = 1 << 16  # places of the corpus that are compared at once


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens that followed the best place of each of R requests.

    Attributes:
        tokens: [R, D] int64. At the end of the text that is known after a place it begins again
            there: so a request that repeats itself goes on doing so. Without a place it is the
            request's last token.
        match_lens: [R] int64; 0 without a place.
        in_corpus: [R] int64; 1 where the place is in the corpus, else 0.
    """

    tokens: torch.Tensor
    match_lens: torch.Tensor
    in_corpus: torch.Tensor


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


class _Places(NamedTuple):
    """All places in one of the texts that are searched.

    Attributes:
        lens: [R, n] uint8; how long their matches are, 0 where they do not count.
        order: [n] int64; whose they are, and how late, as in ranks.
        behind: [n] or [R, n] int32; the token that follows each.
    """

    lens: torch.Tensor
    order: torch.Tensor
    behind: torch.Tensor

    def best(self, merit: torch.Tensor) -> torch.Tensor:
        """[R]; the rank of the best place by merit [R, n], or NO_PLACE if nothing has any."""
        ranks = (merit.to(torch.int64) << MERIT_SHIFT) + self.order
        return torch.where(merit > 0, ranks, NO_PLACE).amax(1)

    def tokens(self) -> torch.Tensor:
        """[R, n] int64; `behind`, with any id where nothing follows."""
        return self.behind.clamp(min=0).to(torch.int64).expand(self.lens.shape)


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
        searched = [
            self._own_places(sequences, num_tokens, last),
            self._shared_places(memory.row_tags[rows], last),
            *self._corpus_places(last),
        ]
        searched = [self._counting(places, taken) for places in searched]
        best = _best(searched, [places.lens for places in searched])
        match_lens = best >> MERIT_SHIFT
        if self._limits.by_frequency:
            best = self._most_frequent(searched, match_lens[:, None])
        place = (best & ((1 << SOURCE_SHIFT) - 1))[:, None]
        source = ((best >> SOURCE_SHIFT) & 3)[:, None]
        offsets = torch.arange(num_drafts, device=rows.device)

        first = (place + 1).clamp(max=width - 1)
        column = first + offsets % (num_tokens - first).clamp(min=1)
        from_own = sequences.gather(1, column.clamp(max=width - 1))
        from_shared = self._shared_tokens(memory.row_tags[rows], place, offsets)
        tokens = torch.where(source == OWN, from_own, from_shared)
        is_found = best[:, None] != NO_PLACE
        in_corpus = torch.zeros_like(match_lens)
        if len(memory.corpus):
            from_corpus = self._corpus_tokens(place, offsets)
            tokens = torch.where(source == CORPUS, from_corpus, tokens)
            in_corpus = (is_found & (source == CORPUS))[:, 0].to(torch.int64)
        tokens = torch.where(is_found, tokens, last[:, -1:])
        return Continuation(tokens.to(torch.int64), match_lens, in_corpus)

    def _own_places(
        self, sequences: torch.Tensor, num_tokens: torch.Tensor, last: torch.Tensor
    ) -> _Places:
        """In sequences [R, width]."""
        places = torch.arange(sequences.shape[1], device=sequences.device)
        before = torch.full_like(last[:, 1:], NOT_A_TOKEN)
        lens = _match_lens(torch.cat((before, sequences), 1), last)
        lens = torch.where(places < num_tokens - 1, lens, 0)
        return _Places(lens, (OWN << SOURCE_SHIFT) + places, sequences.roll(-1, 1))

    def _shared_places(self, row_tags: torch.Tensor, last: torch.Tensor) -> _Places:
        """In texts of the same namespaces, [R] tags."""
        memory = self._memory
        slots = torch.arange(memory.capacity, device=row_tags.device)
        is_mine = memory.tags == row_tags[:, None]
        mine = torch.where(is_mine, memory.tokens, NOT_A_TOKEN)
        backwards = torch.arange(1 - last.shape[1], 0, device=slots.device)
        before = mine[:, backwards % memory.capacity]
        lens = _match_lens(torch.cat((before, mine), 1), last)
        lens = lens.clamp(max=min(memory.capacity, self._limits.longest))
        lens = torch.where(is_mine.roll(-1, 1), lens, 0)
        order = (SHARED << SOURCE_SHIFT) + (slots - memory.head) % memory.capacity
        return _Places(lens, order, memory.tokens.roll(-1))

    def _corpus_places(self, last: torch.Tensor) -> list[_Places]:
        """Finds places in the corpus piece by piece, so that comparing needs memory for one piece.
        The last slot of the corpus is no place."""
        corpus, found = self._memory.corpus, list[_Places]()
        longest = last.shape[1]
        for start in range(0, len(corpus) - 1, PIECE):
            end = min(start + PIECE, len(corpus) - 1)
            before = corpus[max(0, start + 1 - longest) : end]
            lacking = torch.full_like(corpus[:1], NOT_A_TOKEN).expand(longest - 1 + end - start)
            text = torch.cat((lacking[: len(lacking) - len(before)], before))
            behind = corpus[start + 1 : end + 1]
            lens = torch.where(behind == NOT_A_TOKEN, 0, _match_lens(text[None], last))
            order = (CORPUS << SOURCE_SHIFT) + torch.arange(start, end, device=corpus.device)
            found.append(_Places(lens, order, behind))
        return found

    def _counting(self, places: _Places, taken: torch.Tensor | None) -> _Places:
        """Without those that are too short, or that one of taken [R, B] follows."""
        if taken is None and self._limits.shortest == 1:
            return places
        counts = places.lens >= self._limits.shortest
        if taken is not None:
            counts &= ~(places.tokens()[:, :, None] == taken[:, None]).any(2)
        return places._replace(lens=torch.where(counts, places.lens, 0))

    def _most_frequent(self, searched: Sequence[_Places], longest: torch.Tensor) -> torch.Tensor:
        """[R]; the rank of the best place by how many matches of the longest length, longest
        [R, 1], its token follows."""
        shape = len(longest), self._state.vocab_size
        counts = torch.zeros(shape, dtype=torch.int64, device=longest.device)
        are_longest = [(each.lens == longest) & (each.lens > 0) for each in searched]
        for each, is_longest in zip(searched, are_longest, strict=True):
            counts.scatter_add_(1, each.tokens(), is_longest.to(torch.int64))
        merits = [
            torch.where(is_longest, counts.gather(1, each.tokens()), 0)
            for each, is_longest in zip(searched, are_longest, strict=True)
        ]
        return _best(searched, merits)

    def _shared_tokens(
        self, row_tags: torch.Tensor, age: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """[R, D]; what follows slots, which `age` [R, 1] counts from the oldest one on."""
        memory = self._memory
        first = memory.head + age + 1
        is_mine = memory.tags[(first + offsets) % memory.capacity] == row_tags[:, None]
        length = is_mine.int().cumprod(1).sum(1, keepdim=True).clamp(min=1)
        return memory.tokens[(first + offsets % length) % memory.capacity]

    def _corpus_tokens(self, place: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        """[R, D]; what follows places [R, 1] of the corpus, whose last slot ends a text."""
        corpus = self._memory.corpus
        end, first = len(corpus) - 1, place + 1
        is_text = corpus[(first + offsets).clamp(max=end)] != NOT_A_TOKEN
        length = is_text.int().cumprod(1).sum(1, keepdim=True).clamp(min=1)
        return corpus[(first + offsets % length).clamp(max=end)]


def _best(searched: Sequence[_Places], merits: Sequence[torch.Tensor]) -> torch.Tensor:
    """[R]; the best rank of all."""
    pairs = zip(searched, merits, strict=True)
    return torch.stack([places.best(merit) for places, merit in pairs]).amax(0)


def _match_lens(sequences: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """[R, n] uint8; how many of `last` [R, L], from its end on, equal the tokens of sequences
    [R, L - 1 + n], or [1, L - 1 + n], that end at each of its last n places."""
    longest = last.shape[1]
    differs = sequences.unfold(1, longest, 1) != last[:, None]
    places = torch.arange(1, longest + 1, dtype=torch.uint8, device=last.device)
    return longest - (differs.to(torch.uint8) * places).amax(2)
