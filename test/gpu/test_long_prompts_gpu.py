"""Prompts of up to 20,000 tokens on a GPU: transformers' tokens and log-probabilities, aborts and
retractions in their middle, and what their log-probabilities cost."""

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
from sglang.srt.device_copies import HostCopy
from sglang.srt.layers.logprobs import MAX_ROWS_AT_ONCE, LogprobQueries, query_prompt_logprobs
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.step import worker as step_contract

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

# FlashInfer compiles its kernels when they are first asked for.
pytestmark = pytest.mark.timeout(900)

LONGEST = 20_000
LENGTHS = (1, 511, 512, 513, 4095, 8193, LONGEST)
PREFIXES = (1, 15, 16, 17, 511, WINDOW - 1, WINDOW, 999, 1000, 1001, 2047, 12_345)
# FlashInfer has no float32; the kernel for prompts on Hopper has none either.
BACKENDS = (("triton", "float32"), ("triton", "float16"), ("flashinfer", "float16"))
# Heads that every backend has; attention that looks at few of many tokens.
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "initializer_range": 0.08}


def serving_of(backend: str, dtype: str, family: str, folder: pytest.TempPathFactory) -> Serving:
    return Serving(
        long_model(folder.mktemp("model") / "long", family, **SIZES),
        context_len=LONGEST + 128,
        num_slots=80_000,
        device="cuda",
        attention_backend=backend,
        dtype=dtype,
        max_graph_width=1,
    )


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module", params=BACKENDS, ids="-".join)
def serving(
    request: pytest.FixtureRequest, family: str, tmp_path_factory: pytest.TempPathFactory
) -> Serving:
    return serving_of(*request.param, family, tmp_path_factory)


@pytest.mark.parametrize("chunk", [512, 1000, 2048, 8192])
def test_tokens_and_logprobs_of_any_length_in_any_company(serving: Serving, chunk: int) -> None:
    check_lengths(serving, LENGTHS, chunk)


@pytest.mark.parametrize("chunk", [1000, 8192])
def test_a_cached_prefix_of_any_length(serving: Serving, chunk: int) -> None:
    check_cached_prefixes(serving, PREFIXES, chunk, page_size=1)


@pytest.mark.parametrize("chunk", [512, 8192])
def test_logprobs_and_hidden_states_from_the_middle_of_a_chunk(
    serving: Serving, chunk: int
) -> None:
    check_starts_within_chunks(serving, chunk)


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("chunk", [512, 8192])
def test_a_prompt_retracted_in_its_middle_begins_anew(
    serving: Serving, chunk: int, retraction: str
) -> None:
    check_retraction(serving, LONGEST, chunk, retraction)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("chunk", [512, 8192])
def test_a_prompt_aborted_in_its_middle_leaves_nothing_and_harms_nobody(
    serving: Serving, chunk: int, overlap: bool
) -> None:
    check_abort(serving, LONGEST, chunk, overlap)


def test_what_a_long_prompt_returns_is_copied_pinned_and_nothing_waits_for_it(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """torch raises at every operation of a step that would make the host wait. (FlashInfer's plan
    waits for lengths.)"""
    serving = serving_of("triton", "float16", "full", tmp_path_factory)
    harness = serving.harness(8192, use_radix_cache=False)
    options = LogprobOptions(start_len=0, top_num=TOP_NUM, token_ids=[3, 4])
    copied: list[torch.Tensor] = []

    class Recording(HostCopy):
        def read(self) -> list[torch.Tensor]:
            host = super().read()
            copied.extend(host)
            return host

    def run() -> None:
        req_id = submit(
            harness, tokens_of(LONGEST), num_new=1, logprobs=options, hidden_states="all"
        )
        harness.run()
        assert len(harness.outputs[req_id].input_logprobs) == LONGEST - 1
        assert len(harness.outputs[req_id].hidden_states) == LONGEST

    run()  # whatever is compiled
    torch.cuda.set_sync_debug_mode("error")
    try:
        with mock.patch.object(step_contract, "HostCopy", Recording):
            run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    large = [tensor for tensor in copied if tensor.shape[0] == 8192 and tensor.numel()]
    assert len(large) == 2 * 5, "Two chunks: of the token, the best, the chosen; hidden states."
    assert all(tensor.is_pinned() for tensor in large)


def test_logprobs_of_8192_rows_take_the_memory_of_a_few() -> None:
    """With a vocabulary of 128,256 the logits of all rows would take 4.2 GB in float32."""
    num_rows, num_ids, hidden_size = 8192, 128_256, 64
    weight = torch.randn(num_ids, hidden_size, device="cuda", dtype=torch.bfloat16)
    hidden = torch.randn(num_rows, hidden_size, device="cuda", dtype=torch.bfloat16)
    rows = torch.arange(num_rows, device="cuda")
    queries = LogprobQueries(5, [[1, 2]] * num_rows)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    query_prompt_logprobs(hidden, rows, lambda part: part @ weight.T, [7] * num_rows, queries)
    used = torch.cuda.max_memory_allocated() - before
    assert used < 4 * MAX_ROWS_AT_ONCE * num_ids * 4
