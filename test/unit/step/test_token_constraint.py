"""A grammar restricts the tokens of a step: what it allows depends on all tokens before, drafts and
tokens of a step that the host has not read included."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_checks import make_drafter_runners
from ngram_drafter import PLACE, NgramOptions
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.registry import DRAFTERS
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.token_constraint import AllowedTokens, DraftedTokens
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, Worker
from utils import (
    MTP_MAX_ROWS,
    SchedulerHarness,
    Setup,
    make_model_worker,
    make_mtp_worker,
    make_runner,
)

MASK = 5
VOCAB_SIZE = 6
PROMPTS = [[1, 2, 3, 4], [0, 0], [4], [2, 1, 2, 1, 2], [3, 3, 3, 0, 1, 2, 4, 4]]
NUM_NEW = 24


def is_allowed(sequence: Sequence[int], token: int) -> bool:
    """About half of all tokens, by everything before."""
    return (sum(sequence) + len(sequence) + token) % 2 == 0


def bitmask(sequence: Sequence[int]) -> int:
    return sum(1 << token for token in range(VOCAB_SIZE) if is_allowed(sequence, token))


@dataclass
class Grammar:
    """Restricts all requests of a step that emit, once it has read the steps before."""

    worker: ConstrainedWorker
    rows: list[int]
    requests: list[int]
    drafted: list[DraftedTokens] = field(default_factory=list)

    def ask(self, drafted: list[DraftedTokens]) -> None:
        self.worker.catch_up()
        self.drafted = drafted

    def allowed(self, is_computed: Callable[[], bool]) -> AllowedTokens:
        drafted = self.drafted
        places, masks = [], []
        for i, drafts in zip(self.requests, drafted, strict=True):
            ways = [list(self.worker.sequences[self.rows[i]])]
            for token, parent in zip(drafts.tokens, drafts.parents, strict=True):
                ways.append([*ways[parent], token])
            places += range(drafts.first_row, drafts.first_row + len(ways))
            masks += [[bitmask(way)] for way in ways]
        self.worker.num_drafts += len(places) - len(drafted)
        return AllowedTokens(places, torch.tensor(masks, dtype=torch.int32))


class ConstrainedWorker:
    """Gives each step of another worker the grammar."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._unread: list[tuple[ScheduleBatch, GenerationBatchResult]] = []
        self._told: list[HostResult] = []
        self.sequences: dict[int, list[int]] = {}
        self.num_drafts = 0

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self._worker.step_width(params)

    def observe(self, result: HostResult) -> None:
        self._worker.observe(result)

    def catch_up(self) -> None:
        for batch, result in self._unread:
            read = result.read()
            for i, row in enumerate(batch.rows):
                self.sequences[row] += read.next_token_ids[i][: read.accept_lens[i]]
        self._unread = []

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        if batch.new_rows:
            self.catch_up()
        for new in batch.new_rows:
            self.sequences[new.row] = new.tokens.tolist()
        emitting = [i for i, emits in enumerate(batch.emits) if emits]
        grammar = Grammar(self, batch.rows, emitting)
        result = self._worker.forward_batch_generation(replace(batch, constraint=grammar))
        self._unread.append((batch, result))
        return result


def generate(worker: Worker, setup: Setup, **params: Any) -> tuple[list[list[int]], int]:
    constrained = ConstrainedWorker(worker)
    harness = SchedulerHarness(setup, constrained)
    outputs = harness.generate(PROMPTS, max_new_tokens=NUM_NEW, **params)
    return outputs, constrained.num_drafts


@pytest.mark.long_matrix
@pytest.mark.parametrize("enable_overlap", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_restricts_drafts_as_it_does_single_tokens(
    small_model: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, enable_overlap: bool
) -> None:
    """In chains and in trees."""
    setup = Setup(chunked_prefill_size=3, enable_overlap=enable_overlap)
    params: dict[str, Any] = {"temperature": temperature, "sampling_seed": 7}
    plain, _ = generate(make_model_worker(small_model, setup), setup, **params)
    for prompt, output in zip(PROMPTS, plain, strict=True):
        for end, token in enumerate(output):
            assert token != MASK
            assert is_allowed([*prompt, *output[:end]], token)
    ahead = params | {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": True}
    runner = make_runner(small_model, setup, setup.context_len, MTP_MAX_ROWS)
    verified, num_drafts = generate(make_mtp_worker(runner, MASK), setup, **ahead)
    assert verified == plain
    assert num_drafts > 20
    monkeypatch.setitem(DRAFTERS.entries, "toy", PLACE)
    drafter = DrafterConfig("toy", NgramOptions(max_drafts=7, max_depth=3))
    runners, tree_setup = make_drafter_runners(small_model, setup, drafter)
    plain, _ = generate(make_worker(runners, None), tree_setup, **params)  # may emit token MASK
    trees, num_drafts = generate(make_worker(runners, drafter), tree_setup, **params)
    assert trees == plain
    assert num_drafts > 100


def test_rows_without_a_grammar_stay_as_they_are() -> None:
    logits = torch.randn(5, 70)
    allowed = AllowedTokens([1, 3], torch.tensor([[1, 0, 1 << 5], [-1, -1, 0]], dtype=torch.int32))
    masked = allowed.apply(logits)
    assert torch.equal(masked[[0, 2, 4]], logits[[0, 2, 4]])
    assert masked[1].isfinite().nonzero().flatten().tolist() == [0, 69]
    assert masked[3].isfinite().nonzero().flatten().tolist() == list(range(64))
    assert AllowedTokens([], allowed.bitmask[:0]).apply(logits) is logits
