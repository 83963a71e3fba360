"""Checks how many drafts requests get: the best number by prices and by what was right, what is
learnt, and when a head rests."""

from __future__ import annotations

import itertools
import math
import random
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from unittest import mock

import pytest

from policy_steps import drafted, drafting_step
from served_rounds import rounds as measured
from sglang.srt.lookahead import stretches
from sglang.srt.lookahead.acceptance_estimate import Kind
from sglang.srt.lookahead.adaptive_config import parse_adaptive_config
from sglang.srt.lookahead.length_policy import FixedLength, PolicyParts
from sglang.srt.lookahead.load_aware_drafts import (
    CONTEXT_STEPS,
    FEED_SHARE,
    LEAST_GAIN,
    PROBE_SHARE,
    REST_AFTER,
    LoadAwareDrafts,
    Probes,
    RestRule,
    best_tier,
)
from sglang.srt.lookahead.matched_drafts import (
    LONGEST_OF_CLASS,
    NUM_CLASSES,
    PRIORS,
    MatchedDrafts,
    class_of,
)
from sglang.srt.lookahead.prompt_mix import MAX_NUMBERS, MEMORY_STEPS, ROW_GRAIN, PromptMix
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import StepCase
from sglang.srt.lookahead.stretches import Stretches
from sglang.srt.lookahead.upcoming_step import EmittingRequest, UpcomingStep
from sglang.srt.step.price_table import PromptChunk
from simulated_rounds import ListedRounds

MOST = 7
DRAFTING = EmittingRequest(Kind(), 1 + MOST)
PLAIN = EmittingRequest(None, 1, is_adjustable=False)
LENGTHS = [1.0 + sum(0.6**place for place in range(1, 1 + count)) for count in range(1 + MOST)]


# ---------------------------------------------------------------- the best number


def test_the_best_tier_is_that_of_a_search() -> None:
    """Takes the one of fewer rows of equal ones."""
    chooser = random.Random(0)
    for _ in range(500):
        chances = [chooser.random() for _ in range(5)]
        lengths = [*itertools.accumulate(itertools.accumulate(chances, float.__mul__), initial=1.0)]
        more = [chooser.choice([0.2, 1.0, 3.0, 9.0]) * chooser.random() for _ in range(5)]
        costs, gain = dict(enumerate([5.0, *(5.0 + each for each in more)])), chooser.random() / 2
        best, rates = best_tier(lengths, costs), [lengths[tier] / costs[tier] for tier in costs]
        assert rates[best] == max(rates)
        assert best_tier(lengths, costs, gain) == best * (rates[best] > rates[0] * (1 + gain))
        chance = lengths[best] - lengths[best - 1] if best else 1.0
        hopeful = {
            costs[tier]: tier
            for tier in range(best + 1, 6)
            if (lengths[best] + chance * (tier - best)) / costs[tier] > rates[best] * (1 + gain)
        }
        probed = hopeful[min(hopeful)] if hopeful else best
        assert Probes(gain).tier(best, lengths, costs) == probed
    assert best_tier([1.0, 1.5, 2.0], {0: 2.0, 1: 3.0, 2: 4.0}) == 0
    assert best_tier([1.0, 2.0, 3.0], {0: 4.0, 1: 4.0, 2: 6.0}) == 1


def test_the_number_of_drafts_counts_what_all_requests_cost_and_gain() -> None:
    """Those who take no drafts have a token each, and their rows cost time."""
    options, seen = RoundOptions(MOST), set()
    tiers = LoadAwareDrafts.tiers(options)
    for num_drafting in (1, 8, 30, 60, 100, 150, 250):
        for num_plain in (0, 1, 20, 100, 300):
            case = StepCase(num_drafting + num_plain, num_plain=num_plain)
            costs = {tier: measured().round_ms(case, tier) for tier in tiers}
            tokens = [num_drafting * length + num_plain for length in LENGTHS]
            policy = LoadAwareDrafts(PolicyParts(options=options, rounds=measured()))
            step = UpcomingStep(Counter({DRAFTING: num_drafting, PLAIN: num_plain}))
            with mock.patch.object(Stretches, "lengths", return_value=LENGTHS):
                policy.choose(step)
            found = policy.settled
            assert found == best_tier(tokens, costs, LEAST_GAIN)
            seen.add((num_drafting, found))
    assert len(seen) > 10


