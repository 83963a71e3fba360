"""The memory under random texts that end, or are given up, and the search in it and in the requests
themselves, against one that looks everywhere; Triton's kernels in its interpreter."""

from __future__ import annotations

import pytest
import torch

from interpreted import run_interpreted
from ngram_ops_cases import CASES, Slots, best_place, difference
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.ngram_memory import NO_TAG, NgramMemory
from sglang.srt.speculative.ngram_ops import NgramLimits
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import EndedText


@pytest.fixture(scope="module")
def differences() -> dict[str, float | str]:
    return run_interpreted("support/ngram_ops_cases.py", "triton")


@pytest.mark.parametrize("name", CASES)
def test_interpreted_triton(differences: dict[str, float | str], name: str) -> None:
    assert differences[name] == ""


@pytest.mark.parametrize("name", CASES)
def test_torch(name: str) -> None:
    assert difference("torch", "cpu", CASES[name], num_rounds=40) == ""


def test_the_oracle_itself() -> None:
    limits = NgramLimits(1, 4)
    assert best_place([1, 2, 3, 1, 2], [], limits, 4, []) == ([3, 1, 2, 3], 2)
    assert best_place([5, 5], [], limits, 2, []) == ([5, 5], 1)
    assert best_place([1, 2], [(0, [1, 2, 7])], limits, 3, []) == ([7, 7, 7], 2)
    assert best_place([1, 2], [(0, [1, 2, 7])], limits, 1, [7]) == ([2], 0)
    assert best_place([2, 9, 2], [(0, [2, 7])], limits, 1, []) == ([9], 1), "Its own first."
    assert best_place([2], [(0, [2, 7]), (3, [2, 8])], limits, 1, []) == ([8], 1), "The latest."


def test_slots_of_the_oracle() -> None:
    slots = Slots(5)
    slots.append([1, 2], ("a",))
    slots.append([3], ("b",))
    assert slots.texts(("a",)) == [(0, [1, 2])]
    slots.append([4], ("a",))  # one token of the oldest text is gone, and what follows it is not
    assert slots.texts(("a",)) == [(3, [4])]
    assert slots.texts(("b",)) == [(1, [3])]
    assert slots.texts(("c",)) == []


def memory_of(capacity: int) -> NgramMemory:
    pool = ReqToTokenPool(2, 16, "cpu")
    state = RequestRows(pool, 2, 10)
    state.tokens[0, :6] = torch.arange(6)
    return NgramMemory(state, capacity)


def test_a_text_that_is_too_long_leaves_its_end() -> None:
    memory = memory_of(4)
    memory.append([EndedText(0, 0, 6, ())])
    assert memory.tokens.tolist() == [3, 4, 5, -1]
    assert memory.tags.tolist() == [memory.tag_of(())] * 3 + [NO_TAG]
    assert memory.head.tolist() == [0]


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
