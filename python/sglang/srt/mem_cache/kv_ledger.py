"""The KV ledger: the owner of each page, a request or the prefix cache.

Page regions of one request (`RequestKV.pages`, in token order):

    0 ........ shared_end ........ duplicate_end ........ inserted_end ........ len(pages)
    | the tree's, |  own copies of     | given to the tree,   | private            |
    | matched     |  pages the tree has| locked by us         |                    |

A step writes KV into private pages in place; nothing is freed per step. Identity, at any time:
free + tree + sum(private) == pool, every page with exactly one owner.

`weight_epoch` counts the changes of the weights. It is part of every key of the tree, so KV of old
weights is never matched, flushed or not; and a request whose KV spans two epochs gives the tree
nothing.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache, CacheNode, Namespace

SlotState = Literal["cached", "free", "missing"]
NUM_SAMPLE_SLOTS = 16  # of a report


@dataclass(slots=True, eq=False)
class RequestKV:
    """KV of one running request, equal to itself alone. Changed only by the ledger.

    Attributes:
        pages: int64, in token order.
    """

    row: int
    namespace: Namespace
    weight_epoch: int
    pages: array[int]
    node: CacheNode
    shared_end: int
    duplicate_end: int
    inserted_end: int
    is_released: bool = False

    @property
    def private_pages(self) -> array[int]:
        return self.pages[self.shared_end : self.duplicate_end] + self.pages[self.inserted_end :]

    @property
    def num_private_pages(self) -> int:
        return self.duplicate_end - self.shared_end + len(self.pages) - self.inserted_end


def _no_entries() -> np.ndarray:
    return np.empty((3, 0), dtype=np.int64)


@dataclass(frozen=True, slots=True)
class PageTableWrites:
    """Entries for the device's request-to-token table.

    Attributes:
        entries: [3, W] int64; rows, columns and slots: table[row, column] = slot.
    """

    entries: np.ndarray = field(default_factory=_no_entries)

    @classmethod
    def of_runs(cls, runs: Sequence[PageRun], page_size: int) -> PageTableWrites:
        """The entries of whole runs, in their order."""
        if not runs:
            return cls()
        lens = np.array([len(run.pages) for run in runs]) * page_size
        starts = np.array([run.first_page for run in runs]) * page_size
        count = int(lens.sum())
        entries = np.empty((3, count), dtype=np.int64)
        entries[0] = np.repeat([run.row for run in runs], lens)
        entries[1] = np.arange(count) + np.repeat(starts - (np.cumsum(lens) - lens), lens)
        pages = array("q")
        for run in runs:
            pages.extend(run.pages)
        firsts = np.frombuffer(pages, dtype=np.int64) * page_size
        entries[2] = (firsts[:, None] + np.arange(page_size)).ravel()
        return cls(entries)


@dataclass(frozen=True, slots=True)
class PageRun:
    """Consecutive pages of a row: its pages from number `first_page` on."""

    row: int
    first_page: int
    pages: Sequence[int]


@dataclass(frozen=True, slots=True)
class LedgerReport:
    """Outcome of a check, in tokens; all are 0 if the ledger is right. The names are fields of
    `/server_info`, which clients' checks read.

    Attributes:
        legacy_missing_tokens: pool - free - tree - private.
        orphan_token_count: slots that no owner claims.
        overlap_token_count: slots that more than one owner claims.
        orphan_sample, overlap_sample: the first slots of each, `NUM_SAMPLE_SLOTS` at most.
    """

    legacy_missing_tokens: int
    orphan_token_count: int
    overlap_token_count: int
    orphan_sample: tuple[int, ...] = ()
    overlap_sample: tuple[int, ...] = ()

    def __str__(self) -> str:
        counts = (
            f"legacy_missing_tokens={self.legacy_missing_tokens},"
            f" orphan_token_count={self.orphan_token_count},"
            f" overlap_token_count={self.overlap_token_count}"
        )
        samples = {"orphan": self.orphan_sample, "overlap": self.overlap_sample}
        return counts + "".join(
            f", {name}_sample={list(slots)}" for name, slots in samples.items() if slots
        )

    @property
    def is_exact(self) -> bool:
        return not (
            self.legacy_missing_tokens or self.orphan_token_count or self.overlap_token_count
        )


class KVLedger:
    """The owners of the rows of the request-to-token table and of the pages of the KV pool.

    Args:
        row_width: columns of a row.
    """

    def __init__(
        self, num_rows: int, allocator: PageAllocator, tree: BasePrefixCache, row_width: int
    ) -> None:
        assert row_width % allocator.page_size == 0, "A row ends within a page."
        self._row_width = row_width
        self._free_rows = list(range(num_rows - 1, -1, -1))
        self._num_rows = num_rows
        self._allocator = allocator
        self._tree = tree
        # By row: `release` drops a row's entries, so that its next owner does not write the same
        # entries again in one step. The order of two writes to one entry is undefined on a GPU.
        self._writes: dict[int, list[PageRun]] = {}
        self.page_size = allocator.page_size
        self.weight_epoch = 0

    def begin_weight_epoch(self) -> None:
        """Begins the next epoch: KV computed from now on is of other weights. Call it only with no
        step in flight."""
        self.weight_epoch += 1

    @property
    def num_pool_tokens(self) -> int:
        return self._allocator.num_pages * self.page_size

    @property
    def num_free_tokens(self) -> int:
        """Slots without an owner; evictable ones are not counted."""
        return self._allocator.num_free * self.page_size

    @property
    def num_available_tokens(self) -> int:
        """Slots that a request can get, evictable ones included."""
        return (self._allocator.num_free + self._tree.num_evictable_pages) * self.page_size

    @property
    def num_tree_tokens(self) -> int:
        return self._tree.num_pages * self.page_size

    @property
    def num_used_rows(self) -> int:
        return self._num_rows - len(self._free_rows)

    @property
    def num_free_rows(self) -> int:
        return len(self._free_rows)

    def cached_prefix(self, namespace: Namespace, tokens: Sequence[int]) -> tuple[int, int]:
        """Returns how many tokens of the cached prefix `admit` would re-use, and how many of these
        other requests have locked already: re-using those takes nothing from the pool."""
        found = self._tree.match((self.weight_epoch, *namespace), tokens[: len(tokens) - 1])
        num_pages = len(found.pages)
        return num_pages * self.page_size, (num_pages - found.num_unlocked_pages) * self.page_size

    def admit(self, namespace: Namespace, tokens: Sequence[int]) -> RequestKV:
        """Gives a request a row and its cached prefix, locked. At least one token stays without KV,
        since a step must feed one. Needs a free row."""
        namespace = (self.weight_epoch, *namespace)
        found = self._tree.match(namespace, tokens[: len(tokens) - 1])
        self._tree.lock(found.node)
        num_shared = len(found.pages)
        kv = RequestKV(
            row=self._free_rows.pop(),
            namespace=namespace,
            weight_epoch=self.weight_epoch,
            pages=array("q", found.pages),
            node=found.node,
            shared_end=num_shared,
            duplicate_end=num_shared,
            inserted_end=num_shared,
        )
        self._write_table(kv.row, 0, found.pages)
        return kv

    def reserve(self, kv: RequestKV, num_tokens: int) -> bool:
        """Makes the request own slots for its first `num_tokens` tokens, evicting if needed.

        Returns False, with nothing changed, when the pool cannot give them.
        """
        num_new = -(-num_tokens // self.page_size) - len(kv.pages)
        if num_new <= 0:
            return True
        num_lacking = num_new - self._allocator.num_free
        if num_lacking > self._tree.num_evictable_pages:
            return False
        if num_lacking > 0:
            self._allocator.free(self._tree.evict(num_lacking))
        pages = self._allocator.allocate(num_new)
        if pages is None:
            return False
        self._write_table(kv.row, len(kv.pages), pages)
        kv.pages.extend(pages)
        return True

    def publish(self, kv: RequestKV, tokens: Sequence[int]) -> None:
        """Passes the full pages of `tokens`, whose KV is committed, to the tree, locked.

        Pages of tokens that another request has published meanwhile stay the request's own. If the
        weights have changed since its admission, all pages do.
        """
        if kv.weight_epoch != self.weight_epoch:
            return
        num_pages = len(tokens) // self.page_size
        result = self._tree.insert(kv.namespace, tokens, kv.pages[:num_pages])
        self._tree.lock(result.node)
        self._tree.unlock(kv.node)
        kv.node = result.node
        kv.duplicate_end = result.num_existing_pages
        kv.inserted_end = num_pages

    def release(self, kv: RequestKV, tokens: Sequence[int] | None) -> None:
        """Ends a request's ownership, once. First the tree gets the KV of `tokens`, which is
        committed. It gets nothing if that is None (abort, retract) or the KV spans two epochs.

        Raises:
            RuntimeError: if it was released before.
        """
        if kv.is_released:
            raise RuntimeError(f"KV of row {kv.row} was released twice.")
        kv.is_released = True
        leftover = kv.private_pages
        if kv.weight_epoch != self.weight_epoch:
            tokens = None
        num_pages = 0 if tokens is None else len(tokens) // self.page_size
        if tokens is not None and num_pages > kv.inserted_end:
            result = self._tree.insert(kv.namespace, tokens, kv.pages[:num_pages])
            leftover = (
                kv.pages[kv.shared_end : kv.duplicate_end]
                + kv.pages[kv.inserted_end : result.num_existing_pages]
                + kv.pages[num_pages:]
            )
        self._tree.unlock(kv.node)
        self._allocator.free(leftover)
        self._free_rows.append(kv.row)
        self._writes.pop(kv.row, None)
        kv.pages = array("q")

    def shared_nodes(self, kv: RequestKV) -> Iterator[tuple[CacheNode, int]]:
        """The nodes of the tree that are locked by others too and whose prefix is KV of this
        request, each with the pages of its prefix."""
        is_copied = kv.duplicate_end > kv.shared_end
        end = kv.shared_end if is_copied else kv.inserted_end
        for node, num_pages in self._tree.shared_nodes(kv.node, kv.inserted_end):
            if num_pages <= end:
                yield node, num_pages

    def flush(self) -> int:
        """Empties the tree; returns the tokens dropped. Nothing may be locked."""
        pages = self._tree.reset()
        self._allocator.free(pages)
        return len(pages) * self.page_size

    def take_table_writes(self) -> PageTableWrites:
        """Returns the table entries that changed since the last call, for the next step to
        apply."""
        runs = [run for runs in self._writes.values() for run in runs]
        self._writes = {}
        return PageTableWrites.of_runs(runs, self.page_size)

    def num_missing_tokens(self, owners: Iterable[RequestKV]) -> int:
        """Returns pool - free - tree - private, by counts alone."""
        num_owned = self._tree.num_pages + sum(kv.num_private_pages for kv in owners)
        return (self._allocator.num_pages - self._allocator.num_free - num_owned) * self.page_size

    def check(self, owners: Iterable[RequestKV]) -> LedgerReport:
        """Compares every page's claims with the pool. A claim on a page outside of it, the dummy
        one for example, counts as an overlap."""
        private = [kv.private_pages for kv in owners]
        claims = np.concatenate(
            [
                np.array(pages, dtype=np.int64)
                for pages in (self._allocator.free_pages, list(self._tree.pages()), *private)
            ]
        )
        num_pages = self._allocator.num_pages
        is_inside = (claims >= 1) & (claims <= num_pages)
        num_claims = np.bincount(claims[is_inside], minlength=num_pages + 1)
        orphans = np.flatnonzero(num_claims[1:] == 0) + 1
        shared = np.concatenate([np.unique(claims[~is_inside]), np.flatnonzero(num_claims > 1)])
        return LedgerReport(
            legacy_missing_tokens=(num_pages - len(claims)) * self.page_size,
            orphan_token_count=len(orphans) * self.page_size,
            overlap_token_count=len(shared) * self.page_size,
            orphan_sample=self._first_slots(orphans),
            overlap_sample=self._first_slots(shared),
        )

    def _first_slots(self, pages: np.ndarray) -> tuple[int, ...]:
        """
        Args:
            pages: page numbers, [P] int64.
        """
        slots = (
            int(page) * self.page_size + place
            for page in pages[:NUM_SAMPLE_SLOTS]
            for place in range(self.page_size)
        )
        return tuple(itertools.islice(slots, NUM_SAMPLE_SLOTS))

    def slot_states(self, slots: Sequence[int]) -> list[SlotState]:
        """Returns the state of each slot: cached, free or neither. Looks at the whole pool."""
        free, cached = set(self._allocator.free_pages), set(self._tree.pages())
        pages = [slot // self.page_size for slot in slots]
        return ["cached" if p in cached else "free" if p in free else "missing" for p in pages]

    def repair(self, owners: Iterable[RequestKV]) -> None:
        """Makes every unclaimed page free. Only when idle, after a failed `check`."""
        used = set(self._tree.pages())
        for kv in owners:
            used.update(kv.private_pages)
        self._allocator.rebuild(used)

    def _write_table(self, row: int, first_page: int, pages: Sequence[int]) -> None:
        end = (first_page + len(pages)) * self.page_size
        assert end <= self._row_width, "A request outgrows its row."
        if pages:
            self._writes.setdefault(row, []).append(PageRun(row, first_page, pages))
