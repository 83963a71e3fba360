"""Checks how many tokens requests predict from masks: shapes of steps by counting, chances by
chains, the choice beside the best fixed one, and the time that trials may cost."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import pytest

from policy_steps import mask_parts, mask_policy, predicted
from sglang.srt.lookahead.acceptance_estimate import (
    WINDOW,
    Kind,
    Survival,
    share_with_drafts,
    with_draftless_steps,
)
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.load_aware_masks import CERTAINTY, LUCK_STEPS, TRIAL_SHARE
from sglang.srt.lookahead.upcoming_step import MARGIN, EmittingRequest, UpcomingStep
from sglang.srt.step.price_table import Curve, PriceTable, PromptChunk, no_graphs
from simulated_decode import gpu_prices

MAX_K = 8
UNVERIFIED, VERIFIED = Kind(False, 5), Kind(True, 0)


def prices_of(rows: Sequence[int], costs_ms: Sequence[float], kv_ms: float = 0.0) -> PriceTable:
    """Prices a device that launches every step kernel by kernel."""
    eager = Curve(tuple(rows), tuple(costs_ms))
    return PriceTable(no_graphs, {}, eager, Curve((1,), (0.0,)), kv_ms)


KNEE = prices_of((1, 64, 128, 256), (5.0, 5.0, 10.0, 20.0))
PRICES = {
    "flat": prices_of((1, 2), (1.0, 1.0)),
    "knee": KNEE,
    "knee, and KV": replace(KNEE, kv_ms=1e-4),
    "flat, then a line": prices_of((1, 64, 896, 1024), (6.0, 6.0, 23.0, 23.0)),
    "graphs": replace(gpu_prices(), spread=0.004),
}


def step_of(
    num_reqs: int, kind: Kind, limit: int, prompts: int = 0, kv_tokens: int = 0, num_plain: int = 0
) -> UpcomingStep:
    """Requests that wish for MAX_K tokens, as many of them pending as `limit` left."""
    wishes = EmittingRequest(kind, MAX_K, True, limit)
    emitting = Counter({wishes: num_reqs, EmittingRequest(None, 1, False): num_plain})
    chunks = (PromptChunk(0, prompts),) if prompts else ()
    return UpcomingStep(emitting, kv_tokens, prompts, prompts, int(prompts > 0), chunks)


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


def test_shapes_of_steps_are_those_of_their_requests_one_by_one() -> None:
    luck = random.Random(0)
    for _ in range(1500):
        requests, kv, limit = drawn_requests(luck), luck.randint(0, 99), luck.randint(1, MAX_K)
        prompt, is_packed = luck.choice([0, 17]), luck.random() < 0.4
        chunks = (PromptChunk(3, prompt),) if prompt else ()
        step = UpcomingStep(
            Counter(requests), kv, prompt, prompt, int(prompt > 0), chunks, is_packed=is_packed
        )
        all_have = luck.random() < 0.5

        def shape(
            length_of: Callable[[EmittingRequest], int],
            pending_of: Callable[[EmittingRequest], int],
            with_prompts: bool,
            requests: list[EmittingRequest] = requests,
            step: UpcomingStep = step,
            all_have: bool = all_have,
        ) -> tuple[float, ...]:
            """Requests, the widest one, rows, and rows read."""
            widths, num_rows, num_read = list[int](), 0, 0
            for each in requests:
                length, pending = length_of(each), pending_of(each)
                is_verified = each.kind is not None and each.kind.emits_only_confirmed
                can_be_cut = is_verified and (each.pending > 0 or not with_prompts)
                widths.append(pending + length - 1)
                drafts = pending - 1
                if can_be_cut and step.is_packed and not all_have:
                    pending -= drafts
                num_rows += pending + length - 1
                num_read += pending + length - 1 if can_be_cut else length
            if not with_prompts:
                return len(requests), max(widths), num_rows, num_read
            more = step.prompt_reqs
            return (
                len(requests) + more,
                max(*widths, step.longest_prompt),
                num_rows + step.prompt_rows,
                num_read,
            )

        def allowed(each: EmittingRequest, limit: int = limit) -> int:
            return min(each.k, limit) if each.is_adjustable else each.k

        def share(kind: Kind, k: int, all_have: bool = all_have) -> float:
            return float(all_have)

        found = step.current_shape(limit, share)
        assert found[:4] == shape(allowed, lambda each: each.pending, True)
        assert (found.kv_tokens, found.prompts) == (kv, chunks)
        in_row = found.num_rows - prompt
        assert found.row_kv == pytest.approx(in_row * kv / len(requests))
        assert step.current_shape(limit, share, True)[:4] == shape(
            allowed, lambda each: min(each.pending, 1) + allowed(each) - 1, True
        )
        assert step.current_shape(limit, share, True, False)[:4] == shape(allowed, allowed, False)
        assert step.longest == max([each.k for each in requests if each.is_adjustable], default=1)


def test_a_packed_step_has_rows_for_those_who_probably_have_drafts() -> None:
    """Takes 64 requests with 3 drafts each, of which a quarter has them."""
    step = replace(step_of(64, VERIFIED, 4), is_packed=True)
    likely = 64 * 0.25 + MARGIN * math.sqrt(64 * 0.25 * 0.75)
    expected = 64 * 2 + math.ceil(3 * likely)
    shape = step.current_shape(2, lambda kind, k: 0.25 if k == 4 else 1.0)
    assert shape.num_rows == expected
    assert step.current_shape(2).num_rows == 64 * 5


# ---------------------------------------------------------------- chances


def test_estimates_contain_the_truth_and_narrow_with_trials() -> None:
    """They do for nearly all, between the chances that are CERTAINTY deviations less and more."""
    luck, num_inside, widths = random.Random(0), 0, list[tuple[float, ...]]()
    for _ in range(150):
        chances = [luck.uniform(0.3, 0.95) for _ in range(3)]
        truth = 1 + sum(itertools.accumulate(chances, lambda a, b: a * b))
        survival, width = Survival(4), list[float]()
        for _ in range(3):
            for _ in range(120):
                taken = 1
                while taken < 4 and luck.random() < chances[taken - 1]:
                    taken += 1
                survival.record(4, taken)
            low, mean, high = (survival.runs(4, off)[3] for off in (-CERTAINTY, 0.0, CERTAINTY))
            width.append(high - low)
        assert low < mean < high
        num_inside += low < truth < high
        assert mean == pytest.approx(truth, abs=0.35)
        widths.append(tuple(width))
    assert num_inside > 0.85 * 150
    assert all(first > third for first, _, third in widths)


def test_what_was_not_tried_lately_is_less_sure_and_old_trials_are_forgotten() -> None:
    survival = Survival(MAX_K)
    survival.record(2, 2, 10_000)
    runs = survival.runs(MAX_K)
    assert runs[-1] > 7.5, "further tokens are like those before"
    least = survival.runs(MAX_K, -CERTAINTY)
    assert least[-1] < runs[-1] - 0.5
    survival.forget(2)
    assert survival.runs(2) == runs[:2], "what the step tries is not forgotten"
    survival.forget(1)
    assert survival.runs(2, -CERTAINTY)[1] < least[1]
    for _ in range(100):
        survival.record(2, 1, 100)
    assert survival.runs(2)[1] < 1.01
    assert survival.runs(2, CERTAINTY)[1] - survival.runs(2, -CERTAINTY)[1] > 1 / WINDOW
    assert Survival(1).runs(1) == [1.0]


def test_a_verified_request_has_no_drafts_after_a_wrong_one() -> None:
    """Follows the chain of its steps, with drafts and without, multiplied until it is at rest."""
    luck = random.Random(1)
    for _ in range(50):
        survival, longest = Survival(MAX_K), luck.randint(2, MAX_K)
        for taken in range(1, MAX_K + 1):
            survival.record(MAX_K, taken, luck.randint(1, 400))
        runs = survival.runs(MAX_K)
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
            step = step_of(num_reqs, kind, found[-1], prompts, kv_tokens, num_plain)
            budget = policy.choose(step)
            found.append(budget.limit)
            taken = [(budget.limit, min(num_right, budget.limit))] * num_reqs
            policy.observe(predicted(budget, kind, taken))
        [(limit, _)] = Counter(found[-50:]).most_common(1)
        step = step_of(num_reqs, kind, 1, prompts, kv_tokens, num_plain)
        tokens = [num_plain + num_reqs * min(num_right, each) for each in limits]
        free, whole = (
            [
                prices.price_ms(step.current_shape(each, is_steady=True, with_prompts=has_prompts))
                for each in limits
            ]
            for has_prompts in (False, True)
        )
        token_ms = min(cost / given for cost, given in zip(free, tokens, strict=True))
        values = [
            token_ms * (given - tokens[0]) - cost + whole[0]
            for given, cost in zip(tokens, whole, strict=True)
        ]
        gained = tokens[limit - 1] - tokens[0]
        lost_ms = whole[limit - 1] - whole[0] - free[0] / tokens[0] * gained
        assert lost_ms <= 0.005 * whole[0]
        assert values[limit - 1] >= max(values) - 0.05 * whole[0], (num_reqs, num_right, values)
        seen.add(limit)
    assert len(seen) > 2 or name == "flat"


def lost_ms(
    prices: PriceTable, num_reqs: int, lag: int, steps: Iterable[tuple[int, int]]
) -> tuple[float, float, int]:
    """Plays steps, each with its prompt tokens and how many tokens of a request are right; results
    are read `lag` steps late.

    Returns:
        What is lost to plain decoding beyond TRIAL_SHARE in the worst window of steps, what may be
        lost, both in ms, and the longest limit.
    """
    policy, unread, limit, most_tried = mask_policy(prices, MAX_K), list[tuple[Budget, int]](), 1, 0
    net_ms = peak_ms = deepest_ms = most_extra_ms = 0.0
    decode_ms = prices.price_ms(step_of(num_reqs, VERIFIED, 1).current_shape(1, is_steady=True))
    for prompts, num_right in steps:
        step = step_of(num_reqs, VERIFIED, limit, prompts)
        budget = policy.choose(step)
        limit = budget.limit
        plain_ms = prices.price_ms(step.current_shape(1, is_steady=True))
        extra_ms = prices.price_ms(step.current_shape(limit)) - plain_ms
        taken = min(limit, num_right)
        net_ms += decode_ms * (taken - 1) - extra_ms + TRIAL_SHARE * plain_ms
        peak_ms = max(peak_ms, net_ms)
        deepest_ms = max(deepest_ms, peak_ms - net_ms)
        most_extra_ms = max(most_extra_ms, extra_ms)
        most_tried = max(most_tried, limit)
        unread.append((budget, taken))
        if len(unread) > lag:
            budget, taken = unread.pop(0)
            policy.observe(predicted(budget, VERIFIED, [(budget.limit, taken)] * num_reqs))
    luck_ms = LUCK_STEPS / num_reqs * decode_ms
    return deepest_ms, decode_ms + 2 * luck_ms + (2 + lag) * most_extra_ms, most_tried


@pytest.mark.parametrize("lag", [0, 2, 60])
@pytest.mark.parametrize("name", ["knee", "flat, then a line", "graphs"])
def test_trials_cost_a_share_of_the_time_whatever_is_accepted_and_when_that_changes(
    name: str, lag: int
) -> None:
    """In any window of steps: gains of one phase are no credit for the next. Where steps with and
    without prompts alternate, one leaves drafts that cost much in the next."""
    luck, tried = random.Random(f"{name} {lag}"), set[int]()
    cycles = [0, 128], [0, 0, 512], [luck.choice([0, 64, 128, 512]) for _ in range(13)]
    for num_reqs in (4, 40):
        phases = [(luck.choice([0, 0, 512]), luck.choice([1, 1, 2, MAX_K])) for _ in range(10)]
        plays = [[phase for phase in phases for _ in range(60)]]
        for cycle in cycles[: 3 if lag < 60 else 0]:
            pairs = zip(itertools.cycle(cycle), itertools.cycle([1, 1, 1, 3]), strict=False)
            plays.append([*itertools.islice(pairs, 160)])
        for steps in plays:
            deepest_ms, most_ms, most_tried = lost_ms(PRICES[name], num_reqs, lag, steps)
            assert deepest_ms < most_ms, (num_reqs, steps[:13])
            tried.add(most_tried)
    assert max(tried) > 1


def test_what_failed_is_tried_again_later_and_believed_once_it_succeeds() -> None:
    policy, limits, extra_ms = mask_policy(KNEE, MAX_K), [1], 0.0
    for number in range(4500):
        step = step_of(40, UNVERIFIED, limits[-1])
        budget = policy.choose(step)
        limits.append(budget.limit)
        if number < 3000:
            extra_ms += KNEE.price_ms(step.current_shape(budget.limit)) - 5.0
        taken = min(budget.limit, 1 if number < 3000 else MAX_K)
        policy.observe(predicted(budget, UNVERIFIED, [(budget.limit, taken)] * 40))
    tries = [place for place, limit in enumerate(limits[:3000]) if limit > 1]
    assert 3 <= len(tries) < 300
    assert max(tries) > 1500
    assert 0 < extra_ms < (TRIAL_SHARE * 3000 + 1) * 5.0
    assert min(limits[-20:]) > 1


def test_a_fresh_policy_is_sure_of_nothing_that_costs() -> None:
    """It tries as little as may pay, for a step's time at most, and waits for results."""
    policy, limits = mask_policy(KNEE, MAX_K), [1]
    for _ in range(10):
        limits.append(policy.choose(step_of(40, UNVERIFIED, limits[-1])).limit)
    assert limits[1:3] == [2, 1]
    assert limits.count(2) <= 2


