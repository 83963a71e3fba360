"""A target and a draft head over the paged pool, fed as steps feed them and compared with the
head's oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from block_heads import BlockOracle
from draft_heads import DFLASH, EAGLE, EAGLE3, FILE, Oracle
from sglang.srt.head_config import load_head_config
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.models.draft_head import DraftHead
from utils import VOCAB_SIZE, Setup, make_execution

CPU: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "max_graph_width": 0,
}
HIDDEN_SIZE = 64
TOLERANCE = 2e-5  # of the largest value: EAGLE's hidden states grow with each step
WIDTHS = {EAGLE: HIDDEN_SIZE, EAGLE3: 3 * HIDDEN_SIZE}


@dataclass
class Pair:
    """A target and a head, and the head's oracle."""

    group: RunnerGroup
    oracle: Oracle

    @property
    def runner(self) -> ModelRunner:
        return self.group.runners[1]

    @property
    def model(self) -> DraftHead:
        model = self.runner.model
        assert isinstance(model, DraftHead)
        return model


def make_pair(
    target: Path,
    folder: Path,
    kind: str,
    page_size: int = 1,
    token_map: str | None = None,
    on: Mapping[str, Any] = CPU,
) -> Pair:
    """`on` has fields of `ExecutionConfig`; the oracle is on the CPU."""
    setup = Setup(num_pages=512 // page_size, page_size=page_size)
    execution = make_execution(target, setup, **on)
    head = load_head_config(str(folder), kind, execution.model, token_map)
    group = make_runners(execution, replace(execution, model=head))
    weights = load_file(target / FILE)
    embedding = weights["model.embed_tokens.weight"]
    oracle = BlockOracle if kind == DFLASH else Oracle
    return Pair(group, oracle(folder, embedding, weights.get("lm_head.weight", embedding)))


class Feeding:
    """Feeds requests through the paged pool, and knows what the oracle gets: whole sequences."""

    def __init__(self, pair: Pair, seed: int = 0, tolerance: float = TOLERANCE) -> None:
        self.pair = pair
        self.tolerance = tolerance
        self.generator = torch.Generator().manual_seed(seed)
        self.tokens: dict[int, list[int]] = {}
        self.hidden: dict[int, torch.Tensor] = {}
        size = pair.group.memory.page_size
        table = pair.runner.req_to_token_pool.req_to_token
        pages = 1 + torch.randperm(pair.group.memory.num_pages, generator=self.generator)
        per_row = -(-160 // size)
        for row in range(3):
            first = pages[row * per_row : (row + 1) * per_row, None] * size
            slots = (first + torch.arange(size)).flatten()
            table[row, : len(slots)] = slots.to(table.dtype)

    def random(self, count: int, width: int) -> tuple[list[int], torch.Tensor]:
        tokens = torch.randint(0, VOCAB_SIZE, (count,), generator=self.generator)
        return tokens.tolist(), torch.randn(count, width, generator=self.generator)

    def feed(
        self, chunks: dict[int, tuple[list[int], torch.Tensor]], reads: list[int] | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One step, compared with the oracle: rows to tokens and hidden inputs. Returns carried
        hidden states and logits of all rows, or of those that `reads` names."""
        pair, runner, expected = self.pair, self.pair.runner, []
        batch = self.batch(chunks, reads)
        for row, (tokens, _) in chunks.items():
            results = pair.oracle.run(self.tokens[row], self.hidden[row])
            expected.append([result[-len(tokens) :] for result in results])
        hidden = runner.forward(batch).hidden.clone()
        logits = runner.compute_logits(hidden).cpu()
        hidden = hidden.cpu()
        chosen = slice(None) if reads is None else reads
        wanted_hidden, wanted_logits = (torch.cat(each)[chosen] for each in zip(*expected))
        assert_close(hidden, wanted_hidden, self.tolerance)
        if pair.model.hot_head is not None:
            wanted_logits = wanted_logits[:, pair.model.hot_ids.cpu()]
        assert_close(logits, wanted_logits, self.tolerance)
        return hidden, logits

    def batch(
        self, chunks: dict[int, tuple[list[int], torch.Tensor]], reads: list[int] | None = None
    ) -> ForwardBatch:
        """The batch of a step, which is noted as fed."""
        table = self.pair.runner.req_to_token_pool.req_to_token
        device = table.device
        positions, slots, kv_lens = [], [], []
        for row, (tokens, hidden) in chunks.items():
            own = self.pair.oracle.combine(hidden) if hidden.shape[1] != HIDDEN_SIZE else hidden
            start = len(self.tokens.setdefault(row, []))
            self.tokens[row] += tokens
            self.hidden[row] = torch.cat((self.hidden.get(row, own[:0]), own))
            positions.append(torch.arange(start, start + len(tokens)))
            slots.append(table[row, positions[-1]].long())
            kv_lens.append(start + len(tokens))
        return ForwardBatch(
            input_ids=torch.tensor(
                [token for tokens, _ in chunks.values() for token in tokens], device=device
            ),
            positions=torch.cat(positions).to(device),
            slots=torch.cat(slots),
            rows=torch.tensor(list(chunks), device=device),
            q_lens=[len(tokens) for tokens, _ in chunks.values()],
            kv_lens=torch.tensor(kv_lens, device=device),
            kv_len_upper_bounds=kv_lens,
            bounds_are_exact=True,
            read_index=None if reads is None else torch.tensor(reads, device=device),
            hidden=torch.cat([hidden for _, hidden in chunks.values()]).to(device),
        )


def assert_close(
    values: torch.Tensor, expected: torch.Tensor, tolerance: float = TOLERANCE
) -> None:
    atol = tolerance * float(expected.abs().max())
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=atol)


def run_a_round(pair: Pair, kind: str, tolerance: float = TOLERANCE) -> None:
    """Chunks of prompts side by side, then draft steps, then rows of a target's step again."""
    feeding, width = Feeding(pair, tolerance=tolerance), pair.model.hidden_width
    feeding.feed({0: feeding.random(40, width), 1: feeding.random(5, width)})
    feeding.feed({1: feeding.random(17, width), 2: feeding.random(1, width)}, reads=[16, 17])
    hidden, logits = feeding.feed({row: feeding.random(3, width) for row in (0, 1, 2)})
    hidden, logits = hidden[2::3], logits[2::3]
    for _ in range(3):
        best = logits.argmax(dim=-1).to(pair.runner.device)
        tokens = pair.model.to_target_ids(best).tolist()
        steps = {row: ([tokens[row]], hidden[row : row + 1]) for row in range(3)}
        hidden, logits = feeding.feed(steps)
    feeding.feed({1: feeding.random(4, width)}, reads=[3])


def run_blocks(pair: Pair, tolerance: float = TOLERANCE) -> None:
    """Chunks of prompts side by side, blocks behind them, then rows of a target's step over those,
    and blocks again, of fewer drafts."""
    feeding, width, runner = Feeding(pair), pair.model.hidden_width, pair.runner
    oracle, most = pair.oracle, (pair.model.block_size or 0) - 1
    assert isinstance(oracle, BlockOracle)
    runner.forward(feeding.batch({0: feeding.random(40, width), 1: feeding.random(5, width)}))
    chunks = {1: feeding.random(17, width), 2: feeding.random(1, width)}
    runner.forward(feeding.batch(chunks, reads=[16, 17]))
    for rows, num_drafts in (([0, 1, 2], most), ([2, 0], most), ([1], 2), ([0, 1, 2], 1)):
        certain, _ = feeding.random(len(rows), width)
        first = _one_row_each(feeding, rows, certain)
        drafts = runner.draft(first, num_drafts)
        for index, (row, token) in enumerate(zip(rows, certain, strict=True)):
            logits = oracle.draft(token, feeding.hidden[row])[:num_drafts]
            ids = pair.model.target_ids()
            columns = drafts.token_ids[index].cpu()
            if ids is not None:
                columns = (ids.cpu()[None] == columns[:, None]).nonzero()[:, 1]
            right = logits.log_softmax(1).gather(1, columns[:, None])[:, 0]
            assert_close(drafts.logprobs[index].cpu(), right, tolerance)
            assert_close(right, logits.log_softmax(1).amax(1), tolerance)
        runner.forward(feeding.batch({row: feeding.random(3, width) for row in rows}))


def _one_row_each(feeding: Feeding, rows: list[int], tokens: list[int]) -> ForwardBatch:
    """The certain token of each row, behind all that it was fed."""
    table = feeding.pair.runner.req_to_token_pool.req_to_token
    device, lens = table.device, [len(feeding.tokens[row]) for row in rows]
    positions, row_ids = torch.tensor(lens, device=device), torch.tensor(rows, device=device)
    return ForwardBatch(
        input_ids=torch.tensor(tokens, device=device),
        positions=positions,
        slots=table[row_ids, positions].long(),
        rows=row_ids,
        q_lens=[1] * len(rows),
        kv_lens=positions + 1,
        kv_len_upper_bounds=[count + 1 for count in lens],
    )
