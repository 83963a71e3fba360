"""Seed 001's validation matrix: static k and conf_adapt, one request and eight at once, k of 3, 5
and 8, under arrivals, aborts, retractions and little memory. The ledger must be exact after every
step and nothing may ever need repair; re-introducing the bug that the matrix is about must show.

The six cells of a number of requests share all combinations of `SETTINGS`: each is run once. A cell
has every combination of any four of the settings with two values, and every pair of any two. Seeds
vary the rest.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_oracle import STATIC, MTPReference, load_reference, unverified_decode, verified_decode
from sglang.srt.messages.control import AbortReq
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.scheduling.invariants import LedgerViolation
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from target import TARGET
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

MASK = 5
ON_CPU = TARGET.device == "cpu"
MIN_RETRACTIONS = 0.5 if ON_CPU else 0.05  # per run; few runs may differ more
KS, CONCURRENCIES = (3, 5, 8), (1, 8, 64)
TAU = 0.6  # conf_adapt then accepts one token about as often as more
MAX_NEW_TOKENS = 14
NUM_PROMPTS = 6
EQUALITY_MARGIN = 1e-4
BASE = Setup(num_pages=400, max_running_requests=8)
SETTINGS: dict[str, tuple[Any, ...]] = {
    "page_size": (1, 16),
    "num_tokens": (112, 160, 400),  # of the pool, for 8 requests
    "use_radix_cache": (True, False),
    "enable_overlap": (True, False),
    "chunked_prefill_size": (4, 2048),
    "retract_interval": (0, 2),
}


@functools.cache
def runner_for(path: Path, page_size: int, concurrency: int = 8) -> ModelRunner:
    """Shared by all runs: what earlier ones left in the pool must not matter."""
    setup = replace(
        BASE,
        page_size=page_size,
        num_pages=400 * scale_of(concurrency) // page_size,
        max_running_requests=max(BASE.max_running_requests, concurrency),
    )
    return make_runner(path, setup, 128, MTP_MAX_ROWS)


def scale_of(concurrency: int) -> int:
    """Returns how many times the memory for the 8 requests of `BASE` there is."""
    return max(1, concurrency // BASE.max_running_requests)


@functools.cache
def prompt(index: int) -> list[int]:
    chooser = random.Random(index)
    return [chooser.randrange(MASK) for _ in range(chooser.choice([1, 4, 15, 16, 17, 30]))]


@functools.cache
def reference(path: Path, index: int, k: int, tau: float, verify: bool) -> MTPReference:
    decode = verified_decode if verify else unverified_decode
    return decode(load_reference(path), prompt(index), MAX_NEW_TOKENS, k, tau, MASK)


def settings_of_cell(k: int, tau: float, concurrency: int) -> list[dict[str, Any]]:
    """A sixth of all combinations; three of them where requests are many."""
    places = itertools.product(*(range(len(values)) for values in SETTINGS.values()))
    found = [
        {name: values[i] for (name, values), i in zip(SETTINGS.items(), combination, strict=True)}
        for combination in places
        if cell_of(*combination) == ((tau == TAU), KS.index(k))
    ]
    if concurrency > 8:
        return random.Random(k + (tau == TAU)).sample(found, 3)
    return found


def cell_of(page: int, memory: int, *others: int) -> tuple[int, int]:
    """Finds the cell of a combination by the places of its values: that of tau by the parity of the
    five settings with two values, that of k by the memory and three of them."""
    radix, overlap, chunk, retract = others
    parity = (page + radix + overlap + chunk + retract) % 2
    return parity, (memory + page + radix + overlap) % 3


@pytest.mark.parametrize("concurrency", [1, 8])
def test_cells_share_all_combinations_and_each_has_all_pairs(concurrency: int) -> None:
    cells = [settings_of_cell(k, tau, concurrency) for k in KS for tau in (STATIC, TAU)]
    assert len({tuple(each.items()) for cell in cells for each in cell}) == sum(map(len, cells))
    assert sum(map(len, cells)) == math.prod(map(len, SETTINGS.values()))
    pairs = {
        pair
        for one, other in itertools.combinations(SETTINGS, 2)
        for pair in itertools.product(
            [(one, value) for value in SETTINGS[one]], [(other, value) for value in SETTINGS[other]]
        )
    }
    for cell in cells:
        assert pairs == {pair for each in cell for pair in itertools.combinations(each.items(), 2)}


class MatrixRun:
    """One seeded run of the matrix, with a combination of `SETTINGS`."""

    def __init__(
        self, path: Path, k: int, tau: float, concurrency: int, seed: int, settings: dict[str, Any]
    ) -> None:
        self.path, self.k, self.tau = path, k, tau
        self.random = random.Random(seed)
        others = dict(settings)
        num_tokens = others.pop("num_tokens") * scale_of(concurrency)
        page_size = others["page_size"]
        self.setup = replace(
            BASE,
            **others,
            num_pages=num_tokens // page_size,
            max_running_requests=concurrency,
        )
        worker = make_mtp_worker(runner_for(path, page_size, max(concurrency, 8)), MASK)
        self.harness = SchedulerHarness(self.setup, worker)
        self.jobs: dict[int, tuple[int, bool, int]] = {}
        self.num_left = concurrency + 2

    def run(self) -> None:
        while self.num_left:
            for _ in range(min(self.num_left, self.random.choice([1, 2, 8]))):
                self._submit()
            for _ in range(self.random.choice([1, 2, 5])):
                self.harness.step()
            if self.random.random() < 0.2:
                victim = self.random.choice(list(self.jobs))
                self.harness.inbox.messages.append(AbortReq(req_ids=[victim]))
        self.harness.run()

    def _submit(self) -> None:
        self.num_left -= 1
        index = self.random.randrange(NUM_PROMPTS)
        verify = self.random.random() < 0.3
        num_tokens = self.random.choice([1, 2, 5, MAX_NEW_TOKENS, MAX_NEW_TOKENS])
        strategy: list[Any] = ["static"] if self.tau == STATIC else ["conf_adapt", self.tau]
        req_id = self.harness.submit(
            prompt(index),
            stream_interval=None if self.random.random() < 0.5 else 1000,
            max_new_tokens=num_tokens,
            temperature=0.0,
            mtp_enabled=True,
            mtp_k=self.k,
            mtp_strategy=strategy,
            mtp_verify=verify,
        )
        self.jobs[req_id] = (index, verify, num_tokens)

    def check(self) -> None:
        """The ledger was checked by the harness after every step; here the answers are."""
        checker = self.harness.scheduler.checker
        assert checker.num_violations == checker.num_repairs == 0
        assert checker.report().is_exact
        ledger = self.harness.ledger
        assert ledger.num_used_rows == 0
        assert ledger.num_free_tokens + ledger.num_tree_tokens == ledger.num_pool_tokens
        for req_id, (index, verify, num_tokens) in self.jobs.items():
            outcome = self.harness.outputs[req_id]
            assert outcome.num_ends == 1
            assert sum(outcome.step_lens) == len(outcome.token_ids)
            assert outcome.finish_reason is not None
            if outcome.finish_reason.type == "length":
                assert len(outcome.token_ids) == num_tokens
            right = reference(self.path, index, self.k, self.tau, verify)
            count = len(outcome.token_ids)
            if outcome.token_ids != right.tokens[:count]:
                assert min(right.margins) < EQUALITY_MARGIN, (self.setup, index, verify)


@pytest.mark.long_matrix
@pytest.mark.parametrize("concurrency", CONCURRENCIES)
@pytest.mark.parametrize("tau", [STATIC, TAU], ids=["static", "conf_adapt"])
@pytest.mark.parametrize("k", KS)
def test_the_ledger_is_exact_after_every_step(
    small_model: Path, k: int, tau: float, concurrency: int
) -> None:
    num_retractions, step_lens = 0, set()
    combinations = settings_of_cell(k, tau, concurrency)
    for seed, settings in enumerate(combinations):
        run = MatrixRun(small_model, k, tau, concurrency, seed, settings)
        run.run()
        run.check()
        for outcome in run.harness.outputs.values():
            num_retractions += outcome.num_retractions
            step_lens.update(outcome.step_lens)
    # The runs must really do what they are meant to.
    assert {1, 2, k} <= step_lens <= set(range(1, k + 1))
    assert num_retractions > MIN_RETRACTIONS * len(combinations)


def defer_through_admission(lifecycle: RequestLifecycle) -> None:
    """The published defect: a running request that does not suit the batch goes back to the queue
    as if it had never run, and its KV is forgotten when it is admitted again."""
    for req in [req for req in lifecycle.running if not req.num_inflight and req.output_ids]:
        lifecycle.running.remove(req)
        lifecycle.waiting.insert(0, req)
        req.kv = None
        req.committed = req.committed_bound = 0


def test_readmitting_a_running_request_through_prefill_is_found(small_model: Path) -> None:
    setup = replace(BASE, enable_overlap=False)
    harness = SchedulerHarness(setup, make_mtp_worker(runner_for(small_model, 1), MASK))
    for index in range(4):
        harness.submit(
            prompt(index),
            max_new_tokens=MAX_NEW_TOKENS,
            temperature=0.0,
            mtp_enabled=True,
            mtp_k=3,
            mtp_strategy=["conf_adapt", TAU],
        )
    harness.step()
    harness.step()
    defer_through_admission(harness.scheduler.lifecycle)
    with pytest.raises(LedgerViolation, match=r"orphan_token_count=[1-9]"):
        harness.step()
