"""How many tokens to predict under load."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import ClassVar
from unittest import mock

import pytest

from policy_steps import mask_parts, mask_policy, predicted
from sglang.srt.lookahead.acceptance_estimate import WINDOW, Kind, Survival, with_draftless_steps
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength, LengthPolicy, PolicyParts
from sglang.srt.lookahead.load_aware_masks import TRIAL_SHARE
from sglang.srt.lookahead.mask_rows import MTPConfig
from sglang.srt.lookahead.upcoming_step import EmittingRequest, StepOutcome, UpcomingStep
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.registry import LENGTH_POLICIES
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk, no_graphs
from simulated_decode import gpu_prices
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

MAX_K = 8
UNVERIFIED, VERIFIED = Kind(False, 5), Kind(True, 0)


def prices_of(rows: Sequence[int], costs_ms: Sequence[float], kv_ms: float = 0.0) -> PriceTable:
    """Of a device that launches every step kernel by kernel."""
    eager = Curve(tuple(rows), tuple(costs_ms))
    return PriceTable(no_graphs, {}, eager, Curve((1,), (0.0,)), kv_ms)


FLAT = prices_of((1, 2), (1.0, 1.0))
KNEE = prices_of((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0))


def upcoming_step(
    num_requests: int,
    kind: Kind | None = UNVERIFIED,
    k: int = MAX_K,
    pending: int = 1,
    prompts: int = 0,
    kv_tokens: int = 0,
) -> UpcomingStep:
    emitting = Counter({EmittingRequest(kind, k, True, pending): num_requests})
    return UpcomingStep(
        emitting,
        kv_tokens,
        prompt_rows=prompts,
        longest_prompt=prompts,
        prompt_reqs=int(prompts > 0),
    )


def settle(
    policy: LengthPolicy,
    upcoming: UpcomingStep,
    num_accepted: int,
    num_steps: int = 300,
    kind: Kind | None = UNVERIFIED,
) -> int:
    """Has every request accept so many tokens of those predicted, or all; the last limit."""
    limit = 1
    for _ in range(num_steps):
        budget = policy.choose(after(upcoming, limit))
        limit = budget.limit
        taken = min(num_accepted, limit)
        policy.observe(predicted(budget, kind, [(limit, taken)] * upcoming.num_reqs))
    return limit


def after(upcoming: UpcomingStep, limit: int) -> UpcomingStep:
    """The same step where the one before had this limit."""
    emitting = Counter[EmittingRequest]()
    for request, count in upcoming.emitting.items():
        emitting[request._replace(pending=min(request.k, limit))] += count
    return replace(upcoming, emitting=emitting)


def test_where_rows_cost_nothing_and_some_are_accepted_every_request_gets_its_wish() -> None:
    assert settle(mask_policy(FLAT, MAX_K), upcoming_step(50), MAX_K) == MAX_K
    wishes = UpcomingStep(
        Counter({EmittingRequest(UNVERIFIED, 2): 1, EmittingRequest(UNVERIFIED, 5): 1})
    )
    assert settle(mask_policy(FLAT, MAX_K), wishes, 5) == 5
    assert FixedLength(mask_parts()).choose(wishes).limit == 5


def test_beyond_all_measured_rows_none_is_free() -> None:
    prices = prices_of((1, 64, 512, 896, 1024), (6.0, 6.0, 16.0, 23.0, 23.0))
    assert settle(mask_policy(prices, MAX_K), upcoming_step(64, prompts=8192), 1) == 1


def test_lengths_fall_with_load_and_with_failure() -> None:
    limits = [settle(mask_policy(KNEE, MAX_K), upcoming_step(n), 3) for n in (1, 4, 16, 64, 256)]
    assert limits[0] >= 3
    assert limits[-1] == 1
    assert all(a >= b for a, b in pairwise(limits))
    lucky, unlucky = (settle(mask_policy(KNEE, MAX_K), upcoming_step(10), n) for n in (8, 2))
    assert lucky == 4, "70 rows for 40 tokens; 150 for 80 cost twice as much"
    assert lucky > unlucky


def test_a_prompt_makes_no_prediction_cheaper() -> None:
    """In a step of thousands of rows a few hundred more seem to cost little. They cost what they
    cost: more time than the tokens take that they may bring."""
    policy = mask_policy(KNEE, MAX_K)
    for _ in range(100):
        budget = policy.choose(upcoming_step(10))
        pairs = [(2, 1 + (n % 5 == 0)) for n in range(10)]
        policy.observe(predicted(budget, UNVERIFIED, pairs))
    assert policy.choose(upcoming_step(10)).limit > 1
    assert policy.choose(upcoming_step(10, prompts=512)).limit == 1


@pytest.mark.parametrize("num_accepted", [1, MAX_K])
def test_looking_ahead_never_takes_a_step_out_of_its_graph(num_accepted: int) -> None:
    """Even where launched steps seem to cost nothing; a step that has no graph anyway may."""
    prices = replace(gpu_prices(), eager=Curve((1, 4096), (0.1, 0.1)))
    policy, limits = mask_policy(prices, MAX_K), set[int]()
    for prompts in (0, 512, 900) * 100:
        for pending in (1, MAX_K):
            upcoming = upcoming_step(128, VERIFIED, pending=pending, prompts=prompts)
            budget = policy.choose(upcoming)
            limit = budget.limit
            limits.add(limit)
            stays = prices.replays(upcoming.current_shape(limit))
            assert stays or not prices.replays(upcoming.current_shape(1))
            taken = min(limit, num_accepted)
            policy.observe(predicted(budget, VERIFIED, [(limit, taken)] * 128))
    assert num_accepted == 1 or max(limits) > 1


def test_a_busy_server_gives_a_lone_request_no_more_than_it_is_worth() -> None:
    """Rows that are free alone delay those who decode beside it."""
    lone = EmittingRequest(VERIFIED, MAX_K)
    beside = UpcomingStep(Counter({lone: 1, EmittingRequest(None, 1): 120}))
    policy = mask_policy(KNEE, MAX_K)
    assert settle(policy, UpcomingStep(Counter({lone: 1})), 4, kind=VERIFIED) >= 4
    assert policy.choose(beside).limit == 1


def test_what_cannot_be_shortened_is_not_what_is_decided() -> None:
    """Requests of fixed length pay their rows at any limit."""
    others = UpcomingStep(
        Counter(
            {EmittingRequest(None, 1): 1, EmittingRequest(UNVERIFIED, 6, is_adjustable=False): 3}
        )
    )
    assert others.longest == 1
    assert others.current_shape(1) == others.current_shape(MAX_K)
    assert others.plain_shape() == others.current_shape(1)


def test_a_fresh_policy_is_sure_of_nothing_that_costs() -> None:
    """It tries as little as may pay, for a step's time at most, and waits for results."""
    policy = mask_policy(KNEE, MAX_K)
    limits = [1]
    for _ in range(10):
        limits.append(policy.choose(after(upcoming_step(40), limits[-1])).limit)
    assert limits[1:3] == [2, 1]
    assert limits.count(2) <= 2


