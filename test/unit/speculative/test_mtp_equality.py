"""Tokens and tokens per step of the worker over the demo model equal the reference decodes, for
every k, threshold and mode, in one mixed batch and however the scheduler cuts it up."""

from __future__ import annotations

import argparse
import ast
import json
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from mtp_oracle import (
    STATIC,
    MTPReference,
    load_reference,
    unverified_decode,
    verified_decode,
)
from oracle import MAX_GAP, code_snippets, first_divergence, most_near_ties
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.mask_planner import MaskPlanner
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.model_config import resolve_model_path
from sglang.srt.tokenizer import load_tokenizer
from target import TARGET
from utils import (
    MTP_MAX_ROWS,
    Collected,
    RandomBudget,
    SchedulerHarness,
    Setup,
    make_mtp_worker,
    make_runner,
)

DEMO = resolve_model_path("demo")
MASK = 2
NUM_TOKENS = 20
PROMPT_LENGTHS = (15, 16, 33)  # around the edges of pages of 16
LENGTHS = (1, 2, 3, 8)
THRESHOLDS = (STATIC, 0.0, 0.5, 0.9, 0.99)
BASE = Setup(num_pages=6000, max_running_requests=8)
SETUPS = {
    "eight at once": BASE,
    "alone": replace(BASE, max_running_requests=1),
    "overlap off": replace(BASE, enable_overlap=False),
    "radix off": replace(BASE, use_radix_cache=False),
    "pages of 16": replace(BASE, page_size=16, num_pages=400),
    "chunks of 4": replace(BASE, chunked_prefill_size=4),
    "other chunks in every step": replace(BASE, make_budget=partial(RandomBudget, 20)),
    "retracted at every step": replace(BASE, retract_interval=1),
    "retracted at every third step": replace(BASE, retract_interval=3),
    "little memory": replace(BASE, num_pages=170),
}


@dataclass(frozen=True)
class Job:
    """One request and its reference."""

    prompt: int
    k: int
    tau: float
    verify: bool

    @property
    def params(self) -> dict[str, Any]:
        params: dict[str, Any] = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0}
        if self.k:
            strategy = ["static"] if self.tau == STATIC else ["conf_adapt", self.tau]
            params |= {"mtp_enabled": True, "mtp_k": self.k, "mtp_strategy": strategy}
            params |= {"mtp_verify": self.verify}
        return params


# k = 0 is a plain request; a lossless one is told from a plain one by its steps alone.
JOBS = [
    *(Job(p, k, tau, False) for k in LENGTHS for tau in THRESHOLDS for p in range(3)),
    *(Job(p, k, tau, True) for k in (1, 2, 8) for tau in (STATIC, 0.5, 0.9) for p in range(3)),
    *(Job(p, 0, STATIC, False) for p in range(3)),
]


def jobs_in(name: str) -> list[Job]:
    """All jobs in the first set-up and where prompts meet the edges of pages. In another each k,
    threshold and mode with one of the prompts: with the next one in the next set-up. Half of these
    where requests run one after the other."""
    if name in ("eight at once", "pages of 16") or TARGET.device != "cpu":
        return JOBS
    turn = list(SETUPS).index(name)
    kinds = list(dict.fromkeys(replace(job, prompt=0) for job in JOBS))
    jobs = [replace(kind, prompt=(i + turn) % 3) for i, kind in enumerate(kinds)]
    return jobs[::2] if name == "alone" else jobs


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    tokenizer = load_tokenizer(DEMO)
    texts = code_snippets([json, argparse, ast], 3, [200, 210, 220])
    ids = [tokenizer.encode(text, add_special_tokens=True) for text in texts]
    return [tokens[:length] for tokens, length in zip(ids, PROMPT_LENGTHS, strict=True)]


@pytest.fixture(scope="module")
def references(prompts: list[list[int]]) -> dict[Job, MTPReference]:
    model = load_reference(DEMO)
    found = {}
    for job in JOBS:
        decode = verified_decode if job.verify or not job.k else unverified_decode
        k = job.k or 1
        found[job] = decode(model, prompts[job.prompt], NUM_TOKENS, k, job.tau, MASK)
    return found


def run_jobs(
    setup: Setup, prompts: list[list[int]], jobs: list[Job], **config: Any
) -> list[Collected]:
    # Neighbours in the batch are of different kinds.
    order = sorted(range(len(jobs)), key=lambda index: (index * 37) % len(jobs))
    runner = make_runner(DEMO, setup, 256, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK, **config))
    ids = {i: harness.submit(prompts[jobs[i].prompt], **jobs[i].params) for i in order}
    harness.run()
    return [harness.outputs[ids[i]] for i in range(len(jobs))]


