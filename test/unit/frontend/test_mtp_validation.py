"""Parameters of multi-token prediction: what is accepted, what it becomes, and every refusal."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scheduler_infos import scheduler_info
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.sampling_validation import check_sampling_params
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

INFO = scheduler_info(mtp_max_k=8)
ON = {"mtp_enabled": True}
ADAPT = {**ON, "mtp_strategy": ["conf_adapt", 0.9]}
VERIFY = {**ON, "mtp_verify": True}


def limits(preferred: str | None = None, **changes: Any) -> RequestLimits:
    args = ServerArgs(model_path="demo", preferred_sampling_params=preferred)
    return dataclasses.replace(limits_from_flags(args, INFO), **changes)


def check(params: dict[str, Any], preferred: str | None = None) -> SamplingParams:
    return check_sampling_params(params, limits(preferred), "sampling_params")


# ---------------------------------------------------------------- accepted


@pytest.mark.parametrize(
    ("params", "k", "tau"),
    [
        ({}, 1, 0.0),
        ({"mtp_enabled": False}, 1, 0.0),
        ({"mtp_enabled": None, "mtp_k": None}, 1, 0.0),
        (ON, 3, 0.0),
        ({**ON, "mtp_k": 1}, 1, 0.0),
        ({**ON, "mtp_k": 8, "mtp_strategy": ["static"]}, 8, 0.0),
        (ADAPT, 3, 0.9),
        ({**ON, "mtp_strategy": ["conf_adapt", 0]}, 3, 0.0),
        ({**ON, "mtp_strategy": ["conf_adapt", 1]}, 3, 1.0),
        ({**ON, "mtp_strategy": ["conf_adapt"], "mtp_conf_threshold": 0.25}, 3, 0.25),
        ({**ADAPT, "mtp_conf_threshold": 0.9}, 3, 0.9),
        ({**ADAPT, "mtp_verify": False}, 3, 0.9),
        ({**VERIFY, "mtp_strategy": ["conf_adapt", 0.5]}, 3, 0.5),
        ({**ON, "mtp_strategy": "static"}, 3, 0.0),
        ({**ON, "mtp_strategy": "conf_adapt", "mtp_conf_threshold": 0.25}, 3, 0.25),
        ({**ON, "mtp_strategy": "conf_adapt:0.7"}, 3, 0.7),
        ({**ON, "mtp_strategy": " conf_adapt : 1 "}, 3, 1.0),
        ({**ON, "mtp_strategy": '["conf_adapt", 0.7]'}, 3, 0.7),
        ({**ON, "mtp_strategy": '["static"]'}, 3, 0.0),
        ({**ON, "mtp_strategy": '"conf_adapt:0.7"'}, 3, 0.7),
    ],
    ids=str,
)
def test_k_and_threshold(params: dict[str, Any], k: int, tau: float) -> None:
    checked = check(params)
    assert (checked.num_predicted, checked.mtp_threshold) == (k, tau)
    assert checked.reports_steps == (params.get("mtp_enabled") is True)


def test_an_omitted_temperature_is_0_for_unverified_requests_alone() -> None:
    assert check(ON).temperature == 0
    assert check({**ON, "temperature": 0.0}).temperature == 0
    assert check(VERIFY).temperature == 1
    assert check({**VERIFY, "temperature": 0.3}).temperature == 0.3
    assert check({"mtp_enabled": False}).temperature == check({}).temperature == 1


def test_the_default_k_is_never_above_the_servers() -> None:
    checked = check_sampling_params(ON, limits(mtp_max_k=2), "sampling_params")
    assert checked.num_predicted == 2


@pytest.mark.parametrize("more", [{"logit_bias": {"3": 1.0}}, {"min_new_tokens": 2}, {"n": 2}])
def test_biases_and_samples_are_allowed_unverified(more: dict[str, Any]) -> None:
    assert check({**ADAPT, **more}).mtp_enabled


# ---------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"mtp_k": 3}, "mtp_k", "needs mtp_enabled"),
        ({"mtp_strategy": ["static"]}, "mtp_strategy", "needs mtp_enabled"),
        ({"mtp_conf_threshold": 0.5}, "mtp_conf_threshold", "needs mtp_enabled"),
        ({"mtp_verify": True}, "mtp_verify", "needs mtp_enabled"),
        ({"mtp_verify": False}, "mtp_verify", "needs mtp_enabled"),
        ({"mtp_enabled": False, "mtp_k": 2}, "mtp_k", "needs mtp_enabled"),
        ({"mtp_enabled": 1}, "mtp_enabled", "expected bool"),
        ({"mtp_enabled": "yes"}, "mtp_enabled", "expected bool"),
        ({"mtp_enabled": 1, "mtp_k": 2}, "mtp_enabled", "expected bool"),
        ({**ON, "mtp_k": 0}, "mtp_k", "int >= 1"),
        ({**ON, "mtp_k": -3}, "mtp_k", "int >= 1"),
        ({**ON, "mtp_k": 9}, "mtp_k", "at most 8 (--mtp-max-k)"),
        ({**ON, "mtp_k": 2**80}, "mtp_k", "64 bits"),
        ({**ON, "mtp_k": True}, "mtp_k", "expected int"),
        ({**ON, "mtp_k": 2.5}, "mtp_k", "expected int"),
        ({"mtp_strategy": "static"}, "mtp_strategy", "needs mtp_enabled"),
        ({**ON, "mtp_strategy": "conf_adapt"}, "mtp_strategy", "mtp_conf_threshold"),
        ({**ON, "mtp_strategy": "conf_adapt:2"}, "mtp_strategy", "in [0, 1]"),
        ({**ON, "mtp_strategy": "conf_adapt:nan"}, "mtp_strategy", "in [0, 1]"),
        ({**ON, "mtp_strategy": "static:0.5"}, "mtp_strategy", "takes no threshold"),
        ({**ON, "mtp_strategy": '["conf_adapt", "0.9"]'}, "mtp_strategy", "in [0, 1]"),
        *[
            ({**ON, "mtp_strategy": text}, "mtp_strategy", 'must be ["static"]')
            for text in ("", "greedy", "conf_adapt:", "conf_adapt:high", "conf_adapt:1:2", "null")
        ],
        *[
            ({**ON, "mtp_strategy": text}, "mtp_strategy", 'must be ["static"]')
            for text in ("{}", "0.9", '["conf_adapt", 0.9', "[" * 100_000, "\ud800")
        ],
        ({**ON, "mtp_strategy": {}}, "mtp_strategy", 'must be ["static"]'),
        ({**ON, "mtp_strategy": []}, "mtp_strategy", 'must be ["static"]'),
        ({**ON, "mtp_strategy": ["greedy"]}, "mtp_strategy", 'must be ["static"]'),
        ({**ON, "mtp_strategy": [0.9, "conf_adapt"]}, "mtp_strategy", 'must be ["static"]'),
        ({**ON, "mtp_strategy": ["conf_adapt", 0.9, 1]}, "mtp_strategy", 'must be ["static"]'),
        ({**ON, "mtp_strategy": ["conf_adapt"]}, "mtp_strategy", "needs a threshold"),
        ({**ON, "mtp_strategy": ["conf_adapt", 1.01]}, "mtp_strategy", "in [0, 1]"),
        ({**ON, "mtp_strategy": ["conf_adapt", -0.1]}, "mtp_strategy", "in [0, 1]"),
        ({**ON, "mtp_strategy": ["conf_adapt", float("nan")]}, "mtp_strategy", "in [0, 1]"),
        ({**ON, "mtp_strategy": ["conf_adapt", "0.9"]}, "mtp_strategy", "in [0, 1]"),
        ({**ON, "mtp_strategy": ["conf_adapt", True]}, "mtp_strategy[1]", "bool"),
        ({**ON, "mtp_strategy": ["conf_adapt", None]}, "mtp_strategy[1]", "null"),
        ({**ON, "mtp_strategy": ["static", 0.9]}, "mtp_strategy", "takes no threshold"),
        ({**ON, "mtp_conf_threshold": 0.9}, "mtp_conf_threshold", "takes no threshold"),
        (
            {**ON, "mtp_strategy": ["static"], "mtp_conf_threshold": 0.9},
            "mtp_conf_threshold",
            "takes no threshold",
        ),
        ({**ADAPT, "mtp_conf_threshold": 0.8}, "mtp_conf_threshold", "is not the 0.9"),
        ({**ADAPT, "mtp_conf_threshold": 1.5}, "mtp_conf_threshold", "in [0, 1]"),
        ({**ADAPT, "mtp_conf_threshold": float("nan")}, "mtp_conf_threshold", "in [0, 1]"),
        ({**ADAPT, "mtp_conf_threshold": True}, "mtp_conf_threshold", "expected float"),
        ({**ADAPT, "mtp_conf_threshold": "0.9"}, "mtp_conf_threshold", "expected float"),
        ({**ON, "mtp_verify": 1}, "mtp_verify", "expected bool"),
        ({**ON, "temperature": 0.7}, "temperature", "mtp_verify"),
        ({**ADAPT, "temperature": 1}, "temperature", "mtp_verify"),
        ({**ON, "frequency_penalty": 0.5}, "mtp_enabled", "penalties need mtp_verify"),
        ({**ON, "presence_penalty": 0.5}, "mtp_enabled", "penalties need mtp_verify"),
        ({**ON, "repetition_penalty": 1.5}, "mtp_enabled", "penalties need mtp_verify"),
        ({**ON, "mtp_mask_id": 5}, "mtp_mask_id", "not a known field"),
    ],
    ids=str,
)
def test_a_broken_rule_is_named(params: dict[str, Any], field: str, reason: str) -> None:
    with pytest.raises(RequestError) as caught:
        check(params)
    assert caught.value.field == f"sampling_params.{field}"
    assert reason in caught.value.message
    assert caught.value.status_code == 400


def test_a_model_without_a_mask_token_says_so() -> None:
    with pytest.raises(RequestError, match=r"no mask token.*--mtp-mask-token-id"):
        check_sampling_params(ON, limits(mtp_max_k=0), "sampling_params")
    check_sampling_params({"mtp_enabled": False}, limits(mtp_max_k=0), "sampling_params")


# ---------------------------------------------------------------- --preferred-sampling-params


PREFERRED = (
    '{"mtp_enabled": true, "mtp_k": 5, "mtp_strategy": ["conf_adapt"],'
    ' "mtp_conf_threshold": 0.5, "mtp_verify": true, "max_new_tokens": 7}'
)


def test_preferred_parameters_hold_where_a_request_says_nothing() -> None:
    for given in ({}, {"mtp_k": None}, {"temperature": 0.4}):
        params = check(given, PREFERRED)
        assert (params.num_predicted, params.mtp_threshold, params.mtp_verify) == (5, 0.5, True)
        assert params.max_new_tokens == 7
        assert params.temperature == given.get("temperature", 1.0)
    assert check_sampling_params(None, limits(PREFERRED), "sampling_params").max_new_tokens == 7
    assert check({"mtp_k": 2, "max_new_tokens": 3}, PREFERRED).num_predicted == 2


def test_a_request_overrides_the_preferred_strategy_as_a_whole() -> None:
    assert check({"mtp_strategy": ["static"]}, PREFERRED).mtp_threshold == 0
    assert check({"mtp_strategy": ["conf_adapt", 0.8]}, PREFERRED).mtp_threshold == 0.8


def test_a_request_that_switches_prediction_off_gets_none_of_its_settings() -> None:
    params = check({"mtp_enabled": False}, PREFERRED)
    assert params.num_predicted == 1
    assert params.max_new_tokens == 7


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "JSON"),
        ("[]", "JSON"),
        ('{"mtp_k": 3}', "--preferred-sampling-params.mtp_k: needs mtp_enabled"),
        ('{"tempera": 3}', "--preferred-sampling-params.tempera"),
        ('{"mtp_enabled": true, "mtp_k": 9}', "--mtp-max-k"),
        ('{"temperature": -1}', "--preferred-sampling-params.temperature"),
    ],
)
def test_bad_preferred_parameters_fail_the_start(text: str, reason: str) -> None:
    with pytest.raises(LaunchError) as caught:
        limits(text)
    assert "--preferred-sampling-params" in str(caught.value)
    assert reason in str(caught.value)
