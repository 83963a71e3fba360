"""Tests what a drafter is given of the target's hidden states, in each step of a served batch: taps
of all rows that were fed and the last layer of all rows of prompts, as transformers computes
them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from mtp_oracle import load_reference
from sglang.srt.layers.forward_options import HiddenCapture
from sglang.srt.lookahead.contract import Planner, StepPlan
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.registry import DRAFTERS
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_options import DrafterConfig, DrafterNeeds
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import ScheduleBatch
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import SchedulerHarness, Setup, make_execution, make_random_llama
from verifying_plan import verifying_plan

NUM_DRAFTS, NUM_LAYERS, VOCAB = 2, 4, 8
TOLERANCE = 1e-4
CAPTURES = (
    HiddenCapture((3, 0, 2), all_rows=True),
    HiddenCapture((1,)),
    HiddenCapture(all_rows=True),
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_attention_heads": 2}
    folder = tmp_path_factory.mktemp("models") / "target"
    made = make_random_llama(folder, 1, num_hidden_layers=NUM_LAYERS, **sizes)
    place = f"{ProbingDrafter.__module__}:{ProbingDrafter.__name__}"
    with mock.patch.dict(DRAFTERS.entries, {"probing": place}):
        yield made


class ProbingDrafter(Planner, Drafter):
    """Guesses, and compares all that it is given with transformers.

    Attributes:
        seen: rows compared, by what they fed.
    """

    def __init__(self, parts: DrafterParts) -> None:
        self.seen: Counter[str] = Counter()
        self.reference: Any = None
        self._capture: HiddenCapture = parts.options
        self._state = parts.state

    @staticmethod
    def needs(options: HiddenCapture) -> DrafterNeeds:
        return DrafterNeeds(max_drafts=NUM_DRAFTS, max_rows=1 + NUM_DRAFTS, capture=options)

    @staticmethod
    def models(options: HiddenCapture, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return ()

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        made = cls(parts)
        return PlannedDrafter(made, made)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return StepWidth(1 + NUM_DRAFTS, 0, 1 + NUM_DRAFTS)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        return verifying_plan(batch, NUM_DRAFTS, 1 + NUM_DRAFTS)

    def extend(self, step: ComputedStep) -> None:
        first = 0
        assert (step.forward.taps is None) == (not self._capture.layers)
        for i, q_len in enumerate(step.inputs.q_lens):
            self._compare(step, i, slice(first, first + q_len))
            first += q_len

    def propose(self, step: ExtendedStep) -> None:
        rows, state = step.rows, self._state
        certain = state.tokens[rows, state.committed[rows]].to(torch.int64)
        ahead = torch.arange(NUM_DRAFTS)
        emits = torch.tensor(step.batch.emits)
        state.write_drafts(rows, (certain[:, None] + ahead) % VOCAB, emits * NUM_DRAFTS)

    def _compare(self, step: ComputedStep, request: int, rows: slice) -> None:
        """Rejected drafts too: their rows saw what was fed before them."""
        fed, start = step.inputs.input_ids[rows], int(step.inputs.positions[rows][0])
        before = step.state.tokens[step.batch.rows[request], :start].to(torch.int64)
        states = self.reference(torch.cat((before, fed))[None], output_hidden_states=True)
        layers = [layer[0, start:] for layer in states.hidden_states]
        if step.forward.taps is not None:
            right = torch.cat([layers[layer] for layer in self._capture.layers], dim=1)
            assert_close(step.forward.taps[rows], right)
        if self._capture.all_rows:
            assert_close(step.forward.hidden[rows], layers[NUM_LAYERS])
        kind = "prompt" if step.batch.num_prompt_tokens[request] else "decode"
        self.seen[kind] += len(fed)
        if kind == "decode":
            self.seen["confirmed"] += int(step.accepted.accept_lens[request]) - 1


def assert_close(found: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(found, right, rtol=TOLERANCE, atol=TOLERANCE)


def served(path: Path, capture: HiddenCapture | None, setup: Setup) -> tuple[Any, Counter[str]]:
    """Output tokens of requests that share prefixes, and what was compared."""
    drafter = None if capture is None else DrafterConfig("probing", capture)
    changes = {} if capture is None else {"capture": capture}
    execution = make_execution(path, setup, 96, 1 + NUM_DRAFTS, **changes)
    worker = make_worker(make_runners(execution), drafter)
    assert isinstance(worker, TpModelWorker)
    seen: Counter[str] = Counter()
    if isinstance(worker._drafter, ProbingDrafter):
        worker._drafter.reference = load_reference(path)
        seen = worker._drafter.seen
    harness = SchedulerHarness(setup, worker)
    chooser = random.Random(0)
    text = [chooser.randrange(VOCAB) for _ in range(40)]
    outputs = []
    for prompts in ([text[:33], text[5:14]], [text, text[:1], text[:20]]):
        outputs += harness.generate(prompts, temperature=0.0, max_new_tokens=12)
        outputs += harness.generate(prompts, temperature=1.0, sampling_seed=3, max_new_tokens=5)
    return outputs, seen


@pytest.mark.long_matrix
@pytest.mark.parametrize("capture", CAPTURES, ids=str)
@pytest.mark.parametrize(
    ("page_size", "chunk", "overlap"), [(1, 7, True), (16, 2048, False), (16, 16, True)]
)
def test_each_row_that_was_fed_has_the_hidden_states_of_transformers(
    path: Path, capture: HiddenCapture, page_size: int, chunk: int, overlap: bool
) -> None:
    setup = Setup(
        num_pages=640 // page_size,
        page_size=page_size,
        chunked_prefill_size=chunk,
        enable_overlap=overlap,
        context_len=96,
        max_decode_rows=1 + NUM_DRAFTS,
        retract_interval=4,
    )
    right, _ = served(path, None, setup)
    found, seen = served(path, capture, setup)
    assert found == right
    assert seen["prompt"] > 100, seen
    assert seen["decode"] - seen["confirmed"] > 100, seen
    assert seen["confirmed"] > 10, seen
