"""`/metrics`: the exposition that Prometheus reads."""

from __future__ import annotations

import re
from typing import Any

from sglang.srt.observability.metrics import metrics_text

STATE = {
    "engine_paused": True,
    "running_batch_size": 2,
    "waiting_queue_size": 3,
    "available_kv_tokens": 60,
    "tree_cache_size": 15,
    "pause_epoch": 4,
    "num_lease_expiries": 1,
    "weight_epoch": 7,
}
SAMPLE = re.compile(r'(sglang:\w+)\{model_name="((?:[^"\\\n]|\\.)*)"\} (\S+)')


def samples(state: dict[str, Any], name: str = "m") -> dict[str, float]:
    """Values by metric; every line must be a sample or the comment of one."""
    values = {}
    for line in metrics_text(state, 100, name).splitlines():
        if not line.startswith("# "):
            match = SAMPLE.fullmatch(line)
            assert match, line
            values[match[1]] = float(match[3])
    return values


def test_every_figure_of_the_state_is_there() -> None:
    assert samples(STATE) == {
        "sglang:paused": 1,
        "sglang:num_running_reqs": 2,
        "sglang:num_queue_reqs": 3,
        "sglang:pause_epoch": 4,
        "sglang:lease_expired_total": 1,
        "sglang:weight_epoch": 7,
        "sglang:max_total_num_tokens": 100,
        "sglang:num_used_tokens": 25,
        "sglang:token_usage": 0.25,
    }


def test_each_metric_has_its_type_and_help() -> None:
    text = metrics_text(STATE, 100, "m")
    for name in samples(STATE):
        kind = "counter" if name.endswith("_total") else "gauge"
        assert text.count(f"# TYPE {name} {kind}\n") == 1
        assert text.count(f"# HELP {name} ") == 1
    assert text.endswith("\n")


def test_what_the_state_does_not_have_is_left_out() -> None:
    assert set(samples({"engine_paused": False})) == {
        "sglang:paused",
        "sglang:max_total_num_tokens",
    }
    assert samples({"engine_paused": False})["sglang:paused"] == 0


def test_names_of_models_are_escaped() -> None:
    text = metrics_text(STATE, 100, 'a"b\\c\nd')
    assert r'model_name="a\"b\\c\nd"' in text
    assert len(samples(STATE, 'a"b\\c\nd')) == 9


def test_steps_of_drafters_are_there_with_their_switches() -> None:
    state = {
        "speculative_num_steps": 3,
        "speculative_tier_switches": {"0": 1, "3": 12},
    }
    text = metrics_text(state, 100, 'a"b')
    assert 'sglang:spec_num_steps{model_name="a\\"b"} 3\n' in text
    name = "sglang:spec_tier_switches_total"
    assert text.count(f"# HELP {name} ") == text.count(f"# TYPE {name} counter\n") == 1
    switches = [line for line in text.splitlines() if line.startswith(name)]
    assert switches == [
        f'{name}{{model_name="a\\"b",num_steps="0"}} 1',
        f'{name}{{model_name="a\\"b",num_steps="3"}} 12',
    ]
    assert text.splitlines()[-3].startswith(f"# TYPE {name} "), "samples follow their type"


def test_without_switches_their_metric_is_left_out() -> None:
    for state in ({}, {"speculative_tier_switches": {}}):
        assert "spec_tier_switches" not in metrics_text({**STATE, **state}, 100, "m")
