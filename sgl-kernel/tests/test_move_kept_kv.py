"""Moves of the KV that a tree keeps: the torch reference, and the kernel's own code on emulated
threads, against one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import emulated_library
import pytest
import torch
from speculation_oracle import (
    MoveCase,
    expected_kv,
    expected_path,
    random_drafts,
    random_moves,
)

import sgl_kernel
from sgl_kernel import KVAddresses

Move = Callable[[MoveCase], None]


@pytest.fixture(params=["reference", "emulated"])
def move(request: pytest.FixtureRequest) -> Move:
    if request.param == "reference":
        return lambda case: sgl_kernel.move_kept_kv(*case.arguments())
    library = request.getfixturevalue("library")
    return lambda case: emulated_library.move_kept_kv(library, case)


def check_moves(move: Move, case: MoveCase) -> int:
    """Checks the moves; returns how many tensors have changed."""
    before = [tensor.clone() for tensor in case.kv.tensors]
    expected = expected_kv(case)
    move(case)
    for tensor, wanted in zip(case.kv.tensors, expected, strict=True):
        assert torch.equal(tensor, wanted)
    return sum(not torch.equal(*pair) for pair in zip(before, case.kv.tensors, strict=True))


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 2, 16])
@pytest.mark.parametrize("max_rows", [1, 2, 5, 16, 64])
def test_kept_kv_moves_to_the_front_of_all_pools(move: Move, page_size: int, max_rows: int) -> None:
    num_changed = [
        check_moves(move, random_moves(7, max_rows, page_size, seed)) for seed in range(3)
    ]
    assert max(num_changed) == (10 if max_rows > 2 else 0)


def test_more_moves_than_a_block_has_threads(move: Move) -> None:
    case = random_moves(2, 700, 4, seed=1)
    path = torch.arange(700, dtype=torch.int32)
    path[3:] += 1
    path[300:] += 40
    case = replace(case, path=path[None].repeat(2, 1), num_confirmed=torch.tensor([650, 254]))
    case = replace(case, committed=torch.tensor([0, 1]))
    assert check_moves(move, case) == 10


def test_a_chain_moves_nothing(move: Move) -> None:
    case = random_moves(3, 9, 4, seed=2)
    path = torch.arange(9, dtype=torch.int32)[None].repeat(3, 1)
    assert check_moves(move, replace(case, path=path, num_confirmed=torch.tensor([8, 3, 0]))) == 0


def test_numbers_outside_of_their_range_move_nothing(move: Move) -> None:
    case = random_moves(6, 8, 4, seed=3)
    # Before and after the table lie rows, and before and after the pools slots, that would do.
    guards = [tensor[[0, -1]] for tensor in case.kv.tensors]
    storages, page_table = case.kv.tensors, (case.page_table - 1)[1:-1]
    path = torch.tensor([[0, 2, 3, 5, 6, -1, -1, -1]], dtype=torch.int32).repeat(6, 1)
    rows, committed = torch.arange(1, 7), case.committed.clone()
    rows[0], rows[1] = -1, len(page_table)
    committed[2], committed[3], committed[4] = -1, page_table.shape[1] - 6, 2**62
    page_table[6, committed[5] + 1] = -1
    page_table[6, committed[5] + 3] = 2**31 - 1
    page_table[6, committed[5] + 6] = -1
    broken = MoveCase(
        KVAddresses([tensor[1:-1] for tensor in storages]),
        *(page_table, rows, committed, path, torch.full((6,), 4)),
    )
    # Of request 5 nothing is in range, of request 3 all but the last.
    page_table[6, committed[5] + 5] = len(storages[0]) - 2
    assert check_moves(move, broken) == 10
    assert check_moves(move, replace(broken, table_rows=torch.full((6,), 2**40))) == 0
    unkept = torch.tensor([-1, 0, -1, 3 - 2**40, -1, -1])
    assert (
        check_moves(move, replace(broken, table_rows=rows.clamp(0, 6), num_confirmed=unkept)) == 0
    )
    for storage, guard in zip(storages, guards, strict=True):
        assert torch.equal(storage[[0, -1]], guard)


@pytest.mark.parametrize("page_size", [1, 16])
def test_after_verification_and_moves_the_kv_is_a_chain_of_the_kept_rows(
    move: Move, page_size: int
) -> None:
    drafts = random_drafts(9, 20, seed=page_size)
    result = sgl_kernel.confirm_drafts(*drafts.arguments())
    case = random_moves(9, 20, page_size, seed=page_size)
    case = replace(case, path=result.path, num_confirmed=result.num_confirmed)
    tensor = case.kv.tensors[0]
    slots = [
        case.page_table[row, first : first + 20].long()
        for row, first in zip(case.table_rows.tolist(), case.committed.tolist(), strict=True)
    ]
    before = [tensor[own] for own in slots]
    move(case)
    for request, own in enumerate(slots):
        path, _ = expected_path(drafts, request)
        assert torch.equal(tensor[own[: len(path)]], before[request][path])


def test_refreshed_addresses_are_in_the_same_table(move: Move) -> None:
    case = random_moves(4, 9, 2, seed=5)
    table = case.kv.table
    address = table.data_ptr()
    for tensor in case.kv.tensors:
        tensor.data = tensor.clone()
    case.kv.refresh()
    assert case.kv.table is table
    assert table.data_ptr() == address
    assert table[:, 0].tolist() == [tensor.data_ptr() for tensor in case.kv.tensors]
    assert check_moves(move, case) == 10


def test_kv_that_the_table_cannot_describe_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        KVAddresses([])
    with pytest.raises(ValueError, match="not views of them"):
        KVAddresses([torch.zeros(4, 6, 2)[:, :3]])
    with pytest.raises(ValueError, match="not views of them"):
        KVAddresses([torch.zeros(4)])
    with pytest.raises(ValueError, match="one table per device"):
        KVAddresses([torch.zeros(4, 2), torch.zeros(4, 2, device="meta")])


def test_move_arguments_are_refused_with_a_remedy() -> None:
    case = random_moves(3, 6, 2, seed=6)
    for broken, remedy in [
        (replace(case, page_table=case.page_table.long()), "page_table .*convert"),
        (replace(case, page_table=case.page_table[0]), "reshape"),
        (replace(case, page_table=case.page_table[:, ::2]), "page_table .*contiguous"),
        (replace(case, path=case.path.long()), "path .*convert"),
        (replace(case, table_rows=case.table_rows.int()), "table_rows .*convert"),
        (replace(case, committed=case.committed[1:]), "committed must be"),
        (replace(case, num_confirmed=case.num_confirmed.to("meta")), "num_confirmed .*move"),
    ]:
        with pytest.raises(ValueError, match=remedy):
            sgl_kernel.move_kept_kv(*broken.arguments())