def test_what_fails_is_tried_again_later_within_its_budget() -> None:
    policy, upcoming = mask_policy(KNEE, MAX_K), upcoming_step(40)
    limits, extra_ms = [1], 0.0
    plain_ms = KNEE.price_ms(upcoming.plain_shape())
    for _ in range(3000):
        step = after(upcoming, limits[-1])
        budget = policy.choose(step)
        limits.append(budget.limit)
        extra_ms += KNEE.price_ms(step.current_shape(limits[-1])) - plain_ms
        policy.observe(predicted(budget, UNVERIFIED, [(limits[-1], 1)] * 40))
    tries = [place for place, limit in enumerate(limits) if limit > 1]
    assert len(tries) >= 3
    assert max(tries) > 1500
    assert 0 < extra_ms < (TRIAL_SHARE * len(limits) + 1) * plain_ms


def test_gains_of_one_phase_are_no_credit_for_the_next() -> None:
    policy, upcoming = mask_policy(KNEE, MAX_K), upcoming_step(30)
    limit, num_bad = settle(policy, upcoming, MAX_K), 0
    assert limit > 1
    while limit > 1:
        num_bad += 1
        budget = policy.choose(after(upcoming, limit))
        limit = budget.limit
        policy.observe(predicted(budget, UNVERIFIED, [(limit, 1)] * 30))
    assert num_bad < 8


