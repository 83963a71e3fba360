"""Requests that end at the last token of the context, or up to 40 tokens before it: for every page
size and mode, with the tokens of a reference decode and a ledger that is exact after every step.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from mtp_oracle import STATIC, MTPReference, load_reference, unverified_decode, verified_decode
from sglang.srt.mem_cache.kv_sizing import row_width
from sglang.srt.model_executor.model_runner import ModelRunner
from token_table_check import checked_harness
from utils import (
    MTP_MAX_ROWS,
    SchedulerHarness,
    Setup,
    make_model_worker,
    make_mtp_worker,
    make_runner,
)

MASK = 5
CONTEXT = 48
# Tokens between a request's last one and the end of the context: each number that is less than the
# widest step has rows, and some beyond.
LEFT = (*range(MTP_MAX_ROWS + 2), *range(20, 41, 4))
PAGE_SIZES = (1, 4, 16, 64)
MAX_NEW = 9
EQUALITY_MARGIN = 1e-4
NUM_RUNNING = 4
NUM_WAYS = 24


@dataclass(frozen=True)
class Mode:
    """Says how a request decodes; k = 0 is plain greedy."""

    k: int = 0
    tau: float = STATIC
    verify: bool = False

    @property
    def params(self) -> dict[str, Any]:
        if not self.k:
            return {}
        strategy = ["static"] if self.tau == STATIC else ["conf_adapt", self.tau]
        return {
            "mtp_enabled": True,
            "mtp_k": self.k,
            "mtp_strategy": strategy,
            "mtp_verify": self.verify,
        }


MODES = {
    "plain": Mode(),
    "static": Mode(8),
    "conf_adapt": Mode(8, 0.6),
    "verified": Mode(8, 0.6, verify=True),
}


@dataclass(frozen=True)
class Job:
    """A request; `left` tokens of the context stay unused."""

    mode: str
    num_prompt: int
    left: int

    @property
    def num_new(self) -> int:
        return CONTEXT - self.left - self.num_prompt


def prompt(length: int) -> list[int]:
    """The first tokens of one text, so that requests share prefixes."""
    chooser = random.Random(0)
    return [chooser.randrange(MASK) for _ in range(length)]


@functools.cache
def reference(path: Path, mode: Mode, num_prompt: int) -> MTPReference:
    """MAX_NEW tokens; shorter outputs are its beginnings."""
    decode = verified_decode if mode.verify else unverified_decode
    model, k = load_reference(path), mode.k or 1
    return decode(model, prompt(num_prompt), MAX_NEW, k, mode.tau, MASK)


def jobs_of(mode: str, chooser: random.Random) -> list[Job]:
    """One for each number of tokens that stay unused, and for each number of new tokens one that
    leaves none."""
    num_new = {left: min(chooser.randint(1, MAX_NEW), CONTEXT - left - 1) for left in LEFT}
    jobs = [Job(mode, CONTEXT - left - num, left) for left, num in num_new.items()]
    return jobs + [Job(mode, CONTEXT - num, 0) for num in range(1, MAX_NEW + 1)]


def setup_of(page_size: int, index: int, max_decode_rows: int) -> Setup:
    """The `index`-th of NUM_WAYS to schedule; the pool is the smallest in which a request may use
    the whole context, has room for one and a half, or for all that run."""
    uses_radix, overlap, chunked = ((index >> bit) & 1 == 0 for bit in range(3))
    least, row = CONTEXT + max_decode_rows, row_width(CONTEXT, max_decode_rows, page_size)
    num_tokens = (least, row * 3 // 2, row * NUM_RUNNING)[index // 8]
    return Setup(
        page_size=page_size,
        num_pages=-(-num_tokens // page_size),
        use_radix_cache=uses_radix,
        enable_overlap=overlap,
        chunked_prefill_size=20 if chunked else 2048,
        max_running_requests=NUM_RUNNING,
        retract_interval=2 if index // 8 == 1 else 0,
        context_len=CONTEXT,
        max_decode_rows=max_decode_rows,
    )


@functools.cache
def runner_for(path: Path, page_size: int) -> ModelRunner:
    setup = setup_of(page_size, NUM_WAYS - 1, MTP_MAX_ROWS)
    return make_runner(path, setup, CONTEXT, MTP_MAX_ROWS)


def check(harness: SchedulerHarness, path: Path, jobs: dict[int, Job]) -> int:
    """Answers and the ledger at the end of a run; returns how many requests were retracted."""
    for req_id, job in jobs.items():
        outcome = harness.outputs[req_id]
        assert outcome.num_ends == 1
        assert outcome.finish_reason is not None
        assert outcome.finish_reason.type == "length", job
        right = reference(path, MODES[job.mode], job.num_prompt)
        assert len(outcome.token_ids) == job.num_new
        if outcome.token_ids != right.tokens[: job.num_new]:
            assert min(right.margins) < EQUALITY_MARGIN, (harness.setup, job)
    checker, ledger = harness.scheduler.checker, harness.ledger
    assert checker.num_violations == checker.num_repairs == 0
    assert checker.report().is_exact
    assert ledger.num_free_tokens + ledger.num_tree_tokens == ledger.num_pool_tokens
    return sum(harness.outputs[req_id].num_retractions > 0 for req_id in jobs)


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_requests_that_end_at_the_context_give_the_tokens_of_the_reference(
    small_model: Path, page_size: int
) -> None:
    """Modes share steps; each way to schedule gets its share of the jobs."""
    chooser = random.Random(page_size)
    shares: dict[int, list[Job]] = defaultdict(list)
    jobs = [job for mode in MODES for job in jobs_of(mode, chooser)]
    chooser.shuffle(jobs)
    for job, index in zip(jobs, itertools.cycle(range(NUM_WAYS))):
        shares[index].append(job)
    num_retracted = 0
    for index, share in shares.items():
        setup = setup_of(page_size, index, MTP_MAX_ROWS)
        worker = make_mtp_worker(runner_for(small_model, page_size), MASK)
        harness, _ = checked_harness(setup, worker)
        ids = {
            harness.submit(
                prompt(job.num_prompt),
                max_new_tokens=job.num_new,
                temperature=0.0,
                **MODES[job.mode].params,
            ): job
            for job in share
        }
        harness.run()
        num_retracted += check(harness, small_model, ids)
    assert num_retracted > 0


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_the_worker_of_one_token_per_step_reaches_the_end_of_the_context(
    small_model: Path, page_size: int
) -> None:
    chooser = random.Random(page_size)
    jobs = jobs_of("plain", chooser)
    for index in (0, 11, 13, 22):
        setup = setup_of(page_size, index, 1)
        harness, _ = checked_harness(setup, make_model_worker(small_model, setup, CONTEXT))
        ids = {
            harness.submit(prompt(job.num_prompt), max_new_tokens=job.num_new, temperature=0.0): job
            for job in jobs[index % 4 :: 4]
        }
        harness.run()
        check(harness, small_model, ids)
