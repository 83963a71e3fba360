"""Speed of numbers of drafts where requests come with prompts, simulated with the times of an H200,
beside the best fixed number: prompts take the room that drafts would have had for nothing.

    python -m pytest benchmark/simulations
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from served_rounds import MAX_DRAFTS, Load, ServedRounds
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.load_aware_drafts import REST_AFTER, LoadAwareDrafts
from sglang.srt.lookahead.round_options import RoundOptions
from tile_spec_decode import Text

SURE, EVEN, HOT = Text(0.75, 0.96, 0.45), Text(0.0, 0.97, 0.8), Text(0.25, 0.97, 0.05)
# Requests that differ: drafts of some are always right, those of others hardly ever.
EASY, HARD = Text(1.0, 0.95), Text(0.0, 0.9, 0.15)
NEVER = Text(0.0, 0.9, 0.02)  # no draft is right, and the head says so
BLIND = Text(0.0, 0.02, 0.02)  # nor does it ever think so
TEXTS = {"sure": SURE, "even": EVEN, "hot": HOT}
SHORT, LONG = (64, 128), (128, 512)  # prompts and answers, in tokens
STATIC = (1, 2, 3, 5, 7)
BY_LOAD = RoundOptions(MAX_DRAFTS, "load_aware")
CUT = RoundOptions(MAX_DRAFTS, "load_aware", tile_spec_cache=Path("unused"))


def each_way(num_clients: int, counts: Sequence[int], short: str, long: str) -> list[Any]:
    """One text with short prompts and answers, the other one with long ones."""
    return [(num_clients, short, counts, SHORT), (num_clients, long, counts, LONG)]


def rate(load: Load, text: Text, options: RoundOptions) -> float:
    return ServedRounds(load, text, options).rate(400, 200)


def best_static(load: Load, text: Text, counts: Sequence[int] = STATIC) -> float:
    return max(fixed(load, text, count) for count in counts)


def fixed(load: Load, text: Text, count: int) -> float:
    if count:
        return rate(load, text, RoundOptions(count))
    with mock.patch.object(LoadAwareDrafts, "choose", return_value=Budget(1)):
        return rate(load, text, BY_LOAD)


@pytest.mark.parametrize(
    ("num_clients", "text", "counts", "lens"),
    [
        *each_way(1, (7,), "sure", "even"),
        *each_way(8, (7,), "even", "sure"),
        *each_way(32, (3, 5), "sure", "even"),
        *each_way(64, (1, 2, 3), "even", "sure"),
        *each_way(96, (1,), "sure", "even"),
        *each_way(128, (1,), "even", "sure"),
        *((32, "hot", (2, 3), SHORT), (64, "hot", (1, 2), LONG)),
        *((96, "hot", (1,), LONG), (128, "hot", (0,), SHORT)),
    ],
)
def test_numbers_by_load_are_as_fast_as_the_best_fixed_one(
    num_clients: int, text: str, counts: Sequence[int], lens: tuple[int, int]
) -> None:
    """Beside the best of those that may be; of short answers prompts share nearly every step."""
    load = Load(num_clients, *lens)
    speed = rate(load, TEXTS[text], BY_LOAD)
    assert speed > 0.965 * best_static(load, TEXTS[text], counts)


@pytest.mark.parametrize(("num_clients", "counts"), [(8, (2, 3)), (32, (1, 2, 3)), (64, (1, 2))])
def test_numbers_by_load_where_requests_differ(num_clients: int, counts: Sequence[int]) -> None:
    """Easy ones end soon, so at any time most are hard."""
    load, texts = Load(num_clients, 64, 128), (EASY, HARD, HARD)
    num_steps = 19_200 // num_clients  # few requests at once are as many in more steps
    fixed = (ServedRounds(load, texts, RoundOptions(n)) for n in counts)
    best = max(each.rate(num_steps, 200) for each in fixed)
    assert ServedRounds(load, texts, BY_LOAD).rate(num_steps, 200) > 0.96 * best


def without_head(load: Load, text: Text) -> float:
    served = ServedRounds(load, text, BY_LOAD, can_rest=True)
    policy = SimpleNamespace(
        choose=lambda upcoming: Budget(1, rests=True), observe=id, reads_matches=False, settled=0
    )
    with mock.patch.object(served.planner, "policy", policy):
        return served.rate(800, 200)


@pytest.mark.parametrize(
    ("num_clients", "options", "lens"),
    [
        (64, BY_LOAD, SHORT),
        (64, BY_LOAD, LONG),
        (96, BY_LOAD, LONG),
        (128, BY_LOAD, SHORT),
        (128, CUT, LONG),
    ],
)
def test_where_drafts_do_not_pay_a_head_that_rests_costs_next_to_nothing(
    num_clients: int, options: RoundOptions, lens: tuple[int, int]
) -> None:
    """Beside a server without one. From time to time it is fed, and looks again."""
    load = Load(num_clients, *lens)
    served = ServedRounds(load, NEVER, options, can_rest=True)
    speed = served.rate(800, 200)
    assert speed > 0.985 * without_head(load, NEVER)
    assert 850 < served.num_rests < 990
    assert sum(count for tier, count in served.tiers.items() if tier) > 2


@pytest.mark.parametrize(("num_clients", "options"), [(64, CUT), (96, BY_LOAD), (128, CUT)])
def test_a_head_that_rests_wakes_when_drafts_pay(num_clients: int, options: RoundOptions) -> None:
    """As fast as a head that has never rested, within some seconds."""
    load = Load(num_clients)
    served = ServedRounds(load, NEVER, options, can_rest=True)
    served.rate(1, 600)
    num_rests = served.num_rests
    assert num_rests > 300
    served.change_text(SURE)
    speed = served.rate(400, 800)
    assert served.num_rests - num_rests < 400
    assert speed > 0.97 * rate(load, SURE, options)


@pytest.mark.parametrize("num_clients", [32, 64, 96])
def test_cut_steps_gain_beside_prompts(num_clients: int) -> None:
    assert rate(Load(num_clients), SURE, CUT) > 1.02 * best_static(Load(num_clients), SURE, (1, 3))


@pytest.mark.parametrize(("num_clients", "counts"), [(8, (7,)), (64, (3,)), (128, (1, 3))])
def test_cut_steps_lose_nothing_where_all_drafts_are_as_likely(
    num_clients: int, counts: Sequence[int]
) -> None:
    """Long answers, so that nearly all steps are of decodes alone."""
    load = Load(num_clients, prompt_tokens=64, new_tokens=512)
    assert rate(load, EVEN, CUT) > 0.97 * best_static(load, EVEN, counts)


def test_a_head_rests_and_looks_again_where_answers_are_shorter_than_what_it_waits() -> None:
    """Each prompt is a new request's, and no head is fed on behalf of probes that never come."""
    served = ServedRounds(Load(1, 64, REST_AFTER - 4), BLIND, BY_LOAD, can_rest=True)
    served.rate(1, 300)
    assert served.num_rests > 150
    before = served.tiers.copy()
    served.change_text(SURE)
    served.rate(1, 300)
    assert sum(count for tier, count in (served.tiers - before).items() if tier) > 100