def test_of_the_step_after_a_long_one_only_masks_are_saved() -> None:
    """What is pending must be fed whatever the limit."""
    upcoming = upcoming_step(10, pending=4)
    assert [upcoming.current_shape(limit).num_rows for limit in (1, 4)] == [40, 70]
    assert upcoming.plain_shape().num_rows == 10
    assert upcoming.steady_shape(4, with_prompts=True).num_rows == 70
    assert [upcoming.current_shape(limit).num_read for limit in (1, 4)] == [10, 40]
    drafts = upcoming_step(10, VERIFIED, pending=4)
    assert [drafts.current_shape(limit).num_read for limit in (1, 4)] == [40, 70]


def test_a_request_whose_prompt_ends_feeds_masks_behind_it() -> None:
    upcoming = upcoming_step(1, pending=0, prompts=30)
    assert upcoming.current_shape(4).num_rows == 33
    assert upcoming.plain_shape().num_rows == 30
    assert upcoming.steady_shape(4, with_prompts=True).num_rows == 36
    assert upcoming.steady_shape(4, with_prompts=False).num_rows == 7


def test_kv_that_is_read_makes_tokens_dearer_and_rows_no_dearer() -> None:
    prices = prices_of((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0), kv_ms=1e-4)
    policies = [mask_policy(prices, MAX_K) for _ in range(2)]
    empty, full = (
        settle(policy, upcoming_step(60, kv_tokens=kv_tokens), 3)
        for policy, kv_tokens in zip(policies, (0, 200_000), strict=True)
    )
    assert empty == 1 < full


def test_short_outputs_waste_what_was_predicted_past_their_end() -> None:
    def limit(tokens_per_output: int) -> int:
        policy = mask_policy(KNEE, MAX_K)
        steps_per_end = tokens_per_output / 3
        found = 1
        for step in range(400):
            num_ended = int(step / steps_per_end) - int((step - 1) / steps_per_end)
            emitting = upcoming_step(20).emitting
            budget = policy.choose(UpcomingStep(emitting, num_ended=20 * num_ended))
            found = budget.limit
            policy.observe(predicted(budget, UNVERIFIED, [(found, min(found, 3))] * 20))
        return found

    assert limit(2) == 1 < limit(200)


# ---------------------------------------------------------------- acceptance


def test_estimates_contain_the_truth_and_narrow_with_trials() -> None:
    survival = Survival(MAX_K)
    widths = []
    for _ in range(3):
        for taken, count in ((1, 50), (2, 25), (3, 25)):  # half, then half of those
            survival.record(3, taken, count)
        low, mean, high = survival.runs(3)[2]
        assert low < 1.75 < high
        assert mean == pytest.approx(1.75, abs=0.03)
        widths.append(high - low)
    assert widths[0] > widths[1] > widths[2]


def test_no_more_than_the_window_is_remembered() -> None:
    survival = Survival(MAX_K)
    for taken in (2, 1):
        for _ in range(100):
            survival.record(2, taken, 100)
    low, mean, high = survival.runs(2)[1]
    assert mean < 1.01
    assert high - low > 1 / WINDOW


