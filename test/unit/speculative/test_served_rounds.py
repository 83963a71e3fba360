"""Numbers of drafts under a load whose requests come with prompts, simulated with an H200's times:
prompts take the room that drafts would have had for nothing, and steps take longer than priced."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from policy_steps import drafted, drafting_step
from served_rounds import MAX_DRAFTS, Load, ServedRounds, SomeLeftOut, batch_of, rounds
from sglang.srt.layers.forward_batch import MIXED, GraphKey
from sglang.srt.lookahead import load_aware_drafts
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.load_aware_drafts import CONTEXT_STEPS, REST_AFTER, RestRule
from sglang.srt.lookahead.prompt_mix import (
    MAX_NUMBERS,
    MEMORY_STEPS,
    ROW_GRAIN,
    PromptMix,
    case_of,
)
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import MAX_COSTS, MeasuredRounds, StepCase, StepCases
from sglang.srt.lookahead.tile_spec import RoundTables
from sglang.srt.lookahead.upcoming_step import EmittingRequest, UpcomingStep
from sglang.srt.step.price_table import Curve
from tile_spec_decode import Text

SURE, EVEN = Text(0.75, 0.96, 0.45), Text(0.0, 0.97, 0.8)
# Requests that differ: drafts of some are always right, those of others hardly ever.
EASY, HARD = Text(1.0, 0.95), Text(0.0, 0.9, 0.15)
NEVER = Text(0.0, 0.9, 0.02)  # no draft is right, and the head says so
WRONG = Text(0.0, 0.02, 0.02)  # nor does it ever think so
SHORT = (64, 128)  # prompts and answers, in tokens
BY_LOAD = RoundOptions(MAX_DRAFTS, "load_aware")
CUT = RoundOptions(MAX_DRAFTS, "load_aware", tile_spec_cache=Path("unused"))


def test_more_requests_are_given_fewer_drafts() -> None:
    """Where all are right as often; the number settles."""
    means = []
    for num_clients in (1, 16, 96):
        served = ServedRounds(Load(num_clients, *SHORT), EVEN, BY_LOAD)
        served.rate(1, 300)
        counts = served.tiers.copy()
        served.rate(1, 100)
        found = served.tiers - counts
        assert max(found.values()) > 0.6 * found.total()
        means.append(sum(tier * count for tier, count in found.items()) / found.total())
    assert means[0] > means[1] > means[2]


@pytest.mark.long_matrix
@pytest.mark.parametrize("options", [BY_LOAD, CUT], ids=["by load", "cut"])
def test_a_head_rests_where_drafts_do_not_pay_and_wakes_when_they_do(options: RoundOptions) -> None:
    served = ServedRounds(Load(96), NEVER, options, can_rest=True)
    served.rate(1, 400)
    num_rests = served.num_rests
    assert num_rests > 200
    assert sum(count for tier, count in served.tiers.items() if tier) > 2, "it looks again"
    served.change_text(SURE)
    served.rate(1, 900)
    before = served.num_rests
    served.rate(1, 100)
    assert served.num_rests == before


def test_a_head_rests_and_looks_again_where_answers_are_shorter_than_what_it_waits() -> None:
    """Each prompt is a new request's, and no head is fed on behalf of probes that never come."""
    served = ServedRounds(Load(1, 64, REST_AFTER - 4), WRONG, BY_LOAD, can_rest=True)
    served.rate(1, 300)
    assert served.num_rests > 150
    before = served.tiers.copy()
    served.change_text(SURE)
    served.rate(1, 300)
    assert sum(count for tier, count in (served.tiers - before).items() if tier) > 100


@pytest.mark.parametrize("options", [BY_LOAD, CUT], ids=["by load", "cut"])
@pytest.mark.parametrize("can_rest", [False, True])
def test_a_step_of_a_prompts_first_chunk_alone_gives_nobody_drafts(
    options: RoundOptions, can_rest: bool
) -> None:
    planner = ServedRounds(Load(2), SURE, options, can_rest).planner
    for _ in range(3):
        plan = planner.plan(batch_of([16], emits=False))
        assert list(plan.next_drafts) == [0]
    given = [max(planner.plan(batch_of([prompt])).next_drafts) for prompt in (7, 0)]
    assert max(given) > 0


def test_a_head_that_rested_is_fed_the_chunks_of_a_prompt_that_is_alone() -> None:
    """What was left out of a prompt would be missing to all that begin like it."""
    served = ServedRounds(Load(128), NEVER, BY_LOAD, can_rest=True)
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
    rest = RestRule()
    with mock.patch.object(load_aware_drafts, "RestRule", return_value=rest):
        served = ServedRounds(Load(128), (NEVER, SURE), BY_LOAD, can_rest=True)
    served.rate(1, 400)
    for _ in range(REST_AFTER):
        rest.step(False, is_fed=False)
    assert rest.rests
    planner = served.planner
    with mock.patch.object(SomeLeftOut, "lacks_tokens", return_value=not is_fed):
        given = [max(planner.plan(batch_of([0])).next_drafts) for _ in range(CONTEXT_STEPS + 1)]
    assert given[-1] > 0
    assert (given[0] > 0) == is_fed
    assert (max(given[:-1]) > 0) == is_fed