def test_it_looks_again_soon_after_its_best_tier_came_and_went() -> None:
    """Steps that feed the head, since drafts paid a moment ago, are owed for, not without end."""
    prices, feed_ms = ListedRounds({1: (4.0, 4.3)}), 0.2
    parts = PolicyParts(options=RoundOptions(1), rounds=prices, feed_ms=lambda cases: feed_ms)
    policy, step = LoadAwareDrafts(parts), drafting_step(1)
    pays = itertools.cycle([[1.0, 2.0], *[[1.0, 1.0]] * 7])
    with mock.patch.object(policy, "lengths", side_effect=pays):
        for _ in range(1500):
            policy.choose(step)
    with mock.patch.object(policy, "lengths", return_value=[1.0, 1.0]):
        found = next(number for number in itertools.count() if policy.choose(step).limit > 1)
    owed_steps = REST_AFTER * feed_ms / ((PROBE_SHARE + FEED_SHARE) * 4.0)
    assert owed_steps < found < 2 * owed_steps


def test_a_head_rests_after_some_idle_steps_and_is_fed_before_it_drafts_again() -> None:
    """Looks at all steps before each one. If most requests are new, drafts may follow at once."""
    luck, rule, wanted, last_rest, renewed = random.Random(4), RestRule(), [True], -(10**6), -1
    seen = Counter[tuple[bool, bool]]()
    for number in range(4000):
        if luck.random() < 0.02:
            rule.renew()
            renewed = number
        is_fed, wants = luck.random() < 0.1, luck.random() < (0.3 if number % 200 < 80 else 0.01)
        has_context = renewed > last_rest or number - 1 - last_rest >= CONTEXT_STEPS
        assert rule.num_steps_to_feed(True) == 0
        assert (rule.num_steps_to_feed(False) == 0) == has_context
        assert (rule.num_steps_to_feed(is_fed) == 0) == (is_fed or has_context)
        rule.step(wants)
        wanted.append(wants)
        assert rule.rests == (not any(wanted[-REST_AFTER:]))
        last_rest = number if rule.rests else last_rest
        seen[rule.rests, has_context] += 1
    assert len(seen) == 4
    assert min(seen.values()) > 20, seen


def test_tiers_reach_from_none_to_all_or_are_those_that_a_batch_may_have() -> None:
    for max_drafts in range(1, 64):
        options = RoundOptions(max_drafts)
        tiers = LoadAwareDrafts.tiers(options)
        assert list(tiers) == sorted({*tiers})
        assert (tiers[0], tiers[-1]) == (0, max_drafts)
        assert len(tiers) == max_drafts + 1 if max_drafts <= 5 else len(tiers) <= 10
        assert FixedLength.tiers(options) == (max_drafts,)
    slots = b'{"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [1]}}'
    options = RoundOptions(3, adaptive=parse_adaptive_config(slots, "here"))
    assert LoadAwareDrafts.tiers(options) == (0, 1, 3)
    prices = ListedRounds(dict.fromkeys((1, 8, 32), (1.0, 1.01, 1.02, 1.03)))
    with mock.patch.object(Stretches, "lengths", return_value=[1.0, 1.9, 2.7, 3.4]):
        policy = LoadAwareDrafts(PolicyParts(options=options, rounds=prices))
        for num_reqs, tier in ((1, 3), (8, 1), (32, 1)):
            policy.choose(drafting_step(num_reqs))
            assert policy.settled == tier


# ---------------------------------------------------------------- what was right

NUM_ROWS = 32
TEXTS = [(0.1, 0.9), (0.3, 0.5), (0.6, 0.6), (0.9, 0.3), (0.05, 0.97)]


def drawn_rounds(
    begin: float, stay: float, num_drafts: int, num_rounds: int, seed: int = 0
) -> Iterator[list[int]]:
    """Draws how many drafts of each request are right in rounds of text whose tokens are
    predictable in stretches: with the chance `stay` after one that is, and `begin` after one that
    is not. After right drafts comes a token of the model's own."""
    luck, was_predictable = random.Random(seed), [False] * NUM_ROWS
    for _ in range(num_rounds):
        right = [0] * NUM_ROWS
        for row in range(NUM_ROWS):
            while True:
                chance = stay if was_predictable[row] else begin
                was_predictable[row] = luck.random() < chance
                if right[row] == num_drafts or not was_predictable[row]:
                    break
                right[row] += 1
        yield right


def teach(found: Stretches, num_drafts: int, rounds: Iterable[list[int]]) -> None:
    for right in rounds:
        found.observe(drafted(0, len(right), [num_drafts] * len(right), right))


