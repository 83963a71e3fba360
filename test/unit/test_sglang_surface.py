"""Each field that SGLang knows, walked: nothing changes at a neutral value, any other works or is
refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_server import BYTES, GROUP, TENSORS, Server
from serving_utils import make_model_dir
from sglang.srt.entrypoints.openai import chat_protocol
from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.protocol import (
    UNSUPPORTED,
    CompletionRequest,
    prompts_of,
    to_generate_body,
)
from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import (
    CheckedRequest,
    GenerateReqInput,
    check_generate_request,
)
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.sampling_validation import SAMPLING_FIELDS
from sglang.srt.frontend.tokenizer_bodies import DetokenizeReqInput, TokenizeReqInput
from sglang.srt.sglang_surface import (
    ANYTHING,
    facts,
    is_neutral,
    neutral_fields,
)
from sglang.srt.tokenizer import load_tokenizer

LIMITS = RequestLimits(
    vocab_size=100,
    max_req_len=512,
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
HANDLED_FIELDS = frozenset(GenerateReqInput.__struct_fields__)
REFUSED_IF_EMPTY = {"rid"}  # by SGLang too
TEXTS = {"text", "rid", "cache_salt", "extra_key", "stop", "stop_regex"}
LISTS = {"input_ids", "sampling_params", "token_ids_logprob", "stop", "stop_regex"}
LISTS |= {"stop_token_ids", "cache_salt", "extra_key", "return_logprob", "top_logprobs_num"}
OBJECTS = {"sampling_params", "custom_labels", "logit_bias"}
WISHES: tuple[Any, ...] = ("wish", 3, True, ["wish"], {"wish": True}, [[7]])


def neutral_values(body: str) -> dict[str, list[Any]]:
    """Lists the neutral values of each field: null, the defaults, and each empty value that fits
    its type."""
    handled = {"generate": HANDLED_FIELDS, "sampling_params": SAMPLING_FIELDS}[body]
    found = {}
    for name, values in neutral_fields(body).items():
        listed = [None, *(value for value in values if value is not ANYTHING)]
        if name not in handled:
            listed += [False, "", [], {}, [None], {"x": None}]
        elif name not in REFUSED_IF_EMPTY:
            listed += [""] * (name in TEXTS) + [[]] * (name in LISTS) + [{}] * (name in OBJECTS)
        found[name] = listed
    return found


@pytest.mark.parametrize(("name", "values"), neutral_values("generate").items())
def test_a_neutral_field_of_generate_changes_nothing(name: str, values: list[Any]) -> None:
    for prompt in ({"text": "x"}, {"input_ids": [1]}):
        plain = check_generate_request(prompt, LIMITS)
        for value in values if name not in prompt else ():
            assert check_generate_request({**prompt, name: value}, LIMITS) == plain, value


@pytest.mark.parametrize(("name", "values"), neutral_values("sampling_params").items())
def test_a_neutral_sampling_field_changes_nothing(name: str, values: list[Any]) -> None:
    plain = check_generate_request({"text": "x"}, LIMITS).prompts[0].sampling_params
    for value in values:
        request = check_generate_request({"text": "x", "sampling_params": {name: value}}, LIMITS)
        assert request.prompts[0].sampling_params == plain, value


@pytest.mark.parametrize("name", sorted(neutral_fields("generate").keys() - HANDLED_FIELDS))
def test_a_wish_that_generate_cannot_meet_is_refused_by_name(name: str) -> None:
    if ANYTHING in neutral_fields("generate")[name]:
        assert name == "model"
        return
    for value in WISHES:
        if not is_neutral(value, neutral_fields("generate")[name]):
            check_refusal(name, {"text": "x", name: value})


MISSING_SAMPLING = neutral_fields("sampling_params").keys() - SAMPLING_FIELDS - {"custom_params"}


@pytest.mark.parametrize("name", sorted(MISSING_SAMPLING))
def test_a_sampling_wish_that_cannot_be_met_is_refused_by_name(name: str) -> None:
    for value in WISHES:
        body = {"text": "x", "sampling_params": {name: value}}
        check_refusal(f"sampling_params.{name}", body)


def check_refusal(field: str, body: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=r"not supported here; leave it out") as caught:
        check_generate_request(body, LIMITS)
    assert (caught.value.field, caught.value.status_code) == (field, 400)


def test_nested_objects_of_nulls_are_neutral_and_others_are_not() -> None:
    session = dict.fromkeys(neutral_fields("session_params"))
    plain = check_generate_request({"text": "x"}, LIMITS)
    assert check_generate_request({"text": "x", "session_params": session}, LIMITS) == plain
    check_refusal("session_params", {"text": "x", "session_params": {**session, "id": "s"}})
    deep: list[Any] = []
    for _ in range(10_000):
        deep = [deep]
    check_refusal("image_data", {"text": "x", "image_data": deep})


OWN_COMPLETION = frozenset(CompletionRequest.__struct_fields__)


def completion(**fields: Any) -> CheckedRequest:
    request = parse_struct(
        msgspec.json.encode({"prompt": "x", **fields}), CompletionRequest, UNSUPPORTED
    )
    return check_generate_request(to_generate_body(request, prompts_of(request)), LIMITS)


def test_neutral_fields_of_a_completion_change_nothing() -> None:
    """But a length that is given does not give way to a long prompt, as the default one does."""
    plain = completion()
    not_neutral = (("rid", ""), ("max_tokens", 16))
    for name, values in UNSUPPORTED.items():
        listed = [None, *(value for value in values if value is not ANYTHING)]
        listed += [False, "", [], {}, {"a": None}] if name not in OWN_COMPLETION else []
        listed += [""] * (name in TEXTS) + [[]] * (name in LISTS) + [{}] * (name in OBJECTS)
        for value in listed:
            if name != "prompt" and (name, value) not in not_neutral:
                assert completion(**{name: value}) == plain, (name, value)


def test_options_of_a_stream_may_be_null() -> None:
    options = dict.fromkeys(neutral_fields("stream_options"))
    assert completion(stream_options=options) == completion(stream_options={}) == completion()


@pytest.mark.parametrize("name", sorted(UNSUPPORTED.keys() - OWN_COMPLETION))
def test_a_wish_that_a_completion_cannot_meet_is_refused_by_name(name: str) -> None:
    for value in WISHES:
        raw = msgspec.json.encode({"prompt": "x", name: value})
        if is_neutral(value, UNSUPPORTED[name]):
            assert name in ("user", "metadata", "store")
            parse_struct(raw, CompletionRequest, UNSUPPORTED)
            continue
        with pytest.raises(RequestError, match="leave it out") as caught:
            parse_struct(raw, CompletionRequest, UNSUPPORTED)
        assert caught.value.field == name


OWN_CHAT = frozenset(ChatCompletionRequest.__struct_fields__)
MESSAGES = [{"role": "user", "content": "x"}]


def chat(**fields: Any) -> tuple[ChatCompletionRequest, CheckedRequest]:
    raw = msgspec.json.encode({"messages": MESSAGES, **fields})
    request = parse_struct(raw, ChatCompletionRequest, chat_protocol.UNSUPPORTED)
    body = chat_protocol.to_generate_body(request, shows_special=False)
    return request, check_generate_request(body, LIMITS)


def test_neutral_fields_of_a_chat_change_nothing() -> None:
    plain, checked = chat()
    for name, values in chat_protocol.UNSUPPORTED.items():
        listed = [None, *(value for value in values if value is not ANYTHING)]
        listed += [False, "", [], {}, {"a": None}] if name not in OWN_CHAT else []
        for value in listed:
            if name not in ("messages", "model", "tool_choice"):
                found, body = chat(**{name: value})
                assert body == checked, (name, value)
                if value is None:
                    assert found == plain, name


@pytest.mark.parametrize("name", sorted(chat_protocol.UNSUPPORTED.keys() - OWN_CHAT))
def test_a_wish_that_a_chat_cannot_meet_is_refused_by_name(name: str) -> None:
    for value in WISHES:
        if is_neutral(value, chat_protocol.UNSUPPORTED[name]):
            continue
        with pytest.raises(RequestError, match="leave it out") as caught:
            chat(**{name: value})
        assert caught.value.field == name


@pytest.mark.parametrize(
    ("route", "struct", "body"),
    [
        ("/tokenize", TokenizeReqInput, {"prompt": "x"}),
        ("/detokenize", DetokenizeReqInput, {"tokens": [1]}),
    ],
)
def test_neutral_fields_of_the_tokenizer_routes_change_nothing(
    route: str, struct: type[msgspec.Struct], body: dict[str, Any]
) -> None:
    unsupported = neutral_fields(route)
    plain = parse_struct(msgspec.json.encode(body), struct, unsupported)
    for name, values in unsupported.items():
        for value in (None, *(value for value in values if value is not ANYTHING)):
            raw = msgspec.json.encode({name: value, **body})
            assert parse_struct(raw, struct, unsupported) == plain
        if name not in struct.__struct_fields__ and name != "model":
            with pytest.raises(RequestError, match=f"{name}: is not supported"):
                parse_struct(msgspec.json.encode({name: "wish", **body}), struct, unsupported)


CONTROL_BODIES: dict[str, dict[str, Any]] = {
    "/abort_request": {"rid": "r"},
    "/pause_generation": {},
    "/continue_generation": {},
    "/update_weights_from_disk": {"model_path": "x"},
    "/update_weights_from_tensor": {"safetensors": BYTES},
    "/update_weights_from_distributed": TENSORS,
    "/init_weights_update_group": {**GROUP, "backend": "nccl"},
    "/destroy_weights_update_group": {},
    "/begin_weight_update": {},
    "/end_weight_update": {},
    "/update_weight_version": {"new_version": "v"},
    "/release_memory_occupation": {},
    "/resume_memory_occupation": {},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def test_every_control_route_of_the_table_is_walked() -> None:
    routes = {body for body in facts()["bodies"] if body.startswith("/")}
    assert routes - CONTROL_BODIES.keys() == {
        "/v1/completions",
        "/v1/chat/completions",
        "/tokenize",
        "/detokenize",
    }


@pytest.mark.parametrize("path", CONTROL_BODIES)
def test_neutral_fields_of_a_control_call_change_nothing(model_path: Path, path: str) -> None:
    server = Server(str(model_path), load_tokenizer(model_path))
    body = CONTROL_BODIES[path]
    bodies = [body]
    for name, values in neutral_fields(path).items():
        if name not in body:
            bodies += [{**body, name: value} for value in dict.fromkeys((None, *values))]
    for each in bodies:
        answer = server.post(path, each)
        assert answer.status_code == 200, (each, answer.text)
    sent = [msgspec.structs.asdict(message) for message in server.sent]
    for message in sent:
        message.pop("call_id", None)
        message.pop("source", None)  # a file of its own for each update
    assert all(message == sent[0] for message in sent)
    assert len(sent) in (0, len(bodies))
