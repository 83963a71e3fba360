"""The flags `--speculative-adaptive...`: how many drafts which batches may have, and by what."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from draft_heads import write_eagle
from sglang.srt.environ import Environ
from sglang.srt.lookahead.adaptive_config import CONFIG_FLAG, MAX_BATCH_SIZE
from sglang.srt.lookahead.round_options import ALL_BATCH_SIZES, RoundOptions
from sglang.srt.processes.runtime_config import RuntimeConfig
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter_configs import EagleConfig
from speculation_flags_cases import refusal, resolved

FILE = "steps.json"  # of the case's entries
ON = {"algorithm": "EAGLE", "adaptive": True}
NO_HEAD = {"draft_model_path": "nowhere"}  # it is not looked at before the other flags
BY_EMA = {"adaptive_strategy": "ema"}
NUM_STEPS = "--speculative-num-steps"
CONSERVATIVE = {2: (range(1, 8), range(8, 32)), 6: (range(1, 8),)}
AGGRESSIVE = {
    2: (range(1, 8), range(8, 64), range(64, 128), range(128, MAX_BATCH_SIZE)),
    6: (range(1, 8), range(8, 64)),
}
OWN = {"4": {"candidate_steps": [2, 0, 1]}, "16": {"candidate_steps": [5, 0]}}
OF_OWN = {1: (range(1, 16),), 4: (range(16, MAX_BATCH_SIZE),)}
ANY = dict.fromkeys((1, 2, 4, 6), ALL_BATCH_SIZES)
UNDOING = {"candidate_steps": [1, 3], "down_hysteresis": 0.5, "up_hysteresis": 0.25}
WARNED = f"{CONFIG_FLAG} {FILE}"


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_eagle(tmp_path_factory.mktemp("head")))


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the folder that holds FILE; messages have the name as it was given."""
    monkeypatch.chdir(tmp_path)


def write(entries: Any) -> None:
    text = entries if isinstance(entries, str) else json.dumps(entries)
    Path(FILE).write_text(text, encoding="utf-8")


def options_of(config: RuntimeConfig) -> RoundOptions:
    assert config.drafter is not None
    options = config.drafter.options
    assert isinstance(options, EagleConfig)
    return options.rounds


