"""The KV ledger under random lives of requests: exact after every operation, and every token of a
request readable at its place through the page table until the request ends."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from sglang.srt.mem_cache import shared_prefixes
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, Namespace
from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV
from sglang.srt.mem_cache.radix_cache import NullPrefixCache, RadixCache
from sglang.srt.mem_cache.shared_prefixes import TILE_REQUESTS, SharedPrefixes

NUM_ROWS = 4
MAX_PAGES = 12  # of one request


def ledger_over(allocator: PageAllocator, tree: BasePrefixCache) -> KVLedger:
    """A ledger whose rows are as long as the pool."""
    return KVLedger(NUM_ROWS, allocator, tree, allocator.num_pages * allocator.page_size)


@dataclass(eq=False)
class Life:
    """A request: its tokens, and how many have KV."""

    kv: RequestKV
    tokens: list[int]
    num_prompt: int
    committed: int
    is_published: bool = False


class Program:
    """A seeded random program over one ledger, with a page table and KV memory of its own.

    KV of a token is the whole prefix up to it, so a slot that was freed, shared or cached wrongly
    shows at the next look.
    """

    def __init__(self, page_size: int, seed: int, tree: BasePrefixCache | None = None) -> None:
        self.random = random.Random(seed)
        self.page_size = page_size
        self.allocator = PageAllocator(self.random.choice([10, 20, 40]), page_size)
        self.tree = RadixCache(page_size) if tree is None else tree
        self.ledger = ledger_over(self.allocator, self.tree)
        self.lives: list[Life] = []
        self.prefixes = SharedPrefixes(self.ledger)
        self.table: dict[tuple[int, int], int] = {}
        self.memory: dict[int, tuple[Namespace, tuple[int, ...]]] = {}
        block = [self.random.randrange(3) for _ in range(page_size - 1)]
        self.blocks = [[*block, last] for last in range(2)]

    def run(self, num_steps: int) -> None:
        steps = [self.admit, self.reserve, self.reserve, self.compute, self.compute]
        steps += [self.publish, self.extend, self.release, self.flush]
        for _ in range(num_steps):
            self.random.choice(steps)()
            self.compare()
        while self.lives:
            self.release()
            self.compare()
        assert self.ledger.num_available_tokens == self.ledger.num_pool_tokens, "A lock stayed."
        self.flush()
        assert self.ledger.num_free_tokens == self.ledger.num_pool_tokens

    def compare(self) -> None:
        ledger, size = self.ledger, self.page_size
        rows, columns, slots = ledger.take_table_writes().entries.tolist()
        keys = list(zip(rows, columns, strict=True))
        assert len(set(keys)) == len(keys), "A table entry is written twice in one step."
        self.table.update(zip(keys, slots, strict=True))
        report = ledger.check(life.kv for life in self.lives)
        assert report.is_exact, report
        private = [page for life in self.lives for page in life.kv.private_pages]
        assert len(private) == sum(life.kv.num_private_pages for life in self.lives)
        claims = [*self.allocator.free_pages, *self.tree.pages(), *private]
        assert sorted(claims) == list(range(1, self.allocator.num_pages + 1))
        assert ledger.num_tree_tokens == len(list(self.tree.pages())) * size
        assert ledger.num_used_rows == len({life.kv.row for life in self.lives}) == len(self.lives)
        tree_pages = set(self.tree.pages())
        for life in self.lives:
            owned = set(life.kv.private_pages) | tree_pages
            for index in range(len(life.kv.pages) * size):
                slot = self.table[life.kv.row, index]
                assert slot // size in owned, "A token's slot is not its request's."
                assert slot % size == index % size
            for index in range(life.committed):
                expected = (life.kv.namespace, tuple(life.tokens[: index + 1]))
                assert self.memory[self.table[life.kv.row, index]] == expected

        found = self.prefixes.find([life.kv for life in self.lives])
        assert {each.requests: each.num_tokens for each in found} == self.shared_by_pages()
        for prefix in found:
            rows = tuple(self.lives[request].kv.row for request in prefix.requests)
            assert prefix.rows == rows, "A row of another request."
            assert all(self.lives[each].committed >= prefix.num_tokens for each in prefix.requests)

    def shared_by_pages(self) -> dict[tuple[int, ...], int]:
        """Tokens of the prefix that each set of requests shares, by their pages alone."""
        pages = [list(life.kv.pages) for life in self.lives]
        chosen: dict[tuple[int, ...], list[int]] = {}
        for request, own in enumerate(pages):
            counts = [sum(each[:end] == own[:end] for each in pages) for end in range(len(own) + 1)]
            saved = [
                (end * (1 - 1 / min(count, TILE_REQUESTS)), end) for end, count in enumerate(counts)
            ]
            if max(saved)[0] > 0:
                chosen.setdefault(tuple(own[: max(saved)[1]]), []).append(request)
        return {
            tuple(found): len(prefix) * self.page_size
            for prefix, found in chosen.items()
            if len(found) > 1
        }

    def new_tokens(self) -> list[int]:
        tokens: list[int] = []
        for _ in range(self.random.randint(0, 3)):
            tokens += self.random.choice(self.blocks)
        return tokens + self.blocks[0][: self.random.randrange(self.page_size)]

    def pick(self) -> Life | None:
        return self.random.choice(self.lives) if self.lives else None

    def admit(self) -> None:
        assert self.ledger.num_free_rows == NUM_ROWS - len(self.lives)
        if not self.ledger.num_free_rows:
            return
        tokens = self.new_tokens() or [0]
        namespace: Namespace = self.random.choice([(), ("salt",)])
        num_cached, num_locked = self.ledger.cached_prefix(namespace, tokens)
        before = self.ledger.num_available_tokens
        kv = self.ledger.admit(namespace, tokens)
        assert len(kv.pages) * self.page_size == num_cached < len(tokens)
        assert before - self.ledger.num_available_tokens == num_cached - num_locked
        self.lives.append(Life(kv, tokens, len(tokens), num_cached))

    def reserve(self) -> None:
        if (life := self.pick()) is None:
            return
        num_tokens = self.random.randint(0, MAX_PAGES * self.page_size)
        num_new = max(0, -(-num_tokens // self.page_size) - len(life.kv.pages))
        available = self.ledger.num_available_tokens
        state = self.state()
        held = list(life.kv.pages)
        if self.ledger.reserve(life.kv, num_tokens):
            assert num_new * self.page_size <= available
            assert list(life.kv.pages[: len(held)]) == held
            assert len(life.kv.pages) == len(held) + num_new
            assert available - self.ledger.num_available_tokens == num_new * self.page_size
        else:
            assert num_new * self.page_size > available
            assert self.state() == state, "A refused reserve changed something."

    def state(self) -> object:
        pages = [(life.kv.row, list(life.kv.pages)) for life in self.lives]
        return list(self.allocator.free_pages), sorted(self.tree.pages()), pages

    def compute(self) -> None:
        """KV of further tokens, written in place."""
        if (life := self.pick()) is None:
            return
        end = min(len(life.tokens), len(life.kv.pages) * self.page_size)
        end = self.random.randint(life.committed, end)
        for index in range(life.committed, end):
            slot = self.table[life.kv.row, index]
            self.memory[slot] = (life.kv.namespace, tuple(life.tokens[: index + 1]))
        life.committed = end

    def publish(self) -> None:
        life = self.pick()
        if life is None or life.is_published or life.committed < life.num_prompt:
            return
        pages, private = list(life.kv.pages), life.kv.num_private_pages
        in_tree = self.ledger.num_tree_tokens
        self.ledger.publish(life.kv, life.tokens[: life.num_prompt])
        assert list(life.kv.pages) == pages, "A page of a running request changed place."
        moved = (private - life.kv.num_private_pages) * self.page_size
        assert self.ledger.num_tree_tokens == in_tree + moved
        life.is_published = True

    def extend(self) -> None:
        if (life := self.pick()) is not None:
            life.tokens += self.new_tokens()

    def release(self) -> None:
        if (life := self.pick()) is None:
            return
        self.lives.remove(life)
        kept = None
        if self.random.random() < 0.6:
            kept = life.tokens[: self.random.randint(0, life.committed)]
        self.ledger.release(life.kv, kept)
        if kept is not None and not isinstance(self.tree, NullPrefixCache):
            found = self.tree.match(life.kv.namespace, kept)
            assert len(found.pages) == len(kept) // self.page_size, "Committed KV was not cached."

    def flush(self) -> None:
        if not self.lives:
            in_tree = self.ledger.num_tree_tokens
            assert self.ledger.flush() == in_tree
            assert self.ledger.num_tree_tokens == 0


@pytest.fixture(autouse=True)
def prefixes_of_any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_prefixes, "LEAST_SAVED_TOKENS", 0)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_random_lives_leave_the_ledger_exact_and_every_token_in_place(page_size: int) -> None:
    for seed in range(30):
        Program(page_size, seed).run(120)


@pytest.mark.parametrize("seed", range(5))
def test_random_lives_without_a_cache(seed: int) -> None:
    Program(4, seed, tree=NullPrefixCache()).run(120)


def make_ledger(num_pages: int = 12, page_size: int = 1) -> KVLedger:
    return ledger_over(PageAllocator(num_pages, page_size), RadixCache(page_size))


def admit(ledger: KVLedger, tokens: list[int]) -> RequestKV:
    """A request with slots for all its tokens."""
    kv = ledger.admit((), tokens)
    assert ledger.reserve(kv, len(tokens))
    return kv


def test_admission_leaves_one_token_to_feed() -> None:
    ledger = make_ledger()
    tokens = [1, 2, 3, 4]
    ledger.release(admit(ledger, tokens), tokens)
    assert ledger.cached_prefix((), tokens) == (3, 0)
    assert len(ledger.admit((), tokens).pages) == 3


def test_duplicates_of_cached_pages_stay_private_until_release() -> None:
    ledger = make_ledger()
    first, second = admit(ledger, [1, 2, 3]), admit(ledger, [1, 2, 3])
    own = list(second.pages)
    ledger.publish(first, [1, 2, 3])
    ledger.publish(second, [1, 2, 3])
    assert list(second.pages) == list(second.private_pages) == own
    assert ledger.num_tree_tokens == 3
    free = ledger.num_free_tokens
    ledger.release(second, [1, 2, 3])
    assert ledger.num_free_tokens == free + 3
    assert ledger.check([first]).is_exact


def test_a_prefix_in_use_is_not_evicted_for_another_request() -> None:
    ledger = make_ledger(num_pages=6)
    first = admit(ledger, [1, 2, 3])
    ledger.publish(first, [1, 2, 3])
    second = ledger.admit((), [9])
    assert not ledger.reserve(second, 4)
    assert ledger.reserve(second, 3)
    assert ledger.cached_prefix((), [1, 2, 3, 4]) == (3, 3)


def test_reserve_evicts_no_more_than_it_lacks() -> None:
    ledger = make_ledger(num_pages=6)
    ledger.release(admit(ledger, [1, 2, 3, 4]), [1, 2, 3, 4])
    assert ledger.reserve(ledger.admit((), [9]), 3)
    assert ledger.num_tree_tokens == 3


def test_an_aborted_request_leaves_nothing_in_the_cache() -> None:
    ledger = make_ledger()
    ledger.release(admit(ledger, [1, 2, 3]), None)
    assert ledger.num_tree_tokens == 0
    assert ledger.num_free_tokens == ledger.num_pool_tokens


def test_a_second_release_is_refused_and_changes_nothing() -> None:
    ledger = make_ledger()
    kv = admit(ledger, [1, 2, 3])
    ledger.release(kv, [1, 2, 3])
    with pytest.raises(RuntimeError, match="released twice"):
        ledger.release(kv, None)
    assert ledger.num_used_rows == 0
    assert ledger.check([]).is_exact
    rows = [ledger.admit((), [i + 10]).row for i in range(NUM_ROWS)]
    assert len(set(rows)) == NUM_ROWS


def test_a_row_that_changes_hands_before_a_step_is_written_for_its_new_owner_only() -> None:
    ledger = make_ledger(page_size=4)
    first = admit(ledger, [1] * 9)
    ledger.release(first, None)
    second = admit(ledger, [2] * 5)
    assert second.row == first.row
    _, columns, slots = ledger.take_table_writes().entries.tolist()
    assert columns == list(range(8))
    assert slots == [page * 4 + offset for page in second.pages for offset in range(4)]


def test_table_writes_are_taken_once() -> None:
    ledger = make_ledger()
    admit(ledger, [1, 2])
    assert ledger.take_table_writes().entries.shape == (3, 2)
    assert ledger.take_table_writes().entries.shape == (3, 0)


class Planted:
    """A ledger with a cached prefix, a free rest and one running request."""

    def __init__(self) -> None:
        self.allocator = PageAllocator(12, 4)
        self.tree = RadixCache(4)
        self.ledger = ledger_over(self.allocator, self.tree)
        self.ledger.release(admit(self.ledger, [7] * 8), [7] * 8)
        self.kv = admit(self.ledger, [1] * 12)

    def report(self) -> tuple[int, int, int]:
        found = self.ledger.check([self.kv])
        counts = found.legacy_missing_tokens, found.orphan_token_count, found.overlap_token_count
        assert found.is_exact == (counts == (0, 0, 0))
        return counts


def test_check_reports_orphans() -> None:
    planted = Planted()
    planted.allocator.allocate(2)
    assert planted.report() == (8, 8, 0)


def test_check_reports_a_private_page_that_is_free_too() -> None:
    planted = Planted()
    planted.allocator.free(planted.kv.pages[:1])
    assert planted.report() == (-4, 0, 4)


def test_check_reports_a_cached_page_that_is_free_too() -> None:
    planted = Planted()
    planted.allocator.free(list(planted.tree.pages()))
    assert planted.report() == (-8, 0, 8)


def test_check_reports_a_page_of_two_requests() -> None:
    planted = Planted()
    thief = planted.ledger.admit((), [5])
    thief.pages.append(planted.kv.pages[0])
    found = planted.ledger.check([planted.kv, thief])
    assert found.overlap_token_count == 4


def test_an_orphan_and_an_overlap_do_not_cancel_out() -> None:
    planted = Planted()
    planted.allocator.allocate(1)
    planted.allocator.free(planted.kv.pages[:1])
    assert planted.report() == (0, 4, 4)


@pytest.mark.parametrize("page", [0, 13])
def test_a_page_outside_the_pool_does_not_hide_an_orphan(page: int) -> None:
    planted = Planted()
    planted.allocator.allocate(1)
    planted.allocator.free([page])
    _, num_orphans, num_overlaps = planted.report()
    assert (num_orphans, num_overlaps) == (4, 4)


def test_check_reports_the_pages_of_a_forgotten_request() -> None:
    assert Planted().ledger.check([]).orphan_token_count == 12


def test_repair_mends_orphans_overlaps_and_foreign_pages() -> None:
    planted = Planted()
    planted.allocator.allocate(3)
    planted.allocator.free([planted.kv.pages[0], 0, 99])
    planted.allocator.free(list(planted.tree.pages()))
    planted.ledger.repair([planted.kv])
    assert planted.report() == (0, 0, 0)
    assert planted.ledger.num_tree_tokens == 8
    assert len(planted.kv.pages) == 3


def test_a_request_never_gets_a_page_beyond_its_row() -> None:
    allocator = PageAllocator(8, 4)
    ledger = KVLedger(NUM_ROWS, allocator, RadixCache(4), row_width=12)
    kv = ledger.admit((), [1] * 12)
    assert ledger.reserve(kv, 12)
    with pytest.raises(AssertionError, match="outgrows its row"):
        ledger.reserve(kv, 13)
    assert ledger.take_table_writes().entries[1].max() == 11


def test_rows_of_broken_pages_are_refused() -> None:
    with pytest.raises(AssertionError, match="ends within a page"):
        KVLedger(NUM_ROWS, PageAllocator(8, 4), RadixCache(4), row_width=14)
