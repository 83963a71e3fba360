"""A drafter with a model of its own, through the start of the scheduler's process."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from second_model_drafter import NAME, SecondModel, registered
from sglang.srt.entrypoints.server_info import describe_start
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.messages.ipc import IpcAddresses, Receiver, Sender
from sglang.srt.messages.requests import (
    BatchTokenIDOutput,
    SchedulerInfo,
    TokenizedGenerateReqInput,
    ToScheduler,
)
from sglang.srt.processes import model_parts, scheduler_process
from sglang.srt.processes.runtime_config import RuntimeConfig, resolve, with_drafter
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter_options import DrafterConfig
from utils import make_random_model

NUM_DRAFTS, CONTEXT, PAGE_SIZE, BUDGET = 3, 100, 16, 130_000
TARGET_BYTES, DRAFT_BYTES = 2 * 2 * 2 * 16 * 4, 2 * 3 * 1 * 32 * 4  # of a token, in float32


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    draft = {"num_hidden_layers": 3, "num_key_value_heads": 1, "head_dim": 32}
    target = make_random_model("llama", folder / "target")
    return target, make_random_model("qwen3", folder / "draft", 1, **draft)


def args_for(path: Path, **flags: Any) -> ServerArgs:
    defaults = {
        "tokenizer_path": "demo",
        "page_size": PAGE_SIZE,
        "context_length": CONTEXT,
        "max_running_requests": 4,
        "num_threads": 1,
    }
    return ServerArgs(model_path=str(path), device="cpu", **{**defaults, **flags})


@contextmanager
def started(
    args: ServerArgs, drafter: DrafterConfig | None
) -> Iterator[tuple[Scheduler, SchedulerInfo, IpcAddresses]]:
    """Yields what the process makes, with BUDGET bytes for KV."""

    def resolved(*given: Any) -> RuntimeConfig:
        config = resolve(*given)
        config = replace(config, execution=replace(config.execution, kv_budget_bytes=BUDGET))
        return config if drafter is None else with_drafter(config, drafter)

    addresses, directory = IpcAddresses.create()
    try:
        with registered(), mock.patch.object(model_parts, "resolve", resolved):
            inbox: Receiver[Any] = Receiver(addresses.scheduler, ToScheduler)
            yield *scheduler_process.build(args, addresses, inbox), addresses
    finally:
        shutil.rmtree(directory)


def tokens_of(scheduler: Scheduler, addresses: IpcAddresses, prompt: list[int]) -> list[int]:
    """Returns the tokens that the scheduler gives for a prompt that comes through its socket."""
    detokenizer: Receiver[BatchTokenIDOutput] = Receiver(addresses.detokenizer, BatchTokenIDOutput)
    frontend: Sender[Any] = Sender(addresses.scheduler)
    params = SamplingParams(temperature=0.0, max_new_tokens=30)
    frontend.send(TokenizedGenerateReqInput(1, "a", prompt, params))
    tokens: list[int] = []
    for _ in range(200):
        scheduler.event_loop_normal()
        while detokenizer.poll(timeout_ms=5):
            [output] = detokenizer.receive().outputs
            tokens += output.token_ids
            if output.finish_reason is not None:
                frontend.close()
                detokenizer.close()
                return tokens
    raise AssertionError("No end.")


def test_a_drafter_with_a_model_is_sized_started_and_described(paths: tuple[Path, Path]) -> None:
    target, draft = paths
    prompt = [(7 * i) % 320 for i in range(59)]
    with started(args_for(target), None) as (scheduler, plain, addresses):
        right = tokens_of(scheduler, addresses, prompt)
    drafter = DrafterConfig(NAME, SecondModel(draft, NUM_DRAFTS))
    with started(args_for(target), drafter) as (scheduler, info, addresses):
        assert tokens_of(scheduler, addresses, prompt) == right
    assert plain.resolved["kv_bytes_per_token"] == TARGET_BYTES
    assert info.resolved["kv_bytes_per_token"] == TARGET_BYTES + DRAFT_BYTES
    for each, bytes_per_token in ((plain, TARGET_BYTES), (info, TARGET_BYTES + DRAFT_BYTES)):
        num_pages = BUDGET // (PAGE_SIZE * bytes_per_token)
        assert each.max_total_num_tokens == num_pages * PAGE_SIZE
        assert "what fits into" in each.resolved["kv_size_reason"]
    # A request needs 1 + 2 * NUM_DRAFTS slots beyond its tokens: this one has just so many.
    assert info.max_total_num_tokens < CONTEXT < plain.max_total_num_tokens
    assert info.max_req_len == info.max_total_num_tokens - 1 - 2 * NUM_DRAFTS
    assert info.max_req_len == len(prompt) + len(right)
    assert info.mtp_max_k == 0
    [described] = info.resolved["draft_models"]
    assert described["path"] == str(draft)
    assert described["architecture"] == "Qwen3ForCausalLM"
    assert 0 < described["num_parameters"] != info.resolved["num_parameters"]
    rows = [line.split() for line in describe_start(args_for(target), info, {}).splitlines()[1:3]]
    assert [row[:-4] for row in rows] == [["model", str(target)], ["draft", "model", str(draft)]]
    assert [row[-4] for row in rows] == ["(LlamaForCausalLM,", "(Qwen3ForCausalLM,"]
    assert plain.resolved["draft_models"] == []
    assert "draft model" not in describe_start(args_for(target), plain, {})


def test_a_draft_model_with_another_vocabulary_is_refused(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    other = make_random_model("llama", tmp_path / "other", vocab_size=64)
    drafter = DrafterConfig(NAME, SecondModel(other))
    with (
        pytest.raises(ValueError, match="64 tokens, the target 320"),
        started(args_for(paths[0]), drafter),
    ):
        pass
