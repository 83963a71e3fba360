"""The memory under random texts that end, or are given up, and the search in it and in the requests
themselves, against one that looks everywhere; Triton's kernels in its interpreter."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch

from interpreted import run_interpreted
from ngram_ops_cases import CASES, Slots, Texts, best_place, difference
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative import ngram_ops
from sglang.srt.speculative.drafter_configs import NgramLimits
from sglang.srt.speculative.ngram_memory import NO_TAG, NgramMemory
from sglang.srt.speculative.ngram_texts import joined_texts
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import EndedText


@pytest.fixture(scope="module")
def differences(request: pytest.FixtureRequest) -> dict[str, float | str]:
    return run_interpreted("support/ngram_ops_cases.py", "triton", request)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", CASES)
def test_interpreted_triton(differences: dict[str, float | str], name: str) -> None:
    assert differences[name] == ""


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("piece", [7, ngram_ops.PIECE])
def test_torch(name: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_ops, "PIECE", piece)
    assert difference("torch", "cpu", CASES[name], num_rounds=40) == ""


@pytest.mark.parametrize("by_frequency", [False, True])
def test_cases_have_all_kinds_of_places(by_frequency: bool) -> None:
    """Places in the corpus win, and without it others would; frequency decides, and again among
    the tokens that are not taken."""
    seen = Counter[str]()
    for case in CASES.values():
        texts = Texts("torch", "cpu", *case[:3], by_frequency)
        for _ in range(10):
            texts.admit()
            texts.extend()
            for tokens, namespace in texts.running.values():
                known, limits = texts.slots.texts(namespace), texts.limits
                for taken in ([], [tokens[-1]]):
                    best = best_place(tokens, known, limits, 1, taken, texts.corpus)
                    without = best_place(tokens, known, limits, 1, taken)
                    seen["in the corpus"] += best.in_corpus
                    seen["longer there"] += best.match_len > without.match_len > 0
                    by_place = replace(limits, by_frequency=False)
                    latest = best_place(tokens, known, by_place, 1, taken, texts.corpus)
                    seen["by frequency"] += best.drafts != latest.drafts
    assert seen["in the corpus"] > 50
    assert seen["longer there"] > 10
    assert (seen["by frequency"] > 50) == by_frequency


def test_the_oracle_itself() -> None:
    limits = NgramLimits(1, 4)
    assert best_place([1, 2, 3, 1, 2], [], limits, 4, []) == ([3, 1, 2, 3], 2, False)
    assert best_place([5, 5], [], limits, 2, []) == ([5, 5], 1, False)
    assert best_place([1, 2], [(0, [1, 2, 7])], limits, 3, []) == ([7, 7, 7], 2, False)
    assert best_place([1, 2], [(0, [1, 2, 7])], limits, 1, [7]) == ([2], 0, False)
    own_first = best_place([2, 9, 2], [(0, [2, 7])], limits, 1, [], [[2, 6]])
    assert own_first == ([9], 1, False)
    latest = best_place([2], [(0, [2, 7]), (3, [2, 8])], limits, 1, [], [[2, 6]])
    assert latest == ([8], 1, False)
    longest = best_place([4, 2], [(0, [2, 7])], limits, 3, [], [[4, 2, 6, 5]])
    assert longest == ([6, 5, 6], 2, True)
    assert best_place([2], [], limits, 1, [], [[2, 6], [2, 5]]) == ([5], 1, True)


def test_the_oracle_by_frequency() -> None:
    limits = NgramLimits(1, 4, by_frequency=True)
    texts = [(0, [2, 7]), (3, [2, 8]), (6, [2, 7, 2, 8, 2, 6])]
    assert best_place([2], texts, limits, 1, []) == ([8], 1, False), "Of equal counts the latest."
    assert best_place([2], texts, limits, 1, [8]) == ([7], 1, False)
    assert best_place([2], texts, limits, 1, [8, 7]) == ([6], 1, False)
    often = best_place([2, 9, 2], [], limits, 3, [], [[2, 6], [2, 6, 4]])
    assert often == ([6, 4, 6], 1, True), "All places count alike."
    assert best_place([2, 6, 9, 2, 5, 2], [], limits, 1, [], [[2, 6]]) == ([6], 1, False)
    once = best_place([1, 2], [(0, [1, 2, 7])], limits, 1, [], [[2, 6], [2, 6]])
    assert once == ([7], 2, False), "Shorter matches do not count."


def test_slots_of_the_oracle() -> None:
    slots = Slots(5)
    slots.append([1, 2], ("a",))
    slots.append([3], ("b",))
    assert slots.texts(("a",)) == [(0, [1, 2])]
    slots.append([4], ("a",))  # one token of the oldest text is gone, and what follows it is not
    assert slots.texts(("a",)) == [(3, [4])]
    assert slots.texts(("b",)) == [(1, [3])]
    assert slots.texts(("c",)) == []


def memory_of(capacity: int, corpus: np.ndarray | None = None) -> NgramMemory:
    pool = ReqToTokenPool(2, 16, "cpu")
    state = RequestRows(pool, 2, 10)
    state.tokens[0, :6] = torch.arange(6)
    return NgramMemory(state, capacity, corpus)


def test_a_text_that_is_too_long_leaves_its_end() -> None:
    memory = memory_of(4)
    memory.append([EndedText(0, 0, 6, ())])
    assert memory.tokens.tolist() == [3, 4, 5, -1]
    assert memory.tags.tolist() == [memory.tag_of(())] * 3 + [NO_TAG]
    assert memory.head.tolist() == [0]


def test_a_corpus_ends_each_text() -> None:
    assert joined_texts([]).tolist() == []
    joined = joined_texts([[3, 1], [2]])
    assert joined.tolist() == [3, 1, -1, 2, -1]
    memory = memory_of(4, joined)
    memory.append([EndedText(0, 0, 6, ())])
    assert memory.corpus.tolist() == [3, 1, -1, 2, -1], "It is no part of the ring."
    assert len(memory_of(4).corpus) == 0


def test_an_empty_text_leaves_nothing() -> None:
    memory = memory_of(4)
    memory.append([EndedText(0, 3, 3, ())])
    assert memory.tags.tolist() == [NO_TAG] * 4


def test_each_namespace_has_a_tag_of_its_own() -> None:
    memory = memory_of(4)
    names = [(), ("",), ("", ""), ("a", ""), ("", "a"), ("a, ", "")]
    tags = {memory.tag_of(name) for name in names}
    assert len(tags) == len(names)
    assert NO_TAG not in tags
    assert memory.tag_of(("a", "")) == memory.tag_of(("a", ""))
    assert memory_of(4).tag_of(("a", "")) != memory.tag_of(("a", "")), "Keys are random."
