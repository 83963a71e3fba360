"""Checks what a length policy of masks hears of a worker's steps, and that it changes no token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from policy_steps import mask_parts
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength, PolicyParts
from sglang.srt.lookahead.mask_planner import MTPConfig
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.registry import LENGTH_POLICIES
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.price_table import PromptChunk
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

MAX_K = 8
VERIFIED = Kind(True, 0)


@contextmanager
def heard(policy: FixedLength) -> Iterator[list[StepOutcome]]:
    """Notes what a policy hears while this lasts."""
    outcomes = list[StepOutcome]()
    with mock.patch.object(policy, "observe", outcomes.append):
        yield outcomes


@pytest.mark.parametrize("overlap", [True, False])
def test_the_policy_hears_what_became_of_each_step_it_chose_for(
    small_model: Path, overlap: bool
) -> None:
    """Counts of verified drafts those that were there: after a wrong draft a step has none, and its
    one token says nothing."""
    policy = FixedLength(mask_parts(4))
    setup = Setup(max_running_requests=4, enable_overlap=overlap)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, policy, limits_unverified=True))
    params = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with heard(policy) as outcomes:
        harness.generate([[1, 2], [3]], **params)
    assert all(outcome.record.plan.draft_length == 0 for outcome in outcomes)
    params |= {"mtp_enabled": True, "mtp_k": 4}
    with heard(policy) as outcomes:
        harness.generate([[1, 2]], **params)
    first = outcomes[0]
    assert first.kinds == [None]
    assert (first.num_tried, first.num_accepted) == ([4], [4])
    assert first.record.plan.draft_length == 4
    assert first.record.rows[0] in range(4)
    with heard(policy) as outcomes:
        harness.generate([[1, 2]], mtp_strategy=["conf_adapt", 0.5], **params)
    assert {outcome.kinds[0] for outcome in outcomes} == {Kind(False, 5)}
    with heard(policy) as outcomes:
        harness.generate([[1, 2]], mtp_verify=True, **params)
    assert {outcome.kinds[0] for outcome in outcomes} == {VERIFIED}
    steps = [(*outcome.num_tried, *outcome.num_accepted) for outcome in outcomes]
    steps = [step for step in steps if step[1]]  # one that sat the step out teaches nothing
    assert steps[0] == (1, 1)
    for (tried_before, taken_before), (tried, taken) in pairwise(steps):
        assert tried == (4 if taken_before == tried_before else 1)
        assert taken <= tried
    assert {tried for tried, _ in steps} == {1, 4}


def test_the_policy_hears_who_is_in_a_step(small_model: Path) -> None:
    policy, heard = FixedLength(mask_parts(MAX_K)), list[UpcomingStep]()

    def choose(upcoming: UpcomingStep) -> Budget:
        heard.append(upcoming)
        return Budget(upcoming.longest)

    policy.choose = choose
    setup = Setup(max_running_requests=8, chunked_prefill_size=20, use_radix_cache=False)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, policy))
    ahead = {"max_new_tokens": 60, "mtp_enabled": True, "temperature": 0.0, "ignore_eos": True}
    harness.submit([1, 2], max_new_tokens=60, temperature=0.0, ignore_eos=True)
    harness.submit([3], mtp_k=3, **ahead)
    harness.submit([4], mtp_k=8, mtp_strategy=["conf_adapt", 0.9], **ahead)
    harness.step()
    assert not heard, "nobody whom it may shorten"
    harness.submit([1], mtp_k=4, mtp_verify=True, **ahead)
    harness.submit([2] * 40, mtp_k=5, **ahead)  # read in chunks
    while len(heard) < 5:
        harness.step()
    upcoming, plain, static = heard[0], EmittingRequest(None, 1), EmittingRequest(None, 3, False, 3)
    adaptive = EmittingRequest(Kind(False, 9), 8, False, 8)
    assert upcoming.emitting == Counter(
        [plain, static, adaptive, EmittingRequest(VERIFIED, 4, True, 0)]
    )
    assert (upcoming.prompt_rows, upcoming.longest_prompt, upcoming.prompt_reqs) == (20, 19, 1)
    assert upcoming.kv_tokens >= 2 + 1 + 1 + 1
    assert sorted(upcoming.prompts) == [PromptChunk(0, 1), PromptChunk(0, 19)]
    assert upcoming.current_shape(1).prompts == upcoming.prompts
    assert heard[-1].prompt_rows == 0
    assert heard[-1].emitting[EmittingRequest(None, 5, False, 5)] == 1


CHOSEN, HEARD = list[int](), list[int]()


class Alternating(FixedLength):
    """A policy of a test: k and no look-ahead in turn."""

    def __init__(self, parts: PolicyParts) -> None:
        assert (parts.steps, parts.options.num_steps) == (None, MAX_K - 1)

    def choose(self, upcoming: UpcomingStep) -> Budget:
        CHOSEN.append(1 if len(CHOSEN) % 2 else upcoming.longest)
        return Budget(CHOSEN[-1])

    def observe(self, outcome: StepOutcome) -> None:
        HEARD.append(outcome.record.plan.draft_length)


def test_a_policy_of_a_name_in_the_registry_is_asked_and_changes_no_verified_token(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LENGTH_POLICIES.entries, "alternating", f"{__name__}:Alternating")
    setup = Setup(max_running_requests=4)
    params = {"max_new_tokens": 12, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 8}
    tokens = []
    for name in ("fixed", "alternating", "load_aware_masks"):
        runner, prices = make_runner(small_model, setup, 128, MTP_MAX_ROWS), None
        if LENGTH_POLICIES.load(name).needs_prices:
            prices = PriceMeter(runner, 4, MTP_MAX_ROWS).measure()
        mtp = MTPConfig(mask_token_id=5, max_k=MAX_K, length_policy=name)
        worker = make_worker(RunnerGroup([runner]), DrafterConfig("mtp", mtp), prices)
        harness = SchedulerHarness(setup, worker)
        tokens.append(harness.generate([[1, 2, 3], [4]], mtp_verify=True, **params))
    assert tokens[0] == tokens[1] == tokens[2]
    assert HEARD == CHOSEN
    assert {*CHOSEN} == {1, MAX_K}
