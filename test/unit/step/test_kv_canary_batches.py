"""The canary over batches made by hand: chains, trees, rows of earlier draft steps, packed rows."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.forward_options import MAX_TREE_ROWS
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.kv_canary import SUM, KVCanary
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import NewRow

NUM_ROWS, WIDTH, PAGE_SIZE = 4, 160, 4
ALL = -1  # an ancestor mask of all bits
READ, POSITION = "another token's KV is read", "as if at another position"


class Rows:
    """Requests of known sequences, and a canary of two pools: the second one's model is fed each
    position's next token. Row r has the pages behind those of row r - 1."""

    def __init__(self) -> None:
        table = ReqToTokenPool(NUM_ROWS, WIDTH, "cpu")
        slots = torch.arange(NUM_ROWS * WIDTH, dtype=torch.int32) + PAGE_SIZE
        table.req_to_token[:NUM_ROWS] = slots.view(NUM_ROWS, WIDTH)
        pools = [
            MHATokenToKVPool(NUM_ROWS * WIDTH, PAGE_SIZE, 1, 1, 2, torch.float32, "cpu")
            for _ in range(2)
        ]
        self.table, self.notes = table.req_to_token, list[torch.Tensor]()
        self.state = RequestRows(table, 8, 100)
        self.num_updates = 0
        memory = KVMemory(table, pools)
        self.canary = KVCanary(self.state, memory, lambda: self.num_updates, [0, 1])
        self.notes = [pool.tensors[-1] for pool in pools]

    def admit(self, row: int, tokens: list[int], num_committed: int = 0) -> None:
        sequence = np.array(tokens, dtype=np.int32)
        new = NewRow(row, num_committed, sequence, SamplingParams(temperature=0.0), seed=0)
        self.state.initialize([new])

    def fill(self, row: int, tokens: list[int], pool: int = 0) -> None:
        """A request whose tokens but the last have KV."""
        self.admit(row, tokens)
        fed = tokens[pool:] if pool else tokens[:-1]
        self.feed({row: fed}, {row: 0}, pool)
        self.state.committed[row] = len(tokens) - 1

    def feed(
        self,
        tokens: dict[int, list[int]],
        first: dict[int, int],
        pool: int = 0,
        positions: list[int] | None = None,
        ancestors: list[int] | None = None,
        tree_starts: list[int] | None = None,
        num_padded: int | None = None,
        padding_slot: int = 0,
    ) -> None:
        """A step that feeds each row its tokens from column `first` on; in a packed batch, behind
        them `num_padded` rows of padding."""
        columns = {row: [first[row] + i for i in range(len(fed))] for row, fed in tokens.items()}
        q_lens, padding = [len(fed) for fed in tokens.values()], [0] * (num_padded or 0)
        starts = torch.tensor([0, *itertools.accumulate(q_lens)])
        slots = [int(self.table[row, column]) for row in columns for column in columns[row]]
        flat = positions or [column for span in columns.values() for column in span]
        kv_lens = [first[row] + len(fed) for row, fed in tokens.items()]
        batch = ForwardBatch(
            input_ids=torch.tensor([*itertools.chain(*tokens.values()), *padding]),
            positions=torch.tensor([*flat, *padding]),
            slots=torch.tensor([*slots, *(padding_slot for _ in padding)]),
            rows=torch.tensor(list(tokens)),
            q_lens=q_lens if num_padded is None else [max(q_lens) + 1] * len(q_lens),
            kv_lens=torch.tensor(kv_lens),
            kv_len_upper_bounds=kv_lens,
            ancestors=None if ancestors is None else torch.tensor([*ancestors, *padding]),
            tree_starts=None if tree_starts is None else torch.tensor(tree_starts),
            q_starts=None if num_padded is None else starts,
        )
        self.canary.check(pool, batch)

    def sum_at(self, row: int, column: int, pool: int = 0) -> int:
        return int(self.notes[pool][self.table[row, column], SUM])


def test_sums_tell_sequences_apart_by_token_order_and_length() -> None:
    rows, source = Rows(), random.Random(0)
    texts = {tuple(source.randrange(3) for _ in range(length)) for length in range(1, 9)}
    texts |= {tuple(source.randrange(3) for _ in range(6)) for _ in range(200)}
    sums: dict[tuple[int, ...], int] = {}
    for text in texts:
        rows.feed({0: list(text)}, {0: 0})
        for length in range(1, len(text) + 1):
            found = rows.sum_at(0, length - 1)
            assert sums.setdefault(text[:length], found) == found
    assert len(set(sums.values())) == len(sums)


def test_a_step_that_feeds_a_prompt_in_chunks_leaves_the_sums_of_one_that_does_not() -> None:
    rows, tokens = Rows(), list(range(90))
    for row in (0, 1):
        rows.admit(row, [*tokens, 7])
    rows.feed({0: tokens}, {0: 0})
    for start in range(0, 90, 30):
        rows.feed({1: tokens[start : start + 30]}, {1: start})
        rows.state.committed[1] += 30
    assert [rows.sum_at(0, i) for i in range(90)] == [rows.sum_at(1, i) for i in range(90)]


