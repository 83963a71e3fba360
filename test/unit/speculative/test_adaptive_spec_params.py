"""Steps by slot: the rule, what is counted, and every mistake of a configuration."""

from __future__ import annotations

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from code_shape import HEAVY_MODULES, ROOT, modules_that_load
from sglang.srt.lookahead.adaptive_config import (
    MAX_CONFIG_BYTES,
    PRESETS,
    AdaptiveConfig,
    AdaptiveConfigError,
    AdaptiveSlot,
    parse_adaptive_config,
    read_adaptive_config,
)
from sglang.srt.lookahead.ema import (
    AdaptiveSpeculativeParams,
    SlotState,
    next_steps,
)

PACE: dict[str, Any] = {"ema_alpha": 1, "warmup_batches": 0, "update_interval": 1}


def slot(*candidates: int, up: float = 0.0, down: float = 0.0, coeff: float = 0.0) -> AdaptiveSlot:
    return AdaptiveSlot(
        min_batch_size=1,
        candidate_steps=candidates,
        up_hysteresis=up,
        down_hysteresis=down,
        ceiling_coeff=coeff,
        **PACE,
    )


def config(**entries: Any) -> AdaptiveConfig:
    """Slots are `b1=...`, `b8=...`; each round decides and the average is the last round's mean."""
    named = {key.removeprefix("b") if key[1:].isdigit() else key: entries[key] for key in entries}
    return parse_adaptive_config(json.dumps(PACE | named).encode(), "FILE")


def params(initial_steps: int, **entries: Any) -> AdaptiveSpeculativeParams:
    return AdaptiveSpeculativeParams(initial_steps, config=config(**entries))


def steps_of_rounds(adaptive: AdaptiveSpeculativeParams, *rounds: int, batch_size: int = 1) -> str:
    """Steps after each round of one request with so many correct drafts, as text."""
    shown = []
    for num_correct in rounds:
        adaptive.on_verify_complete([num_correct], batch_size)
        shown.append(str(adaptive.get_steps_for_batch(batch_size)))
    return " ".join(shown)


# ---------------------------------------------------------------- one decision


@pytest.mark.parametrize(
    ("steps", "ema", "expected"),
    [
        (7, 2.51, 7),
        (7, 2.5, 3),  # exactly at the threshold it drops
        (7, 0.51, 3),
        (7, 0.5, 1),  # two rungs in one decision
        (7, 0.0, 1),
        (3, 0.51, 3),
        (3, 0.5, 1),
        (3, 2.5, 3),  # exactly at the threshold it does not rise
        (3, 2.51, 7),
        (1, 0.0, 1),
        (1, 0.5, 1),
        (1, 0.51, 3),
        (1, 2.51, 7),  # two rungs too; only negative hysteresis or old drafts bring that about
        (7, 7.0, 7),
    ],
)
def test_it_drops_up_to_the_threshold_and_rises_above_it(
    steps: int, ema: float, expected: int
) -> None:
    assert next_steps(slot(1, 3, 7), steps, ema) == expected


@pytest.mark.parametrize(
    ("steps", "ema", "up", "down", "expected"),
    [
        (3, 0.25, 0.0, -0.25, 1),  # drops late
        (3, 0.26, 0.0, -0.25, 3),
        (3, 0.75, 0.5, 0.25, 1),  # drops early
        (3, 0.76, 0.5, 0.25, 3),
        (1, 0.75, 0.25, 0.0, 1),  # rises late
        (1, 0.76, 0.25, 0.0, 3),
        (1, 0.25, -0.25, -0.25, 1),  # rises early
        (1, 0.26, -0.25, -0.25, 3),
        (7, 2.25, 0.0, -0.25, 3),  # each rung has the margin
        (7, 0.25, 0.0, -0.25, 1),
        (1, 2.75, 0.25, 0.0, 3),
        (1, 2.76, 0.25, 0.0, 7),
        (3, 0.6, 0.0, 0.25, 1),  # a drop comes before a rise
    ],
)
def test_hysteresis_moves_the_thresholds(
    steps: int, ema: float, up: float, down: float, expected: int
) -> None:
    assert next_steps(slot(1, 3, 7, up=up, down=down), steps, ema) == expected


