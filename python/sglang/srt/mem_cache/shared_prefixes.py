"""Finds which requests of a step share KV, by their nodes in the prefix cache."""

from __future__ import annotations

from collections.abc import Sequence

from sglang.srt.mem_cache.base_prefix_cache import CacheNode
from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV
from sglang.srt.mem_cache.memory_pool import SharedPrefix

TILE_REQUESTS = 16  # for which KV that they share is read once, about
# Tokens of KV that a step does not read again; what that takes must be more than two further
# kernels in each layer do. Of the steps in benchmark/results/shared_prefixes.json (an H100, 32
# layers) those that save 12,288 to 30,720 tokens gain 0.04 to 0.32 ms, as a microbenchmark says:
# that whole servers gain below this number has not been measured.
LEAST_SAVED_TOKENS = 32768


class SharedPrefixes:
    """Finds prefixes anew only for other requests than in the step before: pages of a request stay
    the same until it ends, so what some requests share does too, whatever the cache does.
    """

    def __init__(self, ledger: KVLedger) -> None:
        self._ledger = ledger
        self._known_of: list[RequestKV] = []
        self._known: list[SharedPrefix] = []

    def find(self, requests: list[RequestKV]) -> list[SharedPrefix]:
        """Returns prefixes of requests that decode, the longest first; each request is in one at
        most. The result must not be changed."""
        if requests != self._known_of:
            self._known = self._search(requests)
            self._known_of = requests
        return self._known

    def _search(self, requests: list[RequestKV]) -> list[SharedPrefix]:
        """Gives each request the prefix that saves most for it, by how many have that prefix."""
        members: dict[tuple[CacheNode, int], list[int]] = {}
        for index, kv in enumerate(requests):
            for place in self._ledger.shared_nodes(kv):
                members.setdefault(place, []).append(index)
        best: dict[int, tuple[float, int, CacheNode]] = {}
        for (node, num_pages), found in members.items():
            saved = num_pages * (1 - 1 / min(len(found), TILE_REQUESTS))
            for index in found if len(found) > 1 else ():
                if index not in best or (saved, num_pages) > best[index][:2]:
                    best[index] = saved, num_pages, node
        chosen: dict[tuple[CacheNode, int], list[int]] = {}
        for index, (_, num_pages, node) in best.items():
            chosen.setdefault((node, num_pages), []).append(index)
        prefixes = [
            _prefix(num_pages * self._ledger.page_size, sorted(found), requests)
            for (_, num_pages), found in chosen.items()
            if len(found) > 1
        ]
        if sum(map(_saved_tokens, prefixes)) < LEAST_SAVED_TOKENS:
            return []
        return sorted(prefixes, key=lambda prefix: -prefix.num_tokens)


def _prefix(num_tokens: int, found: list[int], requests: Sequence[RequestKV]) -> SharedPrefix:
    rows = tuple(requests[index].row for index in found)
    return SharedPrefix(num_tokens, tuple(found), rows)


def _saved_tokens(prefix: SharedPrefix) -> int:
    count = len(prefix.requests)
    return (count - -(-count // TILE_REQUESTS)) * prefix.num_tokens
