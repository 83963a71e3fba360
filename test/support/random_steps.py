"""Steps of requests that have some KV."""

from __future__ import annotations

import random

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner


def random_step(
    runner: ModelRunner, q_lens: list[int], seed: int, context: int, num_rows: int | None = None
) -> ForwardBatch:
    """Makes a step of random tokens, at random places within `context` tokens, in rows of the page
    table of the runner, or in the first `num_rows` of them."""
    chooser, table = random.Random(seed), runner.req_to_token_pool.req_to_token
    rows = chooser.sample(range(num_rows or len(table)), len(q_lens))
    before = [chooser.randrange(context - q_len + 1) for q_len in q_lens]
    positions = [n + i for n, q_len in zip(before, q_lens, strict=True) for i in range(q_len)]
    row_of = [row for row, q_len in zip(rows, q_lens, strict=True) for _ in range(q_len)]
    lens = [n + q_len for n, q_len in zip(before, q_lens, strict=True)]
    vocab_size, device = runner.config.model.vocab_size, table.device
    return ForwardBatch(
        input_ids=torch.tensor(
            [chooser.randrange(4, vocab_size) for _ in positions], device=device
        ),
        positions=torch.tensor(positions, device=device),
        slots=table[torch.tensor(row_of), torch.tensor(positions)].long(),
        rows=torch.tensor(rows, device=device),
        q_lens=q_lens,
        kv_lens=torch.tensor(lens, device=device),
        kv_len_upper_bounds=lens,
        bounds_are_exact=True,
    )
