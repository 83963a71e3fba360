"""A target and a draft head over the paged pool, fed as steps feed them and compared with the
head's oracle."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from draft_heads import EAGLE, EAGLE3, FILE, Oracle
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
    return Pair(group, Oracle(folder, embedding, weights.get("lm_head.weight", embedding)))


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
        table = runner.req_to_token_pool.req_to_token
        device = table.device
        positions, slots, kv_lens = [], [], []
        for row, (tokens, hidden) in chunks.items():
            own = pair.oracle.combine(hidden) if hidden.shape[1] != HIDDEN_SIZE else hidden
            start = len(self.tokens.setdefault(row, []))
            self.tokens[row] += tokens
            self.hidden[row] = torch.cat((self.hidden.get(row, own[:0]), own))
            results = pair.oracle.run(self.tokens[row], self.hidden[row])
            expected.append([result[start:] for result in results])
            positions.append(torch.arange(start, start + len(tokens)))
            slots.append(table[row, positions[-1]].long())
            kv_lens.append(start + len(tokens))
        batch = ForwardBatch(
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