def test_looking_ahead_never_takes_a_step_out_of_its_graph() -> None:
    """Even where launched steps seem to cost nothing; a step that has no graph anyway may."""
    prices, tried = replace(gpu_prices(), eager=Curve((1, 4096), (0.1, 0.1))), set[int]()
    policy = mask_policy(prices, MAX_K)
    for prompts, pending in itertools.product((0, 512, 900) * 60, (1, MAX_K)):
        step = step_of(128, VERIFIED, pending, prompts)
        budget = policy.choose(step)
        stays = prices.replays(step.current_shape(budget.limit))
        assert stays or not prices.replays(step.current_shape(1))
        tried.add(budget.limit)
        policy.observe(predicted(budget, VERIFIED, [(budget.limit, budget.limit)] * 128))
    assert max(tried) > 1


def test_rows_of_a_packed_step_are_those_that_drafts_need_and_what_its_graph_has_room_for() -> None:
    """Takes requests whose drafts are wrong in every other step."""
    prices, budget = PRICES["graphs"], Budget(1)
    policy = mask_policy(prices, MAX_K)
    for _ in range(200):
        step = replace(step_of(27, VERIFIED, budget.limit), is_packed=True)
        budget = policy.choose(step)
        taken = [(budget.limit, 1 if n % 2 else budget.limit) for n in range(27)]
        policy.observe(predicted(budget, VERIFIED, taken))
    assert budget.limit > 1
    assert budget.num_rows is not None
    assert 27 * budget.limit < budget.num_rows < step.current_shape(budget.limit).num_rows
    key = prices.find(27, 2 * budget.limit, budget.num_rows)
    assert key is not None
    assert key.num_tokens == budget.num_rows


def test_a_fixed_length_is_each_requests_wish() -> None:
    wishes = Counter({EmittingRequest(UNVERIFIED, 2): 1, EmittingRequest(UNVERIFIED, 5): 1})
    assert FixedLength(mask_parts()).choose(UpcomingStep(wishes)).limit == 5
