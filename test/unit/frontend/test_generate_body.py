"""Every rule of a `/generate` body, each with the field that the error names."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang.srt.control.pause_bodies import (
    AbortReqInput,
)
from sglang.srt.frontend.body_parsing import parse_json_object, parse_struct
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import (
    CheckedRequest,
    GenerateReqInput,
    check_generate_request,
)
from sglang.srt.frontend.request_limits import RequestLimits, check_id_lists, check_length
from sglang.srt.frontend.sampling_validation import expand_samples
from sglang.srt.frontend.tokenizer_bodies import TokenizeReqInput
from sglang.srt.frontend.work_in_threads import bos_alone
from sglang.srt.sampling.grammar import Grammar
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.tokenizer import Tokenizer

LIMITS = RequestLimits(
    vocab_size=100,
    max_req_len=64,
    max_req_len_reason="the model's context length",
    max_batch_size=8,
    max_n=4,
    max_stop_strings=2,
    max_stop_string_chars=5,
    max_top_logprobs=16,
    max_token_ids_logprob=8,
    max_cache_key_chars=16,
    allow_hidden_states=True,
)


def check(**body: Any) -> CheckedRequest:
    return check_generate_request(body, LIMITS)


def sampling(**params: Any) -> dict[str, Any]:
    return {"text": "x", "sampling_params": params}


def test_a_whole_number_may_have_a_fraction_of_zero() -> None:
    """As in JSON Schema, and as other languages write it."""
    ids = check(input_ids=[[1.0, 2], [3.0]], top_logprobs_num=[2.0, 0], sampling_params={"n": 2.0})
    plain = check(input_ids=[[1, 2], [3]], top_logprobs_num=[2, 0], sampling_params={"n": 2})
    assert ids.prompts == plain.prompts
    assert [type(token) for prompt in ids.prompts for token in prompt.input_ids or []] == [int] * 3


@pytest.mark.parametrize("value", [1.5, 2.0**60, -1.0, "1", True, [[1.0]]])
def test_no_other_number_becomes_a_whole_one(value: Any) -> None:
    for ids in ([value], [[value]]):
        with pytest.raises(RequestError) as raised:
            check(input_ids=ids)
        assert (raised.value.field or "").startswith("input_ids")


BAD_BODIES: list[tuple[dict[str, Any], str]] = [
    ({}, "text"),
    ({"text": None, "input_ids": None}, "text"),
    ({"text": "x", "input_ids": [1]}, "text"),
    ({"text": []}, "text"),
    ({"text": 5}, "text"),
    ({"text": {}}, "text"),
    ({"text": ["a", 1]}, "text[1]"),
    ({"text": ["a", ["b"]]}, "text[1]"),
    ({"text": "\ud800"}, "text"),
    ({"text": ["x"] * 9}, "text"),
    ({"input_ids": []}, "input_ids"),
    ({"input_ids": "12"}, "input_ids"),
    ({"input_ids": 5}, "input_ids"),
    ({"input_ids": [[]]}, "input_ids[0]"),
    ({"input_ids": [[1], 2]}, "input_ids[1]"),
    ({"input_ids": [1, 100]}, "input_ids[1]"),
    ({"input_ids": [-1]}, "input_ids[0]"),
    ({"input_ids": [True]}, "input_ids[0]"),
    ({"input_ids": [1.5]}, "input_ids[0]"),
    ({"input_ids": ["1"]}, "input_ids[0]"),
    ({"input_ids": [None]}, "input_ids[0]"),
    ({"input_ids": [2**70]}, "input_ids[0]"),
    ({"input_ids": [[1], [1, 2, 200]]}, "input_ids[1][2]"),
    ({"input_ids": [[[1]]]}, "input_ids[0][0]"),
    ({"text": "x", "stream": 1}, "stream"),
    ({"text": "x", "stream": "true"}, "stream"),
    ({"text": "x", "rid": 5}, "rid"),
    ({"text": "x", "rid": ""}, "rid"),
    ({"text": "x", "rid": {}}, "rid"),
    ({"text": "x", "rid": "r" * 1000}, "rid"),
    ({"text": "x", "rid": ["a"]}, "rid"),
    ({"text": ["x", "y"], "rid": ["a"]}, "rid"),
    ({"text": ["x", "y"], "rid": ["a", 1]}, "rid[1]"),
    ({"text": "x", "sampling_params": "greedy"}, "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{}]}, "sampling_params"),
    ({"text": ["x", "y"], "sampling_params": [{}, 1]}, "sampling_params[1]"),
    ({"text": ["x", "y"], "sampling_params": [{}, {"n": 0}]}, "sampling_params[1].n"),
    ({"text": ["x"] * 3, "sampling_params": {"n": 3}}, "sampling_params.n"),
    ({"text": "x", "unknown_thing": 1}, "unknown_thing"),
    ({"text": "x", "u" * 500: 1}, "u" * 64 + "..."),
    ({"text": "x", "return_logprob": 1}, "return_logprob"),
    ({"text": "x", "image_data": "data:"}, "image_data"),
    ({"text": "x", "lora_path": ["a"]}, "lora_path"),
    ({"text": "x", "top_logprobs_num": True}, "top_logprobs_num"),
    (sampling(max_new_tokens="8"), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=1.5), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=True), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=-1), "sampling_params.max_new_tokens"),
    (sampling(max_new_tokens=10**30), "sampling_params.max_new_tokens"),
    (sampling(temperature=-0.1), "sampling_params.temperature"),
    (sampling(temperature="hot"), "sampling_params.temperature"),
    (sampling(temperature=True), "sampling_params.temperature"),
    (sampling(temperature=float("nan")), "sampling_params.temperature"),
    (sampling(temperature=float("inf")), "sampling_params.temperature"),
    (sampling(temperature=10**400), "sampling_params.temperature"),
    (sampling(top_p=0), "sampling_params.top_p"),
    (sampling(top_p=float("nan")), "sampling_params.top_p"),
    (sampling(top_k=0), "sampling_params.top_k"),
    (sampling(top_k=10**30), "sampling_params.top_k"),
    (sampling(min_p=1.1), "sampling_params.min_p"),
    (sampling(n=0), "sampling_params.n"),
    (sampling(n=5), "sampling_params.n"),
    (sampling(n=10**30), "sampling_params.n"),
    (sampling(sampling_seed=2**63), "sampling_params.sampling_seed"),
    (sampling(sampling_seed="1"), "sampling_params.sampling_seed"),
    (sampling(stop=5), "sampling_params.stop"),
    (sampling(stop=["a", ""]), "sampling_params.stop"),
    (sampling(stop=["a", 1]), "sampling_params.stop[1]"),
    (sampling(stop=["a", "b", "c"]), "sampling_params.stop"),
    (sampling(stop="abcdef"), "sampling_params.stop"),
    (sampling(stop="\ud800"), "sampling_params.stop"),
    (sampling(stop_token_ids=[1, 2, 3]), "sampling_params.stop_token_ids"),
    (sampling(stop_token_ids=[1, 100]), "sampling_params.stop_token_ids[1]"),
    (sampling(stop_token_ids=[-1]), "sampling_params.stop_token_ids[0]"),
    (sampling(stop_token_ids=[True]), "sampling_params.stop_token_ids[0]"),
    (sampling(stop_token_ids=7), "sampling_params.stop_token_ids"),
    (sampling(ignore_eos=1), "sampling_params.ignore_eos"),
    (sampling(temprature=1), "sampling_params.temprature"),
    (sampling(frequency_penalty=2.5), "sampling_params.frequency_penalty"),
    (sampling(logit_bias={"100": 1.0}), "sampling_params.logit_bias"),
    (sampling(logit_bias={"-1": 1.0}), "sampling_params.logit_bias"),
    (sampling(logit_bias={"x": 1.0}), "sampling_params.logit_bias"),
    (sampling(logit_bias={"1": float("inf")}), "sampling_params.logit_bias"),
    (sampling(logit_bias={str(i): 1.0 for i in range(2000)}), "sampling_params.logit_bias"),
    (sampling(stop_regex=".{999999999}"), "sampling_params.stop_regex"),
    (sampling(stop_regex="[a"), "sampling_params.stop_regex"),
    (sampling(stop_regex=["a", "b", "c"]), "sampling_params.stop_regex"),
    (sampling(stop_regex="a" * 300), "sampling_params.stop_regex"),
    (sampling(stop_regex=7), "sampling_params.stop_regex"),
    (sampling(min_new_tokens=200), "sampling_params.min_new_tokens"),
    (sampling(stream_interval=0), "sampling_params.stream_interval"),
    ({"text": "x", "return_logprob": True, "top_logprobs_num": 17}, "top_logprobs_num"),
    ({"text": "x", "token_ids_logprob": [100]}, "token_ids_logprob[0]"),
    ({"text": "x", "token_ids_logprob": [5, True]}, "token_ids_logprob[1]"),
    ({"text": ["x"], "token_ids_logprob": [[5], 5]}, "token_ids_logprob[1]"),
    ({"text": ["x"] * 2, "token_ids_logprob": [[5]]}, "token_ids_logprob"),
    ({"text": ["x"] * 2, "return_logprob": [True, 1]}, "return_logprob[1]"),
    ({"text": ["x"] * 2, "top_logprobs_num": [17, 0]}, "top_logprobs_num"),
    ({"text": "x", "custom_labels": {"a": 1}}, "custom_labels"),
    ({"text": "x", "custom_labels": {5: "a"}}, "custom_labels"),
    ({"text": "x", "token_ids_logprob": list(range(9))}, "token_ids_logprob"),
    ({"text": "x", "logprob_start_len": -2}, "logprob_start_len"),
    ({"text": "x", "return_hidden_states": "first"}, "return_hidden_states"),
    ({"text": "x", "cache_salt": "s" * 17}, "cache_salt"),
    ({"text": "x", "extra_key": 5}, "extra_key"),
    ({"text": "x", "priority": 1.5}, "priority"),
    (sampling(repetition_penalty=2.1), "sampling_params.repetition_penalty"),
    (sampling(json_schema={}), "sampling_params.json_schema"),
    (sampling(json_schema="x" * 65_537), "sampling_params.json_schema"),
    (sampling(regex="\ud800"), "sampling_params.regex"),
    (sampling(json_schema="{}", regex="a"), "sampling_params.regex"),
    (sampling(regex="a", ebnf="b"), "sampling_params.ebnf"),
    (sampling(regex="a", min_new_tokens=1), "sampling_params.min_new_tokens"),
    (sampling(structural_tag={}), "sampling_params.structural_tag"),
    (sampling(ebnf="a", structural_tag="{}"), "sampling_params.structural_tag"),
    (sampling(beam_width=2), "sampling_params.beam_width"),
    (sampling(mtp_enabled=True), "sampling_params.mtp_enabled"),
]


def test_grammars_are_refused_with_the_remedy_where_there_are_none() -> None:
    limits = replace(LIMITS, grammar_refusal="start it without that flag")
    check_generate_request(sampling(regex=""), limits)
    with pytest.raises(RequestError, match="without that flag"):
        check_generate_request(sampling(regex="a"), limits)


def test_a_request_s_grammar_is_instead_of_the_server_s() -> None:
    preferred = {"json_schema": "{}", "min_new_tokens": 3, "top_k": 5}
    limits = replace(LIMITS, preferred_sampling_params=preferred)
    (prompt,) = check_generate_request(sampling(regex="a"), limits).prompts
    params = prompt.sampling_params
    assert (params.grammar, params.min_new_tokens, params.top_k) == (Grammar("regex", "a"), 0, 5)


@pytest.mark.parametrize(("body", "field"), BAD_BODIES)
def test_bad_body_names_the_field(body: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_generate_request(body, LIMITS)
    error = caught.value
    assert (error.field, error.status_code) == (field, 400)
    assert len(error.message) < 200
    error.message.encode()


@pytest.mark.parametrize("field", GenerateReqInput.__struct_fields__)
def test_half_a_surrogate_pair_is_refused_in_every_field(field: str) -> None:
    """JSON cannot hold one, but callers in Python can give it."""
    prompt = {} if field == "input_ids" else {"text": "x"}
    with pytest.raises(RequestError) as caught:
        check_generate_request({**prompt, field: "\ud800"}, LIMITS)
    assert caught.value.field == field
    check_error(caught.value)


@pytest.mark.parametrize("field", sorted(SamplingParams.__struct_fields__))
def test_half_a_surrogate_pair_is_refused_in_every_sampling_parameter(field: str) -> None:
    with pytest.raises(RequestError) as error:
        check_generate_request(sampling(**{field: "\ud800"}), LIMITS)
    assert error.value.field == f"sampling_params.{field}"


def test_body_that_sglang_clients_send_is_accepted() -> None:
    request = check(
        input_ids=[1, 2],
        image_data=None,
        return_logprob=False,
        logprob_start_len=-1,
        top_logprobs_num=0,
        lora_path=None,
        stream=False,
        sampling_params={
            "temperature": 0,
            "top_p": 1,
            "max_new_tokens": 4,
            "frequency_penalty": 0.0,
            "presence_penalty": 0,
            "repetition_penalty": 1.0,
            "stop": None,
            "sampling_seed": None,
            "spaces_between_special_tokens": True,
            "stream_interval": None,
        },
    )
    (prompt,) = request.prompts
    assert prompt.input_ids == [1, 2]
    assert prompt.sampling_params == SamplingParams(temperature=0, max_new_tokens=4)
    assert (request.is_batch, request.body.stream) == (False, False)


def test_null_sampling_params_are_the_defaults() -> None:
    assert check(text="x", sampling_params=None).prompts[0].sampling_params == SamplingParams()
    (prompt,) = check(text=["x"], sampling_params=[None]).prompts
    assert (prompt.sampling_params, prompt.has_default_length) == (SamplingParams(), True)


def test_list_of_one_is_a_batch_and_one_rid_names_all() -> None:
    assert check(text=["x"]).is_batch
    assert check(input_ids=[[1]]).is_batch
    assert [item.rid for item in check(text=["x", "y"], rid="r").prompts] == ["r", "r"]
    assert [item.rid for item in check(text=["x", "y"], rid=["r", "r"]).prompts] == ["r", "r"]


def test_top_k_beyond_the_vocabulary_keeps_all() -> None:
    params = check_generate_request(sampling(top_k=2**40), LIMITS).prompts[0].sampling_params
    assert params.top_k == -1


@pytest.mark.parametrize(("length", "ok"), [(63, True), (64, True), (65, False)])
def test_prompt_and_output_must_fit(length: int, ok: bool) -> None:
    if ok:
        check_length("text", length - 4, 4, LIMITS)
        return
    with pytest.raises(RequestError, match="the model's context length") as caught:
        check_length("text", length - 4, 4, LIMITS)
    assert caught.value.field == "sampling_params.max_new_tokens"
    with pytest.raises(RequestError, match="the model's context length") as caught:
        check_length("text", length, 4, LIMITS)
    assert caught.value.field == "text"


def test_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(RequestError, match="no tokens"):
        check_length("text", 0, 4, LIMITS)


def test_a_text_without_tokens_is_the_bos_of_a_model_that_has_one() -> None:
    for bos, expected in (([7], [7]), ([], [])):

        def encode(text: str, adds: bool, bos: list[int] = bos) -> list[int]:
            return bos * (adds and text != "") + [ord(char) for char in text]

        tokenizer = Tokenizer(encode, lambda ids: "".join(map(chr, ids)), frozenset())
        assert tokenizer.encode("") == []
        assert bos_alone(tokenizer) == expected


def test_samples_of_a_seeded_request_have_their_own_seeds() -> None:
    seeds = [p.sampling_seed for p in expand_samples(SamplingParams(n=3, sampling_seed=7))]
    assert seeds == [7, 8, 9]
    wrapped = expand_samples(SamplingParams(n=2, sampling_seed=2**63 - 1))
    assert [p.sampling_seed for p in wrapped] == [2**63 - 1, -(2**63)]
    assert [p.sampling_seed for p in expand_samples(SamplingParams(n=2))] == [None, None]


BAD_BYTES: list[tuple[bytes, str | None, str]] = [
    (b"", None, "not valid JSON"),
    (b"{", None, "not valid JSON"),
    (b'{"text": "\\ud800"}', None, "not valid JSON"),
    (b"[1]", None, "JSON object"),
    (b'"text"', None, "JSON object"),
    (b"null", None, "JSON object"),
    (b"NaN", None, "finite"),
    (b'{"text": "\xff"}', None, "UTF-8"),
    (b"[" * 60_000, None, "nested"),
    (b"[" * 100_000, None, "must be a JSON object"),
    (b'{"text":' * 50_000, None, "nested"),
    (b'{"sampling_params": {"temperature": NaN}}', "sampling_params.temperature", "finite"),
    (b'{"a": [1, {"b": -Infinity}]}', "a[1].b", "finite"),
    (b'{"temperature": 1e999}', "temperature", "finite"),
    (b'{"a": ' + b"9" * 5000 + b"}", None, "not valid JSON"),
]


@pytest.mark.parametrize(("raw", "field", "words"), BAD_BYTES)
def test_bad_bytes_are_named(raw: bytes, field: str | None, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        parse_json_object(raw)
    assert caught.value.field == field
    assert len(caught.value.message) < 200


def test_structs_name_unknown_and_mistyped_fields() -> None:
    for raw, field in ((b'{"rid": 5}', "rid"), (b'{"foo": 5}', "foo")):
        with pytest.raises(RequestError) as caught:
            parse_struct(raw, AbortReqInput)
        assert caught.value.field == field
    with pytest.raises(RequestError, match="prompt"):
        parse_struct(b"{}", TokenizeReqInput)
    assert parse_struct(b'{"rid": null, "abort_all": true}', AbortReqInput).abort_all


def check_error(error: RequestError) -> None:
    assert error.status_code == 400
    assert len(error.message) < 200
    msgspec.json.encode([error.message, error.field])


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    [*GenerateReqInput.__struct_fields__, *SamplingParams.__struct_fields__, "return_logprob"]
)


@settings(max_examples=500, deadline=None)
@given(
    st.dictionaries(NAMES, JSON, max_size=3),
    st.none() | st.dictionaries(NAMES, JSON, max_size=3),
)
def test_any_body_is_checked_or_refused(
    body: dict[str, Any], params: dict[str, Any] | None
) -> None:
    """No other error, and what is accepted can be sent to the scheduler."""
    if params is not None:
        body["sampling_params"] = params
    try:
        request = check_generate_request(body, LIMITS)
    except RequestError as error:
        check_error(error)
        return
    for prompt in request.prompts:
        params = prompt.sampling_params
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
        assert params.problem() is None


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=40) | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_parsed_or_refused(raw: bytes) -> None:
    try:
        assert isinstance(parse_json_object(raw), dict)
    except RequestError as error:
        check_error(error)


@pytest.mark.parametrize(
    ("value", "lists", "is_nested"),
    [
        ([0, 99], [[0, 99]], False),
        ([], [[]], False),
        ([[0], [99, 1]], [[0], [99, 1]], True),
        ([[]], [[]], True),
        ([[7]], [[7]], True),
    ],
)
def test_ids_below_the_vocabulary_are_one_list_or_several(
    value: list[Any], lists: list[list[int]], is_nested: bool
) -> None:
    assert check_id_lists("ids", value, 100) == (lists, is_nested)


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([0, 5, 100, 101], "ids[2]"),
        ([[1], [2, 100]], "ids[1][1]"),
        ([1, [2]], "ids[0]"),
        ([[1], 2], "ids[1]"),
    ],
)
def test_the_first_wrong_entry_of_id_lists_is_named(value: list[Any], field: str) -> None:
    with pytest.raises(RequestError) as caught:
        check_id_lists("ids", value, 100)
    assert caught.value.field == field