@pytest.mark.parametrize("num_drafts", [2, 7])
def test_rounds_of_any_number_of_drafts_give_what_another_number_has_taught(
    num_drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If nothing were forgotten: few steps are remembered, whose shares go up and down. More drafts
    never give less."""
    monkeypatch.setattr(stretches, "MEMORY_STEPS", 1e6)
    monkeypatch.setattr(stretches, "PAST_MEMORY", 1e6)
    for begin, stay in TEXTS:
        found = Stretches()
        teach(found, num_drafts, drawn_rounds(begin, stay, num_drafts, 400))
        said = found.lengths(MOST)
        assert said == sorted(said)
        assert said[0] == 1.0
        for drafts in (1, 3, MOST):
            rounds = drawn_rounds(begin, stay, drafts, 400, seed=100 + drafts)
            mean = statistics.fmean(itertools.chain.from_iterable(rounds))
            assert said[drafts] == pytest.approx(1 + mean, rel=0.06)


def test_text_that_changes_is_believed_within_some_steps_and_new_requests_are_like_all() -> None:
    """New requests are not like those that ran last; what they say is believed at once. Steps
    without drafts leave chances as they are."""
    found, none = Stretches(), [0] * NUM_ROWS
    teach(found, 7, drawn_rounds(0.9, 0.95, 7, 50))
    before = found.lengths(MOST)
    teach(found, 0, [none] * 5)
    assert found.lengths(MOST) == pytest.approx(before, rel=0.05)
    teach(found, 3, [none] * 6)
    wrong = found.lengths(MOST)[3]
    found.renew()
    renewed = found.lengths(MOST)[3]
    teach(found, 3, [none] * 2)
    assert renewed > max(wrong, found.lengths(MOST)[3]) + 0.3
    teach(found, 7, drawn_rounds(0.05, 0.2, 7, 20, seed=1))
    assert found.lengths(MOST)[7] < 1.6


def test_a_new_request_begins_after_no_full_round() -> None:
    """Its first draft says where stretches begin, though its row's last request was in one."""
    one, two = Stretches(), Stretches()
    teach(one, 3, [[3]] * 8)
    teach(two, 3, [[3]] * 8)
    teach(one, 0, [[0]])  # its prompt
    teach(one, 3, [[0]])
    teach(two, 3, [[0]])
    teach(two, 0, [[0]])
    assert one.lengths(MOST)[1] < two.lengths(MOST)[1]


# ---------------------------------------------------------------- n-grams


def taught(
    has_trees: bool, chances: Sequence[Sequence[float]], prices: ListedRounds
) -> MatchedDrafts:
    """Has a policy hear of drafts that were right with these chances, by class and place: of a
    chain given those before it, of a tree's nodes alone."""
    options = RoundOptions(MOST, num_free=MOST, trees_of_any_size=has_trees)
    policy, luck = MatchedDrafts(PolicyParts(options=options, rounds=prices)), random.Random(2)
    most = [MOST] * 8
    for kind in [*range(len(chances))] * 60:
        paths = list[list[int]]()
        for _ in most:
            right = [luck.random() < chance for chance in chances[kind]]
            if not has_trees:
                right = right[: [*right, False].index(False)]
            paths.append([0, *(1 + place for place, is_right in enumerate(right) if is_right)])
        step = drafted(MOST, 8, most, [len(path) - 1 for path in paths], fed=most)
        kinds = [Kind(match=kind)] * 8
        result = replace(step.result, paths=paths if has_trees else [])
        policy.observe(replace(step, kinds=kinds, result=result))
    return policy


@pytest.mark.parametrize("has_trees", [False, True], ids=["chains", "trees"])
def test_the_matches_at_hand_and_plain_requests_say_how_many_drafts_pay(has_trees: bool) -> None:
    """Searches all numbers, with the chances that drafts were drawn by."""
    luck, seen, tiers = random.Random(1), set[int](), LoadAwareDrafts.tiers(RoundOptions(MOST))
    chances = [[luck.uniform(0.3, 0.97)] * MOST for _ in PRIORS]
    alone = [[*itertools.accumulate(of_class, float.__mul__)] for of_class in chances]
    if has_trees:
        chances = [sorted((luck.random() for _ in range(MOST)), reverse=True) for _ in PRIORS]
        alone = chances
    given = [[*itertools.accumulate(of_class, initial=1.0)] for of_class in alone]
    for _ in range(14):
        kinds = luck.sample(range(NUM_CLASSES), 2)
        counts, num_plain = [luck.randint(1, 5) for _ in kinds], luck.choice([0, 30])
        num_reqs, per_row = sum(counts) + num_plain, luck.choice([0.05, 0.3, 1.0])
        costs = [4.0 + bool(tier) * 0.2 + tier * per_row for tier in range(1 + MOST)]
        policy = taught(has_trees, chances, ListedRounds({num_reqs: costs}, 0.0))
        wishes = [EmittingRequest(Kind(match=kind), 1 + MOST) for kind in kinds]
        step = UpcomingStep(Counter({PLAIN: num_plain, **dict(zip(wishes, counts, strict=True))}))
        rates = dict[int, float]()
        for tier in tiers:
            pairs = zip(kinds, counts, strict=True)
            tokens = num_plain + sum(count * given[kind][tier] for kind, count in pairs)
            rates[tier] = tokens / costs[tier]
        policy.choose(step)
        found = policy.settled
        assert rates[found] > 0.97 * max(rates.values())
        seen.add(found)
    assert len(seen) > 1


def test_matches_without_drafts_that_pay_are_probed_with_few_and_each_length_has_a_class() -> None:
    prices = ListedRounds({8: [4.0 + n for n in range(8)]})
    policy = taught(False, [[0.0] * MOST] * NUM_CLASSES, prices)
    step = UpcomingStep(Counter({EmittingRequest(Kind(match=5), 1 + MOST): 8}))
    limits = Counter(policy.choose(step).limit for _ in range(3000))
    assert limits.keys() == {1, 2}
    assert 1 < limits[2] < 300
    classes = [class_of(length) for length in range(20)]
    assert classes[: LONGEST_OF_CLASS[-1] + 2] == [0, 1, 2, 3, 3, 4, 4, 4, 4, 5]
    assert set(classes) == set(range(NUM_CLASSES))


# ---------------------------------------------------------------- prompts beside rounds


def hear(mix: PromptMix, num_tokens: int, num_prompts: int, rows: int, is_full: bool) -> None:
    """Covers a step in which a request decodes."""
    decoding, new = EmittingRequest(Kind(), 2), EmittingRequest(Kind(), 2, pending=0)
    emitting = Counter({decoding: 1, new: num_prompts * (not is_full)})
    chunks = (PromptChunk(0, rows),)
    mix.plan(UpcomingStep(emitting, prompt_reqs=int(is_full), prompts=chunks))
    mix.observe(drafted(0, 1, [0], [num_tokens - 1]))


def test_the_faster_requests_are_given_tokens_the_more_prompts_come() -> None:
    """As many per token, whatever number of requests a round has and however many it gives each:
    counted by a server whose 16 requests are given 2 tokens a step, and each of them 64 in all."""
    mix = PromptMix(8192)
    assert mix.cases(drafting_step(4, 1, 100), 1.0) == StepCase(4, 100)
    for has_prompt in [True, False] * 200:
        hear(mix, 32, int(has_prompt), 100 * has_prompt, False)
    for num_reqs, pace in ((16, 1.0), (16, 2.0), (16, 4.0), (64, 1.0), (64, 3.0), (512, 8.0)):
        prompts = mix.cases(drafting_step(num_reqs), pace).prompts
        assert len(prompts) <= MAX_NUMBERS + 1
        assert sum(chance for chance, _ in prompts) == pytest.approx(1.0)
        # The least of numbers far apart stands for those below it.
        mean = sum(chance * rows for chance, rows in prompts) / 96
        assert mean == pytest.approx(num_reqs * pace / 64, rel=0.1, abs=0.15)
    [(none, _), (_, rows), *_] = mix.cases(drafting_step(16), 1.0).prompts
    assert none == pytest.approx(math.exp(-0.25), abs=0.03)
    assert rows == round(100 / ROW_GRAIN) * ROW_GRAIN
    for _ in range(8 * MEMORY_STEPS):
        hear(mix, 32, 0, 0, False)
    assert mix.cases(drafting_step(4, 1, 100), 2.0) == StepCase(4, 100), "it is forgotten"


def test_a_prompt_of_several_steps_fills_them_one_by_one() -> None:
    """Takes 16 steps, which give 32 tokens each, 11 feed a whole chunk and one the end of a prompt.
    At half the pace there are half as many; there is never more than one in a step."""
    mix, chunk = PromptMix(8192), 2048
    for rows in [*[chunk] * 11, 512, *[0] * 4] * 40:
        hear(mix, 32, int(rows > 0), rows, rows == chunk)
    for pace, share in ((2.0, 11 / 16), (1.0, 11 / 32), (8.0, 1.0)):
        found = {rows: chance for chance, rows in mix.cases(drafting_step(16), pace).prompts}
        assert max(found) == chunk
        assert found[chunk] == pytest.approx(share, abs=0.08)
        assert sum(found.values()) == pytest.approx(1.0)
        # What remains: one step of five with the end of a prompt, at the pace that was seen.
        others = (1.0 - share) * math.exp(-0.2 * pace / 2)
        assert found.get(0, 0.0) == pytest.approx(others, abs=0.08)
