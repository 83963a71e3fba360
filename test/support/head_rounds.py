"""Rounds of a draft head with graphs and without: prompts in chunks, draft steps, rows to verify.
Both runners are fed the same numbers, and whatever they give and write is compared."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from block_heads import write_block_head
from draft_heads import (
    DFLASH,
    EAGLE,
    EAGLE3,
    P_EAGLE,
    architecture_of,
    write_eagle,
    write_eagle3,
    write_p_eagle,
)
from sglang.srt.head_config import load_head_config
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.round_options import ALL_BATCH_SIZES
from sglang.srt.mem_cache.kv_sizing import row_width
from sglang.srt.model_executor.draft_passes import Drafts
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.step.draft_shapes import DraftShape
from utils import VOCAB_SIZE, Setup, make_execution

HIDDEN_SIZE = 64
NUM_STEPS = (1, 3)
MAX_ROWS = 1 + 1 + max(NUM_STEPS)
MAX_REQUESTS = 9  # graphs of 1, 2, 4, 8 and 9
CONTEXT = 96
WRITERS: dict[str, Callable[..., Path]] = {
    EAGLE: write_eagle,
    EAGLE3: write_eagle3,
    P_EAGLE: write_p_eagle,
    DFLASH: write_block_head,
}


def make_head(
    target: Path,
    head: Path,
    kind: str,
    page_size: int,
    shapes: Sequence[DraftShape] = NUM_STEPS,
    **changes: Any,
) -> ModelRunner:
    """The runner of a head that drafts these shapes; `changes` are fields of `ExecutionConfig`."""
    width = row_width(CONTEXT, MAX_ROWS, page_size) // page_size
    setup = Setup(
        num_pages=MAX_REQUESTS * width, page_size=page_size, max_running_requests=MAX_REQUESTS
    )
    execution = make_execution(target, setup, CONTEXT, MAX_ROWS, **changes)
    config = replace(execution, max_graph_rows=64 if execution.max_graph_width else 0)
    model = load_head_config(str(head), architecture_of(kind), config.model)
    target_config = replace(config, max_graph_width=0, max_graph_rows=0)
    group = make_runners(
        target_config,
        replace(config, model=model, draft_steps=dict.fromkeys(shapes, ALL_BATCH_SIZES)),
    )
    table = group.memory.table.req_to_token[:MAX_REQUESTS]
    slots = torch.arange(table.numel(), dtype=torch.int32).view_as(table) + page_size
    table.copy_(slots.flip(0))
    return group.runners[1]


@dataclass
class Rounds:
    """Requests that two runners of one head feed alike.

    Attributes:
        tolerance: of the norm of what is compared.
        max_prompt: rows of a chunk of a prompt.
        seen: how much was compared.
    """

    graphs: ModelRunner
    eager: ModelRunner
    tolerance: float
    max_prompt: int = 7

    def __post_init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self._generator = torch.Generator().manual_seed(0)
        self._chooser = random.Random(0)

    def run(self, num_reqs: int) -> None:
        """New requests: prompts in two chunks, then rounds of each number of draft steps."""
        for runner in (self.graphs, self.eager):
            runner.kv_pool.kv[0].zero_()
        rows = self._chooser.sample(range(MAX_REQUESTS), num_reqs)
        lens = [0] * num_reqs
        chunks = [self._chooser.randint(2, self.max_prompt) for _ in rows]
        self.extend(rows, lens, chunks, list(range(1, num_reqs)))  # the first reads nothing
        lens = [n + fed for n, fed in zip(lens, chunks, strict=True)]
        chunks = [self._chooser.randint(1, self.max_prompt) for _ in rows]
        hidden = self.extend(rows, lens, chunks, list(range(num_reqs)))
        lens = [n + fed for n, fed in zip(lens, chunks, strict=True)]
        for num_steps in (*NUM_STEPS, *reversed(NUM_STEPS)):
            self.draft(rows, lens, hidden, num_steps)
            fed = [self._chooser.randint(1, MAX_ROWS) for _ in rows]
            fed[-1] = MAX_ROWS  # not a plain step
            hidden = self.extend(rows, lens, fed, list(range(num_reqs)))
            kept = [self._chooser.randint(1, most) for most in fed]
            lens = [n + count for n, count in zip(lens, kept, strict=True)]
        self.extend(rows, lens, [1] * num_reqs, list(range(num_reqs)))

    def extend(
        self, rows: list[int], before: list[int], fed: list[int], reads: list[int]
    ) -> torch.Tensor:
        """A step behind the target's, of which the last row of the requests `reads` is read."""
        device, count = self.graphs.device, sum(fed)
        ends = torch.tensor(fed).cumsum(0) - 1
        batch = self._batch(rows, before, fed)
        width = self.graphs.model.hidden_width
        batch = replace(
            batch,
            read_index=ends[reads].to(device),
            hidden=self._random(count, width),
        )
        replayed, right = self.graphs.forward(batch), self.eager.forward(batch)
        assert replayed.used_graph
        assert not right.used_graph
        assert len(replayed.hidden) == len(reads)
        self._compare(replayed.hidden, right.hidden)
        self._compare_kv(batch.slots)
        self.seen["rows"] += count
        return replayed.hidden.clone()

    def draft(
        self, rows: list[int], before: list[int], hidden: torch.Tensor, num_steps: int
    ) -> tuple[ForwardBatch, Drafts]:
        """Draft steps of all; those of one request are compared up to a near-tie."""
        first = self._batch(rows, before, [1] * len(rows))
        is_block = self.graphs.model.draft_hidden_width == 0
        first = first if is_block else replace(first, hidden=hidden)
        found = Drafts(*(values.clone() for values in self.graphs.draft(first, num_steps)))
        right = self.eager.draft(first, num_steps)
        assert found.token_ids.shape == found.logprobs.shape == (len(rows), num_steps)
        assert torch.equal(found.slots, right.slots)
        table = self.graphs.req_to_token_pool.req_to_token
        for index, slots in enumerate(found.slots):
            assert torch.equal(slots, table[first.rows, first.positions + index].long())
        is_same = found.token_ids == right.token_ids
        # A step is fed the same where all tokens before it were.
        is_fed = torch.cat((torch.ones_like(is_same[:, :1]), is_same[:, :-1]), 1).cumprod(1) > 0
        is_fed |= is_block
        gaps = (found.logprobs - right.logprobs).abs()
        bound = self.tolerance * right.logprobs.abs().clamp(min=1)
        assert (gaps <= bound)[is_fed].all(), gaps
        self._compare_kv(found.slots.flatten() if is_block else found.slots.T[is_fed])
        self.seen["drafts"] += int((is_fed & is_same).sum())
        self.seen["near-ties"] += int((is_fed & ~is_same).sum())
        return first, found

    def _batch(self, rows: list[int], before: list[int], fed: list[int]) -> ForwardBatch:
        table = self.graphs.req_to_token_pool.req_to_token
        device = table.device
        positions = [n + i for n, q_len in zip(before, fed, strict=True) for i in range(q_len)]
        row_of = [row for row, q_len in zip(rows, fed, strict=True) for _ in range(q_len)]
        lens = [n + q_len for n, q_len in zip(before, fed, strict=True)]
        ids = torch.randint(0, VOCAB_SIZE, (len(positions),), generator=self._generator)
        return ForwardBatch(
            input_ids=ids.to(device),
            positions=torch.tensor(positions, device=device),
            slots=table[torch.tensor(row_of), torch.tensor(positions)].long(),
            rows=torch.tensor(rows, device=device),
            q_lens=fed,
            kv_lens=torch.tensor(lens, device=device),
            kv_len_upper_bounds=lens,
            bounds_are_exact=True,
        )

    def _random(self, count: int, width: int) -> torch.Tensor:
        values = torch.randn(count, width, generator=self._generator)
        return values.to(self.graphs.device, self.graphs.kv_pool.kv[0].dtype)

    def _compare(self, found: torch.Tensor, right: torch.Tensor) -> None:
        found, right = found.float(), right.float()
        assert found.shape == right.shape
        assert not found.isnan().any()
        assert (found - right).norm() <= self.tolerance * right.norm()

    def _compare_kv(self, slots: torch.Tensor) -> None:
        """Compares the KV of these slots, and checks that no other was written to but the dummy."""
        mine, his = self.graphs.kv_pool.kv[0], self.eager.kv_pool.kv[0]
        self._compare(mine[slots], his[slots])
        is_used = [(kv != 0).flatten(1).any(1) for kv in (mine, his)]
        page_size = self.graphs.kv_pool.page_size
        assert torch.equal(*(used[page_size:] for used in is_used))
