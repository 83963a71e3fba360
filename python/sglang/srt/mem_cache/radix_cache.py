"""Prefix caches: a radix tree over tokens with LRU eviction, and the empty cache."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import cast

from sglang.srt.mem_cache.base_prefix_cache import (
    CacheNode,
    InsertResult,
    Namespace,
    PrefixMatch,
)


class TreeNode:
    """An edge of the tree: `key` tokens (whole pages) and the pages with their KV."""

    __slots__ = (
        "children",
        "in_heap",
        "key",
        "last_used",
        "lock_count",
        "namespace",
        "pages",
        "parent",
    )

    def __init__(self, parent: TreeNode | None, key: list[int], pages: list[int]) -> None:
        self.parent = parent
        self.key = key
        self.pages = pages
        self.children: dict[tuple[int, ...], TreeNode] = {}
        self.lock_count = 0
        self.last_used = 0
        self.in_heap = False
        self.namespace: Namespace = ()  # of a root


class RadixCache:
    """Radix tree with one root per namespace. See `BasePrefixCache` for the contract.

    A node that is split stays the lower half, so that its locks still hold. Eviction takes leaves
    in order of last use from a heap whose stale entries are dropped when they come up, and cuts
    only as many pages off a leaf as are asked for.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[Namespace, TreeNode] = {}
        self._heap: list[tuple[int, int, TreeNode]] = []
        self._clock = 0
        self._num_pages = 0
        self._num_locked_pages = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    @property
    def num_evictable_pages(self) -> int:
        return self._num_pages - self._num_locked_pages

    def pages(self) -> Iterator[int]:
        stack = list(self._roots.values())
        while stack:
            node = stack.pop()
            yield from node.pages
            stack.extend(node.children.values())

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        node = self._roots.get(namespace) or TreeNode(None, [], [])
        pages: list[int] = []
        num_unlocked = 0
        tokens = _as_list(tokens)
        while child := node.children.get(self._first_page(tokens, len(pages))):
            offset = len(pages) * self._page_size
            shared = self._shared_pages(child.key, tokens, offset)
            if shared < len(child.pages):
                child = self._split(child, shared)
            self._touch(child)
            pages.extend(child.pages)
            num_unlocked += 0 if child.lock_count else len(child.pages)
            node = child
        return PrefixMatch(pages, node, num_unlocked)

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int]
    ) -> InsertResult:
        tokens = _as_list(tokens[: len(pages) * self._page_size])
        found = self.match(namespace, tokens)
        num_existing = len(found.pages)
        if num_existing == len(pages):
            return InsertResult(num_existing, found.node)
        parent = cast(TreeNode, found.node)
        if parent.parent is None:
            parent = self._roots.setdefault(namespace, parent)
            parent.namespace = namespace
        leaf = TreeNode(
            parent, tokens[num_existing * self._page_size :], list(pages[num_existing:])
        )
        parent.children[self._first_page(leaf.key, 0)] = leaf
        self._num_pages += len(leaf.pages)
        self._touch(leaf)
        self._offer(leaf)
        return InsertResult(num_existing, leaf)

    def shared_nodes(self, node: CacheNode, num_pages: int) -> Iterator[tuple[CacheNode, int]]:
        current = cast(TreeNode, node)
        while current.parent is not None:
            if current.lock_count > 1:
                yield current, num_pages
            num_pages -= len(current.pages)
            current = current.parent

    def lock(self, node: CacheNode) -> None:
        current: TreeNode | None = cast(TreeNode, node)
        while current is not None:
            if current.lock_count == 0:
                self._num_locked_pages += len(current.pages)
            current.lock_count += 1
            current = current.parent

    def unlock(self, node: CacheNode) -> None:
        current: TreeNode | None = cast(TreeNode, node)
        while current is not None:
            current.lock_count -= 1
            if current.lock_count == 0:
                self._num_locked_pages -= len(current.pages)
                self._offer(current)
            current = current.parent

    def evict(self, num_pages: int) -> list[int]:
        freed: list[int] = []
        while len(freed) < num_pages and self._heap:
            used, _, node = heapq.heappop(self._heap)
            node.in_heap = False
            if not self._is_evictable(node):
                continue
            if used == node.last_used:
                freed.extend(self._cut(node, num_pages - len(freed)))
            if node.pages:
                self._offer(node)
        return freed

    def reset(self) -> list[int]:
        pages = list(self.pages())
        self._roots.clear()
        self._heap.clear()
        self._num_pages = self._num_locked_pages = 0
        return pages

    def _first_page(self, tokens: list[int], num_skipped_pages: int) -> tuple[int, ...]:
        start = num_skipped_pages * self._page_size
        return tuple(tokens[start : start + self._page_size])

    def _shared_pages(self, key: list[int], tokens: list[int], offset: int) -> int:
        """Whole pages that `key` and `tokens[offset:]` have in common (bisection over slices)."""
        low, high = 0, min(len(key), len(tokens) - offset) // self._page_size
        while low < high:
            middle = (low + high + 1) // 2
            begin, end = low * self._page_size, middle * self._page_size
            if key[begin:end] == tokens[offset + begin : offset + end]:
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, node: TreeNode, num_pages: int) -> TreeNode:
        """Puts a new node with the first `num_pages` pages above `node`; returns the new one."""
        size = num_pages * self._page_size
        parent = cast(TreeNode, node.parent)
        upper = TreeNode(parent, node.key[:size], node.pages[:num_pages])
        upper.lock_count, upper.last_used = node.lock_count, node.last_used
        parent.children[self._first_page(upper.key, 0)] = upper
        node.parent, node.key, node.pages = upper, node.key[size:], node.pages[num_pages:]
        upper.children[self._first_page(node.key, 0)] = node
        return upper

    def _touch(self, node: TreeNode) -> None:
        self._clock += 1
        node.last_used = self._clock

    def _is_evictable(self, node: TreeNode) -> bool:
        return bool(node.pages) and not node.children and node.lock_count == 0

    def _offer(self, node: TreeNode) -> None:
        """Puts an evictable leaf on the heap, once."""
        if not node.in_heap and self._is_evictable(node):
            node.in_heap = True
            heapq.heappush(self._heap, (node.last_used, id(node), node))

    def _cut(self, leaf: TreeNode, num_pages: int) -> list[int]:
        """Takes up to `num_pages` pages off the end of a leaf; an empty leaf leaves the tree."""
        num_kept = max(0, len(leaf.pages) - num_pages)
        freed = leaf.pages[num_kept:]
        first_page = self._first_page(leaf.key, 0)
        leaf.pages, leaf.key = leaf.pages[:num_kept], leaf.key[: num_kept * self._page_size]
        self._num_pages -= len(freed)
        if num_kept == 0:
            parent = cast(TreeNode, leaf.parent)
            del parent.children[first_page]
            self._offer(parent)
            if parent.parent is None and not parent.children:
                del self._roots[parent.namespace]
        return freed


