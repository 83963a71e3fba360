"""Tests how the host cuts a step into work items of attention."""

from __future__ import annotations

import random

import pytest

from sglang.srt.layers.attention.triton_ops.item_groups import ItemGroups, ItemRoom, RowLimits
from sglang.srt.layers.attention.triton_ops.items import ITEM_SIZE
from sglang.srt.layers.forward_batch import MIXED, RAGGED, GraphKey

# An H100's with four query heads per KV head: of a step, of graphs with look-ahead and without.
EAGER = RowLimits(narrow=4, few=16, wide_item=16, many_item=32)
GRAPH = RowLimits(narrow=4, few=15, wide_item=15, many_item=16)
PLAIN_GRAPH = RowLimits(narrow=1, few=1, wide_item=1, many_item=16)
ALL = {
    "eager": EAGER,
    "graph": GRAPH,
    "graph of plain decodes": PLAIN_GRAPH,
    "eight heads": RowLimits(narrow=2, few=15, wide_item=8, many_item=8),
    "thirty-two heads": RowLimits(narrow=0, few=15, wide_item=2, many_item=2),
    "no narrow ones": RowLimits(narrow=0, few=15, wide_item=15, many_item=16),
    "narrow alone": RowLimits(narrow=4, few=4, wide_item=4, many_item=16),
}


def rows_of(items: list[int]) -> dict[int, list[tuple[int, int, int]]]:
    """Returns the rows by request: (row of the step, row of the request, rows from there to the
    request's end)."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for index in range(0, len(items), ITEM_SIZE):
        request, first, packed, to_end = items[index : index + ITEM_SIZE]
        for row in range(packed & 255):
            found.setdefault(request, []).append((first + row, (packed >> 8) + row, to_end - row))
    return found


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_every_row_is_in_one_item_of_the_right_group(limits: RowLimits) -> None:
    chooser = random.Random(0)
    for _ in range(300):
        most = chooser.choice([1, 4, 5, 15, 16, 17, 300])
        q_lens = [chooser.randint(1, most) for _ in range(chooser.randint(1, 20))]
        groups = ItemGroups.of(q_lens, limits)
        wide, narrow, many = (rows_of(group) for group in (groups.wide, groups.narrow, groups.many))
        start = 0
        for request, q_len in enumerate(q_lens):
            if q_len <= limits.narrow:
                group = narrow
            else:
                group = wide if q_len <= limits.few else many
            expected = [(start + row, row, q_len - row) for row in range(q_len)]
            assert sorted(group.pop(request)) == expected
            start += q_len
        assert not wide
        assert not narrow
        assert not many


@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_items_are_as_large_as_they_may_be_and_the_last_rows_come_first(limits: RowLimits) -> None:
    q_lens = [limits.few, 3 * limits.many_item + limits.few + 1, max(limits.narrow, 1)]
    groups = ItemGroups.of(q_lens, limits)
    for group, most in ((groups.wide, limits.wide_item), (groups.many, limits.many_item)):
        sizes = [packed & 255 for packed in group[2::ITEM_SIZE]]
        assert max(sizes, default=0) <= most
        assert all(to_end > 0 for to_end in group[3::ITEM_SIZE])
        for request in set(group[::ITEM_SIZE]):
            rest = [
                group[index + 3] for index in range(0, len(group), 4) if group[index] == request
            ]
            assert rest == sorted(rest), "The rows that see least come first."
            assert len(rest) == -(-q_lens[request] // most)
    assert len(groups.narrow) == ITEM_SIZE * sum(q_len <= limits.narrow for q_len in q_lens)


@pytest.mark.parametrize("tag", [MIXED, RAGGED])
@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_a_graph_has_room_for_every_step_that_replays_it(limits: RowLimits, tag: str) -> None:
    chooser = random.Random(1)
    for _ in range(500):
        num_reqs = chooser.choice([1, 2, 8, 40])
        key = GraphKey(tag, num_reqs, limits.few, num_reqs + chooser.randint(0, 400))
        room = ItemRoom.of_graph(key, limits)
        most = 400 if tag == MIXED else limits.few
        edge = min(most, chooser.choice([1, limits.narrow + 1, limits.few, limits.few + 1, most]))
        q_lens: list[int] = []
        while len(q_lens) < num_reqs and sum(q_lens) < key.num_tokens:
            q_len = edge if chooser.random() < 0.8 else chooser.randint(1, most)
            q_lens.append(min(q_len, key.num_tokens - sum(q_lens)))
        groups = ItemGroups.of(q_lens, limits)
        items = groups.padded(room)
        size = (room.wide + room.narrow) * ITEM_SIZE
        assert len(items) == size + room.many * ITEM_SIZE
        assert rows_of(items[: room.wide * ITEM_SIZE]) == rows_of(groups.wide)
        assert rows_of(items[room.wide * ITEM_SIZE : size]) == rows_of(groups.narrow)
        assert rows_of(items[size:]) == rows_of(groups.many)


@pytest.mark.parametrize("tag", [MIXED, RAGGED])
@pytest.mark.parametrize("limits", ALL.values(), ids=ALL)
def test_a_packed_graph_has_room_for_bounds_of_more_rows_than_it_has(
    limits: RowLimits, tag: str
) -> None:
    for num_reqs in (1, 2, 8, 40):
        key = GraphKey(tag, num_reqs, limits.few, num_reqs)
        room = ItemRoom.of_graph(key, limits, by_bounds=True)
        for bound in {1, max(1, limits.narrow), limits.narrow + 1, limits.few}:
            if bound <= limits.few:
                groups = ItemGroups.of([bound] * num_reqs, limits)
                assert len(groups.padded(room)) == sum(
                    ITEM_SIZE * count for count in (room.wide, room.narrow, room.many)
                )


def test_a_graph_of_plain_decodes_has_no_room_for_wide_items() -> None:
    assert ItemRoom.of_graph(GraphKey(MIXED, 8, 1, 64), PLAIN_GRAPH) == ItemRoom(0, 8, 12)


def test_a_graph_of_few_rows_has_room_for_few_wide_items() -> None:
    """Each takes five rows at least."""
    assert ItemRoom.of_graph(GraphKey(MIXED, 64, 15, 96), GRAPH).wide == 19


def test_too_many_rows_are_refused() -> None:
    groups = ItemGroups.of([1, 1, 9], GRAPH)
    with pytest.raises(AssertionError, match="room"):
        groups.padded(ItemRoom(wide=1, narrow=1, many=0))
