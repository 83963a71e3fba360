"""Numbers of drafts under a load whose requests come with prompts, simulated with an H200's times:
prompts take the room that drafts would have had for nothing, and steps take longer than priced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from served_rounds import MAX_DRAFTS, GivenTime, Load, ServedRounds, batch_of, rounds
from sglang.srt.layers.forward_batch import MIXED, GraphKey
from sglang.srt.lookahead.contract import StepPlan, StepRecord
from sglang.srt.speculative.drafter import plan_of_drafts
from sglang.srt.speculative.prompt_mix import (
    MAX_NUMBERS,
    MEMORY_STEPS,
    ROW_GRAIN,
    PromptMix,
    round_of,
)
from sglang.srt.speculative.request_mix import (
    BEGUN,
    BEGUN_TRIED,
    STAYED,
    STAYED_TRIED,
    RequestMix,
)
from sglang.srt.speculative.rest_rule import CONTEXT_STEPS, REST_AFTER, RestRule
from sglang.srt.speculative.round_options import RoundOptions
from sglang.srt.speculative.round_prices import MAX_COSTS, MeasuredRounds, RoundCase, UpcomingRound
from sglang.srt.speculative.round_times import RoundTimes
from sglang.srt.speculative.tile_spec.budget import RoundTables
from sglang.srt.step.price_table import Curve
from sglang.srt.step.worker import HostResult, ScheduleBatch
from tile_spec_decode import Text

SURE, EVEN = Text(0.75, 0.96, 0.45), Text(0.0, 0.97, 0.8)
# Requests that differ: drafts of some are always right, those of others hardly ever.
EASY, HARD = Text(1.0, 0.95), Text(0.0, 0.9, 0.15)
NEVER = Text(0.0, 0.9, 0.02)  # no draft is right, and the head says so
SHORT = (64, 128)  # prompts and answers, in tokens
BY_LOAD = RoundOptions(MAX_DRAFTS, "load_aware")
CUT = RoundOptions(MAX_DRAFTS, "load_aware", tile_spec_cache=Path("unused"))


def test_more_requests_are_given_fewer_drafts() -> None:
    """Where all are right as often; the number settles."""
    means = []
    for num_clients in (1, 16, 96):
        served = ServedRounds(Load(num_clients, *SHORT), EVEN, BY_LOAD, is_timed=True)
        served.rate(1, 300)
        counts = served.tiers.copy()
        served.rate(1, 100)
        found = served.tiers - counts
        assert max(found.values()) > 0.6 * found.total()
        means.append(sum(tier * count for tier, count in found.items()) / found.total())
    assert means[0] > means[1] > means[2]


@pytest.mark.parametrize("options", [BY_LOAD, CUT], ids=["by load", "cut"])
def test_a_head_rests_where_drafts_do_not_pay_and_wakes_when_they_do(options: RoundOptions) -> None:
    served = ServedRounds(Load(96), NEVER, options, True, can_rest=True)
    served.rate(1, 400)
    num_rests = served.num_rests
    assert num_rests > 200
    assert sum(count for tier, count in served.tiers.items() if tier) > 2, "it looks again"
    served.change_text(SURE)
    served.rate(1, 500)
    before = served.num_rests
    served.rate(1, 100)
    assert served.num_rests == before


@pytest.mark.parametrize("num_late", [0, 1])
def test_steps_that_are_launched_before_the_last_one_is_read_are_those_behind_an_end(
    num_late: int,
) -> None:
    planner = ServedRounds(Load(2), EVEN, BY_LOAD, is_timed=False).planner
    asked = list[dict[str, Any]]()
    lengths = RequestMix.lengths

    def watched(mix: RequestMix, rows: Sequence[int], most: int, **more: Any) -> list[float]:
        asked.append(more)
        return lengths(mix, rows, most, **more)

    with mock.patch.object(RequestMix, "lengths", watched):
        record = StepRecord(rows=[0, 1], plan=planner.plan(batch_of([0, 0])))
        for number in range(4):
            if number:
                planner.plan(batch_of([0, 0]))
            if number >= num_late:
                planner.observe(record, HostResult([[], []], [1, 1], [1, 1]))
        for _ in range(num_late):  # there is nothing to launch for a while, which tells nothing
            planner.observe(record, HostResult([[], []], [1, 1], [1, 1]))
        planner.plan(batch_of([0, 0]))
    before_it_is_known = [0] * (1 + num_late)
    found = [each["num_late"] for each in asked]
    assert found == [*before_it_is_known, *[num_late] * (4 - num_late)]


@pytest.mark.parametrize("options", [BY_LOAD, CUT], ids=["by load", "cut"])
@pytest.mark.parametrize("can_rest", [False, True])
def test_a_step_of_a_prompts_first_chunk_alone_gives_nobody_drafts(
    options: RoundOptions, can_rest: bool
) -> None:
    planner = ServedRounds(Load(2), SURE, options, True, can_rest).planner
    for _ in range(3):
        plan = planner.plan(batch_of([16], emits=False))
        assert list(plan.next_drafts) == [0]
    given = [max(planner.plan(batch_of([prompt])).next_drafts) for prompt in (7, 0)]
    assert max(given) > 0


def test_a_head_that_rested_is_fed_the_chunks_of_a_prompt_that_is_alone() -> None:
    """What was left out of a prompt would be missing to all that begin like it."""
    served = ServedRounds(Load(128), NEVER, BY_LOAD, True, can_rest=True)
    served.rate(1, 100)
    planner, is_idle = served.planner, [0] * 128
    while not planner.plan(batch_of(is_idle)).rests:
        pass
    plans = [planner.plan(batch_of([16], emits=False)) for _ in range(3)]
    assert [plan.rests for plan in plans] == [False] * 3
    assert planner.plan(batch_of(is_idle)).rests


@pytest.mark.parametrize("is_fed", [False, True])
def test_requests_that_were_fed_whole_are_drafted_for_at_once(is_fed: bool) -> None:
    """Others when the head has been fed some of their tokens."""
    served = ServedRounds(Load(128), (NEVER, SURE), BY_LOAD, True, can_rest=True)
    served.rate(1, 400)
    planner = served.planner
    policy: Any = planner.policy
    policy._rest = RestRule()
    for _ in range(REST_AFTER):
        policy._rest.step(False, is_fed=False)
    assert policy.rests
    with mock.patch.object(planner._left_out, "lacks_tokens", return_value=not is_fed):
        given = [max(planner.plan(batch_of([0])).next_drafts) for _ in range(CONTEXT_STEPS + 1)]
    assert given[-1] > 0
    assert (given[0] > 0) == is_fed
    assert (max(given[:-1]) > 0) == is_fed


def test_what_feeding_costs_is_asked_beside_the_prompts_that_come() -> None:
    """The head reads these too."""
    served = ServedRounds(Load(64, 2048, 64), NEVER, BY_LOAD, True, can_rest=True)
    served.rate(1, 300)
    policy: Any = served.planner.policy
    asked: list[UpcomingRound] = []
    feed_ms = policy._feed_ms

    def noted(upcoming: UpcomingRound) -> float:
        asked.append(upcoming)
        return float(feed_ms(upcoming))

    with mock.patch.object(policy, "_feed_ms", noted):
        served.rate(1, 20)
    assert any(case.prompt_rows > 0 for upcoming in asked for _, case in upcoming.cases)


@pytest.mark.parametrize("options", [BY_LOAD, CUT], ids=["by load", "cut"])
def test_what_became_of_drafts_is_told_of_their_request(options: RoundOptions) -> None:
    """Between others that read prompts, and whatever was cut."""
    served = ServedRounds(Load(6, 64, 128), (EASY, HARD), options, True)
    served.rate(60, 0)
    mix, kinds = served.planner._requests, served._kinds
    assert mix is not None
    known = mix._known[:6]
    tried = known[:, STAYED_TRIED] + known[:, BEGUN_TRIED]
    shares = (known[:, STAYED] + known[:, BEGUN]) / np.maximum(tried, 1.0)
    rows = [row for row in range(6) if tried[row] > 12]
    assert {kinds[row] for row in rows} == {0, 1}
    assert all((shares[row] > 0.6) == (kinds[row] == 0) for row in rows), "easy ones are right"


@pytest.mark.parametrize("policy", ["fixed", "load_aware", "matched"])
def test_requests_are_told_apart_where_the_policy_looks_at_it(policy: str) -> None:
    served = ServedRounds(Load(4), SURE, RoundOptions(MAX_DRAFTS, policy), True)
    read = RequestMix.lengths
    with mock.patch.object(RequestMix, "lengths", autospec=True, side_effect=read) as lengths:
        served.rate(20, 0)
    assert lengths.called == (served.planner._requests is not None)


def test_what_steps_take_is_learnt_by_rows() -> None:
    load = Load(64, excess=0.2)
    served = ServedRounds(load, SURE, BY_LOAD, is_timed=True)
    served.rate(600, 0)
    found = served.planner.policy._prices.excess.of_rounds(7)  # type: ignore[attr-defined]
    assert found.at(1024) == pytest.approx(1.2, abs=0.04)
    assert found.at(128) == pytest.approx(1.06, abs=0.05)
    assert found.at(128) < found.at(256) < found.at(1024)


# ------------------------------------------------------------ parts


def test_how_often_prompts_share_steps_is_remembered_for_a_while() -> None:
    mix = PromptMix(8192)
    assert mix.upcoming(4, 100, 1.0) == UpcomingRound(4, 100)
    for number in range(400):
        mix.observe(*((1, 100) if number % 4 == 0 else (0, 0)))
        mix.hear(8)
    (none, no_rows), *some = mix.upcoming(4, 100, 2.0).prompts
    assert no_rows == 0
    assert none == pytest.approx(math.exp(-0.25), abs=0.03)
    assert next(rows for _, rows in some) == round(100 / ROW_GRAIN) * ROW_GRAIN
    for _ in range(8 * MEMORY_STEPS):
        mix.observe(0, 0)
        mix.hear(8)
    assert mix.upcoming(4, 100, 2.0) == UpcomingRound(4, 100)


def test_the_faster_requests_are_given_tokens_the_more_prompts_come() -> None:
    """As many per token, whatever number of requests a round has and however many it gives each:
    counted by a server whose 16 requests are given 2 tokens a step, and each of them 64 in all."""
    mix = PromptMix(8192)
    for number in range(400):
        mix.observe(*((1, 50) if number % 2 == 0 else (0, 0)))
        mix.hear(32)
    for num_reqs, pace in ((16, 1.0), (16, 2.0), (16, 4.0), (64, 1.0), (64, 3.0), (512, 8.0)):
        prompts = mix.upcoming(num_reqs, 0, pace).prompts
        assert len(prompts) <= MAX_NUMBERS + 1
        assert sum(chance for chance, _ in prompts) == pytest.approx(1.0)
        expected = num_reqs * pace / 64
        # The least of numbers far apart stands for those below it.
        mean = sum(chance * rows for chance, rows in prompts) / 50
        assert mean == pytest.approx(expected, rel=0.1, abs=0.15)


def test_a_prompt_of_several_steps_fills_them_one_by_one() -> None:
    """Of 16 steps, which give 32 tokens each, 11 feed a whole chunk and one the end of the prompt.
    At half the pace there are half as many; there is never more than one in a step."""
    mix, chunk = PromptMix(8192), 2048
    for number in range(640):
        place = number % 16
        rows = chunk if place < 11 else 512 if place == 11 else 0
        mix.observe(int(rows > 0), rows, is_full=rows == chunk)
        mix.hear(32)
    for pace, share in ((2.0, 11 / 16), (1.0, 11 / 32), (8.0, 1.0)):
        found = {rows: chance for chance, rows in mix.upcoming(16, 0, pace).prompts}
        assert max(found) == chunk
        assert found[chunk] == pytest.approx(share, abs=0.08)
        assert sum(found.values()) == pytest.approx(1.0)
        # What remains: one step of five with the end of a prompt, at the pace that was seen.
        others = (1.0 - share) * math.exp(-0.2 * pace / 2)
        assert found.get(0, 0.0) == pytest.approx(others, abs=0.08)


def test_a_round_beside_prompts_costs_what_it_adds_to_them() -> None:
    """In steps so wide that each row costs the same, prompts change nothing."""
    prices = rounds()
    alone = UpcomingRound(512)
    beside = alone._replace(prompts=((1.0, 1024),))
    for tier in (1, 3, 7):
        assert prices.round_ms(beside, tier) == pytest.approx(prices.round_ms(alone, tier), rel=0.1)
    few = UpcomingRound(8)
    mixed = few._replace(prompts=((0.75, 0), (0.25, 512)))
    sure = few._replace(prompts=((1.0, 512),))
    expected = 0.75 * prices.round_ms(few, 3) + 0.25 * prices.round_ms(sure, 3)
    assert prices.round_ms(mixed, 3) == pytest.approx(expected)
    grows = [prices.round_ms(each, 7) - prices.round_ms(each, 1) for each in (few, sure)]
    assert grows[1] > grows[0] + 0.5, "beside prompts rows are not free"


def test_a_full_server_has_no_room_for_one_more_prompt() -> None:
    """It comes when another request has ended, so the step replays a graph of as many requests;
    without one it would seem to cost the same whatever is drafted."""
    most = 32
    target, head = rounds().target, rounds().head
    key = GraphKey(MIXED, most, 8, 512)

    def find(num_reqs: int, widest: int, num_rows: int) -> GraphKey | None:
        return key if num_reqs <= most and num_rows <= key.num_tokens else None

    target = replace(target, find=find, graphs_ms={key: 10.0}, eager=Curve((1, 4096), (99.0, 99.0)))
    prices = MeasuredRounds(target, head, max_requests=most)
    beside = UpcomingRound(most, 0, ((1.0, 64),))
    for num_drafts in (0, 1, 7):
        full = prices.cost(most, num_drafts, most * (1 + num_drafts), 64)
        assert full.rows_ms < 99.0
        assert prices.round_ms(beside, num_drafts) < 20.0
        last_bucket = RoundTables(prices, packs_in_graphs=True).table(
            beside.cases[0][1], max(1, num_drafts)
        )
        assert last_bucket.costs_ms[-1] < 20.0
    without_bound = MeasuredRounds(target, head)
    assert without_bound.cost(most, 1, 2 * most, 64).rows_ms > 99.0, "what this is about"


def test_a_step_knows_its_prompts() -> None:
    assert round_of(batch_of([0, 0, 0])) == RoundCase(3)
    assert round_of(batch_of([100, 0, 20, 0])) == RoundCase(2, 0, 128)


def hear(times: RoundTimes, batch: ScheduleBatch, plan: StepPlan, took_ms: float) -> None:
    """A step takes so long, and the one after it is read."""
    plan = replace(plan, expected=times.expected(batch, plan))
    times.compare(StepRecord(rows=batch.rows, plan=plan, time=GivenTime(took_ms)))
    times.compare(StepRecord(rows=batch.rows, plan=plan))


def test_only_rounds_of_one_number_of_drafts_are_compared() -> None:
    prices = rounds()
    times = RoundTimes(prices, packs_in_graphs=True)
    for prompts, given, following, factor in (
        ([0] * 8, 3, 3, 1.5),
        ([0] * 8, 3, 5, 9.0),  # drafts more than it verifies
        ([128] * 8, 0, 3, 9.0),  # nobody decodes
    ):
        batch = batch_of(prompts)
        counts = [0 if each else given for each in prompts]
        plan = replace(plan_of_drafts(batch, counts), next_drafts=[following] * 8)
        hear(times, batch, plan, factor * prices.cost(8, 3, 32).rows_ms)
    assert prices.excess.of_rounds(3).at(32) > 1.1, "which one such round says of others"
    others = prices.excess.of_rounds(5)
    assert others.at(32) == pytest.approx(1.1)
    assert others.at(2048) == pytest.approx(1.1)


@pytest.mark.parametrize(
    "asked",
    [
        {"hidden_rows": [(0, 0)]},
        {"logprobs": mock.Mock(prompt_rows=[(0, 0)])},
        {"constraint": mock.Mock()},
    ],
)
def test_steps_that_return_more_are_not_compared(asked: dict[str, Any]) -> None:
    prices = rounds()
    times = RoundTimes(prices, packs_in_graphs=True)
    batch = replace(batch_of([128, 0, 0]), **asked)
    plan = replace(plan_of_drafts(batch, [0, 3, 3]), next_drafts=[3] * 3)
    hear(times, batch, plan, 1000.0)
    assert prices.excess.of_rounds(3).at(128) == 1.0
    hear(times, batch_of([128, 0, 0]), plan, 1000.0)
    assert prices.excess.of_rounds(3).at(128) > 1.0


def test_slots_behind_a_prompt_are_no_part_of_its_price() -> None:
    """Those are reserved for draft steps."""
    prices = rounds()
    prices.target = replace(prices.target, prompt_kv_ms=Curve((1, 4096), (1.0, 1.0)))
    times = RoundTimes(prices, packs_in_graphs=True)
    batch = batch_of([128, 0])
    behind = replace(batch, max_q_lens=[128 + 100, batch.max_q_lens[1]])
    plan = replace(plan_of_drafts(batch, [0, 3]), next_drafts=[3, 3])
    assert times.expected(batch, plan) == times.expected(behind, plan)


def test_prices_that_are_remembered_are_bounded() -> None:
    """Prompts are of any number of rows."""
    prices = rounds()
    right = prices.round_ms(UpcomingRound(8), 3)
    for number in range(2 * MAX_COSTS):
        prices.round_ms(UpcomingRound(8, 0, ((1.0, number),)), 3)
    assert prices._known_cost.cache_info().currsize <= MAX_COSTS
    assert prices.round_ms(UpcomingRound(8), 3) == right
