"""Random texts for the search for n-grams, an oracle that walks over all places in Python, and the
comparison of a set of operations with it.

As a program it runs all cases on a CPU and prints a line of JSON per case: what differs, nothing if
all is well. Triton kernels then need TRITON_INTERPRET=1 in the environment, set before Triton is
imported:

    export PYTHONPATH=python:sgl-kernel/python:test/support
    TRITON_INTERPRET=1 python test/support/ngram_ops_cases.py triton
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch

from interpreted import asked
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.registry import OPERATIONS, load
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter_configs import NgramLimits
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_ops import Continuation, NgramOps
from sglang.srt.speculative.ngram_texts import joined_texts
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import EndedText, NewRow

WIDTH, NUM_ROWS, NUM_DRAFTS = 96, 6, 5
NAMESPACES: list[tuple[str, ...]] = [("", ""), ("a", ""), ("", "a")]
NUM_PARTS = 2


def small_blocks(ops: str, capacity: int) -> dict[str, int]:
    """Settings of the kernels' search, so that a memory fills several blocks of a part, or none."""
    if ops == "torch":
        return {}
    return {"num_parts": NUM_PARTS, "block": 16 if capacity < 200 else 64}


@dataclass
class Slots:
    """Lists what `NgramMemory` should hold: the last `capacity` slots, each a token and
    its namespace; None ends a text."""

    capacity: int
    slots: list[tuple[int, tuple[str, ...]] | None] = field(default_factory=list)

    def append(self, tokens: list[int], namespace: tuple[str, ...]) -> None:
        kept = tokens[-(self.capacity - 1) :]
        self.slots += [(token, namespace) for token in kept] + [None] * bool(kept)
        self.slots = self.slots[-self.capacity :]

    def texts(self, namespace: tuple[str, ...]) -> list[tuple[int, list[int]]]:
        """Texts of a namespace, with the age of the first token of each."""
        found: list[tuple[int, list[int]]] = []
        current: list[int] = []
        for place, slot in enumerate([*self.slots, None]):
            if slot is not None:
                current.append(slot[0])
                own = slot[1]
                continue
            if current and own == namespace:
                found.append((place - len(current), current))
            current = []
        return found


class Answer(NamedTuple):
    """Drafts, the length of the match that they come from, and whether that is in the corpus."""

    drafts: list[int]
    match_len: int = 0
    in_corpus: bool = False


class Place(NamedTuple):
    """An earlier place of the last tokens; fields in order of what makes a place better.

    Attributes:
        length: of the match.
        source: 2 in the own text, 1 in one that has ended, 0 in the corpus.
        order: later ones are larger.
        behind: what follows.
    """

    length: int
    source: int
    order: int
    behind: list[int]


def best_place(
    own: list[int],
    texts: list[tuple[int, list[int]]],
    limits: NgramLimits,
    num_drafts: int,
    taken: list[int],
    corpus: list[list[int]] | None = None,
) -> Answer:
    """Found by looking everywhere."""
    sources = [(2, 0, own)] + [(1, start, text) for start, text in texts]
    sources += [(0, 1000 * index, text) for index, text in enumerate(corpus or [])]
    found = list[Place]()
    for source, start, text in sources:
        for place in range(len(text) - 1):
            length = 0
            while (
                length < limits.longest
                and length <= place
                and length < len(own)
                and text[place - length] == own[-1 - length]
            ):
                length += 1
            if length >= limits.shortest and text[place + 1] not in taken:
                found.append(Place(length, source, start + place, text[place + 1 :]))
    if not found:
        return Answer([own[-1]] * num_drafts)
    longest = max(place.length for place in found)
    found = [place for place in found if place.length == longest]
    if limits.by_frequency:
        counts = Counter(place.behind[0] for place in found)
        most = max(counts.values())
        found = [place for place in found if counts[place.behind[0]] == most]
    best = max(found)
    drafts = [best.behind[j % len(best.behind)] for j in range(num_drafts)]
    return Answer(drafts, longest, best.source == 0)


