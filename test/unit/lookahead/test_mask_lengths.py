"""Checks how many tokens requests predict from masks: shapes of steps by counting, chances by
chains, and the choice beside the best fixed one."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from policy_steps import mask_parts, mask_policy, mask_step, predicted
from sglang.srt.lookahead.acceptance_estimate import (
    PRIOR_SURVIVAL,
    Kind,
    Survival,
    share_with_drafts,
    with_draftless_steps,
)
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.upcoming_step import MARGIN, EmittingRequest, UpcomingStep
from sglang.srt.step.price_table import PromptChunk
from simulated_decode import gpu_prices
from tile_spec_rounds import prices_of

MAX_K, MAX_DRAFTS = 8, 7
UNVERIFIED, VERIFIED = Kind(False, 5), Kind(True, 0)
KNEE = prices_of((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0))
PRICES = {
    "flat": prices_of((1, 2), (1.0, 1.0)),
    "knee": KNEE,
    "knee, and KV": replace(KNEE, kv_ms=1e-4),
    "graphs": replace(gpu_prices(), spread=0.004),
}


# ---------------------------------------------------------------- shapes


def drawn_requests(luck: random.Random) -> list[EmittingRequest]:
    kinds = [None, Kind(False, 5), Kind(True, 0), Kind(True, 9)]
    return [
        EmittingRequest(
            kind := luck.choice(kinds),
            k := luck.randint(1, MAX_K),
            kind is not None and luck.random() < 0.7,
            luck.randint(0, k),
        )
        for _ in range(luck.randint(1, 6))
    ]


def counted(
    step: UpcomingStep,
    requests: list[EmittingRequest],
    lengths: list[int],
    pending: list[int],
    all_have: float,
    with_prompts: bool = True,
) -> tuple[int, ...]:
    """Requests, the widest one, rows, and rows read, if requests feed so many pending tokens, of
    which those that a packed step may cut feed one unless they all have drafts."""
    widths, num_rows, num_read = [step.longest_prompt * with_prompts], 0, 0
    for each, length, fed in zip(requests, lengths, pending, strict=True):
        is_verified = each.kind is not None and each.kind.emits_only_confirmed
        can_be_cut = is_verified and (each.pending > 0 or not with_prompts)
        own = (1 if can_be_cut and step.is_packed and not all_have else fed) + length - 1
        widths.append(fed + length - 1)
        num_rows, num_read = num_rows + own, num_read + (own if can_be_cut else length)
    num_rows += step.prompt_rows * with_prompts
    return len(requests) + step.prompt_reqs * with_prompts, max(widths), num_rows, num_read


def test_shapes_of_steps_are_those_of_their_requests_one_by_one() -> None:
    luck = random.Random(0)
    for _ in range(1500):
        requests, kv, limit = drawn_requests(luck), luck.randint(0, 99), luck.randint(1, MAX_K)
        prompt, is_packed = luck.choice([0, 17]), luck.random() < 0.4
        chunks = (PromptChunk(3, prompt),) if prompt else ()
        num_chunks = len(chunks)
        step = UpcomingStep(Counter(requests), kv, num_chunks, chunks, is_packed=is_packed)
        all_have, pending = float(luck.random() < 0.5), [each.pending for each in requests]
        lengths = [min(each.k, limit) if each.is_adjustable else each.k for each in requests]
        shape = partial(step.current_shape, limit, lambda kind, k, share=all_have: share)
        found = shape()
        assert found[:4] == counted(step, requests, lengths, pending, all_have)
        assert (found.kv_tokens, found.prompts) == (kv, chunks)
        assert found.row_kv == pytest.approx((found.num_rows - prompt) * kv / len(requests))
        steady = [min(count, 1) + k - 1 for count, k in zip(pending, lengths, strict=True)]
        assert shape(True)[:4] == counted(step, requests, lengths, steady, all_have)
        assert shape(True, False)[:4] == counted(step, requests, lengths, lengths, all_have, False)
        assert step.longest == max([each.k for each in requests if each.is_adjustable], default=1)


def test_a_packed_step_has_rows_for_those_who_probably_have_drafts() -> None:
    """Takes 64 requests with 3 drafts each, of which a quarter has them."""
    step = replace(mask_step(64, VERIFIED, 4), is_packed=True)
    likely = 64 * 0.25 + MARGIN * math.sqrt(64 * 0.25 * 0.75)
    expected = 64 * 2 + math.ceil(3 * likely)
    shape = step.current_shape(2, lambda kind, k: 0.25 if k == 4 else 1.0)
    assert shape.num_rows == expected
    assert step.current_shape(2).num_rows == 64 * 5


# ---------------------------------------------------------------- chances


def test_estimates_are_near_the_truth() -> None:
    luck = random.Random(0)
    for _ in range(150):
        chances = [luck.uniform(0.3, 0.95) for _ in range(3)]
        truth = 1 + sum(itertools.accumulate(chances, float.__mul__))
        survival = Survival(3)
        for _ in range(360):
            lots = [luck.random() < chance for chance in chances]
            survival.record(3, range([*lots, False].index(False)))
        assert survival.runs(3)[3] == pytest.approx(truth, abs=0.35)


def test_what_was_not_tried_lately_returns_towards_the_prior_and_old_trials_are_forgotten() -> None:
    survival = Survival(MAX_DRAFTS)
    survival.record(1, range(1), 10_000)
    runs = survival.runs(MAX_DRAFTS)
    assert runs[-1] > 7.5, "further tokens are like those before"
    survival.forget(1)
    assert survival.runs(1) == runs[:2], "what the step tries is not forgotten"
    survival.forget(0)
    assert PRIOR_SURVIVAL < survival.runs(1)[1] - 1 < runs[1] - 1
    for _ in range(100):
        survival.record(1, (), 100)
    assert survival.runs(1)[1] < 1.01
    assert Survival(0).runs(0) == [1.0]


def test_a_verified_request_has_no_drafts_after_a_wrong_one() -> None:
    """Follows the chain of its steps, with drafts and without, multiplied until it is at rest."""
    luck = random.Random(1)
    for _ in range(50):
        survival, longest = Survival(MAX_DRAFTS), luck.randint(2, MAX_K)
        for num_right in range(MAX_K):
            survival.record(MAX_DRAFTS, range(num_right), luck.randint(1, 400))
        runs = survival.runs(MAX_DRAFTS)
        before, run = runs[longest - 2], runs[longest - 1]
        all_right, with_drafts = run - before, 1.0
        for _ in range(500):
            with_drafts = with_drafts * all_right + (1.0 - with_drafts)
        expected = with_drafts * run + (1.0 - with_drafts)
        assert with_draftless_steps(runs)[longest - 1] == pytest.approx(expected)
        assert share_with_drafts(before, run) == pytest.approx(with_drafts)


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("name", ["flat", "knee", "knee, and KV", "graphs"])
def test_where_as_many_are_right_in_each_step_it_settles_on_the_best_limit(name: str) -> None:
    """Tries all limits, in steps that follow each other, with tokens worth what they cost at the
    best limit without prompts; and never on one that loses time to plain decoding. The more load
    and the fewer right, the shorter; beside plain requests rows that are free alone cost time."""
    prices, seen = PRICES[name], set[int]()
    beside = [(0, 0, 0), (0, 512, 0), (120, 0, 0), *[(0, 0, 300_000)] * (prices.kv_ms > 0)]
    loads = itertools.product((1, 40), (1, 3, MAX_K), beside)
    for num_reqs, num_right, (num_plain, prompts, kv_tokens) in loads:
        kind = VERIFIED if num_right == MAX_K and num_plain == 0 else UNVERIFIED
        policy, limits, found = mask_policy(prices, MAX_K), range(1, 1 + MAX_K), [1]
        for _ in range(150):
            step = mask_step(num_reqs, kind, found[-1], prompts, kv_tokens, num_plain)
            budget = policy.choose(step)
            found.append(budget.limit)
            taken = [(budget.limit, min(num_right, budget.limit))] * num_reqs
            policy.observe(predicted(budget, kind, taken))
        limit = statistics.mode(found[-50:])
        step = mask_step(num_reqs, kind, 1, prompts, kv_tokens, num_plain)
        gained = np.array([num_reqs * (min(num_right, each) - 1) for each in limits])
        free, whole = (
            np.array(
                [prices.price_ms(step.current_shape(each, None, True, has)) for each in limits]
            )
            for has in (False, True)
        )
        tokens = num_plain + num_reqs + gained
        lost_ms = whole - whole[0] - free[0] / tokens[0] * gained
        assert lost_ms[limit - 1] <= 0.005 * whole[0]
        values = (free / tokens).min() * gained - whole
        assert values[limit - 1] >= values.max() - 0.05 * whole[0], (num_reqs, num_right, values)
        seen.add(limit)
    assert len(seen) > 2 or name == "flat"


def test_rows_of_a_packed_step_are_those_that_drafts_need_and_what_its_graph_has_room_for() -> None:
    """Takes requests whose drafts are wrong in every other step."""
    prices, budget = PRICES["graphs"], Budget(1)
    policy = mask_policy(prices, MAX_K)
    for _ in range(200):
        step = replace(mask_step(27, VERIFIED, budget.limit), is_packed=True)
        budget = policy.choose(step)
        taken = [(budget.limit, 1 if n % 2 else budget.limit) for n in range(27)]
        policy.observe(predicted(budget, VERIFIED, taken))
    num_rows = budget.num_rows or 0
    assert 27 < 27 * budget.limit < num_rows < step.current_shape(budget.limit).num_rows
    key = prices.find(27, 2 * budget.limit, num_rows)
    assert key is not None
    assert key.num_tokens == num_rows


def test_a_fixed_length_is_each_requests_wish() -> None:
    wishes = dict.fromkeys((EmittingRequest(UNVERIFIED, 2), EmittingRequest(UNVERIFIED, 5)), 1)
    assert FixedLength(mask_parts()).choose(UpcomingStep(wishes)).limit == 5
