"""The radix tree against a flat dictionary from page-aligned token prefixes to pages."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from sglang.srt.mem_cache.base_prefix_cache import CacheNode, Namespace
from sglang.srt.mem_cache.radix_cache import NullPrefixCache, RadixCache

PAGE_SIZES = (1, 4, 16)
NAMESPACES: tuple[Namespace, ...] = ((), ("salt",))

Prefix = tuple[Namespace, tuple[int, ...]]


@dataclass
class Entry:
    """A cached page: the last operation that used it, and how many locks lie on it."""

    page: int
    last_used: int
    num_locks: int = 0


class FlatCache:
    """One entry per cached page, under all tokens up to the page's end. No tree, no nodes."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.entries: dict[Prefix, Entry] = {}
        self.clock = 0

    def prefixes(self, namespace: Namespace, tokens: Sequence[int]) -> list[Prefix]:
        ends = range(self.page_size, len(tokens) + 1, self.page_size)
        return [(namespace, tuple(tokens[:end])) for end in ends]

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> list[Entry]:
        self.clock += 1
        found = []
        for prefix in self.prefixes(namespace, tokens):
            if prefix not in self.entries:
                break
            self.entries[prefix].last_used = self.clock
            found.append(self.entries[prefix])
        return found

    def insert(self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Returns the pages that were there."""
        num_existing = len(self.match(namespace, tokens[: len(pages) * self.page_size]))
        prefixes = self.prefixes(namespace, tokens)
        for prefix, page in list(zip(prefixes, pages))[num_existing:]:
            self.entries[prefix] = Entry(page, self.clock)
        return num_existing

    def lock(self, prefixes: list[Prefix], change: int) -> None:
        for prefix in prefixes:
            self.entries[prefix].num_locks += change

    def evict(self, num_pages: int) -> list[int]:
        """Oldest first, one page at a time, never a page that another one continues."""
        freed: list[int] = []
        while len(freed) < num_pages:
            parents = {(space, tokens[: -self.page_size]) for space, tokens in self.entries}
            ends = [
                (entry.last_used, prefix)
                for prefix, entry in self.entries.items()
                if not entry.num_locks and prefix not in parents
            ]
            if not ends:
                break
            freed.append(self.entries.pop(min(ends)[1]).page)
        return freed

    @property
    def num_evictable(self) -> int:
        return sum(not entry.num_locks for entry in self.entries.values())


@dataclass
class Lock:
    node: CacheNode
    prefixes: list[Prefix]


class Program:
    """A seeded random program, run on the tree and on the flat cache side by side."""

    def __init__(self, page_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.tree = RadixCache(page_size)
        self.flat = FlatCache(page_size)
        self.locks: list[Lock] = []
        self.next_page = 1
        # Pages that differ in the last token only, so that a look at the first one misleads.
        common = [self.random.randrange(5) for _ in range(page_size - 1)]
        self.alphabet = [[*common, last] for last in range(3)]

    def tokens(self) -> list[int]:
        """Some whole pages, and often a part of one."""
        tokens: list[int] = []
        for _ in range(self.random.randint(0, 7)):
            tokens += self.random.choice(self.alphabet)
        return tokens + self.alphabet[0][: self.random.randrange(self.page_size)]

    def run(self, num_steps: int) -> None:
        steps = [self.match] * 3 + [self.insert] * 4 + [self.lock, self.unlock] * 2
        steps += [self.evict] * 3
        for _ in range(num_steps):
            self.random.choice(steps)()
            if self.random.random() < 0.01:
                self.reset()
            self.compare()

    def compare(self) -> None:
        pages = list(self.tree.pages())
        assert len(pages) == len(set(pages)), "A page is in the tree twice."
        assert set(pages) == {entry.page for entry in self.flat.entries.values()}
        assert self.tree.num_pages == len(pages)
        assert self.tree.num_evictable_pages == self.flat.num_evictable

    def match(self) -> Lock:
        namespace, tokens = self.random.choice(NAMESPACES), self.tokens()
        found = self.tree.match(namespace, tokens)
        expected = self.flat.match(namespace, tokens)
        assert found.pages == [entry.page for entry in expected]
        assert found.num_unlocked_pages == sum(not entry.num_locks for entry in expected)
        prefixes = self.flat.prefixes(namespace, tokens)[: len(expected)]
        return Lock(found.node, prefixes)

    def insert(self) -> Lock:
        namespace, tokens = self.random.choice(NAMESPACES), self.tokens()
        num_pages = len(tokens) // self.page_size
        pages = list(range(self.next_page, self.next_page + num_pages))
        self.next_page += num_pages
        result = self.tree.insert(namespace, tokens, pages)
        assert result.num_existing_pages == self.flat.insert(namespace, tokens, pages)
        return Lock(result.node, self.flat.prefixes(namespace, tokens))

    def lock(self) -> None:
        lock = self.random.choice([self.match, self.insert])()
        self.tree.lock(lock.node)
        self.flat.lock(lock.prefixes, 1)
        self.locks.append(lock)

    def unlock(self) -> None:
        if self.locks:
            lock = self.locks.pop(self.random.randrange(len(self.locks)))
            self.tree.unlock(lock.node)
            self.flat.lock(lock.prefixes, -1)

    def evict(self) -> None:
        num_pages = self.random.randint(0, 6)
        freed = self.tree.evict(num_pages)
        assert len(freed) <= num_pages
        assert sorted(freed) == sorted(self.flat.evict(num_pages))

    def reset(self) -> None:
        assert set(self.tree.reset()) == {entry.page for entry in self.flat.entries.values()}
        self.flat.entries.clear()
        self.locks.clear()


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_random_programs_agree_with_a_flat_dictionary(page_size: int) -> None:
    for seed in range(25):
        Program(page_size, seed).run(250)


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_match_is_the_longest_cached_prefix_in_whole_pages(page_size: int) -> None:
    tree = RadixCache(page_size)
    tokens = list(range(page_size * 5))
    tree.insert((), tokens, [11, 12, 13, 14, 15])
    for length in range(len(tokens) + 1):
        expected = [11, 12, 13, 14, 15][: length // page_size]
        assert tree.match((), tokens[:length]).pages == expected
        assert tree.match((), [*tokens[:length], -1, *tokens[length:]]).pages == expected


def test_insert_keeps_the_first_pages_and_ignores_a_ragged_tail() -> None:
    tree = RadixCache(4)
    assert tree.insert((), range(10), [1, 2]).num_existing_pages == 0
    result = tree.insert((), range(12), [7, 8, 9])
    assert result.num_existing_pages == 2
    assert tree.match((), list(range(12))).pages == [1, 2, 9]


def test_evict_drops_the_least_recently_used_first() -> None:
    tree = RadixCache(1)
    for first, pages in enumerate([[1, 2], [3, 4], [5, 6]]):
        tree.insert((), [first, 9], pages)
    tree.match((), [0, 9])
    assert sorted(tree.evict(2)) == [3, 4]
    assert sorted(tree.evict(2)) == [5, 6]
    assert sorted(tree.evict(9)) == [1, 2]


def test_evict_cuts_a_long_leaf_only_as_far_as_asked() -> None:
    tree = RadixCache(2)
    tree.insert((), range(12), [1, 2, 3, 4, 5, 6])
    assert sorted(tree.evict(2)) == [5, 6]
    assert tree.match((), list(range(12))).pages == [1, 2, 3, 4]


def test_a_matched_part_of_an_edge_outlives_its_unmatched_rest() -> None:
    tree = RadixCache(1)
    tree.insert((), [1, 2, 3, 4], [1, 2, 3, 4])
    tree.insert((), [7], [7])
    tree.match((), [1, 2])
    assert sorted(tree.evict(2)) == [3, 4]
    assert tree.evict(1) == [7]


def test_locked_path_survives_while_its_branches_go() -> None:
    tree = RadixCache(1)
    tree.insert((), [1, 2, 3, 4], [1, 2, 3, 4])
    tree.lock(tree.match((), [1, 2]).node)
    tree.insert((), [1, 9], [0, 9])
    assert tree.num_evictable_pages == 3
    assert sorted(tree.evict(100)) == [3, 4, 9]
    assert tree.match((), [1, 2, 3]).pages == [1, 2]


def test_a_split_leaves_the_lock_on_both_halves() -> None:
    tree = RadixCache(1)
    node = tree.insert((), [1, 2, 3, 4], [1, 2, 3, 4]).node
    tree.lock(node)
    tree.insert((), [1, 2, 8], [0, 0, 8])
    assert tree.evict(100) == [8]
    tree.unlock(node)
    assert tree.num_evictable_pages == 4
    assert sorted(tree.evict(100)) == [1, 2, 3, 4]


def test_each_of_two_locks_holds_alone() -> None:
    tree = RadixCache(1)
    node = tree.insert((), [1, 2], [1, 2]).node
    tree.lock(node)
    tree.lock(node)
    tree.unlock(node)
    assert tree.evict(2) == []
    tree.unlock(node)
    assert sorted(tree.evict(2)) == [1, 2]


def test_namespaces_share_nothing() -> None:
    tree = RadixCache(1)
    tree.insert(("a",), [1, 2], [1, 2])
    assert tree.match(("b",), [1, 2]).pages == []
    assert tree.insert(("b",), [1, 2], [3, 4]).num_existing_pages == 0
    assert tree.match(("a",), [1, 2]).pages == [1, 2]


def test_reset_returns_every_page_once_and_forgets_locks() -> None:
    tree = RadixCache(1)
    tree.lock(tree.insert((), [1, 2], [1, 2]).node)
    tree.insert(("x",), [1], [3])
    assert sorted(tree.reset()) == [1, 2, 3]
    assert tree.num_pages == tree.num_evictable_pages == 0
    assert tree.match((), [1, 2]).pages == []
    assert tree.evict(5) == []


def test_looking_up_tokens_changes_neither_them_nor_the_pages_given() -> None:
    tree = RadixCache(2)
    tokens, pages = [1, 2, 3, 4], [5, 6]
    tree.insert((), tokens, pages)
    tree.match((), tokens).pages.append(99)
    tree.evict(1)
    assert (tokens, pages) == ([1, 2, 3, 4], [5, 6])
    assert tree.match((), tokens).pages == [5]


def test_the_empty_cache_owns_nothing() -> None:
    cache = NullPrefixCache()
    result = cache.insert((), [1, 2, 3], [1, 2, 3])
    assert result.num_existing_pages == 3, "The pages stay the caller's."
    cache.lock(result.node)
    assert cache.match((), [1, 2, 3]).pages == []
    assert list(cache.pages()) == cache.evict(3) == cache.reset() == []
    assert cache.num_pages == cache.num_evictable_pages == 0


def test_a_namespace_leaves_nothing_behind_when_its_pages_are_evicted() -> None:
    """Clients choose namespaces (cache_salt), so they must not add up."""
    cache = RadixCache(1)
    for salt in range(50):
        cache.match((salt,), [1, 2, 3])
        cache.insert((salt,), [1, 2, 3], [3 * salt + 1, 3 * salt + 2, 3 * salt + 3])
    assert len(cache._roots) == 50
    assert len(cache.evict(1000)) == 150
    assert not cache._roots
    assert cache.match((0,), [1, 2, 3]).pages == []


def test_a_lock_taken_before_the_namespace_had_pages_can_be_given_back() -> None:
    cache = RadixCache(1)
    early = cache.match((), [1, 2]).node
    cache.lock(early)
    node = cache.insert((), [1, 2], [1, 2]).node
    cache.lock(node)
    cache.unlock(early)
    assert cache.num_evictable_pages == 0
    cache.unlock(node)
    assert cache.evict(5) == [1, 2]