def test_the_node_of_a_tree_has_the_sum_of_a_chain_of_its_path() -> None:
    rows = Rows()
    for row in (0, 1):
        rows.fill(row, [5, 6, 7, 8])
    # Root 8; 20 and 30 behind it, 21 behind 20, 31 behind 30; a row that is no node.
    tree, path = [8, 20, 30, 21, 31, 9], [8, 30, 31]
    ancestors = [0b1, 0b11, 0b101, 0b1011, 0b10101, ALL]
    rows.feed({0: tree}, {0: 3}, positions=[3, 4, 4, 5, 5, 8], ancestors=ancestors)
    rows.feed({1: path}, {1: 3})
    assert [rows.sum_at(0, 3 + node) for node in (0, 2, 4)] == [
        rows.sum_at(1, 3 + i) for i in range(3)
    ]
    others = {rows.sum_at(0, 3 + node) for node in (1, 3, 5)}
    assert len(others) == 3
    assert not others & {rows.sum_at(1, 3 + i) for i in range(3)}


def test_the_node_of_a_tree_stands_at_its_depth() -> None:
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8])
    with pytest.raises(RuntimeError, match=rf"position 5: .*{POSITION}"):
        rows.feed({0: [8, 20, 30]}, {0: 3}, positions=[3, 4, 5], ancestors=[0b1, 0b11, 0b101])


def test_prompts_longer_than_a_mask_stand_beside_trees() -> None:
    rows, tokens = Rows(), list(range(MAX_TREE_ROWS + 20))
    rows.fill(0, [5, 6, 7, 8])
    for row in (1, 2):
        rows.admit(row, [*tokens, 1])
    rows.feed(
        {1: tokens, 0: [8, 20, 30]},
        {1: 0, 0: 3},
        positions=[*range(len(tokens)), 3, 4, 4],
        ancestors=[ALL] * len(tokens) + [0b1, 0b11, 0b101],
    )
    rows.feed({2: tokens}, {2: 0})
    assert rows.sum_at(1, len(tokens) - 1) == rows.sum_at(2, len(tokens) - 1)


def test_a_short_prompt_beside_a_tree_has_the_sums_of_a_chain() -> None:
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8])
    for row in (1, 2):
        rows.admit(row, [5, 6, 1])
    ancestors = [0b1, 0b11, 0b101, ALL, ALL]
    rows.feed(
        {0: [8, 20, 30], 1: [5, 6]}, {0: 3, 1: 0}, positions=[3, 4, 4, 0, 1], ancestors=ancestors
    )
    rows.feed({2: [5, 6]}, {2: 0})
    assert [rows.sum_at(1, i) for i in range(2)] == [rows.sum_at(2, i) for i in range(2)]
    rows.state.committed[1] = 2
    rows.feed({1: [1]}, {1: 2})


# ---------------------------------------------------------------- rows of earlier draft steps


def drafted(pool: int = 0) -> Rows:
    """Row 0 has KV of four tokens and of a round's first draft step: 20 and 30, siblings."""
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8, 9], pool)
    rows.feed({0: [20, 30]}, {0: 4}, pool, positions=[4, 4], ancestors=[0b1, 0b10], tree_starts=[4])
    return rows


@pytest.mark.parametrize("pool", [0, 1])
def test_a_draft_step_reads_its_branch_of_earlier_ones(pool: int) -> None:
    rows = drafted(pool)
    rows.feed(
        {0: [21, 31]}, {0: 6}, pool, positions=[5, 5], ancestors=[0b101, 0b1010], tree_starts=[4]
    )
    rows.feed({0: [32]}, {0: 8}, pool, positions=[6], ancestors=[0b11010], tree_starts=[4])


def test_a_draft_step_that_takes_siblings_for_a_path_is_found() -> None:
    with pytest.raises(RuntimeError, match=rf"position 5: .*{READ}"):
        drafted().feed({0: [21]}, {0: 6}, positions=[6], ancestors=[0b111], tree_starts=[4])


def test_a_draft_step_that_reads_siblings_as_a_chain_is_found() -> None:
    with pytest.raises(RuntimeError, match=rf"position 5: .*{READ}"):
        drafted().feed({0: [21]}, {0: 6})


def test_a_draft_step_that_reads_rows_nobody_fed_is_found() -> None:
    with pytest.raises(RuntimeError, match=rf"position 6: .*{READ}"):
        drafted().feed({0: [21]}, {0: 7}, positions=[5], ancestors=[0b1100], tree_starts=[4])


def test_a_draft_step_that_reads_a_round_before_is_found() -> None:
    rows = drafted()
    rows.feed({0: [9]}, {0: 4})
    rows.admit(0, [5, 6, 7, 8, 9, 10])
    rows.state.committed[0] = 5
    with pytest.raises(RuntimeError, match=rf"position 5: .*{READ}"):
        rows.feed({0: [21]}, {0: 6}, positions=[6], ancestors=[0b11], tree_starts=[5])


