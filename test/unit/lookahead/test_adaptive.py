"""Steps by slot: the rule against its words, the rule as a server's policy, which graphs its tiers
have, and every mistake of a configuration."""

from __future__ import annotations

import json
import math
import random
from collections import Counter, deque
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from policy_steps import drafted, drafting_step
from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.lookahead.adaptive_config import (
    MAX_CONFIG_BYTES,
    PRESETS,
    AdaptiveConfig,
    AdaptiveSlot,
    parse_adaptive_config,
    read_adaptive_config,
)
from sglang.srt.lookahead.ema import AdaptiveController, AdaptiveSpeculativeParams
from sglang.srt.lookahead.length_policy import PolicyParts
from sglang.srt.lookahead.round_options import ALL_BATCH_SIZES, RoundOptions
from sglang.srt.model_executor.graph_keys import GraphKeys
from simulated_rounds import LAG

MAX_REQUESTS = 200
HIDDEN = 32


def drawn_slot(luck: random.Random) -> dict[str, Any]:
    """A slot of a file. All numbers are exact in binary, so that fractions and floats agree."""
    return {
        "candidate_steps": luck.sample(range(9), luck.randint(1, 5)),
        "up_hysteresis": luck.randint(-8, 8) / 8,
        "down_hysteresis": luck.randint(-8, 8) / 8,
        "ceiling_coeff": luck.choice([0.0, 0.0, 0.25, 1.0, 1.5, 3.0]),
        "ema_alpha": luck.choice([0.25, 0.5, 1.0]),
        "warmup_batches": luck.randint(0, 4),
        "update_interval": luck.randint(1, 3),
    }


def config_of(slots: dict[int, dict[str, Any]], **beside: Any) -> AdaptiveConfig:
    entries = {**beside, **{str(size): slot for size, slot in slots.items()}}
    return parse_adaptive_config(json.dumps(entries).encode(), "FILE")


def decided(slot: AdaptiveSlot, current: int, ema: Fraction) -> int:
    """The rule said of all candidates at once, without a walk by rungs."""
    steps, half = slot.candidate_steps, Fraction(1, 2)
    if current == 0:
        return min((each for each in steps if each), default=0)
    up, down = Fraction(slot.up_hysteresis), Fraction(slot.down_hysteresis)

    def is_dropped(upper: int) -> bool:
        lower = max((each for each in steps if each < upper), default=None)
        return lower is not None and ema <= (lower - half if lower else half) + down

    def is_outgrown(lower: int) -> bool:
        return lower < max(steps) and ema > lower - half + up

    target = max((each for each in steps if each <= current and not is_dropped(each)), default=None)
    target = min(steps) if target is None else target
    if target == current:
        target = min(each for each in steps if each >= current and not is_outgrown(each))
    if slot.ceiling_coeff and 0 < target <= current:
        ceiling = max(1, math.ceil(ema * Fraction(slot.ceiling_coeff)))
        target = max((each for each in steps if each <= min(target, ceiling)), default=min(steps))
    return target