def test_what_was_never_tried_survives_like_what_came_before_it() -> None:
    survival = Survival(MAX_K)
    survival.record(2, 2, 10_000)
    runs = survival.runs(MAX_K)
    assert runs[-1].mean > 7.5
    assert runs[-1].low < runs[-1].mean - 0.5
    survival.forget(1)
    assert survival.runs(2)[1].low < runs[1].low


def test_a_verified_request_has_no_drafts_after_a_wrong_one() -> None:
    """Two drafts that survive with chance 1/2 each, by the chain of steps with and without."""
    survival = Survival(3)
    for taken, count in ((1, 100), (2, 50), (3, 50)):
        survival.record(3, taken, count)
    with_drafts = 1 / (2 - 0.25)
    expected = with_drafts * 1.75 + (1 - with_drafts)
    assert with_draftless_steps(survival.runs(3))[2].mean == pytest.approx(expected, abs=0.02)


def test_nothing_certain_is_no_certain_gain() -> None:
    assert all(math.isfinite(value) for run in Survival(MAX_K).runs(MAX_K) for value in run)
    assert Survival(1).runs(1) == [(1.0, 1.0, 1.0)]


# ---------------------------------------------------------------- the worker


def test_the_policy_hears_what_became_of_each_step_it_chose_for(small_model: Path) -> None:
    policy = FixedLength(mask_parts(4))
    setup = Setup(max_running_requests=4)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, policy, limits_unverified=True))
    ahead = {"max_new_tokens": 9, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 4}
    with mock.patch.object(policy, "observe") as observe:
        harness.generate([[1, 2], [3]], max_new_tokens=9, temperature=0.0)
        assert all(call.args[0].plan.budget is None for call in observe.call_args_list)
        observe.reset_mock()
        harness.generate([[1, 2]], **ahead)
        first = observe.call_args_list[0].args[0]
        assert (first.kinds, first.is_adjustable) == ([None], [True])
        assert (first.num_tried, first.num_accepted, first.plan.budget.limit) == ([4], [4], 4)
        assert first.rows[0] in range(4)
        observe.reset_mock()
        harness.generate([[1, 2]], mtp_strategy=["conf_adapt", 0.5], **ahead)
        kinds = [call.args[0].kinds[0] for call in observe.call_args_list]
        assert set(kinds) == {Kind(False, 5)}


@pytest.mark.parametrize("overlap", [True, False])
def test_of_verified_drafts_those_are_counted_that_were_there(
    small_model: Path, overlap: bool
) -> None:
    """After a wrong draft a step has none, and its one token says nothing."""
    policy = FixedLength(mask_parts(4))
    setup = Setup(max_running_requests=4, enable_overlap=overlap)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, policy))
    params = {"max_new_tokens": 40, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 4}
    with mock.patch.object(policy, "observe") as observe:
        harness.generate([[1, 2]], mtp_verify=True, ignore_eos=True, **params)
    outcomes = [call.args[0] for call in observe.call_args_list]
    assert {outcome.kinds[0] for outcome in outcomes} == {VERIFIED}
    steps = [(*outcome.num_tried, *outcome.num_accepted) for outcome in outcomes]
    steps = [step for step in steps if step[0]]  # one that sat the step out teaches nothing
    assert steps[0] == (1, 1)
    for (tried_before, taken_before), (tried, taken) in pairwise(steps):
        assert tried == (4 if taken_before == tried_before else 1)
        assert taken <= tried
    assert {tried for tried, _ in steps} == {1, 4}