@pytest.mark.parametrize(
    ("flags", "policy", "tiers", "initial", "draft_steps"),
    [
        ({}, "load_aware", (0, 1, 2, 3, 5, 7), 3, ANY),
        ({"adaptive_strategy": "auto"}, "load_aware", (0, 1, 2, 3, 5, 7), 3, ANY),
        ({"adaptive_strategy": "ema"}, "adaptive", (1, 3, 7), 3, CONSERVATIVE),
        ({"adaptive_config": "conservative"}, "adaptive", (1, 3, 7), 3, CONSERVATIVE),
        (
            {"adaptive_config": "conservative", "adaptive_strategy": "auto"},
            "adaptive",
            (1, 3, 7),
            3,
            CONSERVATIVE,
        ),
        ({"adaptive_config": "aggressive"}, "adaptive", (1, 3, 7), 3, AGGRESSIVE),
        ({"num_steps": 1, "eagle_topk": 1}, "load_aware", (0, 1, 2, 3, 5, 7), 1, ANY),
        ({"num_draft_tokens": 8}, "load_aware", (0, 1, 2, 3, 5, 7), 7, ANY),
        ({**BY_EMA, "num_steps": 7}, "adaptive", (1, 3, 7), 7, CONSERVATIVE),
        ({**BY_EMA, "num_steps": 1, "eagle_topk": 1}, "adaptive", (1, 3, 7), 1, CONSERVATIVE),
        ({**BY_EMA, "num_draft_tokens": 8}, "adaptive", (1, 3, 7), 7, CONSERVATIVE),
        ({"adaptive_config": FILE}, "adaptive", (0, 1, 2, 5), 2, OF_OWN),
        ({"adaptive_config": FILE, "num_steps": 5}, "adaptive", (0, 1, 2, 5), 5, OF_OWN),
        ({"adaptive_strategy": "throughput"}, "load_aware", (0, 1, 2, 3, 5, 7), 3, ANY),
        (
            {"adaptive_strategy": "throughput", "num_steps": 1},
            "load_aware",
            (0, 1, 2, 3, 5, 7),
            1,
            ANY,
        ),
        (
            {"adaptive_strategy": "throughput", "num_steps": 12},
            "load_aware",
            (0, 1, 2, 3, 5, 9, 12),
            12,
            dict.fromkeys((1, 2, 4, 8, 11), ALL_BATCH_SIZES),
        ),
        (
            {"adaptive_strategy": "throughput", "adaptive_config": "conservative"},
            "load_aware",
            (0, 1, 3, 7),
            3,
            CONSERVATIVE,
        ),
        (
            {"adaptive_strategy": "throughput", "adaptive_config": FILE, "num_steps": 1},
            "load_aware",
            (0, 1, 2, 5),
            1,
            OF_OWN,
        ),
    ],
)
def test_policy_and_tiers_follow_from_strategy_configuration_and_steps(
    target: Path,
    head: str,
    flags: dict[str, Any],
    policy: str,
    tiers: tuple[int, ...],
    initial: int,
    draft_steps: dict[int, tuple[range, ...]],
) -> None:
    write(OWN)
    config = resolved(target, draft_model_path=head, **ON, **flags)
    options = options_of(config)
    assert options.tier_policy == policy
    assert options.policy.tiers(options) == config.scheduler.draft_tiers == tiers
    assert options.initial == config.scheduler.num_draft_steps == initial
    needs = config.needs
    assert (needs.max_drafts, needs.max_rows) == (tiers[-1], 1 + tiers[-1])
    assert needs.needs_prices == (policy == "load_aware")
    [model] = drafter_models(config.drafter, config.execution)
    assert model.draft_steps == draft_steps


def test_slots_of_the_file_reach_the_policy(target: Path, head: str) -> None:
    write({"ema_alpha": 0.5, **OWN})
    config = resolved(target, draft_model_path=head, adaptive_config=FILE, **ON)
    adaptive = options_of(config).adaptive
    assert adaptive is not None
    assert [slot.ema_alpha for slot in adaptive.slots.values()] == [0.5, 0.5]
    candidates = {key: slot.candidate_steps for key, slot in adaptive.slots.items()}
    assert candidates == {4: (0, 1, 2), 16: (0, 5)}


EAGLE = {"algorithm": "EAGLE"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"adaptive_config": "aggressive"}, f"{CONFIG_FLAG} needs --speculative-algorithm "),
        (
            {"adaptive_strategy": "ema"},
            "--speculative-adaptive-strategy needs --speculative-algorithm ",
        ),
        ({**EAGLE, "adaptive_config": FILE}, f"{CONFIG_FLAG} needs --speculative-adaptive; "),
        (
            {**EAGLE, "adaptive_strategy": "throughput"},
            "--speculative-adaptive-strategy needs --speculative-adaptive; ",
        ),
        (
            {**ON, "load_aware": "on"},
            "--speculative-adaptive decides how many tokens are drafted, as"
            " --speculative-load-aware does; leave out one of them.",
        ),
        (
            {**ON, "load_aware": "off"},
            "--speculative-adaptive decides how many tokens are drafted, as"
            " --speculative-load-aware does; leave out one of them.",
        ),
        (
            {**ON, **BY_EMA, "num_steps": 5},
            f"{NUM_STEPS} 5 drafts 5 tokens, but the candidate_steps of {CONFIG_FLAG} conservative"
            " are 1, 3, 7; change it or leave it out.",
        ),
        (
            {**ON, **BY_EMA, "num_draft_tokens": 5},
            "--speculative-num-draft-tokens 5 drafts 4 tokens, but the candidate_steps of"
            f" {CONFIG_FLAG} conservative are 1, 3, 7; change it or leave it out.",
        ),
        ({**ON, "num_steps": 0}, f"{NUM_STEPS} 0 must be a whole number from 1 to 63"),
        (
            {**ON, "adaptive_config": "none.json"},
            f"{CONFIG_FLAG} none.json cannot be read: No such file",
        ),
        (ON, "--speculative-algorithm EAGLE needs --speculative-draft-model-path"),
    ],
)
def test_flags_that_do_not_go_together_are_named(
    target: Path, flags: dict[str, Any], said: str
) -> None:
    write(OWN)
    head = {} if flags is ON or "algorithm" not in flags else NO_HEAD
    assert said in refusal(target, **flags, **head)