def test_what_feeding_costs_is_asked_beside_the_prompts_that_come() -> None:
    """The head reads these too."""
    asked: list[StepCases] = []
    feed_ms = MeasuredRounds.feed_ms

    def noted(prices: MeasuredRounds, upcoming: StepCases) -> float:
        asked.append(upcoming)
        return feed_ms(prices, upcoming)

    with mock.patch.object(MeasuredRounds, "feed_ms", noted):
        ServedRounds(Load(64, 2048, 64), NEVER, BY_LOAD, can_rest=True).rate(1, 300)
    assert any(case.prompt_rows > 0 for upcoming in asked for _, case in upcoming.cases)


# ------------------------------------------------------------ parts


def hear(
    mix: PromptMix, num_tokens: int, num_prompts: int = 0, rows: int = 0, is_full: bool = False
) -> None:
    """Covers a step in which a request decodes."""
    emitting = Counter({EmittingRequest(Kind(), 2): 1})
    if not is_full:
        emitting[EmittingRequest(Kind(), 2, pending=0)] = num_prompts
    mix.plan(UpcomingStep(emitting, prompt_rows=rows, prompt_reqs=int(is_full)))
    mix.observe(drafted(0, 1, [0], [num_tokens - 1]))


def test_how_often_prompts_share_steps_is_remembered_for_a_while() -> None:
    mix = PromptMix(8192)
    assert mix.cases(drafting_step(4, 1, 100), 1.0) == StepCases(4, 100)
    for number in range(400):
        hear(mix, 8, *((1, 100) if number % 4 == 0 else (0, 0)))
    (none, no_rows), *some = mix.cases(drafting_step(4, 1, 100), 2.0).prompts
    assert no_rows == 0
    assert none == pytest.approx(math.exp(-0.25), abs=0.03)
    assert next(rows for _, rows in some) == round(100 / ROW_GRAIN) * ROW_GRAIN
    for _ in range(8 * MEMORY_STEPS):
        hear(mix, 8)
    assert mix.cases(drafting_step(4, 1, 100), 2.0) == StepCases(4, 100)


def test_the_faster_requests_are_given_tokens_the_more_prompts_come() -> None:
    """As many per token, whatever number of requests a round has and however many it gives each:
    counted by a server whose 16 requests are given 2 tokens a step, and each of them 64 in all."""
    mix = PromptMix(8192)
    for number in range(400):
        hear(mix, 32, *((1, 50) if number % 2 == 0 else (0, 0)))
    for num_reqs, pace in ((16, 1.0), (16, 2.0), (16, 4.0), (64, 1.0), (64, 3.0), (512, 8.0)):
        prompts = mix.cases(drafting_step(num_reqs), pace).prompts
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
        hear(mix, 32, int(rows > 0), rows, is_full=rows == chunk)
    for pace, share in ((2.0, 11 / 16), (1.0, 11 / 32), (8.0, 1.0)):
        found = {rows: chance for chance, rows in mix.cases(drafting_step(16), pace).prompts}
        assert max(found) == chunk
        assert found[chunk] == pytest.approx(share, abs=0.08)
        assert sum(found.values()) == pytest.approx(1.0)
        # What remains: one step of five with the end of a prompt, at the pace that was seen.
        others = (1.0 - share) * math.exp(-0.2 * pace / 2)
        assert found.get(0, 0.0) == pytest.approx(others, abs=0.08)


def test_a_round_beside_prompts_costs_what_it_adds_to_them() -> None:
    """In steps so wide that each row costs the same, prompts change nothing."""
    prices = rounds()
    alone = StepCases(512)
    beside = alone._replace(prompts=((1.0, 1024),))
    for tier in (1, 3, 7):
        assert prices.round_ms(beside, tier) == pytest.approx(prices.round_ms(alone, tier), rel=0.1)
    few = StepCases(8)
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
    beside = StepCases(most, 0, ((1.0, 64),))
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
    assert case_of(batch_of([0, 0, 0])) == StepCase(3)
    assert case_of(batch_of([100, 0, 20, 0])) == StepCase(2, 0, 128)


def test_prices_that_are_remembered_are_bounded() -> None:
    """Prompts are of any number of rows."""
    prices = rounds()
    right = prices.round_ms(StepCases(8), 3)
    for number in range(2 * MAX_COSTS):
        prices.round_ms(StepCases(8, 0, ((1.0, number),)), 3)
    assert prices._known_cost.cache_info().currsize <= MAX_COSTS
    assert prices.round_ms(StepCases(8), 3) == right
