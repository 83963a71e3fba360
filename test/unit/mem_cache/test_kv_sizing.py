"""Pool size: as much as is wished, affordable and useful, in whole pages."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from sglang.srt.mem_cache.kv_sizing import KVSizing

SIZING = KVSizing(
    available_bytes=10_000,
    bytes_per_token=10,
    page_size=16,
    wished_tokens=None,
    max_useful_tokens=1_000_000,
)


def num_pages(**changes: Any) -> int:
    return dataclasses.replace(SIZING, **changes).num_pages()


def test_without_a_wish_the_pool_is_what_fits_and_no_page_more() -> None:
    for available, per_token, page_size in itertools.product(
        (640, 999, 12_345), (1, 3, 8), (1, 4, 16)
    ):
        pages = num_pages(available_bytes=available, bytes_per_token=per_token, page_size=page_size)
        page_bytes = page_size * per_token
        assert pages * page_bytes <= available < (pages + 1) * page_bytes


def test_memory_that_no_request_could_use_is_left_alone() -> None:
    assert num_pages(max_useful_tokens=320) == 20


def test_a_wish_decides_even_beyond_what_is_useful() -> None:
    assert num_pages(wished_tokens=480, max_useful_tokens=320) == 30


@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"wished_tokens": 95}, "--max-total-tokens"),
        ({"max_useful_tokens": 320}, "--max-running-requests"),
        ({"available_bytes": 5 << 20}, "the 5 MiB left (--mem-fraction-static)"),
    ],
)
def test_the_reason_names_what_decided(changes: dict[str, Any], part: str) -> None:
    assert part in dataclasses.replace(SIZING, **changes).reason


def test_a_wish_is_cut_to_whole_pages() -> None:
    assert num_pages(wished_tokens=95) == 5


def test_a_wish_may_take_all_memory_but_one_token_more_is_refused() -> None:
    assert num_pages(wished_tokens=1000) == 62
    with pytest.raises(ValueError, match="--max-total-tokens 1001") as refusal:
        num_pages(wished_tokens=1001)
    assert "--mem-fraction-static" in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [{"available_bytes": 159}, {"wished_tokens": 15}, {"wished_tokens": 0}, {"wished_tokens": -1}],
    ids=str,
)
def test_less_than_one_page_is_refused_with_the_remedies(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="no room for one page") as refusal:
        num_pages(**changes)
    for remedy in ("--max-total-tokens", "--mem-fraction-static", "--page-size"):
        assert remedy in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_memory_that_others_hold_is_named_before_a_wish() -> None:
    with pytest.raises(ValueError, match=r"no room for one page .* 17 MiB more are in use"):
        num_pages(available_bytes=-17 << 20, wished_tokens=1)