@pytest.mark.parametrize("strategy", [None, "throughput"])
@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ('{"1": ', "is not valid JSON"),
        ({}, "has no slot"),
        ({"1": {}}, 'slot "1": Object missing required field `candidate_steps`'),
        (
            {"8": {"candidate_steps": [1, -1]}},
            'slot "8": Expected `int` >= 0, in `candidate_steps[1]`',
        ),
        (
            {"8": {"candidate_steps": [1], "ceiling": 1}},
            'slot "8": Object contains unknown field `ceiling`',
        ),
        (
            {"1": {"candidate_steps": [1]}, "ema_alpha": 2},
            "Expected `float` <= 1.0, in `ema_alpha`",
        ),
        ({"0": {"candidate_steps": [1]}}, ': "0" is neither '),
        (
            {"1": {"candidate_steps": [0]}, "8": {"candidate_steps": [0]}},
            "drafts nothing: no slot has candidate_steps above 0; give one",
        ),
    ],
)
def test_a_mistake_of_the_file_ends_the_start_with_its_name_slot_and_key(
    target: Path, strategy: str | None, entries: Any, said: str
) -> None:
    write(entries)
    text = refusal(target, adaptive_config=FILE, adaptive_strategy=strategy, **ON, **NO_HEAD)
    assert text.startswith(f"{CONFIG_FLAG} {FILE}")
    assert said in text


@pytest.mark.parametrize(
    ("flags", "num_steps"),
    [
        ({}, 3),
        ({"num_steps": 5}, 5),
        ({"adaptive_config": "aggressive"}, 3),
        ({"adaptive_strategy": "throughput"}, 3),
    ],
)
def test_where_acceptance_is_simulated_steps_are_fixed_and_one_warning_says_so(
    target: Path,
    head: str,
    flags: dict[str, Any],
    num_steps: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING)
    environ = Environ(simulated_accept_len=2.5)
    config = resolved(target, environ, draft_model_path=head, **ON, **flags)
    options = options_of(config)
    assert options.tier_policy == "fixed"
    assert options.policy.tiers(options) == (num_steps,)
    assert config.needs.max_drafts == config.scheduler.num_draft_steps == num_steps
    [warning] = [text for text in caplog.messages if "adaptive" in text]
    assert warning == (
        "--speculative-adaptive has no effect here: SGLANG_SIMULATE_ACC_LEN says how many drafts"
        " are right, so all are verified."
    )


@pytest.mark.parametrize("strategy", [None, "throughput"])
def test_what_is_hardly_meant_is_warned_of(
    target: Path, head: str, strategy: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """Each slot on a line, which names file, slot and keys."""
    write({"1": UNDOING, "8": {"candidate_steps": [1, 3]}, "32": UNDOING})
    caplog.set_level(logging.WARNING)
    flags = {"adaptive_config": FILE, "adaptive_strategy": strategy}
    resolved(target, draft_model_path=head, **ON, **flags)
    warnings = [text for text in caplog.messages if "hysteresis" in text]
    assert len(warnings) == 2
    for text, slot in zip(warnings, ("1", "32"), strict=True):
        assert text.startswith(f'{WARNED}: slot "{slot}": down_hysteresis 0.5 is above')


def test_presets_and_fixed_steps_warn_of_nothing(
    target: Path, head: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for name in (None, "conservative", "aggressive"):
        resolved(target, draft_model_path=head, adaptive_config=name, **ON)
    resolved(target, draft_model_path=head, **EAGLE)
    assert not [text for text in caplog.messages if "adaptive" in text]
