"""Contract of a prefix cache: it owns KV pages under the tokens whose KV they hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

Namespace = tuple[Any, ...]
"""The values beside the tokens that must be equal to share KV: weight epoch, adapter, salt."""


class CacheNode(Protocol):
    """A place in the tree. Opaque to callers; locked and unlocked through the cache."""

    lock_count: int


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """Longest cached prefix: `pages` hold the KV of the first len(pages) * page_size tokens.

    `num_unlocked_pages` of them are not locked, so they count as evictable.
    """

    pages: list[int]
    node: CacheNode
    num_unlocked_pages: int


@dataclass(frozen=True, slots=True)
class InsertResult:
    """`num_existing_pages` were in the tree before; the tree took the pages after them."""

    num_existing_pages: int
    node: CacheNode


class BasePrefixCache(Protocol):
    """Contract of a prefix cache. It counts in pages and cuts token sequences down to whole pages.

    A locked node keeps itself and all nodes above it from being evicted.
    """

    @property
    def num_pages(self) -> int: ...

    @property
    def num_evictable_pages(self) -> int: ...

    def pages(self) -> Iterator[int]:
        """Every page that the cache owns."""

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        """Longest cached prefix, marked as just used."""

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int]
    ) -> InsertResult:
        """Gives `pages`, holding KV of `tokens`, to the cache where it lacks them."""

    def shared_nodes(self, node: CacheNode, num_pages: int) -> Iterator[tuple[CacheNode, int]]:
        """The nodes from `node`, whose prefix has num_pages pages, up to the root that several have
        locked, each with the pages of its prefix."""

    def lock(self, node: CacheNode) -> None: ...

    def unlock(self, node: CacheNode) -> None: ...

    def evict(self, num_pages: int) -> list[int]:
        """Drops least recently used, unlocked pages: at most `num_pages`, fewer if there are
        fewer. The caller frees them."""

    def reset(self) -> list[int]:
        """Drops everything, locks included; returns the pages for the caller to free."""
