"""Prompts that take many steps equal transformers', whatever the chunks, the cached prefix, the
windows and the company, and after an abort or a retraction in their middle."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from long_prompts import (
    FAMILIES,
    RETRACTIONS,
    TOP_NUM,
    WINDOW,
    Serving,
    check_abort,
    check_cached_prefixes,
    check_lengths,
    check_retraction,
    check_starts_within_chunks,
    long_model,
    submit,
    tokens_of,
)
from sglang.srt.layers.logprobs import MAX_ROWS_AT_ONCE
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.step.worker import GenerationBatchResult, ScheduleBatch

LENGTHS = (1, 511, 512, 513, 2047, 4097)
PREFIXES = (1, 15, 16, 17, 511, WINDOW - 1, WINDOW, 999, 1000, 1001, 2047, 2599)


@pytest.fixture(scope="module", params=FAMILIES)
def serving(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Serving:
    path = long_model(tmp_path_factory.mktemp("model") / "long", request.param)
    return Serving(path, context_len=4096 + 64, num_slots=26_000)


@pytest.mark.long_matrix
@pytest.mark.parametrize("chunk", [512, 1000, 4096])
def test_tokens_and_logprobs_of_any_length_in_any_company(serving: Serving, chunk: int) -> None:
    check_lengths(serving, LENGTHS, chunk)


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
def test_a_cached_prefix_of_any_length(serving: Serving, page_size: int) -> None:
    """It ends within a page, a window and a chunk, and at their edges."""
    check_cached_prefixes(serving, PREFIXES, 1000, page_size)


@pytest.mark.long_matrix
@pytest.mark.parametrize("chunk", [512, 4096])
def test_logprobs_and_hidden_states_from_the_middle_of_a_chunk(
    serving: Serving, chunk: int
) -> None:
    check_starts_within_chunks(serving, chunk)


@pytest.mark.long_matrix
@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("chunk", [512, 1000])
def test_a_prompt_retracted_in_its_middle_begins_anew(
    serving: Serving, chunk: int, retraction: str
) -> None:
    check_retraction(serving, 2047, chunk, retraction)


@pytest.mark.long_matrix
@pytest.mark.parametrize(("chunk", "overlap"), [(512, True), (1000, True), (1000, False)])
def test_a_prompt_aborted_in_its_middle_leaves_nothing_and_harms_nobody(
    serving: Serving, chunk: int, overlap: bool
) -> None:
    check_abort(serving, 2047, chunk, overlap)


def test_no_step_asks_for_more_logits_than_a_few_rows_of_a_prompt(serving: Serving) -> None:
    """Nor gathers more hidden states than it asks logits of, nor copies more than the answers."""
    runner = serving.runner(1)
    worker = make_worker(RunnerGroup([runner]), None)
    num_rows: list[int] = []
    compute_logits, forward = runner.compute_logits, worker.forward_batch_generation

    def recording(hidden: torch.Tensor) -> torch.Tensor:
        num_rows.append(len(hidden))
        assert hidden.untyped_storage().nbytes() == hidden.nbytes
        return compute_logits(hidden)

    def checking(batch: ScheduleBatch) -> GenerationBatchResult:
        result = forward(batch)
        assert result.prompt_logprobs is not None
        for tensor in result.prompt_logprobs.tensors:
            assert tensor.untyped_storage().nbytes() == tensor.nbytes
        return result

    harness = serving.harness(8192, worker=worker)
    options = LogprobOptions(start_len=0, top_num=TOP_NUM, token_ids=[3, 4, 5])
    lengths = (1500, 3000)
    with (
        mock.patch.object(runner, "compute_logits", recording),
        mock.patch.object(worker, "forward_batch_generation", checking),
    ):
        for length in lengths:
            submit(harness, tokens_of(length, seed=length), num_new=1, logprobs=options)
        harness.run()
    assert sum(num_rows) == sum(lengths)
    assert max(num_rows) == MAX_ROWS_AT_ONCE == 256