def test_the_policy_hears_who_is_in_a_step(small_model: Path) -> None:
    heard: list[UpcomingStep] = []

    class Recording(FixedLength):
        def choose(self, upcoming: UpcomingStep) -> Budget:
            heard.append(upcoming)
            return super().choose(upcoming)

    setup = Setup(max_running_requests=8, chunked_prefill_size=20, use_radix_cache=False)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, Recording(mask_parts(MAX_K))))
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
    upcoming = heard[0]
    plain, static = EmittingRequest(None, 1), EmittingRequest(None, 3, False, 3)
    adaptive, newcomer = (
        EmittingRequest(Kind(False, 9), 8, False, 8),
        EmittingRequest(VERIFIED, 4, True, 0),
    )
    assert upcoming.emitting == Counter([plain, static, adaptive, newcomer])
    assert (upcoming.prompt_rows, upcoming.longest_prompt, upcoming.prompt_reqs) == (20, 19, 1)
    assert upcoming.kv_tokens >= 2 + 1 + 1 + 1
    assert sorted(upcoming.prompts) == [PromptChunk(0, 1), PromptChunk(0, 19)]
    assert upcoming.current_shape(1).prompts == upcoming.prompts
    assert heard[-1].prompt_rows == 0
    assert heard[-1].emitting[EmittingRequest(None, 5, False, 5)] == 1
    assert all(upcoming.num_ended == 0 for upcoming in heard)


def test_ends_are_counted_when_their_rows_are_given_away(small_model: Path) -> None:
    heard: list[int] = []

    class Recording(FixedLength):
        def choose(self, upcoming: UpcomingStep) -> Budget:
            heard.append(upcoming.num_ended)
            return super().choose(upcoming)

    setup = Setup(max_running_requests=2)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, Recording(mask_parts(MAX_K))))
    params = {"max_new_tokens": 5, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 4}
    harness.generate([[1], [2], [3], [4], [5]], mtp_verify=True, **params)
    assert sum(heard) == 3


def test_prices_can_be_measured_and_leave_no_trace(small_model: Path) -> None:
    """With measured prices verified requests give the same tokens as without any."""
    setup = Setup(max_running_requests=4)
    tokens = []
    for measures in (False, True):
        runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
        mtp = MTPConfig(
            mask_token_id=5, max_k=MAX_K, length_policy="load_aware_masks" if measures else "fixed"
        )
        prices = PriceMeter(runner, 4, MTP_MAX_ROWS).measure() if measures else None
        worker = make_worker(RunnerGroup([runner]), DrafterConfig("mtp", mtp), prices)
        harness = SchedulerHarness(setup, worker)
        assert not runner.req_to_token_pool.req_to_token.any()
        params = {"max_new_tokens": 12, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 8}
        tokens.append(harness.generate([[1, 2, 3], [4]], mtp_verify=True, **params))
    assert tokens[0] == tokens[1]


class Alternating(FixedLength):
    """A policy of a test: k and no look-ahead in turn."""

    made: ClassVar[list[Alternating]] = []

    def __init__(self, parts: PolicyParts) -> None:
        assert parts.steps is None
        assert parts.options.max_drafts == MAX_K - 1
        super().__init__(parts)
        self.chosen: list[int] = []
        self.num_observed = 0
        self.made.append(self)

    def choose(self, upcoming: UpcomingStep) -> Budget:
        self.chosen.append(1 if len(self.chosen) % 2 else upcoming.longest)
        return Budget(self.chosen[-1])

    def observe(self, outcome: StepOutcome) -> None:
        assert outcome.plan.budget is not None
        assert outcome.plan.budget.limit in self.chosen
        self.num_observed += 1


def test_a_policy_of_a_name_in_the_registry_is_asked_and_changes_no_verified_token(
    small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(LENGTH_POLICIES._entries, "alternating", f"{__name__}:Alternating")
    setup = Setup(max_running_requests=4)
    params = {"max_new_tokens": 12, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 8}
    tokens = []
    for name in ("fixed", "alternating"):
        runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
        mtp = MTPConfig(mask_token_id=5, max_k=MAX_K, length_policy=name)
        worker = make_worker(RunnerGroup([runner]), DrafterConfig("mtp", mtp))
        harness = SchedulerHarness(setup, worker)
        tokens.append(harness.generate([[1, 2, 3], [4]], mtp_verify=True, **params))
    assert tokens[0] == tokens[1]
    (policy,) = Alternating.made
    assert policy.num_observed == len(policy.chosen) > 2
    assert set(policy.chosen) == {1, 8}
