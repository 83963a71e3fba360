"""Sampling parameters of requests that give none: the server's preferred ones, then the
model's (of OpenAI's routes), then OpenAI's."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_backend import LIMITS
from request_routes import OPENAI_ROUTES, ROUTES, Server
from scheduler_infos import scheduler_info
from serving_utils import make_model_dir
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.entrypoints.openai.sampling_defaults import NAMES, describe_sampling
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.model_config import load_model_config
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

FILE = {"temperature": 0.6, "top_p": 0.8, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.05}
OPENAI = {name: getattr(SamplingParams(), name) for name in NAMES}
ON = {"mtp_enabled": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("model"))
    yield server
    server.templates.close()


def limits_with(
    file: dict[str, Any], preferred: dict[str, Any] | None = None, **more: Any
) -> RequestLimits:
    return dataclasses.replace(
        LIMITS,
        mtp_max_k=8,
        openai_sampling_defaults=file,
        preferred_sampling_params=preferred or {},
        **more,
    )


@pytest.mark.parametrize("route", ROUTES)
@settings(max_examples=60, deadline=None)
@given(st.data())
def test_the_first_that_says_something_counts(
    server: Server, route: str, data: st.DataObject
) -> None:
    values = {
        "temperature": st.sampled_from([0.0, 0.3, 0.9]),
        "top_p": st.sampled_from([0.5, 0.9]),
        "top_k": st.sampled_from([-1, 1, 7]),
        "min_p": st.sampled_from([0.0, 0.2]),
        "repetition_penalty": st.sampled_from([0.9, 1.2]),
    }
    some = st.fixed_dictionaries({}, optional=values)
    request, preferred, file = (data.draw(some) for _ in range(3))
    nulls = dict.fromkeys(data.draw(st.sets(st.sampled_from(NAMES))) - request.keys())
    params = server.check(route, limits_with(file, preferred), {**nulls, **request})
    expected = {**OPENAI, **({} if route == "generate" else file), **preferred, **request}
    assert {name: getattr(params, name) for name in NAMES} == expected


@pytest.mark.parametrize("route", OPENAI_ROUTES)
@pytest.mark.parametrize(
    ("fields", "preferred"),
    [
        (ON, {}),
        ({"custom_params": ON}, {}),
        ({}, ON),
        ({**ON, "mtp_verify": False, "mtp_k": 2, "temperature": 0}, {}),
    ],
    ids=str,
)
def test_unverified_multi_token_prediction_takes_no_temperature_or_penalty_of_a_file(
    server: Server, route: str, fields: dict[str, Any], preferred: dict[str, Any]
) -> None:
    params = server.check(route, limits_with(FILE, preferred), fields)
    assert params.mtp_enabled
    assert (params.temperature, params.repetition_penalty, params.top_k) == (0.0, 1.0, 20)
    verified = server.check(route, limits_with(FILE, preferred), {**ON, "mtp_verify": True})
    assert (verified.temperature, verified.repetition_penalty) == (0.6, 1.05)


@pytest.mark.parametrize("route", OPENAI_ROUTES)
@pytest.mark.parametrize("explicit", [{"temperature": 0.6}, {"repetition_penalty": 1.05}])
def test_what_a_request_says_itself_is_refused_as_before(
    server: Server, route: str, explicit: dict[str, Any]
) -> None:
    for fields, preferred in (({**ON, **explicit}, {}), (ON, explicit)):
        with pytest.raises(RequestError):
            server.check(route, limits_with(FILE, preferred), fields)


def limits_of(folder: Path, generation: dict[str, Any] | None, **flags: Any) -> RequestLimits:
    """The limits of a server over a folder with this generation_config.json."""
    make_model_dir(folder)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    args = ServerArgs(model_path=str(folder), **flags)
    return limits_from_flags(args, scheduler_info(), load_model_config(str(folder)))


@pytest.mark.parametrize("do_sample", [{}, {"do_sample": True}, {"do_sample": False}], ids=str)
def test_the_models_file_gives_the_defaults_whatever_do_sample_says(
    tmp_path: Path, do_sample: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    others = {"eos_token_id": 1, "max_new_tokens": 5, "num_beams": 3, "typical_p": 1.0}
    preferred = json.dumps({"temperature": 0.1})
    found = limits_of(
        tmp_path, {**FILE, **do_sample, **others}, preferred_sampling_params=preferred
    )
    assert found.openai_sampling_defaults == FILE
    assert found.preferred_sampling_params == {"temperature": 0.1}
    assert not caplog.records


def test_a_top_k_of_0_keeps_all_tokens_and_null_is_no_value(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = limits_of(tmp_path, {"top_k": 0, "temperature": None})
    assert found.openai_sampling_defaults == {"top_k": -1}
    assert not caplog.records


def test_wrong_values_are_ignored_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {"temperature": "warm", "top_p": math.nan, "top_k": 2**70, "repetition_penalty": -1}
    with caplog.at_level(logging.WARNING):
        found = limits_of(tmp_path, {**wrong, "min_p": 0.25})
    assert found.openai_sampling_defaults == {"min_p": 0.25}
    (record,) = caplog.records
    message = record.getMessage()
    assert str(tmp_path / "generation_config.json") in message
    assert all(f"{name}: " in message for name in wrong)
    assert "\n" not in message


@pytest.mark.parametrize(
    ("generation", "flag", "text"),
    [
        (FILE, "openai", "OpenAI's defaults, as --sampling-defaults asks"),
        (None, "model", "OpenAI's defaults, as the model has none in generation_config.json"),
        (
            {"temperature": 0.6, "top_k": 20},
            "model",
            "temperature 0.6, top_k 20 of generation_config.json, where a /v1 request gives none",
        ),
    ],
    ids=str,
)
def test_the_start_says_which_defaults_are_in_force(
    tmp_path: Path, generation: dict[str, Any] | None, flag: str, text: str
) -> None:
    found = limits_of(tmp_path, generation, sampling_defaults=flag).openai_sampling_defaults
    assert found == {} or flag == "model"
    assert describe_sampling(flag, found) == text


def test_the_demo_models_give_no_defaults() -> None:
    for name in ("demo", "demo-draft"):
        model = load_model_config(name)
        args = ServerArgs(model_path=name)
        assert limits_from_flags(args, scheduler_info(), model).openai_sampling_defaults == {}