@pytest.mark.parametrize(
    ("candidates", "steps", "ema", "expected"),
    [
        ((0, 1, 3), 1, 0.5, 0),
        ((0, 1, 3), 1, 0.51, 3),
        ((0, 1, 3), 3, 0.5, 0),  # 3 to 1 and 1 to 0 have one threshold
        ((0, 1, 3), 3, 0.51, 3),
        ((0, 3), 3, 0.5, 0),
        ((0, 3), 3, 0.51, 3),
        ((0, 1, 3), 0, 0.0, 1),  # a probe
        ((0, 3), 0, 3.0, 3),
        ((0, 2, 5), 0, 5.0, 2),  # of the fewest steps, whatever the average
        ((0,), 0, 9.0, 0),  # nothing to probe
        ((3,), 3, 0.0, 3),
    ],
)
def test_zero_is_the_lowest_rung_and_probes(
    candidates: tuple[int, ...], steps: int, ema: float, expected: int
) -> None:
    assert next_steps(slot(*candidates), steps, ema) == expected


@pytest.mark.parametrize(
    ("candidates", "steps", "ema", "coeff", "expected"),
    [
        ((1, 3, 7), 7, 3.0, 0.0, 7),  # off
        ((1, 3, 7), 7, 3.0, 2.34, 7),  # ceil(7.02) = 8
        ((1, 3, 7), 7, 3.0, 2.0, 3),  # at most 6
        ((1, 3, 7), 7, 3.0, 0.5, 1),  # at most 2
        ((1, 3, 7), 7, 3.0, 0.01, 1),
        ((1, 3, 7), 3, 1.0, 1.0, 1),  # stays by the thresholds, capped all the same
        ((1, 3, 7), 1, 0.6, 0.1, 3),  # a rise is not capped
        ((1, 3, 7), 3, 2.6, 0.1, 7),
        ((1, 3, 7), 7, 0.1, 0.0, 1),
        ((3, 7), 7, 3.0, 0.1, 3),  # nothing is under the ceiling: the fewest steps
        ((0, 3), 3, 1.0, 0.1, 0),  # no steps that draft are under it
        ((0, 1, 3), 3, 1.0, 0.1, 1),
        ((0, 1, 3), 3, 0.5, 9.0, 0),  # it does not keep a slot from 0
        ((0, 3), 0, 0.0, 0.1, 3),  # nor from a probe
        ((1, 63), 63, 63.0, 1000.0, 63),
    ],
)
def test_the_ceiling_caps_what_is_not_a_rise(
    candidates: tuple[int, ...], steps: int, ema: float, coeff: float, expected: int
) -> None:
    assert next_steps(slot(*candidates, coeff=coeff), steps, ema) == expected


# ---------------------------------------------------------------- rounds


