"""Cuts a step into work items (`items.py`), by numbers of the host.

There are three groups of items, each with its own tiles and launch:

- narrow: of requests that feed so few rows that they fit into a narrow tile, as decodes do;
- wide: of other requests that feed few rows, as look-ahead does;
- many: of requests that feed many rows, as prompts do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE, pack_rows
from sglang.srt.layers.forward_batch import MIXED, GraphKey


@dataclass(frozen=True, kw_only=True, slots=True)
class RowLimits:
    """Limits that decide a request's group of items, and the most rows of an item.

    Attributes:
        narrow: the most rows of a request of the narrow group, each of which is one item.
        few: the most rows of a request of the wide group; `narrow` at least.
        wide_item, many_item: the most rows of an item of these groups.
    """

    narrow: int
    few: int
    wide_item: int
    many_item: int


@dataclass(frozen=True, slots=True)
class ItemRoom:
    """Numbers of items of the groups."""

    wide: int
    narrow: int
    many: int

    @classmethod
    def of_graph(cls, key: GraphKey, limits: RowLimits, by_bounds: bool = False) -> ItemRoom:
        """Returns the most items of any step that replays a graph, by group. `by_bounds`: also of
        packed steps, whose items are cut by bounds that add up to more than the graph's rows."""
        num_wide = 0
        if limits.few > limits.narrow:
            num_requests = key.num_reqs
            if not by_bounds:
                num_requests = min(num_requests, key.num_tokens // (limits.narrow + 1))
            num_wide = num_requests * -(-limits.few // limits.wide_item)
        return cls(
            wide=num_wide,
            narrow=key.num_reqs if limits.narrow else 0,
            many=key.num_tokens // limits.many_item + key.num_reqs if key.tag == MIXED else 0,
        )


@dataclass(frozen=True, slots=True)
class ItemGroups:
    """The items of a step, four numbers each, by group; in memory they lie in this order."""

    wide: list[int]
    narrow: list[int]
    many: list[int]

    @classmethod
    def of(
        cls, q_lens: Sequence[int], limits: RowLimits, others: frozenset[int] = frozenset()
    ) -> ItemGroups:
        """Groups requests that feed q_lens[i] rows, without those in `others`. If a request has
        several items, its last rows come first: they see most, so their programs should start
        first."""
        groups = cls([], [], [])
        starts = accumulate(q_lens, initial=0)
        for request, (start, q_len) in enumerate(zip(starts, q_lens, strict=False)):
            if request in others:
                continue
            if q_len <= limits.narrow:
                groups.narrow.extend((request, start, pack_rows(q_len, 0), q_len))
            elif q_len <= limits.few:
                groups.wide.extend(_cut(request, start, q_len, limits.wide_item))
            else:
                groups.many.extend(_cut(request, start, q_len, limits.many_item))
        return groups

    @property
    def room(self) -> ItemRoom:
        """Returns the room that these items take."""
        return ItemRoom(*(len(group) // ITEM_SIZE for group in self._in_order()))

    def padded(self, room: ItemRoom) -> list[int]:
        """Returns all items, filled up to `room` with empty ones."""
        found: list[int] = []
        sizes = room.wide, room.narrow, room.many
        for group, size in zip(self._in_order(), sizes, strict=True):
            lacking = size * ITEM_SIZE - len(group)
            assert lacking >= 0, "More rows than there is room for."
            found += group
            found += [0] * lacking
        return found

    def _in_order(self) -> tuple[list[int], list[int], list[int]]:
        return self.wide, self.narrow, self.many


def _cut(request: int, start: int, q_len: int, most_rows: int) -> list[int]:
    """Cuts a request whose first token is `start` into items of at most `most_rows` rows."""
    items: list[int] = []
    for first in reversed(range(0, q_len, most_rows)):
        rows = pack_rows(min(most_rows, q_len - first), first)
        items += (request, start + first, rows, q_len - first)
    return items
