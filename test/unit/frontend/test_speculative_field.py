"""Tests what a request may say of its drafts: what is accepted, what it means, and every
refusal."""

from __future__ import annotations

import re
from typing import Any

import msgspec
import pytest

from code_shape import ROOT
from scheduler_infos import scheduler_info
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.entrypoints.openai import protocol
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.sampling_validation import check_sampling_params
from sglang.srt.frontend.unknown_fields import UnknownFields
from sglang.srt.sampling.sampling_params import SamplingParams, Speculative
from sglang.srt.server_args import ServerArgs

DRAFTS = scheduler_info(drafters={"eagle3": "eagle3", "eagle": "eagle3", "ngram": "ngram"})
PLAIN, MASKS = scheduler_info(), scheduler_info(mtp_max_k=8)
NAME = "sampling_params"
OFF, TWO = {"enabled": False}, {"max_drafts": 2}


def check(params: dict[str, Any], info: Any = DRAFTS, preferred: Any = None) -> SamplingParams:
    text = None if preferred is None else msgspec.json.encode(preferred).decode()
    args = ServerArgs(model_path="demo", preferred_sampling_params=text)
    return check_sampling_params(params, limits_from_flags(args, info), NAME)


def refused(params: dict[str, Any], info: Any = DRAFTS, preferred: Any = None) -> str:
    with pytest.raises(RequestError) as caught:
        check(params, info, preferred)
    assert caught.value.field is not None
    assert caught.value.message.startswith(f"{caught.value.field}: ")
    return caught.value.message


@pytest.mark.parametrize(
    ("value", "means"),
    [
        (None, Speculative()),
        ({}, Speculative()),
        ({"enabled": None, "max_drafts": None, "drafter": None}, Speculative()),
        ({"enabled": True}, Speculative()),
        (OFF, Speculative(enabled=False)),
        ({"max_drafts": 2.0}, Speculative(max_drafts=2)),
        ({"max_drafts": 1000, "drafter": "ngram"}, Speculative(max_drafts=1000, drafter="ngram")),
        (Speculative(enabled=False), Speculative(enabled=False)),
    ],
    ids=str,
)
def test_what_a_request_says(value: Any, means: Speculative) -> None:
    assert check({"speculative": value}).speculative == means
    assert check({"custom_params": {"speculative": value}}).speculative == means


@pytest.mark.parametrize("name", ["eagle", "EAGLE3", "eagle3", "Eagle"])
def test_a_drafter_has_the_names_of_its_algorithm_in_any_case(name: str) -> None:
    chosen = check({"speculative": {"drafter": name, "max_drafts": 2}}).speculative
    assert chosen == Speculative(drafter="eagle3", max_drafts=2)
    assert check({"speculative": {"drafter": "NGRAM"}}).speculative.drafter == "ngram"


@pytest.mark.parametrize("value", [OFF, {"max_drafts": 0}, {**OFF, "max_drafts": 3}], ids=str)
@pytest.mark.parametrize("info", [PLAIN, MASKS, DRAFTS])
def test_every_server_takes_a_request_without_drafts(value: Any, info: Any) -> None:
    assert check({"speculative": value}, info).speculative.is_off


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"speculative": 3}, 'speculative: must be an object, such as {"enabled": false}.'),
        ({"speculative": {"enabled": 1}}, "speculative.enabled: expected bool, got int"),
        ({"speculative": {"max_drafts": -1}}, "speculative.max_drafts: expected int >= 0"),
        ({"speculative": {"max_drafts": 1.5}}, "speculative.max_drafts: expected int"),
        ({"speculative": {"max_drafts": 2**63}}, "speculative.max_drafts: "),
        ({"speculative": {"on": 1}}, "speculative.on: is none of enabled, max_drafts and drafter."),
        (
            {"speculative": {"drafter": "x"}},
            "speculative.drafter: the server has no drafter 'x'; name eagle3 or ngram, or leave it"
            " out.",
        ),
        ({"custom_params": {"speculative": {"on": 1}}}, "custom_params.speculative.on: is none"),
        ({"speculative": TWO, "custom_params": {"speculative": OFF}}, "custom_params.speculative:"),
    ],
    ids=str,
)
def test_refusals(params: dict[str, Any], reason: str) -> None:
    assert refused(params).startswith(f"{NAME}.{reason}")


def test_a_server_without_a_drafter_says_how_to_get_one() -> None:
    said = refused({"speculative": TWO}, PLAIN)
    assert "--speculative-algorithm" in said
    assert "mtp_enabled" not in said
    assert "mtp_enabled" in refused({"speculative": {"drafter": "ngram"}}, MASKS)


def test_masks_are_asked_for_by_their_own_fields_alone() -> None:
    on = {"mtp_enabled": True}
    assert "leave one of them out" in refused({**on, "speculative": OFF}, MASKS)
    assert "give mtp_k" in refused({**on, "speculative": TWO}, MASKS)
    assert check({**on, "speculative": {}}, MASKS).mtp_enabled


def test_a_request_without_drafts_has_none_of_the_servers_masks_either() -> None:
    preferred = {"mtp_enabled": True, "mtp_verify": True}
    assert not check({"speculative": OFF}, MASKS, preferred).mtp_enabled
    assert check({}, MASKS, preferred).mtp_enabled


def test_a_request_for_masks_has_none_of_the_servers_choices_of_drafts() -> None:
    preferred = {"speculative": OFF}
    params = check({"mtp_enabled": True}, MASKS, preferred)
    assert params.mtp_enabled
    assert params.speculative == Speculative()


def test_the_server_may_draft_for_those_alone_who_ask() -> None:
    preferred = {"speculative": OFF}
    assert check({}, DRAFTS, preferred).speculative.is_off
    assert not check({"speculative": {"enabled": True}}, DRAFTS, preferred).speculative.is_off
    with pytest.raises(LaunchError, match=r"--preferred-sampling-params.speculative.drafter"):
        check({}, DRAFTS, {"speculative": {"drafter": "x"}})


def test_bodies_of_openai() -> None:
    def of(**fields: Any) -> Any:
        raw = msgspec.json.encode({"prompt": "x", **fields})
        request = protocol.parse_completion(raw, UnknownFields(are_refused=False))
        return check(protocol.common_body(request)["sampling_params"]).speculative

    assert of(speculative={"enabled": False, "max_drafts": None, "unknown": 1}).is_off
    assert of(speculative=TWO, custom_params={"speculative": TWO}).max_drafts == 2
    assert of() == of(speculative=None) == of(speculative={}) == Speculative()
    with pytest.raises(RequestError, match=r"speculative.max_drafts: expected int"):
        of(speculative={"max_drafts": "x"})


def test_it_travels() -> None:
    params = SamplingParams(speculative=Speculative(enabled=False, drafter="ngram"))
    raw = msgspec.msgpack.encode(params)
    assert msgspec.msgpack.decode(raw, type=SamplingParams) == params
    assert "speculative" not in msgspec.to_builtins(SamplingParams())


@pytest.mark.parametrize("page", ["speculation.md", "sampling.md", "openai.md"])
def test_what_pages_show_is_taken(page: str) -> None:
    text = (ROOT / "docs" / page).read_text()
    shown = re.findall(r'(?:"speculative": |`speculative` [^\n]*`)(\{".*?\})', text)
    assert shown
    for value in shown:
        check({"speculative": msgspec.json.decode(value)})
