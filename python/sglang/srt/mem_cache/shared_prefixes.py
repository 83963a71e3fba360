"""Finds which requests of a step share KV, by their nodes in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.base_prefix_cache import CacheNode
from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV
from sglang.srt.mem_cache.memory_pool import SharedPrefix

TILE_REQUESTS = 16  # for which KV that they share is read once, about
# Tokens of KV that a step does not read again; what that takes must be more than two further
# kernels in each layer do.
LEAST_SAVED_TOKENS = 16384


class SharedPrefixes:
    """Finds prefixes anew only after requests or the cache have changed, since both stay the same
    from one decode step to the next.

    Args:
        least_saved: tokens that prefixes must save in a step.
    """

    def __init__(self, ledger: KVLedger, least_saved: int = LEAST_SAVED_TOKENS) -> None:
        self._ledger = ledger
        self._least_saved = least_saved
        self._known_of: tuple[int, list[RequestKV]] = (-1, [])
        self._known: list[SharedPrefix] = []

    def find(self, requests: list[RequestKV]) -> list[SharedPrefix]:
        """Returns prefixes of requests that decode, the longest first; each request is in one at
        most. The result must not be changed."""
        if not requests:
            return []
        version, known = self._known_of
        if version != self._ledger.version or known != requests:
            self._known = self._search(requests)
            self._known_of = self._ledger.version, requests
        return self._known

    def _search(self, requests: list[RequestKV]) -> list[SharedPrefix]:
        members: dict[CacheNode, list[int]] = {}
        num_pages: dict[CacheNode, int] = {}
        for index, kv in enumerate(requests):
            for node, depth in self._ledger.shared_nodes(kv):
                members.setdefault(node, []).append(index)
                num_pages[node] = depth
        gains = {
            node: num_pages[node] * (1 - 1 / min(len(found), TILE_REQUESTS))
            for node, found in members.items()
            if len(found) > 1
        }
        best: dict[int, CacheNode] = {}
        for node, gain in gains.items():
            for index in members[node]:
                if index not in best or gain > gains[best[index]]:
                    best[index] = node
        chosen: dict[CacheNode, list[int]] = {}
        for index, node in best.items():
            chosen.setdefault(node, []).append(index)
        page_size = self._ledger.page_size
        prefixes = [
            _prefix(num_pages[node] * page_size, sorted(found), requests)
            for node, found in chosen.items()
            if len(found) > 1
        ]
        if sum(_saved_tokens(prefix) for prefix in prefixes) < self._least_saved:
            return []
        return sorted(prefixes, key=lambda prefix: -prefix.num_tokens)


def _prefix(num_tokens: int, found: list[int], requests: Sequence[RequestKV]) -> SharedPrefix:
    rows = tuple(requests[index].row for index in found)
    return SharedPrefix(num_tokens, tuple(found), rows)


def _saved_tokens(prefix: SharedPrefix) -> int:
    count = len(prefix.requests)
    return (count - -(-count // TILE_REQUESTS)) * prefix.num_tokens
