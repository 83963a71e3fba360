"""The device rows of requests that have just been admitted."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.request_rows import PRIOR_CONFIDENCE, RequestRows
from sglang.srt.step.worker import NewRow

WIDTH = 12
LEFT = 99  # by requests that had the row before


def rows() -> RequestRows:
    state = RequestRows(ReqToTokenPool(5, WIDTH, "cpu"), max_pending=3, vocab_size=100)
    state.tokens.fill_(LEFT)
    return state


def new_row(row: int, num_committed: int, tokens: list[int]) -> NewRow:
    params = SamplingParams(temperature=0.0)
    return NewRow(row, num_committed, np.array(tokens, dtype=np.int32), params, seed=0)


def test_each_new_row_gets_all_tokens_that_are_known_and_no_other_row_changes() -> None:
    state = rows()
    sequences = {3: [1, 2, 3, 4], 0: [5], 4: list(range(10, 10 + WIDTH))}
    state.initialize([new_row(row, 0, tokens) for row, tokens in sequences.items()])
    right = torch.full_like(state.tokens, LEFT)
    for row, tokens in sequences.items():
        right[row, : len(tokens)] = torch.tensor(tokens)
        assert int(state.num_tokens[row]) == len(tokens)
    assert torch.equal(state.tokens, right)


def test_pending_tokens_are_those_behind_the_watermark() -> None:
    state = rows()
    state.initialize([new_row(1, 2, [1, 2, 3, 4, 5]), new_row(2, WIDTH - 1, [7] * WIDTH)])
    pending = state.pending(torch.tensor([2, 1]))
    assert pending.dtype == torch.int64
    assert pending[1].tolist() == [3, 4, 5]
    assert pending[0, 0] == 7  # and what is behind the row's end is not read
    assert state.pending(torch.tensor([1]), start=1).tolist() == [[4, 5]]


def test_a_sequence_that_is_longer_than_its_row_is_a_bug() -> None:
    with pytest.raises(AssertionError, match="longer than its row"):
        rows().initialize([new_row(0, 0, [1] * (WIDTH + 1))])


def test_drafts_without_parents_are_a_chain_where_others_are_trees() -> None:
    state = RequestRows(ReqToTokenPool(5, WIDTH, "cpu"), 5, vocab_size=100, has_trees=True)
    assert state.trees is not None
    tokens, rows, count = torch.arange(8).view(2, 4), torch.tensor([1, 3]), torch.tensor([4, 4])
    state.write_drafts(rows, tokens, count, torch.tensor([[0, 0, 1, 1]] * 2, dtype=torch.int32))
    assert state.trees.parents[3].tolist() == [-1, 0, 0, 1, 1]
    state.write_drafts(rows[1:], tokens[1:], count[1:])
    assert state.trees.parents[1].tolist() == [-1, 0, 0, 1, 1]
    assert state.trees.parents[3].tolist() == [-1, 0, 1, 2, 3]
    assert state.trees.depths[3].tolist() == [0, 1, 2, 3, 4]
    assert state.trees.ancestors[3].tolist() == [1, 3, 7, 15, 31]


@pytest.mark.parametrize("has_trees", [False, True])
def test_drafts_that_a_request_lacks_have_no_confidence(has_trees: bool) -> None:
    """A request without any keeps what it had."""
    table = ReqToTokenPool(5, WIDTH, "cpu")
    state = RequestRows(table, 4, vocab_size=100, has_trees=has_trees, keeps_confidence=True)
    assert state.confidence is not None
    tokens, rows, counts = torch.ones(2, 3, dtype=torch.int64), torch.tensor([0, 1]), [1, 0]
    told = torch.tensor([[0.5, 0.4, 0.3]] * 2)
    parents = torch.tensor([[0, 0, 1]] * 2, dtype=torch.int32) if has_trees else None
    state.write_drafts(rows, tokens, torch.tensor(counts), parents, told)
    state.write_drafts(rows + 2, tokens, torch.tensor(counts), parents)
    prior = pytest.approx(PRIOR_CONFIDENCE)
    assert state.confidence[0].tolist() == [0.5, 0.0, 0.0]
    assert state.confidence[2].tolist() == [prior, 0.0, 0.0]
    for row in (1, 3):
        assert state.confidence[row].tolist() == [prior] * 3