def check(
    outcomes: list[Collected], references: dict[Job, MTPReference], jobs: list[Job], what: str
) -> None:
    """Tokens and steps are equal, up to near-ties (also of a confidence with its threshold). One
    decision that several jobs come to after the same text counts once."""
    near_ties: set[tuple[int, ...]] = set()
    for outcome, job in zip(outcomes, jobs, strict=True):
        right = references[job]
        steps = right.step_lens if job.k else []
        if outcome.num_retractions:
            assert sum(outcome.step_lens) == (NUM_TOKENS if job.k else 0)
            if job.verify:  # drafts that were not shown yet are lost with a retraction
                steps = outcome.step_lens
        if (outcome.token_ids, outcome.step_lens) == (right.tokens, steps):
            continue
        place = first_divergence(outcome.token_ids, right.tokens)
        if job.k:
            step = first_divergence(outcome.step_lens, steps)
            place = min(place, sum(right.step_lens[:step]))
        # A verified step tries what the one before it chose to draft.
        first = max(0, place - 1) if job.verify else place
        margin = min(right.margins[first : place + 1])
        assert margin <= MAX_GAP, f"{what}: {job} at {place}: {outcome.step_lens}"
        near_ties.add((job.prompt, *right.tokens[:place]))
    print(f"{what}: {len(near_ties)} near-ties in {len(jobs)} requests")
    assert len(near_ties) <= most_near_ties(len(jobs))


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", SETUPS)
def test_tokens_and_steps_equal_the_reference(
    name: str, prompts: list[list[int]], references: dict[Job, MTPReference]
) -> None:
    jobs = jobs_in(name)
    check(run_jobs(SETUPS[name], prompts, jobs), references, jobs, name)


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", ["eight at once", "alone", "retracted at every third step"])
def test_rows_that_follow_what_is_pending_give_the_same(
    name: str, prompts: list[list[int]], references: dict[Job, MTPReference]
) -> None:
    jobs = jobs_in(name)
    outcomes = run_jobs(SETUPS[name], prompts, jobs, trims_rows=True)
    check(outcomes, references, jobs, f"{name}, trimmed")


def test_the_references_see_what_they_are_to_tell_apart(
    references: dict[Job, MTPReference],
) -> None:
    """Steps of every length occur, and unverified text differs from greedy text somewhere."""
    lengths = {n for job, right in references.items() if job.k == 8 for n in right.step_lens}
    assert lengths >= {1, 2, 3, 8}
    plain = {job.prompt: right.tokens for job, right in references.items() if not job.k}
    unverified = [job for job in JOBS if job.k > 1 and not job.verify]
    assert any(references[job].tokens != plain[job.prompt] for job in unverified)


def test_k_1_and_verified_requests_give_the_greedy_tokens(
    references: dict[Job, MTPReference],
) -> None:
    """Checks the references; that the worker equals them is tested above."""
    plain = {job.prompt: right.tokens for job, right in references.items() if not job.k}
    for job, right in references.items():
        if job.k == 1 or job.verify:
            assert right.tokens == plain[job.prompt], job


def test_masks_to_the_right_change_nothing(
    monkeypatch: pytest.MonkeyPatch,
    prompts: list[list[int]],
    references: dict[Job, MTPReference],
) -> None:
    """Rows padded with one to three more masks give the same tokens and steps."""
    reserve, plan = KVLedger.reserve, MaskPlanner.plan

    def reserve_more(self: KVLedger, kv: Any, num_tokens: int) -> bool:
        return reserve(self, kv, num_tokens + 3)

    def plan_more(self: MaskPlanner, *arguments: Any) -> StepPlan:
        planned = plan(self, *arguments)
        counts = planned.counts
        padded = [
            q_len + 1 + i % 3 if k > 1 else q_len
            for i, (q_len, k) in enumerate(zip(counts.q_lens, counts.num_predicted, strict=True))
        ]
        return replace(planned, counts=replace(counts, q_lens=padded))

    monkeypatch.setattr(KVLedger, "reserve", reserve_more)
    monkeypatch.setattr(MaskPlanner, "plan", plan_more)
    jobs = jobs_in("radix off")
    check(run_jobs(BASE, prompts, jobs), references, jobs, "padded")
