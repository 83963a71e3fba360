"""The rule of adaptive steps as a server's tier policy, and which graphs its tiers have."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policy_steps import drafted, drafting_step
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead.adaptive_config import (
    MAX_BATCH_SIZE,
    AdaptiveConfig,
    parse_adaptive_config,
)
from sglang.srt.lookahead.ema import AdaptiveSpeculativeParams
from sglang.srt.lookahead.ema_policy import AdaptiveController
from sglang.srt.lookahead.length_policy import PolicyParts, same_size
from sglang.srt.lookahead.round_options import ALL_BATCH_SIZES, LengthOptions, runtime_states
from sglang.srt.lookahead.upcoming_step import StepOutcome
from sglang.srt.model_executor.graph_keys import GraphKeys
from simulated_rounds import LAG

EACH_ROUND = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}
MAX_REQUESTS = 200
HIDDEN = 32


def config(slots: dict[int, Sequence[int]], **numbers: Any) -> AdaptiveConfig:
    """Slots by their least batch size; each round decides unless numbers say otherwise."""
    named = {str(size): {"candidate_steps": list(steps)} for size, steps in slots.items()}
    return parse_adaptive_config(json.dumps({**EACH_ROUND, **numbers, **named}).encode(), "FILE")


def controller(
    adaptive: AdaptiveConfig, initial: int, graph_size: Callable[[int], int] = same_size
) -> AdaptiveController:
    most = adaptive.candidate_steps[-1]
    options = LengthOptions(most, initial, adaptive)
    return AdaptiveController(PolicyParts(options=options, graph_size=graph_size))


def steps_of(policy: AdaptiveController, num_reqs: int) -> int:
    """Drafts that so many requests are given next."""
    return policy.choose(drafting_step(num_reqs)).limit - 1


def graph_keys(max_requests: int = MAX_REQUESTS) -> GraphKeys:
    return GraphKeys(GraphSupport.RAGGED_Q, max_requests, 4, 0)


def outcome(tier: int, *correct: int, num_reqs: int | None = None) -> StepOutcome:
    """A step in which each request verified the tier's drafts."""
    right = correct if tier else ()
    told = len(correct) if num_reqs is None else num_reqs
    return drafted(tier, told, [tier] * len(right), right)


SLOTS = st.dictionaries(
    st.integers(1, 160),
    st.lists(st.integers(0, 6), min_size=1, max_size=4, unique=True),
    min_size=1,
    max_size=5,
)


# ---------------------------------------------------------------- the controller


