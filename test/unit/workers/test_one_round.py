"""`one_round` and the worker: the same tokens, and as many in each step."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from mtp_oracle import load_reference
from oracle import code_snippets
from sglang.srt.model_config import resolve_model_path
from sglang.srt.tokenizer import load_tokenizer
from sglang.srt.workers.one_round import PLAIN, Choice, LookAhead, Request, one_round
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

DEMO = resolve_model_path("demo")
MASK, NUM_TOKENS = 2, 24
SETUP = Setup(num_pages=6000, max_running_requests=8)
WAYS: dict[str, tuple[LookAhead, dict[str, Any]]] = {
    "plain": (PLAIN, {}),
    "static": (
        LookAhead(2, MASK, 0.0, verifies=False),
        {"mtp_k": 3, "mtp_strategy": ["static"]},
    ),
    "by confidence": (
        LookAhead(7, MASK, 0.9, verifies=False),
        {"mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.9]},
    ),
    "verified": (
        LookAhead(7, MASK, 0.5),
        {"mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.5], "mtp_verify": True},
    ),
}


class CachedModel:
    """transformers over a KV cache that is cut where the step begins."""

    def __init__(self) -> None:
        self._model = load_reference(DEMO)
        self._cache = DynamicCache()
        self.num_rows = 0

    @torch.inference_mode()
    def __call__(self, token_ids: Sequence[int], start: int) -> list[Choice]:
        if surplus := self._cache.get_seq_length() - start:
            self._cache.crop(-surplus)
        self.num_rows += len(token_ids)
        ids = torch.tensor([list(token_ids)])
        logits = self._model(ids, past_key_values=self._cache, use_cache=True).logits[0].float()
        logits[:, MASK] = float("-inf")
        best = logits.softmax(-1).max(-1)
        return [Choice(*each) for each in zip(best.indices.tolist(), best.values.tolist())]


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    (text,) = code_snippets([json], 1, [200])
    return load_tokenizer(DEMO).encode(text, add_special_tokens=True)[:33]


def rounds(prompt: list[int], model: CachedModel, ahead: LookAhead) -> list[list[int]]:
    """Returns the tokens that each step emits, NUM_TOKENS in all."""
    request, found, left = Request(list(prompt)), list[list[int]](), NUM_TOKENS
    while left > 0:
        found.append(one_round(request, model, ahead)[:left])
        left -= len(found[-1])
    return found


@pytest.mark.parametrize("way", WAYS)
def test_it_gives_what_the_worker_gives(prompt: list[int], way: str) -> None:
    ahead, params = WAYS[way]
    found = rounds(prompt, CachedModel(), ahead)
    harness = SchedulerHarness(
        SETUP, make_mtp_worker(make_runner(DEMO, SETUP, 256, MTP_MAX_ROWS), MASK)
    )
    params = {**params, "mtp_enabled": True} if params else {}
    req_id = harness.submit(prompt, max_new_tokens=NUM_TOKENS, temperature=0.0, **params)
    harness.run()
    outcome = harness.outputs[req_id]
    assert outcome.token_ids == [token for step in found for token in step]
    if params:
        assert outcome.step_lens == [len(step) for step in found]
        assert max(outcome.step_lens) > 1


@pytest.mark.parametrize("wrong_at", [None, 0, 2])
def test_drafts_change_how_many_tokens_a_step_gives_and_none_of_them(
    prompt: list[int], wrong_at: int | None
) -> None:
    """Four drafts that are right up to a place. If all are, each row is fed once."""
    plain = [token for step in rounds(prompt, CachedModel(), PLAIN) for token in step]
    text = [*prompt, *plain]

    def propose(tokens: Sequence[int]) -> list[int]:
        drafts = text[len(tokens) : len(tokens) + 4]
        return [token if place != wrong_at else MASK for place, token in enumerate(drafts)]

    model = CachedModel()
    found = rounds(prompt, model, LookAhead(propose=propose))
    assert [token for step in found for token in step] == plain
    per_step = 5 if wrong_at is None else 1 + wrong_at
    assert {len(step) for step in found[1:-1]} == {per_step}
    if wrong_at is None:
        assert model.num_rows <= len(text)
