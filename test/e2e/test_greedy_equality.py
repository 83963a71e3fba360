"""Greedy tokens of the bundled model equal transformers', however they are scheduled."""

from __future__ import annotations

import argparse
import dataclasses
import heapq
import json.decoder
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from oracle import (
    FEW_NEAR_TIES,
    Reference,
    assert_equal_up_to_near_ties,
    code_snippets,
    transformers_greedy,
)
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.tokenizer import load_tokenizer
from utils import RandomBudget, SchedulerHarness, Setup, make_model_worker

NUM_PROMPTS, NUM_TOKENS = 20, 32
CONTEXT_LEN = 512
LENGTHS = [8, 40, 90, 200, 400]  # of prompts, in characters, in turn
NUM_SHARED, NUM_CROWDED = 10, 5  # prompts of a variant, and where steps are many
BASE = Setup(num_pages=16384, max_running_requests=8)

VARIANTS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "normal": {"enable_overlap": False},
    "without radix cache": {"use_radix_cache": False},
    "chunks of 4": {"chunked_prefill_size": 4},
    "other chunks in every step": {"make_budget": partial(RandomBudget, 50)},
    "page size 16": {"page_size": 16, "num_pages": 1024},
    "retraction every 3 steps": {"retract_interval": 3},
    "small pool": {"num_pages": 400},
    "lpm": {"schedule_policy": "lpm"},
    "everything at once": {
        "page_size": 16,
        "num_pages": 64,
        "chunked_prefill_size": 4,
        "retract_interval": 3,
    },
}


@pytest.fixture(scope="module")
def model_path() -> Path:
    torch.set_num_threads(1)
    return resolve_model_path("demo")


@pytest.fixture(scope="module")
def references(model_path: Path) -> list[Reference]:
    tokenizer = load_tokenizer(model_path)
    modules = [argparse, dataclasses, heapq, json.decoder, textwrap]
    texts = code_snippets(modules, NUM_PROMPTS, LENGTHS)
    prompts = [tokenizer.encode(text) for text in texts]
    return transformers_greedy(model_path, prompts, NUM_TOKENS)


def some(references: list[Reference], variant: str, count: int) -> list[Reference]:
    """Prompts side by side, of all lengths equally often; those of the next variant overlap them by
    half, so that together all are used."""
    assert count % len(LENGTHS) == 0
    first = list(VARIANTS).index(variant) * NUM_CROWDED
    return [references[(first + place) % NUM_PROMPTS] for place in range(count)]


def make_harness(model_path: Path, **changes: Any) -> SchedulerHarness:
    eos = frozenset(load_model_config(str(model_path)).eos_token_ids)
    setup = dataclasses.replace(BASE, eos_token_ids=eos, **changes)
    return SchedulerHarness(setup, make_model_worker(model_path, setup, CONTEXT_LEN))


def generate(harness: SchedulerHarness, references: list[Reference]) -> list[list[int]]:
    prompts = [reference.prompt for reference in references]
    return harness.generate(prompts, max_new_tokens=NUM_TOKENS, temperature=0.0)


def test_alone(model_path: Path, references: list[Reference]) -> None:
    harness = make_harness(model_path)
    chosen = some(references, "normal", NUM_SHARED)
    actual = [generate(harness, [reference])[0] for reference in chosen]
    assert_equal_up_to_near_ties(actual, chosen, "alone")


@pytest.mark.long_matrix
@pytest.mark.parametrize("variant", VARIANTS)
def test_eight_at_once(model_path: Path, references: list[Reference], variant: str) -> None:
    """All prompts as it is by default, some in each other way."""
    harness = make_harness(model_path, **VARIANTS[variant])
    chosen = references if variant == "overlap" else some(references, variant, NUM_SHARED)
    actual = generate(harness, chosen)
    assert_equal_up_to_near_ties(actual, chosen, f"8 at once, {variant}")
    if "retract_interval" in VARIANTS[variant]:
        assert all(output.num_retractions >= 5 for output in harness.outputs.values())
    if "small pool" in variant:
        assert any(output.num_retractions for output in harness.outputs.values())


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    "variant", ["overlap", "normal", "other chunks in every step", "everything at once"]
)
def test_mixed_arrival(model_path: Path, references: list[Reference], variant: str) -> None:
    """A request every other step, so prompts and decodes share batches all the time."""
    harness = make_harness(model_path, **VARIANTS[variant])
    count = NUM_CROWDED if variant == "everything at once" else NUM_SHARED
    chosen = some(references, variant, count)
    ids = []
    for reference in chosen:
        ids.append(harness.submit(reference.prompt, max_new_tokens=NUM_TOKENS, temperature=0.0))
        harness.step()
        harness.step()
    harness.run()
    actual = [harness.outputs[req_id].token_ids for req_id in ids]
    assert_equal_up_to_near_ties(actual, chosen, f"mixed arrival, {variant}")


def test_a_second_run_from_the_cache_gives_the_same_tokens(
    model_path: Path, references: list[Reference]
) -> None:
    harness = make_harness(model_path)
    chosen = some(references, "overlap", NUM_SHARED)
    generate(harness, chosen)
    actual = generate(harness, chosen)
    assert_equal_up_to_near_ties(actual, chosen, "from the radix cache")
    again = [harness.outputs[NUM_SHARED + 1 + i].cached_tokens for i in range(NUM_SHARED)]
    assert again == [len(reference.prompt) - 1 for reference in chosen]


@pytest.mark.long_matrix
def test_seeded_sampling_depends_on_nothing_but_the_seed(
    model_path: Path, references: list[Reference]
) -> None:
    """Alone, batched, chunked, paged and retracted: the same tokens for the same seed."""
    params = {
        "max_new_tokens": 16,
        "temperature": 0.8,
        "top_p": 0.95,
        "top_k": 50,
        "min_p": 0.01,
        "ignore_eos": True,
    }
    prompts = [reference.prompt for reference in references[:NUM_CROWDED]]

    def run(alone: bool, **changes: Any) -> list[list[int]]:
        harness = make_harness(model_path, **changes)
        ids = []
        for seed, prompt in enumerate(prompts):
            ids.append(harness.submit(prompt, sampling_seed=seed, **params))
            if alone:
                harness.run()
        harness.run()
        return [harness.outputs[req_id].token_ids for req_id in ids]

    alone = run(alone=True)
    assert len({tuple(tokens) for tokens in alone}) == len(alone)
    for variant, changes in VARIANTS.items():
        # Rounding differs with the shape of a batch and can move a draw across a boundary.
        differing = sum(a != b for a, b in zip(alone, run(False, **changes), strict=True))
        assert differing <= max(1, FEW_NEAR_TIES), variant
