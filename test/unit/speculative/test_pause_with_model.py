"""Pauses and weight updates over a real model: every kind of decoding in one batch."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

from mtp_oracle import greedy_over_kv_of, load_reference
from sglang.srt.control.control import ModelResources
from sglang.srt.messages.control import (
    AbortReq,
    ContinueGenerationReq,
    FromDirectory,
    PauseGenerationReq,
    UpdateWeightsReq,
)
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.weight_sync.serving_weights import ServingWeights
from utils import (
    MTP_MAX_ROWS,
    SchedulerHarness,
    Setup,
    make_mtp_worker,
    make_random_llama,
    make_runner,
)

MASK = 5
NUM_NEW = 24
PLAIN: dict[str, Any] = {"temperature": 0.0}
STATIC = {"mtp_enabled": True, "mtp_k": 4, "temperature": 0.0}
ADAPTIVE = {**STATIC, "mtp_strategy": ["conf_adapt", 0.6]}
VERIFIED = {**STATIC, "mtp_verify": True}
SAMPLED = {**VERIFIED, "temperature": 1.0, "sampling_seed": 7}
KINDS = (PLAIN, STATIC, ADAPTIVE, VERIFIED, SAMPLED, PLAIN, ADAPTIVE, VERIFIED)
PROMPTS = [[(i * j + j) % 5 for i in range(7 + 3 * j)] for j in range(1, len(KINDS) + 1)]
_call_ids = itertools.count(1)


class ModelHarness(SchedulerHarness):
    """A scheduler over a model, whose weights can be updated."""

    def __init__(self, path: Path, **changes: Any) -> None:
        setup = Setup(num_pages=600, chunked_prefill_size=16, **changes)
        self.runner = make_runner(path, setup, 128, MTP_MAX_ROWS)
        resources = ModelResources(weights=ServingWeights(self.runner.weights), memory={})
        super().__init__(setup, make_mtp_worker(self.runner, MASK), resources=resources)

    def start(self) -> list[int]:
        return [
            self.submit(
                prompt, max_new_tokens=NUM_NEW, logprobs=LogprobOptions(len(prompt)), **kind
            )
            for prompt, kind in zip(PROMPTS, KINDS, strict=True)
        ]

    def send(self, kind: type, **fields: Any) -> Any:
        reply = self.call(kind(call_id=next(_call_ids), **fields), max_steps=100_000)
        assert reply.success, reply
        return reply

    def pause(self, mode: str) -> None:
        self.send(PauseGenerationReq, mode=mode)

    def resume(self) -> None:
        self.send(ContinueGenerationReq)

    def update(self, path: Path, **fields: Any) -> None:
        self.send(UpdateWeightsReq, source=FromDirectory(path=str(path)), **fields)

    def tokens(self, req_ids: list[int]) -> list[list[int]]:
        return [list(self.outputs[req_id].token_ids) for req_id in req_ids]


@pytest.fixture(scope="module")
def undisturbed(small_model: Path) -> list[list[int]]:
    harness = ModelHarness(small_model)
    req_ids = harness.start()
    harness.run()
    return harness.tokens(req_ids)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {
        "vocab_size": 6,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "mtp_mask_token_id": MASK,
        "initializer_range": 0.3,
    }
    return make_random_llama(tmp_path_factory.mktemp("other"), seed=8, **changes)


@pytest.mark.long_matrix
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_turns", [0, 1, 2, 3, 5, 8, 12, 20])
@pytest.mark.parametrize("mode", ["retract", "in_place", "drain"])
def test_tokens_after_a_pause_at_any_turn_are_those_without(
    small_model: Path, undisturbed: list[list[int]], mode: str, num_turns: int, overlap: bool
) -> None:
    harness = ModelHarness(small_model, enable_overlap=overlap)
    req_ids = harness.start()
    for _ in range(num_turns):
        harness.step()
    harness.pause(mode)
    harness.resume()
    harness.step()
    harness.pause(mode)  # again, right after
    harness.resume()
    harness.run()
    assert harness.tokens(req_ids) == undisturbed
    for req_id in req_ids:
        assert [p.token_id for p in harness.outputs[req_id].output_logprobs] == (
            harness.outputs[req_id].token_ids
        )


@pytest.mark.parametrize("num_turns", [0, 2, 6, 12])
def test_what_an_abort_gives_is_a_prefix_with_as_many_logprobs(
    small_model: Path, undisturbed: list[list[int]], num_turns: int
) -> None:
    harness = ModelHarness(small_model)
    req_ids = harness.start()
    for _ in range(num_turns):
        harness.step()
    harness.pause("abort")
    for tokens, right, req_id in zip(harness.tokens(req_ids), undisturbed, req_ids, strict=True):
        assert tokens == right[: len(tokens)]
        assert len(harness.outputs[req_id].output_logprobs) == len(tokens)
    harness.resume()
    again = harness.start()
    harness.run()
    assert harness.tokens(again) == undisturbed


def test_an_abort_under_in_place_has_as_many_logprobs_as_tokens(small_model: Path) -> None:
    harness = ModelHarness(small_model)
    req_ids = harness.start()
    for _ in range(8):
        harness.step()
    harness.pause("in_place")
    harness.inbox.messages.append(AbortReq(abort_all=True))
    harness.step()
    for req_id in req_ids:
        outcome = harness.outputs[req_id]
        assert outcome.num_ends == 1
        assert len(outcome.output_logprobs) == len(outcome.token_ids)


@pytest.mark.parametrize("is_flushed", [True, False])
def test_retracted_requests_go_on_as_if_the_new_weights_had_read_all_before(
    small_model: Path, other_model: Path, is_flushed: bool
) -> None:
    """Against a server that starts with the new weights and gets prompt and partial output."""
    harness = ModelHarness(small_model)
    req_ids = harness.start()
    for _ in range(7):
        harness.step()
    harness.pause("retract")
    partial = harness.tokens(req_ids)
    assert any(partial)
    harness.update(other_model, weight_version="v1", flush_cache=is_flushed)
    harness.resume()
    harness.run()
    fresh = ModelHarness(other_model)
    for req_id, prompt, head, kind in zip(req_ids, PROMPTS, partial, KINDS, strict=True):
        num_left = NUM_NEW - len(head)
        if num_left:
            [tail] = fresh.generate([prompt + head], max_new_tokens=num_left, **kind)
            assert harness.outputs[req_id].token_ids == head + tail
            assert harness.outputs[req_id].weight_spans["target"][-1] == ("v1", len(head))


def test_in_place_keeps_the_old_weights_kv(small_model: Path, other_model: Path) -> None:
    harness = ModelHarness(small_model)
    prompt = PROMPTS[4]
    req_id = harness.submit(prompt, max_new_tokens=NUM_NEW, temperature=0.0)
    for _ in range(9):
        harness.step()
    harness.pause("in_place")
    head = list(harness.outputs[req_id].token_ids)
    assert head
    harness.update(other_model)
    harness.resume()
    harness.run()
    old, new = load_reference(small_model), load_reference(other_model)
    right = head + greedy_over_kv_of(old, new, prompt + head, NUM_NEW - len(head), MASK)
    assert harness.outputs[req_id].token_ids == right
    only_new = ModelHarness(other_model)
    [tail] = only_new.generate([prompt + head], max_new_tokens=NUM_NEW - len(head), temperature=0.0)
    assert right != head + tail, "The test cannot tell old KV from new."
