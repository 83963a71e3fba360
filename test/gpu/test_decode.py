"""Decode on a GPU: the tokens of the CPU, for every kind of request, and no wait for the device."""

from __future__ import annotations

import argparse
import ast
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_oracle import load_reference
from oracle import MAX_SHARE, code_snippets, first_divergence
from policy_steps import mask_parts
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.upcoming_step import UpcomingStep
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.model_config import resolve_model_path
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.registry import ATTENTION_BACKENDS
from sglang.srt.tokenizer import load_tokenizer
from sglang.srt.workers.tp_worker import TpModelWorker
from target import MAX_GAPS
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

DEMO = Path(resolve_model_path("demo"))
MASK = 2
NUM_NEW = 48
SETUP = Setup(num_pages=8000, max_running_requests=32)
STATIC: dict[str, Any] = {"mtp_enabled": True, "mtp_k": 4, "temperature": 0.0}
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    STATIC,
    {**STATIC, "mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.9]},
    {**STATIC, "mtp_k": 8, "mtp_verify": True},
    {"temperature": 1.0, "sampling_seed": 3},
    {**STATIC, "mtp_verify": True, "temperature": 1.0, "sampling_seed": 3},
)
BACKENDS = tuple(ATTENTION_BACKENDS.names)
# What requests may ask for beside tokens, for the first of KINDS and then the next ones.
WISHES: tuple[dict[str, Any], ...] = (
    {"logprobs": LogprobOptions(start_len=0, top_num=2, token_ids=[5, 6])},
    {"hidden_states": "last"},
    {"logprobs": LogprobOptions(start_len=99)},
    {"logprobs": LogprobOptions(start_len=99, top_num=3), "frequency_penalty": 0.5},
    {"logprobs": LogprobOptions(start_len=99), "repetition_penalty": 1.2},
    {"presence_penalty": 0.5, "hidden_states": "all"},
)
# Of requests that begin together: two score their prompts, with and without chosen ids.
ARRIVALS: tuple[tuple[dict[str, Any], ...], ...] = (
    ({"logprobs": LogprobOptions(start_len=0)}, WISHES[0]),
    ({"frequency_penalty": 0.5}, {"hidden_states": "all"}),
)
NEVER_WAIT = [
    name for name in BACKENDS if ATTENTION_BACKENDS.load(name).capabilities().reads_q_starts
]


def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(DEMO)
    texts = code_snippets([argparse, ast, json], 36, [60, 200, 350])
    return [tokenizer.encode(text)[:100] for text in texts]


def dtype_of(backend: str) -> str:
    """float32, or the finest type that the backend has."""
    dtypes = ATTENTION_BACKENDS.load(backend).capabilities().dtypes
    return "float32" if torch.float32 in dtypes else "float16"


def runner_on(
    device: str, backend: str = "torch_native", max_graph_width: int = 0, **changes: Any
) -> ModelRunner:
    return make_runner(
        DEMO,
        SETUP,
        512,
        MTP_MAX_ROWS,
        device=device,
        attention_backend=backend,
        max_graph_width=max_graph_width,
        dtype=dtype_of(backend),
        **changes,
    )


class Limited(FixedLength):
    """Mostly says that nobody may look ahead: steps with drafts and plain ones alternate."""

    def __init__(self) -> None:
        super().__init__(mask_parts(8))
        self._limits = itertools.cycle((8, 1, 1, 3, 1))

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(next(self._limits))


LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {},
    "limited": {"policy": Limited},
}


def mtp_worker(runner: ModelRunner, layout: str) -> TpModelWorker:
    """One that lays its steps out in a way of LAYOUTS."""
    config = dict(LAYOUTS[layout])
    policy = config.pop("policy", None)
    return make_mtp_worker(runner, MASK, policy and policy(), **config)


def outputs(runner: ModelRunner, setup: Setup, layout: str = "padded") -> list[list[int]]:
    harness = SchedulerHarness(setup, mtp_worker(runner, layout))
    ids = [
        harness.submit(prompt, max_new_tokens=NUM_NEW, **KINDS[i % len(KINDS)])
        for i, prompt in enumerate(prompts())
    ]
    harness.run()
    return [harness.outputs[req_id].token_ids for req_id in ids]


@pytest.fixture(scope="module")
def on_cpu() -> list[list[int]]:
    return outputs(runner_on("cpu"), SETUP)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_those_of_the_cpu(
    on_cpu: list[list[int]], backend: str, graphs: bool, overlap: bool, layout: str
) -> None:
    setup = Setup(num_pages=8000, max_running_requests=32, enable_overlap=overlap)
    width = MTP_MAX_ROWS if graphs else 0
    runner = runner_on("cuda", backend, max_graph_width=width, poisons_graphs=True)
    found = outputs(runner, setup, layout)
    reference = load_reference(DEMO)
    num_near_ties = 0
    for index, (tokens, right) in enumerate(zip(found, on_cpu, strict=True)):
        if tokens == right:
            continue
        place = first_divergence(tokens, right)
        ids = torch.tensor([prompts()[index] + right[:place]])
        logits = reference(ids).logits[0, -1].float()
        logits[MASK] = float("-inf")
        top = logits.topk(2).values
        kind = KINDS[index % len(KINDS)]
        assert (
            kind["temperature"] > 0
            or kind is not KINDS[0]
            or top[0] - top[1] <= MAX_GAPS[dtype_of(backend)]
        ), index
        num_near_ties += 1
    print(f"{num_near_ties} of {len(found)} outputs differ from the CPU's")
    assert num_near_ties <= max(1, MAX_SHARE * len(found))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("asks_more", [False, True])
@pytest.mark.parametrize("width", [0, 1, MTP_MAX_ROWS])
@pytest.mark.parametrize("backend", NEVER_WAIT)
def test_the_decode_loop_never_waits_for_the_device(
    backend: str, width: int, asks_more: bool, layout: str
) -> None:
    """torch raises at every operation that would make the host wait, be it that requests begin, or
    that they ask for log-probabilities, hidden states and penalties."""
    runner = runner_on("cuda", backend, max_graph_width=width)
    harness = SchedulerHarness(SETUP, mtp_worker(runner, layout))
    for i, prompt in enumerate(prompts()[:12]):
        wishes = WISHES[i - len(KINDS)] if asks_more and i >= len(KINDS) else {}
        kind = KINDS[i % len(KINDS)]
        harness.submit(prompt, max_new_tokens=200, ignore_eos=True, **kind, **wishes)
    for _ in range(6):  # prompts, and whatever is compiled
        harness.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in range(12):
            if step % 3 == 0:
                kind = KINDS[step // 3 % len(KINDS)]
                wishes = ARRIVALS[step // 3 % len(ARRIVALS)] if asks_more else ({},)
                for wish in wishes:
                    prompt = prompts()[12 + step]
                    harness.submit(prompt, max_new_tokens=4, ignore_eos=True, **kind, **wish)
            harness.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len(harness.scheduler.lifecycle.running) >= 12
    assert len(harness.outputs) == (20 if asks_more else 16)
    harness.run()
