"""The page free list against a plain set of free pages."""

from __future__ import annotations

import random

import pytest

from sglang.srt.mem_cache.allocator import PageAllocator


def test_every_page_but_the_dummy_is_handed_out_once() -> None:
    allocator = PageAllocator(num_pages=7, page_size=4)
    pages = [page for size in (3, 1, 3) for page in allocator.allocate(size) or []]
    assert sorted(pages) == [1, 2, 3, 4, 5, 6, 7]
    assert allocator.num_free == 0


def test_refusal_takes_nothing() -> None:
    allocator = PageAllocator(num_pages=5, page_size=1)
    allocator.allocate(2)
    before = list(allocator.free_pages)
    assert allocator.allocate(4) is None
    assert list(allocator.free_pages) == before


def test_allocating_nothing_takes_nothing() -> None:
    """Also on a full pool: a slice from -0 would be everything."""
    allocator = PageAllocator(num_pages=5, page_size=1)
    pages = allocator.allocate(0)
    assert pages is not None
    assert len(pages) == 0
    assert allocator.num_free == 5


def test_rebuild_frees_exactly_the_unused_pages() -> None:
    allocator = PageAllocator(num_pages=6, page_size=1)
    allocator.allocate(6)
    allocator.free([2, 2, 5])
    allocator.rebuild({1, 4})
    assert sorted(allocator.free_pages) == [2, 3, 5, 6]


@pytest.mark.parametrize("seed", range(20))
def test_random_programs_agree_with_a_set(seed: int) -> None:
    chooser = random.Random(seed)
    num_pages = chooser.randint(1, 30)
    allocator = PageAllocator(num_pages, page_size=1)
    free, held = set(range(1, num_pages + 1)), []
    for _ in range(200):
        if chooser.random() < 0.5:
            wanted = chooser.randint(0, num_pages)
            pages = allocator.allocate(wanted)
            assert (pages is None) == (wanted > len(free))
            if pages is not None:
                assert len(pages) == wanted == len(set(pages))
                assert free.issuperset(pages)
                free.difference_update(pages)
                held.extend(pages)
        else:
            chooser.shuffle(held)
            count = chooser.randint(0, len(held))
            given, held = held[:count], held[count:]
            allocator.free(given)
            free.update(given)
        assert allocator.num_free == len(free)
        assert set(allocator.free_pages) == free