class Texts:
    """Rows of the token table, texts that end, a corpus or none, and what they should be.

    Args:
        ops: `torch` or `triton`.
        vocab_size: small, so that texts repeat themselves.
        by_frequency: see `NgramLimits`.
    """

    def __init__(
        self,
        ops: str,
        device: str,
        capacity: int,
        vocab_size: int,
        seed: int,
        by_frequency: bool = False,
    ) -> None:
        self.random = random.Random(seed)
        self.vocab_size = vocab_size
        pool = ReqToTokenPool(NUM_ROWS, WIDTH, device)
        self.state = RequestRows(pool, 1 + NUM_DRAFTS, vocab_size)
        shortest = self.random.choice([1, 1, 2, 3])
        longest = shortest + self.random.choice([0, 1, 4, 15])
        self.limits = NgramLimits(shortest, longest, by_frequency)
        num_texts = self.random.choice([0, 1, 5, 9])
        self.corpus = [self._tokens(self.random.choice([1, 2, 30])) for _ in range(num_texts)]
        joined = joined_texts(self.corpus) if num_texts else None
        self.memory = NgramMemory(self.state, capacity, joined)
        kind: Any = load(OPERATIONS[ops].ngrams)
        self.ops: NgramOps = kind(
            self.state, self.memory, self.limits, **small_blocks(ops, capacity)
        )
        self.slots = Slots(capacity)
        self.running: dict[int, tuple[list[int], tuple[str, ...]]] = {}

    def admit(self) -> None:
        """Requests get rows; of those that they had, texts end now and then, or do not."""
        ended, new_rows = [], []
        for row in self.random.sample(range(NUM_ROWS), self.random.randint(1, NUM_ROWS)):
            if row in self.running and self.random.random() < 0.7:
                tokens, namespace = self.running[row]
                start = self.random.choice([0, 0, len(tokens) // 2])
                end = self.random.choice([len(tokens), len(tokens), max(1, len(tokens) - 1)])
                ended.append(EndedText(row, start, end, namespace))
                self.slots.append(tokens[start:end], namespace)
            tokens = self._tokens(self._length())
            namespace = self.random.choice(NAMESPACES)
            self.running[row] = tokens, namespace
            given = np.array(tokens, dtype=np.int32)
            new_rows.append(NewRow(row, 0, given, SamplingParams(), 0, namespace=namespace))
        self.state.end(ended)
        self.state.initialize(new_rows)
        self.memory.admit(new_rows)

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(self.vocab_size) for _ in range(count)]

    def _length(self) -> int:
        return self.random.choice([1, 2, self.random.randint(3, 40), WIDTH - NUM_DRAFTS])

    def extend(self) -> None:
        """Requests are given tokens that often repeat what was before."""
        for row, (tokens, _) in self.running.items():
            if len(tokens) < WIDTH and self.random.random() < 0.5:
                known = [*tokens, self.random.randrange(self.vocab_size)]
                tokens.append(self.random.choice(known))
                self.state.tokens[row, len(tokens) - 1] = tokens[-1]
                self.state.num_tokens[row] = len(tokens)

    def difference(self) -> str:
        """Compares what the search finds for some requests with what it should find; empty if they
        are equal."""
        rows = self.random.sample(list(self.running), self.random.randint(1, len(self.running)))
        device = self.state.tokens.device
        count = self.random.choice([0, 0, 1, 3])
        taken = [self._tokens(count) for _ in rows]
        given = torch.tensor(taken, device=device, dtype=torch.int64) if count else None
        num_drafts = self.random.randint(1, NUM_DRAFTS)
        found: Continuation = self.ops.find(torch.tensor(rows, device=device), num_drafts, given)
        for place, row in enumerate(rows):
            tokens, namespace = self.running[row]
            texts = self.slots.texts(namespace)
            right = best_place(tokens, texts, self.limits, num_drafts, taken[place], self.corpus)
            found_len, in_corpus = int(found.match_lens[place]), int(found.in_corpus[place])
            own = Answer(found.tokens[place].tolist(), found_len, bool(in_corpus))
            if own != right:
                return f"row {row} of {tokens}: {own}, not {right}; {self.limits}, {taken[place]}"
        return ""


# Slots of the memory, different tokens, a seed, and whether the most frequent token wins.
Case = tuple[int, int, int, bool]
CASES: dict[str, Case] = {
    f"{capacity} slots, {vocab_size} tokens{', by frequency' * by_frequency}": (
        capacity,
        vocab_size,
        seed,
        by_frequency,
    )
    for by_frequency in (False, True)
    for seed, (capacity, vocab_size) in enumerate(
        [(2, 2), (17, 2), (64, 3), (200, 4), (333, 2), (1000, 6)]
    )
}


def difference(ops: str, device: str, case: Case, num_rounds: int) -> str:
    """The first difference in rounds of admissions and steps; empty for none."""
    texts = Texts(ops, device, *case)
    for _ in range(num_rounds):
        texts.admit()
        for _ in range(2):
            texts.extend()
            found = texts.difference()
            if found:
                return found
    return ""


def main(name: str) -> None:
    torch.set_num_threads(1)
    for case_name, case in asked(CASES).items():
        print(json.dumps([case_name, difference(name, "cpu", case, num_rounds=3)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