@pytest.mark.parametrize(
    ("warmup", "interval", "expected"),
    [
        (0, 1, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (0, 4, [4, 8, 12]),
        (3, 1, [4, 5, 6, 7, 8, 9, 10, 11, 12]),
        (1, 4, [5, 9]),
        (5, 3, [8, 11]),
        (11, 1, [12]),
        (6, 6, [12]),
        (12, 1, []),
        (0, 13, []),
    ],
)
def test_decisions_begin_an_interval_after_the_warm_up(
    warmup: int, interval: int, expected: list[int]
) -> None:
    """Drafts are such that every decision changes the steps."""
    adaptive = params(
        3, b1={"candidate_steps": [1, 3]}, warmup_batches=warmup, update_interval=interval
    )
    decided = [
        number
        for number in range(1, 13)
        if adaptive.on_verify_complete([int(adaptive.get_steps_for_batch(1) == 1)], 1)
    ]
    assert decided == expected


def test_the_average_begins_below_the_steps_and_follows_the_means_of_batches() -> None:
    adaptive = params(7, b1={"candidate_steps": [7]}, ema_alpha=0.5)
    assert adaptive.state_for_batch(1) == SlotState(steps=7, ema=6.0, has_drafted=True)
    emas = []
    for correct in ([0], [7, 7, 4], [1, 2, 3, 4]):
        adaptive.on_verify_complete(correct, len(correct))
        emas.append(adaptive.state_for_batch(1).ema)
    assert emas == [3.0, 4.5, 3.5]


def test_warm_up_rounds_are_averaged_too() -> None:
    adaptive = params(3, b1={"candidate_steps": [1, 3]}, ema_alpha=0.5, warmup_batches=3)
    assert steps_of_rounds(adaptive, 0, 0, 0, 0) == "3 3 3 1"
    assert adaptive.state_for_batch(1).ema == 0.125


def test_a_switch_keeps_the_average() -> None:
    adaptive = params(1, b1={"candidate_steps": [1, 3, 7]}, ema_alpha=0.5)
    steps_and_emas = []
    for num_correct in (1, 1, 3, 3, 7, 0, 0, 0):
        adaptive.on_verify_complete([num_correct], 1)
        state = adaptive.state_for_batch(1)
        steps_and_emas.append((state.steps, state.ema))
    assert steps_and_emas == [
        (1, 0.5),
        (3, 0.75),
        (3, 1.875),
        (3, 2.4375),
        (7, 4.71875),
        (7, 2.359375),
        (3, 1.1796875),
        (3, 0.58984375),
    ]


def test_a_decision_that_changes_steps_is_told() -> None:
    adaptive = params(1, b1={"candidate_steps": [1, 3]}, b8={"candidate_steps": [1, 3]})
    heard = [adaptive.on_verify_complete([correct], 1) for correct in (0, 1, 3, 3, 0, 0)]
    assert heard == [False, True, False, False, True, False]
    assert adaptive.on_verify_complete([1], 8)


def test_an_empty_round_is_not_counted() -> None:
    adaptive = params(3, b1={"candidate_steps": [1, 3]}, warmup_batches=1)
    before = adaptive.state_for_batch(1)
    assert not adaptive.on_verify_complete([], 1)
    assert not adaptive.on_verify_complete([], 1, steps=3)
    assert adaptive.state_for_batch(1) == before
    assert steps_of_rounds(adaptive, 0, 0) == "3 1"


def test_a_round_of_other_steps_is_not_counted() -> None:
    """Two rounds were on their way when the slot's steps changed."""
    adaptive = params(3, b1={"candidate_steps": [0, 1, 3]})
    assert adaptive.on_verify_complete([0], 1, steps=3)
    before = adaptive.state_for_batch(1)
    assert before.steps == 0
    for num_correct in (3, 0):
        assert not adaptive.on_verify_complete([num_correct], 1, steps=3)
    assert adaptive.state_for_batch(1) == before
    assert adaptive.on_verify_complete([0], 1, steps=0)
    assert not adaptive.on_verify_complete([0], 1, steps=0)
    assert adaptive.get_steps_for_batch(1) == 1


def test_without_drafts_the_average_stays_and_rounds_count_up_to_the_probe() -> None:
    adaptive = params(
        1, b1={"candidate_steps": [0, 1]}, ema_alpha=0.5, warmup_batches=2, update_interval=3
    )
    assert steps_of_rounds(adaptive, 0, 0, 1, 0, 0) == "1 1 1 1 0"
    ema = adaptive.state_for_batch(1).ema
    assert ema == 0.125
    assert steps_of_rounds(adaptive, 0, 0, 0) == "0 0 1"
    assert adaptive.state_for_batch(1) == SlotState(
        steps=1, ema=ema, num_rounds=8, has_drafted=True
    )
    assert steps_of_rounds(adaptive, 0, 0, 0) == "1 1 0"
    assert steps_of_rounds(adaptive, 0, 0, 0, 1, 1, 1) == "0 0 1 1 1 1"


def test_a_first_probe_begins_with_the_average_of_its_steps() -> None:
    adaptive = params(0, b1={"candidate_steps": [0, 3]}, ema_alpha=0.5)
    assert adaptive.state_for_batch(1) == SlotState(steps=0, ema=0.0, has_drafted=False)
    assert steps_of_rounds(adaptive, 0) == "3"
    assert adaptive.state_for_batch(1) == SlotState(
        steps=3, ema=2.0, num_rounds=1, has_drafted=True
    )
    assert steps_of_rounds(adaptive, 0, 0, 0, 0) == "3 3 0 3"
    assert adaptive.state_for_batch(1).ema == 0.25, "a later probe goes on with it"


def test_a_probe_brings_a_slot_back_that_its_ceiling_had_ended() -> None:
    """The threshold of 0.5 would have kept its drafts, as 0.6 of them were right."""
    adaptive = params(
        2,
        b1={"candidate_steps": [0, 2], "ceiling_coeff": 1.0, "down_hysteresis": 0},
        ema_alpha=0.5,
        update_interval=4,
    )
    adaptive.on_verify_complete([1, 0], 1)
    assert steps_of_rounds(adaptive, 1, 1, 1) == "2 2 0"
    assert adaptive.state_for_batch(1).ema > 0.5
    assert steps_of_rounds(adaptive, 0, 0, 0, 0, 2, 2, 2, 2, 2) == "0 0 0 2 2 2 2 2 2"


def test_a_slot_of_zero_alone_never_probes() -> None:
    adaptive = params(3, b1={"candidate_steps": [0]})
    assert steps_of_rounds(adaptive, *[0] * 20) == " ".join("0" * 20)


# ---------------------------------------------------------------- slots


def test_slots_do_not_hear_of_each_other() -> None:
    candidates = {"candidate_steps": [1, 3, 7]}
    adaptive = params(3, b1=candidates, b8=candidates, b32=candidates)
    untouched = adaptive.state_for_batch(1)
    adaptive.on_verify_complete([0] * 9, 9)
    adaptive.on_verify_complete([3] * 40, 64)
    assert [adaptive.get_steps_for_batch(size) for size in (7, 8, 31, 32, 999)] == [3, 1, 1, 7, 7]
    assert adaptive.state_for_batch(7) == untouched


def test_a_batch_belongs_to_the_slot_at_or_below_its_size() -> None:
    adaptive = params(
        3,
        b4={"candidate_steps": [7, 2]},
        b16={"candidate_steps": [1]},
        b100={"candidate_steps": [0, 1]},
    )
    served = {size: adaptive.config.candidates(size) for size in (4, 15, 16, 99, 100, 10**9)}
    assert list(served.values()) == [(2, 7), (2, 7), (1,), (1,), (0, 1), (0, 1)]
    assert adaptive.candidate_steps == (0, 1, 2, 7)


def test_the_first_slot_serves_smaller_batches_too() -> None:
    adaptive = params(3, b4={"candidate_steps": [2]}, b16={"candidate_steps": [1]})
    assert [adaptive.get_steps_for_batch(size) for size in (0, 1, 3)] == [2, 2, 2]


def test_padding_is_no_request() -> None:
    """Five requests replay the graph of eight."""
    adaptive = params(3, b1={"candidate_steps": [3]}, b8={"candidate_steps": [3]}, ema_alpha=0.5)
    adaptive.on_verify_complete([3] * 5, 8)
    assert adaptive.state_for_batch(8).ema == 2.5
    assert adaptive.state_for_batch(5).ema == 2.0


@pytest.mark.parametrize(
    ("initial", "candidates", "expected"),
    [
        (3, [1, 3, 7], 3),
        (5, [1, 3, 7], 3),
        (63, [1, 3, 7], 3),
        (2, [1, 3], 3),
        (3, [0, 1], 1),
        (3, [0, 1, 2], 1),
        (1, [0, 3], 3),
        (3, [0], 0),
        (0, [0, 1], 0),
    ],
)
def test_initial_steps_that_are_no_candidate_give_way_to_the_middle(
    initial: int, candidates: list[int], expected: int
) -> None:
    adaptive = params(initial, b1={"candidate_steps": candidates})
    assert adaptive.get_steps_for_batch(1) == expected
    assert adaptive.candidate_steps == tuple(candidates)


# ---------------------------------------------------------------- against the words of the rule


def eighths(least: int, most: int) -> st.SearchStrategy[float]:
    """Exact in binary, so that Fractions and floats agree."""
    return st.integers(least * 8, most * 8).map(lambda number: number / 8)


SLOTS = st.builds(
    lambda steps, up, down, coeff: slot(*sorted(steps), up=up, down=down, coeff=coeff),
    st.sets(st.integers(0, 8), min_size=1, max_size=5),
    eighths(-2, 2),
    eighths(-2, 2),
    st.sampled_from([0.0, 0.0, 0.25, 1.0, 1.5, 3.0]),
)


def read_decision(entry: AdaptiveSlot, current: int, ema: Fraction) -> int:
    """The rule said of all candidates at once, without a walk from rung to rung."""
    steps = entry.candidate_steps
    positive = [each for each in steps if each]
    if current == 0:
        return min(positive, default=0)
    up, down = Fraction(entry.up_hysteresis), Fraction(entry.down_hysteresis)
    half = Fraction(1, 2)

    def is_dropped(upper: int) -> bool:
        below = [each for each in steps if each < upper]
        if not below:
            return False
        lower = max(below)
        return ema <= (lower - half if lower else half) + down

    def is_outgrown(lower: int) -> bool:
        return lower < max(steps) and ema > lower - half + up

    kept = [each for each in steps if each <= current and not is_dropped(each)]
    target = max(kept, default=min(steps))
    if target == current:
        target = min(each for each in steps if each >= current and not is_outgrown(each))
    if entry.ceiling_coeff and 0 < target <= current:
        ceiling = max(1, math.ceil(ema * Fraction(entry.ceiling_coeff)))
        if target > ceiling:
            target = max((each for each in steps if each <= ceiling), default=min(steps))
    return target


@given(SLOTS, st.data())
@settings(max_examples=300, deadline=None)
def test_decisions_are_those_of_the_rule(entry: AdaptiveSlot, data: st.DataObject) -> None:
    current = data.draw(st.sampled_from(entry.candidate_steps))
    ema = data.draw(eighths(0, 9))
    assert next_steps(entry, current, ema) == read_decision(entry, current, Fraction(ema))


def replayed(entry: AdaptiveSlot, initial: int, rounds: list[tuple[int, int, int]]) -> list[int]:
    """Steps after each round (steps, correct drafts of two requests) of one slot, in Fractions."""
    steps = entry.candidate_steps
    current = initial if initial in steps else sorted(steps)[len(steps) // 2]
    ema = Fraction(current - 1) if current else None
    alpha, since_warm, after = Fraction(entry.ema_alpha), -entry.warmup_batches, []
    for ran, *correct in rounds:
        if ran == current:
            if ran and ema is not None:
                ema += alpha * (Fraction(sum(correct), 2) - ema)
            since_warm += 1
            if since_warm in range(entry.update_interval, 99, entry.update_interval):
                current = read_decision(entry, current, ema or Fraction(0))
                ema = Fraction(current - 1) if ema is None and current else ema
        after.append(current)
    return after


@given(SLOTS, SLOTS, st.data())
@settings(max_examples=150, deadline=None)
def test_histories_lead_where_the_rule_says(
    small: AdaptiveSlot, large: AdaptiveSlot, data: st.DataObject
) -> None:
    slots = {
        size: {
            "candidate_steps": list(entry.candidate_steps),
            "up_hysteresis": entry.up_hysteresis,
            "down_hysteresis": entry.down_hysteresis,
            "ceiling_coeff": entry.ceiling_coeff,
            "ema_alpha": data.draw(st.sampled_from([0.25, 0.5, 1.0])),
            "warmup_batches": data.draw(st.integers(0, 4)),
            "update_interval": data.draw(st.integers(1, 3)),
        }
        for size, entry in (("b1", small), ("b8", large))
    }
    read = config(**slots)
    initial = data.draw(st.integers(0, 8))
    adaptive = AdaptiveSpeculativeParams(initial, config=read)
    heard: dict[int, list[tuple[int, int, int]]] = {1: [], 8: []}
    found: dict[int, list[int]] = {1: [], 8: []}
    for size, lag, *shares in data.draw(
        st.lists(
            st.tuples(st.sampled_from([1, 8]), st.integers(0, 5), *[st.integers(0, 8)] * 2),
            max_size=20,
        )
    ):
        before = adaptive.get_steps_for_batch(size)
        steps = found[size][-2] if lag == 0 and len(found[size]) > 1 else before
        correct = [min(share, steps) for share in shares]
        has_switched = adaptive.on_verify_complete(correct, size, steps=steps)
        assert has_switched == (adaptive.get_steps_for_batch(size) != before)
        heard[size].append((steps, *correct))
        found[size].append(adaptive.get_steps_for_batch(size))
    for size, entry in zip((1, 8), read.slots, strict=True):
        assert found[size] == replayed(entry, initial, heard[size])
        assert set(found[size]) <= set(entry.candidate_steps)


# ---------------------------------------------------------------- configurations


def test_presets_are_the_published_ones() -> None:
    def listed(name: str | None) -> dict[int, tuple[Any, ...]]:
        return {
            entry.min_batch_size: (
                entry.candidate_steps,
                entry.up_hysteresis,
                entry.down_hysteresis,
                entry.ceiling_coeff,
            )
            for entry in read_adaptive_config(name).slots
        }

    conservative = {
        1: ((1, 3, 7), 0.0, -0.25, 0.0),
        8: ((1, 3), 0.0, 0.0, 0.0),
        32: ((1,), 0.0, 0.0, 0.0),
    }
    assert listed(None) == listed("conservative") == conservative
    assert listed("aggressive") == {
        1: ((1, 3, 7), 0.0, -0.25, 0.0),
        8: ((1, 3, 7), 0.0, -0.25, 3.0),
        64: ((1, 3), 0.0, -0.25, 1.67),
        128: ((1, 3), 0.0, -0.25, 1.2),
    }
    for name in PRESETS:
        read = read_adaptive_config(name)
        paces = {(s.ema_alpha, s.warmup_batches, s.update_interval) for s in read.slots}
        assert paces == {(0.2, 10, 5)}
        assert not read.warnings()


def test_by_default_the_first_decision_follows_the_fifteenth_round() -> None:
    adaptive = AdaptiveSpeculativeParams(3, None)
    steps = steps_of_rounds(adaptive, *[3] * 20)
    assert steps == " ".join("3" * 14 + "7" * 6)
    assert [adaptive.get_steps_for_batch(size) for size in (8, 32)] == [3, 1]


def test_slots_take_what_they_leave_out_from_beside_them_or_the_defaults() -> None:
    read = config(
        b1={"candidate_steps": [3, 1]},
        b8={"candidate_steps": [1], "up_hysteresis": 0, "ceiling_coeff": 2, "ema_alpha": 0.5},
        warmup_batches=4,
        up_hysteresis=0.5,
        ceiling_coeff=1.5,
    )
    assert read.slots == (
        AdaptiveSlot(
            min_batch_size=1,
            candidate_steps=(1, 3),
            up_hysteresis=0.5,
            down_hysteresis=-0.25,
            ceiling_coeff=1.5,
            ema_alpha=1.0,
            warmup_batches=4,
            update_interval=1,
        ),
        AdaptiveSlot(
            min_batch_size=8,
            candidate_steps=(1,),
            up_hysteresis=0.0,
            down_hysteresis=-0.25,
            ceiling_coeff=2.0,
            ema_alpha=0.5,
            warmup_batches=4,
            update_interval=1,
        ),
    )


def test_slots_are_sorted_by_number_not_by_text() -> None:
    read = config(b16={"candidate_steps": [1]}, b2={"candidate_steps": [3]})
    assert [entry.min_batch_size for entry in read.slots] == [2, 16]


def test_hysteresis_that_undoes_every_decision_is_warned_of() -> None:
    candidates = {"down_hysteresis": 0.25, "candidate_steps": [1, 3]}
    (warning,) = config(b1={"candidate_steps": [1, 3]}, b8=candidates).warnings()
    assert warning.startswith('slot "8": down_hysteresis 0.25 is above up_hysteresis 0')
    assert not config(b1=candidates | {"candidate_steps": [0, 1]}).warnings()


ONE = '"1": {"candidate_steps": [1]}'
MISTAKES: list[tuple[str, str]] = [
    # content, what the message has behind the file's name
    ("", " is not valid JSON: Expecting value, line 1, column 1."),
    ("{" + ONE, " is not valid JSON: "),
    ("[1]", " must be an object, not a list."),
    ("null", " must be an object, not null."),
    ("[" * 50_000, " is nested too deeply"),
    ('{"1":' * 10_000, " is nested too deeply"),
    ("{}", ' has no slot; give at least one, such as "1"'),
    ('{"ema_alpha": 0.5}', " has no slot"),
    ("{" + ONE + "," + ONE + "}", ': "1" is there 2 times; keep one.'),
    ('{"ema_alpha": 1, "ema_alpha": 1, ' + ONE + "}", ': "ema_alpha" is there 2 times'),
    ('{"1": {"candidate_steps": [1], "candidate_steps": [1]}}', ', slot "1": "candidate_steps" is'),
    ("{" + ONE + ', "01": {"candidate_steps": [1]}}', ', slots "1" and "01" are for the same'),
    ('{"0": {"candidate_steps": [1]}}', ', slot "0": a slot is the least batch size that it'),
    ('{"-8": {"candidate_steps": [1]}}', ', slot "-8": a slot is the least batch size'),
    ('{"1000001": {}}', ', slot "1000001": a slot is the least batch size'),
    ('{"' + "9" * 5000 + '": {}}', ', slot "' + "9" * 39 + "...: a slot is the least batch size"),
    ('{"8.0": {}}', ': "8.0" is not a known key; there are ceiling_coeff, down_hysteresis, ema_al'),
    ('{"１": {}}', ': "\\uff11" is not a known key'),
    ('{"1_0": {}}', ': "1_0" is not a known key'),
    ("{" + ONE + ', "candidate_steps": [1]}', ': "candidate_steps" is not a known key'),
    ('{"a\x7f": 1}', ': "a\\u007f" is not a known key'),
    ('{"a\\nb": 1}', ': "a\\nb" is not a known key'),
    ('{"1": {"candidate_steps": [1], "ema_alpha": 2}}', ', slot "1": ema_alpha must be a number'),
    ('{"1": {"candidate_step": [1]}}', ', slot "1": "candidate_step" is not a known key; there ar'),
    ('{"1": {}}', ', slot "1": candidate_steps is missing; give a list of different integers'),
    ('{"1": [1, 3]}', ', slot "1" must be an object, not a list.'),
    ('{"1": 3}', ', slot "1" must be an object, not 3.'),
]
MISTAKES += [
    (f'{{"8": {{"candidate_steps": {steps}}}}}', f', slot "8": candidate_steps{message}')
    for steps, message in [
        ("3", " must be a list of different integers from 0 to 63, at least one, not 3."),
        ('{"1": 1}', " must be a list of different integers"),
        ("[]", " is empty; it must be a list of different integers from 0 to 63"),
        ("[1, 3, 1]", " has 1 twice"),
        ("[1, 1.5]", "[1] must be an integer from 0 to 63, not 1.5."),
        ("[1.0]", "[0] must be an integer from 0 to 63, not 1.0."),
        ("[64]", "[0] must be an integer from 0 to 63, not 64."),
        ("[-1]", "[0] must be an integer from 0 to 63, not -1."),
        ("[true]", "[0] must be an integer from 0 to 63, not true."),
        ("[null]", "[0] must be an integer from 0 to 63, not null."),
        ("[NaN]", "[0] must be an integer from 0 to 63, not NaN."),
        ('["1"]', '[0] must be an integer from 0 to 63, not "1".'),
        ("[[1]]", "[0] must be an integer from 0 to 63, not a list."),
        (f"[{'9' * 5000}]", "[0] must be an integer from 0 to 63, not Infinity."),
    ]
]
MISTAKES += [
    (f'{{"8": {{"candidate_steps": [1], "{key}": {value}}}}}', f', slot "8": {key} must be a num')
    for key in ("up_hysteresis", "down_hysteresis", "ceiling_coeff")
    for value in ("NaN", "Infinity", "-Infinity", "1e999", "true", "null", '"0"', "[0]", "9" * 400)
]
MISTAKES += [
    (f"{{{ONE}, {entry}}}", f": {entry[1:].partition(chr(34))[0]} must be {allowed}")
    for entry, allowed in [
        ('"ema_alpha": 0', "a number above 0 and up to 1, not 0."),
        ('"ema_alpha": -0.5', "a number above 0 and up to 1, not -0.5."),
        ('"ema_alpha": 1.01', "a number above 0 and up to 1, not 1.01."),
        ('"ema_alpha": NaN', "a number above 0 and up to 1, not NaN."),
        ('"ema_alpha": true', "a number above 0 and up to 1, not true."),
        ('"warmup_batches": -1', "an integer from 0 to 1000000, not -1."),
        ('"warmup_batches": 1.5', "an integer from 0 to 1000000, not 1.5."),
        ('"warmup_batches": false', "an integer from 0 to 1000000, not false."),
        ('"warmup_batches": Infinity', "an integer from 0 to 1000000, not Infinity."),
        ('"update_interval": 0', "an integer from 1 to 1000000, not 0."),
        ('"update_interval": -5', "an integer from 1 to 1000000, not -5."),
        ('"update_interval": true', "an integer from 1 to 1000000, not true."),
        ('"up_hysteresis": 63.5', "a number from -63 to 63, in drafts, not 63.5."),
        ('"down_hysteresis": -64', "a number from -63 to 63, in drafts, not -64."),
        ('"ceiling_coeff": -0.1', "a number from 0, which is off, to 1000, not -0.1."),
        ('"ceiling_coeff": 1001', "a number from 0, which is off, to 1000, not 1001."),
        ('"ceiling_coeff": {}', "a number from 0, which is off, to 1000, not an object."),
    ]
]


@pytest.mark.parametrize(
    ("content", "message"), MISTAKES, ids=[f"{content:.60}" for content, _ in MISTAKES]
)
def test_a_mistake_is_one_line_that_names_file_slot_and_key(
    content: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "steps.json"
    path.write_text(content, encoding="utf-8")
    with pytest.raises(AdaptiveConfigError) as caught:
        AdaptiveSpeculativeParams(3, str(path))
    text = str(caught.value)
    assert text.startswith(f"--speculative-adaptive-config {path}{message}")
    assert text.isprintable()
    assert len(text) < 300 + len(str(path))


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    large, binary = tmp_path / "large.json", tmp_path / "binary.json"
    large.write_text("{" + ONE + "}" + " " * MAX_CONFIG_BYTES)
    binary.write_bytes(b"\xff\xfe{}")
    for path, message in [
        (tmp_path, "is no file, and none of the presets conservative and aggressive."),
        (tmp_path / "none.json", "is no file, and none of the presets"),
        ("Conservative", "is no file, and none of the presets"),
        ("", "is no file, and none of the presets"),
        ("x" * 5000, "cannot be read: File name too long."),
        (large, f"is larger than {MAX_CONFIG_BYTES} bytes, the most that is read of it."),
        (binary, "is not text in UTF-8."),
    ]:
        with pytest.raises(AdaptiveConfigError) as caught:
            read_adaptive_config(str(path))
        assert str(caught.value).startswith(f"--speculative-adaptive-config {path} {message}")
    with pytest.raises(AdaptiveConfigError, match=r"'a\\nb\\x00' is no file"):
        read_adaptive_config("a\nb\0")


def test_a_file_of_a_presets_name_is_reached_by_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "aggressive").write_text("\ufeff{" + ONE + "}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    assert len(read_adaptive_config("aggressive").slots) == 4
    assert len(read_adaptive_config("./aggressive").slots) == 1


ENTRY_NAMES = ["1", "8", "08", "candidate_steps", "ema_alpha", "ceiling_coeff"]
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(0, 70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.sampled_from(ENTRY_NAMES), inner, max_size=3)
    ),
    max_leaves=6,
)


@pytest.mark.long_matrix
@given(st.dictionaries(st.sampled_from(ENTRY_NAMES), JSON_VALUES, max_size=3) | JSON_VALUES)
@settings(max_examples=100, deadline=None)
def test_whatever_a_file_says_is_read_or_refused_on_one_line(value: Any) -> None:
    refusal = "none"
    try:
        read = parse_adaptive_config(json.dumps(value).encode(), "FILE")
        assert AdaptiveSpeculativeParams(3, config=read).candidate_steps
    except AdaptiveConfigError as error:
        refusal = str(error)
    assert refusal.isprintable()


def test_it_loads_no_torch() -> None:
    module = "sglang.srt.lookahead.ema"
    assert not modules_that_load([module], HEAVY_MODULES, ROOT / "python")