@dataclass
class ByHand:
    """A slot's history in fractions."""

    slot: AdaptiveSlot
    steps: int
    ema: Fraction
    num_rounds: int = 0
    has_drafted: bool = field(init=False)

    def __post_init__(self) -> None:
        candidates = self.slot.candidate_steps
        if self.steps not in candidates:
            self.steps = sorted(candidates)[len(candidates) // 2]
        self.ema, self.has_drafted = Fraction(max(0, self.steps - 1)), self.steps > 0

    def hear(self, steps: int, correct: list[int]) -> bool:
        """Returns whether the steps have changed."""
        slot, before = self.slot, self.steps
        if not correct or steps != before:
            return False
        if steps:
            mean = Fraction(sum(correct), len(correct))
            self.ema += Fraction(slot.ema_alpha) * (mean - self.ema)
        self.num_rounds += 1
        warm = self.num_rounds - slot.warmup_batches
        if warm in range(slot.update_interval, 10**6, slot.update_interval):
            self.steps = decided(slot, before, self.ema)
            if self.steps and not self.has_drafted:
                self.ema, self.has_drafted = Fraction(self.steps - 1), True
        return self.steps != before


def test_a_policy_has_the_history_of_the_rule_round_by_round() -> None:
    """Rounds are heard some steps later, for the slot of the size that they were padded to; slots
    hear nothing of each other. Those who take fewer drafts than all say nothing, and without drafts
    each request counts. Rounds in which nobody says anything, or of steps that were chosen before
    the last decision, are ignored."""
    luck, pad = random.Random(1), GraphKeys(GraphSupport.RAGGED_Q, MAX_REQUESTS, 4, 0).decode_size
    seen = Counter[str]()
    for _ in range(120):
        starts, initial = sorted(luck.sample(range(1, 160), luck.randint(1, 4))), luck.randint(0, 8)
        config = config_of({start: drawn_slot(luck) for start in starts})
        options = RoundOptions(8, initial_steps=initial, adaptive=config)
        policy = AdaptiveController(PolicyParts(options=options, graph_size=pad))
        slots = config.slots.values()
        tiers = tuple(sorted({steps for slot in slots for steps in slot.candidate_steps}))
        assert AdaptiveController.tiers(options) == policy.candidate_steps == tiers
        by_hand = [ByHand(slot, initial, Fraction(0)) for slot in config.slots.values()]
        slot_of = {
            size: by_hand[max(0, sum(start <= pad(size) for start in starts) - 1)]
            for size in range(1, MAX_REQUESTS + 1)
        }
        assert policy.settled == slot_of[1].steps, "before the first round"
        unread = deque[tuple[int, int]]()
        for _ in range(60):
            num_reqs = luck.choice([luck.randint(1, 12), luck.randint(1, 170)])
            tier = policy.choose(drafting_step(num_reqs)).limit - 1
            assert tier == policy.settled == slot_of[num_reqs].steps
            unread.append((tier, num_reqs))
            if len(unread) <= LAG:
                continue
            tier, num_reqs = unread.popleft()
            tried = [luck.choice([tier, tier, 0, luck.randint(0, tier)]) for _ in range(3)]
            right = [luck.randint(0, count) for count in tried]
            whole = [own for own, count in zip(right, tried, strict=True) if count == tier]
            correct = whole if tier else [0] * num_reqs
            is_late = tier != slot_of[num_reqs].steps
            has_switched = slot_of[num_reqs].hear(tier, correct)
            if luck.random() < 0.5:
                policy.observe(drafted(tier, num_reqs, tried, right))
            else:
                told = tier if is_late or luck.random() < 0.5 else None
                assert policy.on_verify_complete(correct, num_reqs, steps=told) == has_switched
            seen.update({"late": is_late, "empty": not correct, "switches": has_switched})
        policy.observe(drafted(tiers[-1], None, [0], [0]))  # a step that drafts for nobody
        # Drafts of a request that had waited for its grammar, from a step that drafted for nobody.
        policy.observe(drafted(tiers[-1], 0, [tiers[-1]], [0]))
        for size, each in slot_of.items():
            state = policy.state_for_batch(size)
            assert (state.steps, state.num_rounds) == (each.steps, each.num_rounds)
            if each.has_drafted:
                assert state.ema == pytest.approx(float(each.ema), abs=1e-9)
    assert min(seen["late"], seen["empty"], seen["switches"]) > 100, seen


# ---------------------------------------------------------------- what tiers own


def test_each_tier_owns_the_batch_sizes_that_may_have_it_and_finds_its_graphs() -> None:
    """Searches all sizes. Draft steps have the graphs that some batch needs, and no other
    ones. A tier that no slot has, such as 0 of the throughput strategy, owns nothing."""
    luck = random.Random(3)
    for max_requests in (1, 3, 13, *luck.sample(range(1, MAX_REQUESTS), 20)):
        starts = sorted(luck.sample(range(1, 161), luck.randint(1, 5)))
        adaptive = config_of({start: drawn_slot(luck) for start in starts})
        pad = GraphKeys(GraphSupport.RAGGED_Q, max_requests, 4, 0).decode_size
        every = (1, 2, 4, *range(8, 129, 8), *range(144, MAX_REQUESTS, 16))
        sizes = {max_requests, *(each for each in every if each <= max_requests)}
        assert pad(max_requests + 1) == max_requests + 1, "no graph"
        for tier, state in RoundOptions(8, "load_aware", adaptive=adaptive).states.items():
            for num_reqs in range(1, MAX_REQUESTS + 1):
                served = max((each for each in starts if each <= num_reqs), default=starts[0])
                slot = adaptive.slots[served]
                assert adaptive.slot(num_reqs) == slot
                owns = sum(num_reqs in sizes for sizes in state.batch_sizes)
                assert owns == (tier in slot.candidate_steps)
            steps = max(1, tier)
            keys = GraphKeys.of_draft_steps(max_requests, HIDDEN, steps, state.batch_sizes)
            padded = {
                n: min(size for size in sizes if size >= n) for n in range(1, max_requests + 1)
            }
            needed = {n: m for n, m in padded.items() if tier in adaptive.slot(m).candidate_steps}
            assert all(pad(num_reqs) == size for num_reqs, size in padded.items())
            for num_reqs, size in needed.items():
                key = keys.find_shape(num_reqs, 1, num_reqs, hidden_width=HIDDEN)
                assert key is not None
                assert (key.num_reqs, key.num_tokens, key.num_steps) == (size, size, steps)
            assert {key.num_reqs for key in keys.all} == {*needed.values()}
            assert (state.speculative_num_steps, state.num_draft_steps) == (tier, max(0, tier - 1))
    assert GraphKeys(GraphSupport.NEVER, 8, 4).decode_size(3) == 3
    states = RoundOptions(3, "load_aware").states
    assert [each.batch_sizes for each in states.values()] == [ALL_BATCH_SIZES] * 4


# ---------------------------------------------------------------- configurations


def test_presets_are_the_published_ones() -> None:
    pace = {"ema_alpha": 0.2, "warmup_batches": 10, "update_interval": 5}
    one, two, three = ({"candidate_steps": [1, 3, 7][:count]} for count in (1, 2, 3))
    flat = {"down_hysteresis": 0}
    published = {
        "conservative": {1: three, 8: two | flat, 32: one | flat},
        "aggressive": {
            size: steps | {"ceiling_coeff": coeff}
            for size, steps, coeff in (
                (1, three, 0),
                (8, three, 3),
                (64, two, 1.67),
                (128, two, 1.2),
            )
        },
    }
    assert {*PRESETS} == {*published}
    for name, slots in published.items():
        assert read_adaptive_config(name) == config_of(slots, **pace)
        assert not read_adaptive_config(name).warnings()
    assert read_adaptive_config(None) == read_adaptive_config("conservative")


def test_hysteresis_that_undoes_every_decision_is_warned_of() -> None:
    restless = {"down_hysteresis": 0.25, "candidate_steps": [1, 3]}
    (warning,) = config_of({1: {"candidate_steps": [1, 3]}, 8: restless}).warnings()
    assert warning.startswith('slot "8": down_hysteresis 0.25 is above up_hysteresis 0')
    assert not config_of({1: restless | {"candidate_steps": [0, 1]}}).warnings()


ONE = '"1": {"candidate_steps": [1]}'
KEYS = (
    "up_hysteresis, down_hysteresis, ceiling_coeff, ema_alpha, warmup_batches, update_interval nor"
    " a slot, the least batch size that it serves, from 1 to 999999."
)
MISTAKES: list[tuple[str, str]] = [
    # content, what the message has after the file's name
    ("{" + ONE, " is not valid JSON: "),
    ("null", ": Expected `object`, got `null`."),
    ('{"1":' * 10_000, " is not valid JSON: maximum recursion depth"),
    ('{"ema_alpha": 0.5}', ' has no slot; give one, as "1": {'),
    ("{" + ONE + "," + ONE + "}", " is not valid JSON: '1' is there twice."),
    ('{"1": {"ema_alpha": 1, "ema_alpha": 1}}', " is not valid JSON: 'ema_alpha' is there twice."),
    ("{" + ONE + ', "01": {"candidate_steps": [1]}}', ': "01" is neither ' + KEYS),
    ('{"0": {"candidate_steps": [1]}}', f': "0" is neither {KEYS}'),
    ('{"-8": {"candidate_steps": [1]}}', f': "-8" is neither {KEYS}'),
    ('{"1000000": {}}', f': "1000000" is neither {KEYS}'),
    ('{"' + "9" * 5000 + '": {}}', ': "' + "9" * 199 + f" is neither {KEYS}"),
    ('{"8.0": {}}', f': "8.0" is neither {KEYS}'),
    ('{"１": {}}', f': "\\uff11" is neither {KEYS}'),
    ("{" + ONE + ', "candidate_steps": [1]}', f': "candidate_steps" is neither {KEYS}'),
    ('{"a\x7f": 1}', f': "a\\u007f" is neither {KEYS}'),
    ('{"\\ud800": 1}', f': "\\ud800" is neither {KEYS}'),
    ('{"1": {"a\x7f": 1}}', ', slot "1": Object contains unknown field `a\\x7f`.'),
    ('{"1": {"\\ud800": 1}}', ", slot \"1\": 'utf-8' codec can't encode character"),
    ('{"1": {"min_batch_size": 1}}', ', slot "1": Object contains unknown field `min_batch_size`'),
    ('{"1": {}}', ', slot "1": Object missing required field `candidate_steps`.'),
    ('{"1": [1, 3]}', ', slot "1": Expected `object`, got `array`.'),
    ('{"8": {"candidate_steps": []}}', ', slot "8": Expected `array` of length >= 1, in `candida'),
    ('{"8": {"candidate_steps": [1, 3, 1]}}', ', slot "8": candidate_steps has a number twice'),
]
MISTAKES += [
    (f'{{"8": {{"candidate_steps": [1, {value}]}}}}', f', slot "8": Expected `int`{message}')
    for value, message in [
        ("1.0", ", got `float`, in `candidate_steps[1]`."),
        ("9" * 400, " <= 63, in `candidate_steps[1]`."),
        ("64", " <= 63, in `candidate_steps[1]`."),
        ("-1", " >= 0, in `candidate_steps[1]`."),
        ("true", ", got "),
    ]
]
BAD_NUMBERS = ("NaN", "-Infinity", "1e999", "true", "null", '"0"', "[0]", "9" * 400)
NAMED = [
    (key, value)
    for key, more in [
        ("ema_alpha", ("0", "-0.5", "1.01")),
        ("warmup_batches", ("-1", "1.5", "1000001")),
        ("update_interval", ("0", "1.0", "1000001")),
        ("up_hysteresis", ("63.5", "-64")),
        ("down_hysteresis", ("63.5", "-64")),
        ("ceiling_coeff", ("-0.1", "1001", "{}")),
    ]
    for value in (*BAD_NUMBERS, *more)
]


def test_a_mistake_is_one_line_that_names_file_slot_and_key(tmp_path: Path) -> None:
    path = tmp_path / "steps.json"
    for content, message in MISTAKES:
        path.write_text(content, encoding="utf-8")
        with pytest.raises(ValueError) as caught:
            AdaptiveSpeculativeParams(3, str(path))
        text = str(caught.value)
        assert text.startswith(f"--speculative-adaptive-config {path}{message}"), content[:80]
        assert text.isprintable()
        assert len(text) < 450 + len(str(path))
    for key, value in NAMED:
        for content, place in [
            (f'{{"8": {{"candidate_steps": [1], "{key}": {value}}}}}', 'FILE, slot "8"'),
            (f'{{{ONE}, "{key}": {value}}}', "FILE"),
        ]:
            with pytest.raises(ValueError, match=f"^{place}: .*in `{key}`.$"):
                parse_adaptive_config(content.encode(), "FILE")


def test_a_file_that_cannot_be_read_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file of a preset's name is reached by a path."""
    (tmp_path / "large.json").write_text("{" + ONE + "}" + " " * MAX_CONFIG_BYTES)
    (tmp_path / "binary.json").write_bytes(b"\xff\xfe{}")
    (tmp_path / "aggressive").write_text("\ufeff{" + ONE + "}", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    for name, message in [
        ("Conservative", "cannot be read: No such file or directory; presets are conservative and"),
        ("", "cannot be read: Is a directory; presets are"),
        ("x" * 5000, "cannot be read: File name too long;"),
        ("large.json", f"is larger than {MAX_CONFIG_BYTES} bytes, the most that is read of it;"),
        ("binary.json", "is not valid JSON: 'utf-8' codec can't decode byte 0xff"),
        ("a\nb\0", "cannot be read: "),
    ]:
        with pytest.raises(ValueError) as caught:
            read_adaptive_config(name)
        told = name if name.isprintable() else repr(name)
        assert str(caught.value).startswith(f"--speculative-adaptive-config {told} {message}")
    assert len(read_adaptive_config("aggressive").slots) == 4
    assert len(read_adaptive_config("./aggressive").slots) == 1