def _as_list(tokens: Sequence[int]) -> list[int]:
    """The tokens, whose slices can be compared with those of keys; a list is not copied."""
    return tokens if isinstance(tokens, list) else list(tokens)


class NullPrefixCache:
    """The cache of `--disable-radix-cache`: it owns nothing and matches nothing."""

    num_pages = 0
    num_evictable_pages = 0

    def __init__(self) -> None:
        self._node = TreeNode(None, [], [])

    def pages(self) -> Iterator[int]:
        return iter(())

    def match(self, namespace: Namespace, tokens: Sequence[int]) -> PrefixMatch:
        return PrefixMatch([], self._node, 0)

    def insert(
        self, namespace: Namespace, tokens: Sequence[int], pages: Sequence[int]
    ) -> InsertResult:
        """Takes nothing: every page counts as existing elsewhere, so it stays the caller's."""
        return InsertResult(len(pages), self._node)

    def shared_nodes(self, node: CacheNode, num_pages: int) -> Iterator[tuple[CacheNode, int]]:
        return iter(())

    def lock(self, node: CacheNode) -> None:
        node.lock_count += 1

    def unlock(self, node: CacheNode) -> None:
        node.lock_count -= 1

    def evict(self, num_pages: int) -> list[int]:
        return []

    def reset(self) -> list[int]:
        return []