def test_what_stands_before_a_tree_is_read_by_all_of_it() -> None:
    rows = drafted()
    rows.table[0, 2] = rows.table[1, 2]
    with pytest.raises(RuntimeError, match=rf"position 2: .*{READ}"):
        rows.feed({0: [21]}, {0: 6}, positions=[5], ancestors=[0b101], tree_starts=[4])


def test_rows_that_no_draft_step_sees_may_hold_anything() -> None:
    rows = drafted()
    rows.table[0, 5] = rows.table[1, 5]
    rows.feed({0: [21]}, {0: 6}, positions=[5], ancestors=[0b101], tree_starts=[4])


def test_a_chain_behind_its_tree_start_by_more_than_a_mask_is_read_as_one() -> None:
    rows, tokens = Rows(), list(range(10))
    rows.fill(0, tokens)
    drafts = list(range(20, 20 + MAX_TREE_ROWS))
    rows.feed({0: drafts}, {0: 9})
    last = 9 + MAX_TREE_ROWS
    rows.feed({0: [1]}, {0: last}, ancestors=[ALL], tree_starts=[9])
    rows.table[0, last - 1] = rows.table[1, last - 1]
    with pytest.raises(RuntimeError, match=rf"position {last - 1}: .*{READ}"):
        rows.feed({0: [1]}, {0: last}, ancestors=[ALL], tree_starts=[9])


# ---------------------------------------------------------------- tokens that are shifted


def test_a_pool_that_is_fed_next_tokens_is_checked_by_them() -> None:
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8], pool=1)
    rows.feed({0: [50]}, {0: 3}, pool=1)
    rows.fill(1, [5, 6, 7, 8], pool=0)
    with pytest.raises(RuntimeError, match=rf"position 0: .*{READ}.* of pool 1; 3 positions"):
        rows.feed({1: [50]}, {1: 3}, pool=1)
    rows.fill(2, [5, 6, 7, 8], pool=1)
    rows.state.tokens[2, 3] = 9
    with pytest.raises(RuntimeError, match=rf"position 2: .*{READ}.* of pool 1; 1 positions"):
        rows.feed({2: [50]}, {2: 3}, pool=1)


# ---------------------------------------------------------------- packed batches


def test_packed_rows_leave_the_sums_of_others() -> None:
    rows = Rows()
    for row in (0, 1, 2):
        rows.fill(row, [5, 6, 7, 8])
    rows.feed({0: [8, 9], 1: [8, 10, 11]}, {0: 3, 1: 3}, num_padded=3)
    packed = [rows.sum_at(1, column) for column in range(6)]
    rows.feed({2: [8, 10, 11]}, {2: 3})
    assert packed == [rows.sum_at(2, column) for column in range(6)]


def test_the_packed_tree_of_a_request_is_its_own() -> None:
    rows = Rows()
    for row in (0, 1):
        rows.fill(row, [5, 6, 7, 8])
    ancestors = [ALL, ALL, 0b1, 0b11, 0b101]
    rows.feed(
        {0: [8, 9], 1: [8, 20, 30]},
        {0: 3, 1: 3},
        positions=[3, 4, 3, 4, 4],
        ancestors=ancestors,
        num_padded=2,
    )
    rows.feed({0: [8, 30]}, {0: 3})
    assert rows.sum_at(1, 5) == rows.sum_at(0, 4)


def test_a_request_that_feeds_no_row_reads_nothing() -> None:
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8])
    rows.admit(1, [5, 6, 7, 8])
    rows.admit(3, [5, 6, 7, 8])
    rows.feed({1: [], 0: [8], 3: []}, {1: 3, 0: 3, 3: 3}, num_padded=1)
    rows.feed({1: [], 3: []}, {1: 3, 3: 3}, num_padded=1)
    with pytest.raises(RuntimeError, match=rf"row 1, position 0: .*{READ}"):
        rows.feed({1: [8]}, {1: 3}, num_padded=1)


def test_padding_that_is_written_to_a_page_is_found() -> None:
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8])
    rows.feed({0: [8]}, {0: 3}, num_padded=1, padding_slot=PAGE_SIZE - 1)
    with pytest.raises(RuntimeError, match="padding is written to a slot of pool 0"):
        rows.feed({0: [8]}, {0: 3}, num_padded=1, padding_slot=PAGE_SIZE)


# ---------------------------------------------------------------- weights


def test_what_a_request_reads_was_written_with_the_weights_of_its_admission_or_later_ones() -> None:
    rows = Rows()
    rows.fill(0, [5, 6, 7, 8])
    rows.num_updates = 1
    rows.feed({0: [8]}, {0: 3})
    rows.state.tokens[0, 4], rows.state.committed[0] = 9, 4
    rows.feed({0: [9]}, {0: 4})
    rows.admit(0, [5, 6, 7, 8, 10], num_committed=4)
    with pytest.raises(RuntimeError, match=r"position 0: KV of weights before .*; 3 positions"):
        rows.feed({0: [10]}, {0: 4})
