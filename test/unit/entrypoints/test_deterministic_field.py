"""`"deterministic": true` by each route: where it is accepted, what it becomes, and how it is
refused."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from fake_backend import LIMITS
from request_routes import ROUTES, Server
from scheduler_infos import scheduler_info
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.messages.requests import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

REMEDY = (
    "start the server with --enable-deterministic-requests, or with"
    " --enable-deterministic-inference for all requests"
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("model"))
    yield server
    server.templates.close()


def limits_of(**flags: Any) -> RequestLimits:
    found = limits_from_flags(ServerArgs(model_path="demo", **flags), scheduler_info())
    names = "deterministic_refusal", "all_are_deterministic", "preferred_sampling_params"
    return replace(LIMITS, **{name: getattr(found, name) for name in names})


@pytest.mark.parametrize("route", ROUTES)
def test_a_request_asks_where_the_server_lets_it(server: Server, route: str) -> None:
    limits = limits_of(enable_deterministic_requests=True)
    assert server.check(route, limits, {"deterministic": True}).deterministic
    for others in ({}, {"deterministic": False}, {"deterministic": None}):
        assert not server.check(route, limits, others).deterministic


@pytest.mark.parametrize("route", ROUTES)
def test_of_a_server_that_is_all_requests_are(server: Server, route: str) -> None:
    for more in ({}, {"enable_deterministic_requests": True}):
        limits = limits_of(enable_deterministic_inference=True, **more)
        for fields in ({}, {"deterministic": True}, {"deterministic": False}):
            assert server.check(route, limits, fields).deterministic


@pytest.mark.parametrize("route", ROUTES)
def test_another_server_refuses_it_with_the_remedy(server: Server, route: str) -> None:
    name = "sampling_params.deterministic" if route == "generate" else "deterministic"
    with pytest.raises(RequestError) as caught:
        server.check(route, limits_of(), {"deterministic": True})
    assert caught.value.message == f"{name}: {REMEDY}."
    assert caught.value.status_code == 400
    assert not server.check(route, limits_of(), {"deterministic": False}).deterministic


@pytest.mark.parametrize("name", ["acc", "single"])
@pytest.mark.parametrize("route", ROUTES)
def test_thresholds_by_which_drafts_change_tokens_refuse_who_asks(
    server: Server, route: str, name: str
) -> None:
    flags: dict[str, Any] = {f"speculative_accept_threshold_{name}": 0.9}
    limits = limits_of(enable_deterministic_inference=True, **flags)
    with pytest.raises(RequestError) as caught:
        server.check(route, limits, {"deterministic": True})
    assert "deterministic: the server has accept thresholds below 1" in caught.value.message
    assert f"--speculative-accept-threshold-{name}" in caught.value.message
    assert caught.value.status_code == 400
    assert server.check(route, limits, {}).deterministic, "all sums are in fixed orders"


@pytest.mark.parametrize("route", ["generate", "completions"])
def test_routers_pass_it_on_in_custom_params(server: Server, route: str) -> None:
    custom = {"custom_params": {"deterministic": True}}
    assert server.check(route, limits_of(enable_deterministic_requests=True), custom).deterministic
    with pytest.raises(RequestError, match=r"custom_params\.deterministic: start the server"):
        server.check(route, limits_of(), custom)


def test_the_flags_of_a_server_may_ask_for_all_that_do_not_say() -> None:
    preferred = {"preferred_sampling_params": '{"deterministic": true}'}
    limits = limits_of(enable_deterministic_requests=True, **preferred)
    assert limits.preferred_sampling_params == {"deterministic": True}
    with pytest.raises(LaunchError, match="deterministic: start the server with"):
        limits_of(**preferred)


@pytest.mark.parametrize("value", [1, "yes", [True]])
def test_nothing_but_a_truth_value_is_one(server: Server, value: Any) -> None:
    limits = limits_of(enable_deterministic_requests=True)
    with pytest.raises(RequestError, match="deterministic: expected bool"):
        server.check("generate", limits, {"deterministic": value})


def test_predictions_that_nobody_verifies_are_not_deterministic(server: Server) -> None:
    """The load may decide how many of them a request is given."""
    limits = replace(limits_of(enable_deterministic_requests=True), mtp_max_k=8)
    unverified = {"deterministic": True, "mtp_enabled": True, "temperature": 0}
    with pytest.raises(RequestError, match="deterministic: needs mtp_verify: true") as caught:
        server.check("generate", limits, unverified)
    assert "or deterministic: false, or mtp_enabled: false" in caught.value.message
    assert server.check("generate", limits, {**unverified, "mtp_verify": True}).deterministic
    of_all = replace(limits_of(enable_deterministic_inference=True), mtp_max_k=8)
    server.check("generate", of_all, {"mtp_enabled": True, "temperature": 0})


def test_no_kv_is_shared_with_requests_that_are_not() -> None:
    plain, salted, fixed = (
        TokenizedGenerateReqInput(
            req_id=1, rid="", input_ids=[1], cache_key=key, sampling_params=params
        ).namespace
        for key, params in (
            (("a", "b"), SamplingParams()),
            (("a", "c"), SamplingParams()),
            (("a", "b"), SamplingParams(deterministic=True)),
        )
    )
    assert len({plain, salted, fixed}) == 3