def test_a_batch_has_the_steps_of_the_size_that_it_is_padded_to() -> None:
    adaptive = config({1: [3], 8: [2], 16: [1]})
    padded = controller(adaptive, 3, graph_size=lambda num_reqs: -(-num_reqs // 8) * 8)
    exact = controller(adaptive, 3)
    sizes = (1, 7, 8, 9, 15, 16)
    assert [steps_of(exact, size) for size in sizes] == [3, 3, 2, 2, 2, 1]
    assert [steps_of(padded, size) for size in sizes] == [2, 2, 2, 1, 1, 1]
    assert padded.settled == 1


def test_a_round_is_counted_for_the_slot_of_its_padded_size() -> None:
    """5 requests run in a graph of 8: slot 8 hears of them, slot 1 does not."""
    policy = controller(config({1: [1, 3], 8: [1, 3]}), 3, lambda num_reqs: max(8, num_reqs))
    policy.observe(outcome(3, 0, 0, 0, 0, 0))
    assert policy.params.get_steps_for_batch(8) == steps_of(policy, 5) == 1
    assert policy.params.get_steps_for_batch(1) == 3


def test_a_round_that_was_drafted_under_another_tier_is_not_counted() -> None:
    policy = controller(config({1: [1, 3]}), 3)
    assert steps_of(policy, 2) == 3
    policy.observe(outcome(3, 0, 0))
    assert steps_of(policy, 2) == 1
    before = policy.params.state_for_batch(2)
    for late in (outcome(3, 3, 3), outcome(3, 0, 0), outcome(0, 0, 0)):
        policy.observe(late)
    assert policy.params.state_for_batch(2) == before
    policy.observe(outcome(1, 1, 1))
    assert steps_of(policy, 2) == 3


def test_of_a_round_without_drafts_its_requests_are_counted_up_to_the_probe() -> None:
    adaptive = config({1: [0, 2]}, warmup_batches=1, update_interval=3)
    policy, chosen = controller(adaptive, 0), []
    for _ in range(5):
        chosen.append(steps_of(policy, 3))
        policy.observe(outcome(0, num_reqs=3))
    assert chosen == [0, 0, 0, 0, 2]
    assert policy.params.state_for_batch(3).num_rounds == 4, "the fifth was late"


def test_a_tier_whose_requests_had_no_drafts_teaches_nothing() -> None:
    """Of tier 2, but all had begun just now."""
    policy = controller(config({1: [0, 2]}), 2)
    policy.observe(outcome(2, num_reqs=3))
    assert policy.params.state_for_batch(3).num_rounds == 0


def test_it_is_settled_before_the_first_round_and_knows_all_tiers() -> None:
    adaptive = config({1: [1, 3], 8: [0, 5]})
    assert AdaptiveController.tiers(LengthOptions(5, 3, adaptive)) == (0, 1, 3, 5)
    assert not AdaptiveController.needs_prices
    assert controller(adaptive, 3).settled == 3
    assert controller(adaptive, 5).settled == 3, "of the slot of one request"


@settings(max_examples=150, deadline=None)
@given(
    slots=SLOTS,
    initial=st.integers(0, 6),
    pace=st.fixed_dictionaries(
        {
            "ema_alpha": st.sampled_from([0.2, 1]),
            "warmup_batches": st.integers(0, 2),
            "update_interval": st.integers(1, 3),
        }
    ),
    sizes=st.lists(st.integers(1, 170), min_size=LAG + 1, max_size=40),
    chooser=st.randoms(use_true_random=False),
)
def test_as_a_policy_it_does_what_the_rule_says_round_by_round(
    slots: dict[int, list[int]], initial: int, pace: dict[str, Any], sizes: list[int], chooser: Any
) -> None:
    """Rounds are heard two steps later; the rule by hand hears those whose steps are still its
    slot's."""
    adaptive, pad = config(slots, **pace), graph_keys().decode_size
    policy = controller(adaptive, initial, pad)
    by_hand = AdaptiveSpeculativeParams(initial, config=adaptive)
    unread = deque[tuple[int, int, list[int]]]()
    for num_reqs in sizes:
        tier = steps_of(policy, num_reqs)
        assert tier == policy.settled == by_hand.get_steps_for_batch(pad(num_reqs))
        most = min(chooser.randint(0, 3), num_reqs)  # few, so that means are anything
        unread.append((tier, num_reqs, [chooser.randint(0, tier) for _ in range(max(1, most))]))
        if len(unread) > LAG:
            tier, num_reqs, correct = unread.popleft()
            policy.observe(outcome(tier, *correct, num_reqs=num_reqs))
            if tier == by_hand.get_steps_for_batch(pad(num_reqs)):
                by_hand.on_verify_complete(correct, pad(num_reqs))
    for size in range(1, MAX_REQUESTS + 1):
        assert policy.params.state_for_batch(size) == by_hand.state_for_batch(size)


# ---------------------------------------------------------------- what tiers own


def test_each_tier_owns_the_batch_sizes_that_may_have_it() -> None:
    adaptive = config({2: [0, 1, 3], 8: [1], 32: [0, 3]})
    states = runtime_states(adaptive.candidate_steps, adaptive, 1)
    low, middle, high = range(1, 8), range(8, 32), range(32, MAX_BATCH_SIZE)
    assert {tier: state.batch_sizes for tier, state in states.items()} == {
        0: (low, high),
        1: (low, middle),
        3: (low, high),
    }
    shapes = [(each.speculative_num_draft_tokens, each.num_draft_steps) for each in states.values()]
    assert shapes == [(1, 0), (2, 0), (4, 2)]


def test_where_nobody_says_every_tier_may_have_all_batches() -> None:
    states = runtime_states((0, 3), None, 1)
    assert [state.speculative_num_steps for state in states.values()] == [0, 3]
    assert all(state.batch_sizes == ALL_BATCH_SIZES for state in states.values())


def test_a_tier_that_no_slot_has_owns_no_batch_size() -> None:
    """Such as 0 of the throughput strategy, where slots leave it out."""
    adaptive = config({1: [1, 3]})
    assert runtime_states((0, 1, 3), adaptive, 1)[0].batch_sizes == ()


@settings(max_examples=100, deadline=None)
@given(slots=SLOTS)
def test_batch_sizes_of_steps_are_those_of_a_search(slots: dict[int, list[int]]) -> None:
    adaptive, options = config(slots), LengthOptions(6, 0, config(slots))
    starts = sorted(slots)
    for size in range(1, MAX_REQUESTS + 1):
        served = max((start for start in starts if start <= size), default=starts[0])
        for steps in range(8):
            ranges = adaptive.batch_sizes(steps)
            num_holding = sum(size in each for each in ranges)
            assert num_holding == (steps in slots[served])
            assert (steps in (options.candidates(size) or ())) == bool(num_holding)


# ---------------------------------------------------------------- graphs


@pytest.mark.parametrize("max_requests", [1, 3, 8, 13, 100, 128])
def test_a_batch_is_padded_to_the_smallest_decode_graph(max_requests: int) -> None:
    keys = graph_keys(max_requests)
    sizes = {size for size in (1, 2, 4, *range(8, 129, 8), max_requests) if size <= max_requests}
    for num_reqs in range(1, max_requests + 1):
        assert keys.decode_size(num_reqs) == min(size for size in sizes if size >= num_reqs)
    assert keys.decode_size(max_requests + 1) == max_requests + 1, "no graph"


def test_without_graphs_nothing_is_padded() -> None:
    keys = GraphKeys(GraphSupport.NEVER, 8, 4)
    assert [keys.decode_size(size) for size in (1, 3, 7)] == [1, 3, 7]


def test_draft_steps_have_graphs_of_the_sizes_that_reach_their_tier() -> None:
    keys = GraphKeys.of_draft_steps(40, HIDDEN, 2, (range(1, 5), range(24, 33)))
    assert [(key.num_reqs, key.num_tokens, key.width) for key in keys.all] == [
        (size, size, 1) for size in (1, 2, 4, 24, 32)
    ]
    assert {(key.hidden_width, key.num_steps) for key in keys.all} == {(HIDDEN, 2)}
    assert GraphKeys.of_draft_steps(40, HIDDEN, 2, ()).all == []


@settings(max_examples=60, deadline=None)
@given(slots=SLOTS, max_requests=st.integers(1, MAX_REQUESTS))
def test_every_tier_that_is_chosen_finds_its_graph_and_no_other_graph_is_made(
    slots: dict[int, list[int]], max_requests: int
) -> None:
    """Whatever batch chooses a tier, draft steps of its padded size are captured for that tier."""
    adaptive, decode = config(slots), graph_keys(max_requests)
    for tier, state in runtime_states(adaptive.candidate_steps, adaptive, 1).items():
        keys = GraphKeys.of_draft_steps(max_requests, HIDDEN, max(1, tier), state.batch_sizes)
        needed = set()
        for num_reqs in range(1, max_requests + 1):
            size = decode.decode_size(num_reqs)
            served = adaptive.slots[adaptive.slot_index(size)]
            if tier in served.candidate_steps:
                key = keys.find_shape(num_reqs, 1, num_reqs, hidden_width=HIDDEN)
                assert key is not None
                assert key.num_reqs == size
                needed.add(size)
        assert {key.num_reqs for key in keys.all} == needed
