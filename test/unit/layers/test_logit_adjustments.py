"""Penalties, biases and min_new_tokens against plain numpy over the same logits."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from sglang.srt.layers.logit_adjustments import LogitAdjustments, RowAdjustments
from sglang.srt.sampling.sampling_params import SamplingParams

VOCAB, ROWS = 23, 6


def numpy_oracle(
    logits: np.ndarray, wanted: RowAdjustments, generated: list[int], position: int
) -> np.ndarray:
    """One row, token by token."""
    out = logits.astype(np.float64).copy()
    params = wanted.params
    for token in range(VOCAB):
        count = generated.count(token)
        if count:
            factor = params.repetition_penalty
            out[token] = out[token] / factor if out[token] > 0 else out[token] * factor
            out[token] -= params.frequency_penalty * count + params.presence_penalty
    for token, bias in (params.logit_bias or {}).items():
        out[int(token)] += bias
    if position - wanted.num_prompt_tokens < params.min_new_tokens:
        out[wanted.stop_token_ids] = -np.inf
    return out


def random_wish(choose: random.Random) -> RowAdjustments | None:
    if choose.random() < 0.3:
        return None
    tokens = [choose.randrange(VOCAB) for _ in range(choose.choice([0, 5]))]
    bias = {
        str(choose.randrange(VOCAB)): choose.uniform(-9, 9) for _ in range(choose.choice([0, 3]))
    }
    params = SamplingParams(
        repetition_penalty=choose.choice([1.0, 1.3, 0.7]),
        frequency_penalty=choose.choice([0.0, 0.5, -1.5]),
        presence_penalty=choose.choice([0.0, 1.0, -0.3]),
        logit_bias=bias or None,
        min_new_tokens=choose.choice([0, 4]),
    )
    return RowAdjustments(params, tokens, 10, [1, 2])


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(30))
def test_every_row_equals_numpy_through_arrivals_and_draws(seed: int) -> None:
    """Rows are re-used by requests with and without wishes; counts follow what is recorded."""
    choose = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    state = LogitAdjustments(ROWS, VOCAB, "cpu")
    wishes: dict[int, RowAdjustments | None] = {}
    generated: dict[int, list[int]] = {}
    for _ in range(40):
        for row in range(ROWS):
            if row not in wishes or choose.random() < 0.1:
                wishes[row] = wish = random_wish(choose)
                generated[row] = [] if wish is None else list(wish.output_ids)
                state.initialize(row, wish)
        rows = choose.sample(range(ROWS), choose.randint(1, ROWS))
        positions = [10 + len(generated[row]) for row in rows]
        logits = torch.randn(len(rows), VOCAB, generator=generator) * 5
        adjusted = state.apply(logits.clone(), torch.tensor(rows), torch.tensor(positions))
        for i, row in enumerate(rows):
            wish = wishes[row]
            expected = logits[i].numpy()
            if wish is not None:
                expected = numpy_oracle(expected, wish, generated[row], positions[i])
            np.testing.assert_allclose(adjusted[i].numpy(), expected, rtol=1e-5, atol=1e-5)
        tokens = [choose.randrange(VOCAB) for _ in rows]
        state.record(torch.tensor(rows), torch.tensor(tokens))
        for row, token in zip(rows, tokens, strict=True):
            generated[row].append(token)


def test_a_row_may_record_several_tokens_at_once() -> None:
    state = LogitAdjustments(ROWS, VOCAB, "cpu")
    wish = RowAdjustments(SamplingParams(frequency_penalty=1.0), [], 10, [])
    state.initialize(2, wish)
    state.record(torch.tensor([2, 2, 2]), torch.tensor([5, 5, 7]))
    logits = state.apply(torch.zeros(1, VOCAB), torch.tensor([2]), torch.tensor([13]))
    assert logits[0, [5, 7, 8]].tolist() == [-2.0, -1.0, 0.0]


def test_without_wishes_nothing_is_allocated_and_nothing_changes() -> None:
    state = LogitAdjustments(ROWS, 1_000_000, "cpu")
    state.initialize(0, None)
    logits = torch.randn(1, 1_000_000)
    adjusted = state.apply(logits.clone(), torch.tensor([0]), torch.tensor([3]))
    assert torch.equal(adjusted, logits)
    assert state._counts is None
