"""How many tokens to predict under load."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from unittest import mock

import pytest

from sglang.srt.mtp.length_policy import (
    PRIOR_SURVIVAL,
    CostTable,
    FullLength,
    LengthPolicy,
    LoadAwareLength,
    Wishes,
    measure_costs,
)
from sglang.srt.mtp.mtp_worker import MTPConfig
from sglang.srt.mtp.step_costs import measure_step_costs
from sglang.srt.worker_factory import make_worker
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, make_mtp_worker, make_runner

MAX_K = 8
NOBODY = Wishes()
FLAT = CostTable((1,), (1.0,))
KNEE = CostTable((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0))


def wishes_of(static: Iterable[int] = (), adaptive: Iterable[int] = ()) -> Wishes:
    return Wishes(Counter(static), Counter(adaptive))


def limit(
    policy: LengthPolicy, adaptive: list[int], others: Wishes = NOBODY, prompts: int = 0
) -> int:
    return policy.limit(wishes_of(adaptive=adaptive), others, prompts)


def expected_tokens(survival: list[float], length: int) -> float:
    total, chance = 1.0, 1.0
    for value in survival[: length - 1]:
        chance *= value
        total += chance
    return total


def test_the_table_is_linear_between_points_and_beyond_the_last() -> None:
    table = CostTable((10, 20, 40), (1.0, 3.0, 4.0))
    for rows, cost in ((1, 1.0), (10, 1.0), (15, 2.0), (20, 3.0), (30, 3.5), (40, 4.0), (80, 6.0)):
        assert table.cost_ms(rows) == pytest.approx(cost)
    assert CostTable((4,), (2.0,)).cost_ms(100) == 2.0


def test_a_flat_end_of_the_table_makes_no_rows_free() -> None:
    table = CostTable((1, 64, 512, 896, 1024), (6.0, 6.0, 16.0, 23.0, 23.0))
    assert table.cost_ms(8192) == pytest.approx(23.0 + 7168 * 7.0 / 512)
    policy = LoadAwareLength(table, MAX_K)
    for _ in range(2000):
        policy.observe(MAX_K, 1)
    assert limit(policy, [MAX_K] * 64, prompts=8192) == 1


def test_where_rows_cost_nothing_every_request_gets_its_wish() -> None:
    policy = LoadAwareLength(FLAT, MAX_K)
    for _ in range(2000):
        policy.observe(MAX_K, 1)  # even when no prediction is ever accepted
    assert limit(policy, [8, 3, 1] * 50, wishes_of([1] * 20, [4]), 500) == 8
    assert limit(FullLength(), [2, 5], prompts=100) == 5


@pytest.mark.parametrize("num_prompt_rows", [0, 40, 512])
@pytest.mark.parametrize("others", [NOBODY, wishes_of([1] * 5), wishes_of([4, 1], [8, 2])], ids=str)
@pytest.mark.parametrize("num_requests", [1, 2, 4, 6, 10, 30, 100])
def test_the_choice_is_the_best_by_brute_force(
    num_requests: int, others: Wishes, num_prompt_rows: int
) -> None:
    """The most tokens, each worth the time that it takes at best in a step without prompts."""
    survival = [PRIOR_SURVIVAL] * (MAX_K - 1)
    static, adaptive = [*others.static.elements()], [*others.adaptive.elements()]
    other_tokens = sum(static) + sum(expected_tokens(survival, k) for k in adaptive)
    other_rows = sum(2 * k - 1 for k in [*static, *adaptive])

    def outcome(length: int) -> tuple[float, int]:
        """Tokens and rows; one request in two is static."""
        num_static = num_requests // 2
        tokens = num_static * length
        tokens += (num_requests - num_static) * expected_tokens(survival, length)
        return tokens + other_tokens, num_requests * (2 * length - 1) + other_rows

    outcomes = [outcome(length) for length in range(1, MAX_K + 1)]
    ms_per_token = min(KNEE.cost_ms(rows) / tokens for tokens, rows in outcomes)
    values = [
        tokens * ms_per_token - KNEE.cost_ms(rows + num_prompt_rows) for tokens, rows in outcomes
    ]
    wishes = wishes_of([MAX_K] * (num_requests // 2), [MAX_K] * (num_requests - num_requests // 2))
    chosen = LoadAwareLength(KNEE, MAX_K).limit(wishes, others, num_prompt_rows)
    assert values[chosen - 1] == pytest.approx(max(values))


def test_a_prompt_makes_no_prediction_cheaper() -> None:
    """In a step of thousands of rows a few hundred more seem to cost little. They cost what they
    cost: more time than the tokens take that they may bring."""
    for num_requests in (1, 4, 40, 100):
        alone = limit(LoadAwareLength(KNEE, MAX_K), [8] * num_requests)
        beside = limit(LoadAwareLength(KNEE, MAX_K), [8] * num_requests, prompts=8192)
        assert beside <= alone
    assert limit(LoadAwareLength(KNEE, MAX_K), [8] * 4) == 8
    assert limit(LoadAwareLength(KNEE, MAX_K), [8] * 4, prompts=512) < 8


def test_a_busy_server_gives_a_lone_request_no_more_than_it_is_worth() -> None:
    """Rows that are free alone delay those who decode beside it, the more so the more they give."""
    assert limit(LoadAwareLength(KNEE, MAX_K), [8]) == 8
    assert limit(LoadAwareLength(KNEE, MAX_K), [8], wishes_of([1] * 120)) == 1
    assert limit(LoadAwareLength(KNEE, MAX_K), [8], wishes_of([8] * 30)) == 1


def test_what_is_always_accepted_says_nothing_of_what_is_not(small_model: Path) -> None:
    policy = LoadAwareLength(KNEE, MAX_K)
    runner = make_runner(small_model, Setup(max_running_requests=4), 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(Setup(max_running_requests=4), make_mtp_worker(runner, 5, policy))
    with mock.patch.object(policy, "observe") as observe:
        static = {"max_new_tokens": 9, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 4}
        harness.generate([[1, 2], [3]], **static)
        harness.generate([[1, 2], [3]], max_new_tokens=9, temperature=0.0)
        observe.assert_not_called()
        harness.generate([[1, 2]], mtp_strategy=["conf_adapt", 0.5], **static)
        num_calls = observe.call_count
        assert num_calls
        harness.generate([[1, 2]], mtp_verify=True, **static)
        assert observe.call_count > num_calls


def test_the_policy_hears_who_else_is_in_a_step(small_model: Path) -> None:
    heard = []

    class Recording(FullLength):
        def limit(self, wishes: Wishes, others: Wishes, num_prompt_rows: int) -> int:
            heard.append((wishes, others, num_prompt_rows))
            return super().limit(wishes, others, num_prompt_rows)

    setup = Setup(max_running_requests=8, chunked_prefill_size=20, use_radix_cache=False)
    runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, 5, Recording()))
    ahead = {"max_new_tokens": 60, "mtp_enabled": True, "temperature": 0.0, "ignore_eos": True}
    harness.submit([1, 2], max_new_tokens=60, temperature=0.0, ignore_eos=True)
    harness.submit([3], mtp_k=3, **ahead)
    harness.submit([4], mtp_k=8, mtp_strategy=["conf_adapt", 0.9], **ahead)
    harness.step()
    harness.submit([1], mtp_k=4, mtp_verify=True, **ahead)
    harness.submit([2] * 40, mtp_k=5, **ahead)  # read in chunks
    while len(heard) < 5:
        harness.step()
    wishes, others, num_prompt_rows = heard[0]
    assert (wishes, others) == (wishes_of([1], [4]), wishes_of([3], [8]))
    assert num_prompt_rows == 20
    assert (others, heard[-1][1]) == (wishes_of([3], [8]), wishes_of([3, 5], [8]))
    assert heard[-1][2] == 0


def test_lengths_fall_with_load_and_with_failure() -> None:
    limits = [limit(LoadAwareLength(KNEE, MAX_K), [8] * n) for n in (1, 4, 16, 64, 256)]
    assert limits[0] == 8
    assert limits[-1] == 1
    assert all(a >= b for a, b in pairwise(limits))
    lucky, unlucky = LoadAwareLength(KNEE, MAX_K), LoadAwareLength(KNEE, MAX_K)
    for _ in range(500):
        lucky.observe(8, 8)
        unlucky.observe(8, 1)
    assert limit(lucky, [8] * 40) > limit(unlucky, [8] * 40) == 1


def test_what_is_not_tried_is_forgotten_so_that_it_is_tried_again() -> None:
    policy = LoadAwareLength(KNEE, MAX_K)
    for _ in range(500):
        policy.observe(8, 1)
    assert limit(policy, [8] * 30) == 1
    fresh = limit(LoadAwareLength(KNEE, MAX_K), [8] * 30)
    assert fresh > 1
    num_steps = 0
    while limit(policy, [8] * 30) == 1 and num_steps < 5000:
        num_steps += 1
        for _ in range(30):
            policy.observe(1, 1)
    assert 200 < num_steps < 5000, "however many requests observe, steps alone forget"


def test_under_heavy_load_little_is_spent_on_trying() -> None:
    """Of a token after the first a third is accepted; rows cost far more than that is worth."""
    policy, chooser = LoadAwareLength(KNEE, MAX_K), random.Random(0)
    tokens = costs = 0.0
    num_requests, num_steps = 128, 3000
    for _ in range(num_steps):
        most = limit(policy, [8] * num_requests)
        costs += KNEE.cost_ms(num_requests * (2 * most - 1))
        for _ in range(num_requests):
            accepted = 1
            while accepted < most and chooser.random() < 1 / 3:
                accepted += 1
            tokens += accepted
            policy.observe(most, accepted)
    plain = num_requests * num_steps / (KNEE.cost_ms(num_requests) * num_steps)
    assert tokens / costs > 0.98 * plain


def test_costs_can_be_measured_and_leave_no_trace(small_model: Path) -> None:
    """With measured prices verified requests give the same tokens as without any."""
    setup = Setup(max_running_requests=4)
    tokens = []
    for measures in (False, True):
        runner = make_runner(small_model, setup, 128, MTP_MAX_ROWS)
        mtp = MTPConfig(mask_token_id=5, max_k=MAX_K, measures_costs=measures)
        harness = SchedulerHarness(setup, make_worker(runner, mtp))
        params = {"max_new_tokens": 12, "temperature": 0.0, "mtp_enabled": True, "mtp_k": 8}
        tokens.append(harness.generate([[1, 2, 3], [4]], mtp_verify=True, **params))
    assert tokens[0] == tokens[1]
    table = measure_step_costs(make_runner(small_model, setup, 128, MTP_MAX_ROWS), 4, 15)
    assert table.num_rows == (1, 2, 4, 8, 16, 32, 48)
    assert len(table.costs_ms) == 7
    assert min(table.costs_ms) > 0


def test_costs_are_medians_of_timed_runs() -> None:
    now = 0.0
    runs: list[int] = []
    spikes = iter([0] * 9 + [50] * 5 + [0] * 4)  # one slow moment, longer than a run of each

    def run_step(num_rows: int) -> None:
        nonlocal now
        runs.append(num_rows)
        now += num_rows * 1e-3 + next(spikes) * 1e-3

    table = measure_costs(run_step, [1, 8, 64], repeats=5, clock=lambda: now)
    assert runs == [1, 8, 64] * 6
    assert table.num_rows == (1, 8, 64)
    assert table.costs_ms == pytest.approx((1.0, 8.0, 64.0))
