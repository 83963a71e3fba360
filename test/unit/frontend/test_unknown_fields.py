"""Fields that nobody knows, and the parameters that come in `custom_params`."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

import msgspec
import pytest

from fake_backend import LIMITS
from scheduler_infos import scheduler_info
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.entrypoints.openai.protocol import (
    CompletionRequest,
    in_openai_terms,
    parse_completion,
    prompts_of,
    to_generate_body,
)
from sglang.srt.frontend import unknown_fields
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import CheckedRequest, check_generate_request
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.unknown_fields import REFUSED, UnknownFields
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

WITH_MTP = dataclasses.replace(LIMITS, mtp_max_k=8)
INFO = scheduler_info()
MTP = {"mtp_enabled": True, "mtp_k": 5, "mtp_verify": True}


def lenient() -> RequestLimits:
    return dataclasses.replace(WITH_MTP, unknown_fields=UnknownFields(False))


def sampled(limits: RequestLimits = WITH_MTP, **params: Any) -> SamplingParams:
    body = {"text": "x", "sampling_params": params}
    return check_generate_request(body, limits).prompts[0].sampling_params


def parsed(unknown: UnknownFields, **fields: Any) -> CompletionRequest:
    return parse_completion(msgspec.json.encode({"prompt": "x", **fields}), unknown)


def completed(**fields: Any) -> CheckedRequest:
    request = parsed(UnknownFields(False), **fields)
    try:
        return check_generate_request(to_generate_body(request, prompts_of(request)), WITH_MTP)
    except RequestError as error:
        raise in_openai_terms(error) from None


@pytest.mark.parametrize(
    ("flag", "generate", "openai"),
    [(None, True, False), ("refuse", True, True), ("ignore", False, False)],
)
def test_the_flag_says_where_unknown_fields_are_refused(
    flag: str | None, generate: bool, openai: bool
) -> None:
    limits = limits_from_flags(ServerArgs(model_path="m", unknown_fields=flag), INFO)
    assert limits.unknown_fields.are_refused is generate
    assert limits.unknown_openai_fields.are_refused is openai


def test_generate_ignores_unknown_fields_where_it_is_told_to() -> None:
    plain = check_generate_request({"text": "x"}, WITH_MTP)
    body = {"text": "x", "wish": 1, "sampling_params": {"wish": [2]}}
    assert check_generate_request(body, lenient()).prompts == plain.prompts
    with pytest.raises(RequestError) as caught:
        check_generate_request({"text": "x", "sampling_params": {"wish": [2]}}, WITH_MTP)
    assert caught.value.field == "sampling_params.wish"


@pytest.mark.parametrize("name", ["temperature", "speculative"])
def test_generate_says_where_a_sampling_parameter_belongs(name: str) -> None:
    with pytest.raises(RequestError, match=rf"^{name}: is a field of sampling_params\.$"):
        check_generate_request({"text": "x", name: 0}, WITH_MTP)


def test_completions_ignore_unknown_fields_unless_told_to_refuse_them() -> None:
    fields = {"wish": 1, "stream_options": {"include_usage": True, "include_obfuscation": True}}
    request = parsed(UnknownFields(False), **fields)
    assert request.stream_options is not None
    assert request.stream_options.include_usage is True
    for name, value in fields.items():
        with pytest.raises(RequestError, match="is not a known field") as caught:
            parsed(REFUSED, **{name: value})
        assert (caught.value.field or "").startswith(name)


@pytest.mark.parametrize(("name", "wish"), [("best_of", 3), ("suffix", "tail"), ("lora_path", "a")])
def test_what_is_known_and_missing_is_refused_wherever_unknown_fields_are_not(
    name: str, wish: Any
) -> None:
    with pytest.raises(RequestError, match=r"not supported here; leave it out") as caught:
        parsed(UnknownFields(False), **{name: wish})
    assert caught.value.field == name


def test_a_name_is_logged_once_shortened_and_only_so_many_are(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unknown_fields, "MAX_LOGGED_NAMES", 3)
    unknown = UnknownFields(False)
    with caplog.at_level(logging.WARNING):
        for name in ("a", "a", "x\ny" * 1000, *(f"n{index}" for index in range(50))):
            parsed(unknown, **{name: 1})
    messages = [record.getMessage() for record in caplog.records]
    assert [message.split("'")[1] for message in messages[:-1]][:1] == ["a"]
    assert len(messages) == 4
    assert "not logged" in messages[-1]
    assert all("\n" not in message and len(message) < 200 for message in messages)


def test_a_completion_takes_mtp_parameters_in_its_body_and_in_custom_params() -> None:
    expected = sampled(**MTP)
    for fields in (MTP, {"custom_params": MTP}, {"mtp_k": 5, "custom_params": MTP}):
        assert completed(**fields).prompts[0].sampling_params.mtp_k == expected.mtp_k == 5
        assert completed(**fields).prompts[0].sampling_params.mtp_verify


def test_generate_takes_the_wish_for_kept_tokens_in_custom_params() -> None:
    kept = {"custom_params": {"return_top_p_token_ids": True}}

    def options(**params: Any) -> LogprobOptions | None:
        body = {"text": "a", "return_logprob": True, "sampling_params": {**kept, **params}}
        return check_generate_request(body, LIMITS).prompts[0].logprobs

    for params in ({"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"temperature": 0}):
        assert options(**params) == LogprobOptions(-1, kept=True)
    assert options() == LogprobOptions(-1)  # nothing is filtered
    with pytest.raises(RequestError, match=r"^return_logprob: must be true with return_top_p"):
        check_generate_request({"text": "a", "sampling_params": kept}, LIMITS)
    with pytest.raises(RequestError, match=r"custom_params\.return_top_p_token_ids: goes with"):
        completed(**kept)


def test_generate_takes_mtp_parameters_in_custom_params() -> None:
    assert sampled(custom_params=MTP) == sampled(**MTP)
    assert sampled(custom_params={**MTP, "mtp_k": None}, mtp_k=5) == sampled(**MTP)
    assert sampled(custom_params={}) == sampled(custom_params={"x": None}) == sampled()
    assert sampled(lenient(), custom_params={"x": 1}) == sampled()


@pytest.mark.parametrize(
    ("params", "field", "reason"),
    [
        ({"custom_params": "x"}, "custom_params", "must be an object|expected object"),
        ({"custom_params": {"x" * 300: 1}}, "custom_params.xxx", "none of those that are read"),
        ({"custom_params": {"temperature": 0}}, "custom_params.temperature", "none of those"),
        ({"custom_params": {**MTP, "mtp_k": 9}}, "custom_params.mtp_k", "at most 8"),
        ({"custom_params": {**MTP, "mtp_k": "a"}}, "custom_params.mtp_k", "expected int"),
        ({"custom_params": MTP, "mtp_k": 4}, "custom_params.mtp_k", "another value than"),
        ({"custom_params": {"mtp_k": 4}}, "custom_params.mtp_k", "needs mtp_enabled"),
    ],
)
def test_a_bad_parameter_of_custom_params_is_named_as_it_was_written(
    params: dict[str, Any], field: str, reason: str
) -> None:
    for body, prefix in ((sampled, "sampling_params."), (completed, "")):
        if prefix or not reason.startswith("none of those"):
            with pytest.raises(RequestError, match=reason) as caught:
                body(**params)
            error = caught.value
            assert (error.field or "").startswith(prefix + field)
            if not reason.startswith("must be"):
                assert error.message.startswith(error.field or "?")


def test_custom_params_of_a_completion_must_be_an_object() -> None:
    assert completed(custom_params=[]) == completed(custom_params=None) == completed()
    with pytest.raises(RequestError) as caught:
        completed(custom_params=[1])
    assert caught.value.field == "custom_params"


def test_preferred_parameters_may_be_in_custom_params_and_must_be_known() -> None:
    info = msgspec.structs.replace(INFO, mtp_max_k=8)

    def limits(text: str) -> RequestLimits:
        args = ServerArgs(model_path="m", preferred_sampling_params=text, unknown_fields="ignore")
        return limits_from_flags(args, info)

    preferred = limits(msgspec.json.encode({"custom_params": MTP}).decode())
    assert sampled(preferred) == sampled(**MTP)
    with pytest.raises(LaunchError, match="wish"):
        limits('{"wish": 1}')
