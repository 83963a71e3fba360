"""Bodies as SGLang's clients send them: routers, trainers, OpenAI's client."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_server import BYTES, GROUP, RAW, TENSORS, Server
from serving_utils import make_model_dir
from sglang.srt.entrypoints.openai.protocol import (
    UNSUPPORTED,
    CompletionRequest,
    prompts_of,
    to_generate_body,
)
from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import GenerateReqInput
from sglang.srt.messages.control import UpdateWeightsReq, WeightGroupReq
from sglang.srt.tokenizer import load_tokenizer

SGLANG = {
    "load_format": "auto",
    "selector": "all",
    "torch_empty_cache": True,
    "is_async": False,
    "keep_pause": True,
    "token_step": 3,
    "recapture_cuda_graph": True,
    "disable_draft_model": True,
    "crash_on_error": True,
    "post_load_weights": True,
    "rid": None,
    "http_worker_ipc": None,
    "serialized_named_tensors": None,
    "abort_all_request": False,
}
GOOD: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "x"},
    "/update_weights_from_tensor": {"safetensors": BYTES},
    "/update_weights_from_distributed": TENSORS,
    "/init_weights_update_group": GROUP,
    "/destroy_weights_update_group": {},
    "/begin_weight_update": {},
    "/commit_weight_update": {},
    "/end_weight_update": {},
    "/update_weight_version": {"new_version": "v"},
    "/release_memory_occupation": {"tags": ["cuda_graph"]},
    "/resume_memory_occupation": {"tags": ["cuda_graph"]},
    "/pause_generation": {},
    "/continue_generation": {},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model_path: Path) -> Server:
    return Server(str(model_path), load_tokenizer(model_path))


@pytest.mark.parametrize("path", GOOD)
def test_fields_of_sglang_that_ask_for_nothing_are_accepted(server: Server, path: str) -> None:
    nulls = dict.fromkeys(SGLANG)
    other = {"load_format": "safetensors", "selector": "target"}
    for extra in (SGLANG, nulls, other):
        answer = server.post(path, {**GOOD[path], **extra})
        assert answer.status_code == 200, answer.text
    assert len(server.sent) == 3
    assert server.sent[0] == msgspec.structs.replace(server.sent[1], call_id=server.sent[0].call_id)


@pytest.mark.parametrize(
    "path", [path for path in GOOD if "update_weight" in path or "commit" in path]
)
def test_misspelt_abort_is_understood(server: Server, path: str) -> None:
    if path == "/update_weights_from_distributed":
        body = {**TENSORS, "abort_all_requests": False, "abort_all_request": True}
    else:
        body = {**GOOD[path], "abort_all_request": True}
    assert server.post(path, body).status_code == 200
    assert server.sent[-1].abort_all_requests is True


def test_port_of_a_group_may_be_a_string(server: Server) -> None:
    answer = server.post("/init_weights_update_group", {**GROUP, "master_port": "12345"})
    assert answer.status_code == 200
    assert server.only(WeightGroupReq).join.master_port == 12345


def test_options_of_raw_weights_may_have_fields_of_sglang(server: Server) -> None:
    query = "load_format=safetensors&is_async=False&abort_all_request=1&weight_version=1"
    path = f"/update_weights_from_tensor?{query}"
    answer = server.request("POST", path, content=b"weights", headers=RAW)
    assert answer.status_code == 200, answer.text
    message = server.only(UpdateWeightsReq)
    assert (message.weight_version, message.abort_all_requests) == ("1", True)


ROUTER = {
    "text": "hi",
    "sampling_params": {"max_new_tokens": 4},
    "return_text_in_logprobs": False,
    "stream": False,
    "log_metrics": True,
    "return_hidden_states": False,
    "background": False,
    "no_logs": False,
    "return_bytes": False,
    "return_entropy": False,
}
ROUTER_COMPLETION = {
    "model": "demo",
    "prompt": "hi",
    "stream": False,
    "echo": False,
    "no_stop_trim": False,
    "ignore_eos": False,
    "skip_special_tokens": True,
    "return_hidden_states": False,
}
TRAINER = {
    "input_ids": [1, 2],
    "rid": "a",
    "stream": False,
    "return_logprob": True,
    "logprob_start_len": -1,
    "image_data": None,
    "lora_path": None,
    "session_params": None,
}
GENERATE_BODIES: dict[str, dict[str, Any]] = {
    "sglang-router 0.2.2": ROUTER,
    "sglang-router 0.3.2": {**ROUTER, "model": None},
    "sglang-router with ranks": {**ROUTER, "data_parallel_rank": 0},
    "RuntimeEndpoint": {
        "text": "hi",
        "sampling_params": {
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
            "max_new_tokens": 4,
            "min_new_tokens": 0,
            "stop": (),
            "stop_token_ids": (),
            "stop_regex": (),
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "frequency_penalty": 0.0,
            "presence_penalty": 0.0,
            "ignore_eos": False,
            "regex": None,
            "json_schema": None,
        },
        "return_logprob": None,
        "logprob_start_len": None,
        "top_logprobs_num": None,
        "return_text_in_logprobs": None,
        "lora_path": None,
    },
    "slime": {
        "input_ids": [1, 2],
        "image_data": [],
        "return_logprob": True,
        "return_routed_experts": False,
        "sampling_params": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 4,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": 3,
        },
    },
    "AReaL": {
        **TRAINER,
        "sampling_params": {
            "top_p": 1.0,
            "top_k": 100_000_000,
            "max_new_tokens": 4,
            "temperature": 1.0,
            "stop_token_ids": [1],
            "ignore_eos": False,
            "skip_special_tokens": False,
            "frequency_penalty": 0.0,
            "stop": [],
        },
    },
    "verl": {
        **TRAINER,
        "sampling_params": {
            "n": 1,
            "max_new_tokens": 4,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            "temperature": 1.0,
            "top_k": -1,
            "top_p": 1,
            "ignore_eos": False,
            "min_new_tokens": 0,
            "skip_special_tokens": True,
            "spaces_between_special_tokens": True,
        },
        "return_hidden_states": False,
        "custom_logit_processor": None,
        "bootstrap_host": None,
        "bootstrap_port": None,
        "bootstrap_room": None,
    },
    "lm-eval": {
        "input_ids": [[1, 2]],
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
        "logprob_start_len": 0,
        "top_logprobs_num": 1,
        "return_logprob": True,
    },
}
COMPLETION_BODIES: dict[str, dict[str, Any]] = {
    "sglang-router": ROUTER_COMPLETION,
    "openai": {
        "model": "demo",
        "prompt": "hi",
        "best_of": 1,
        "echo": False,
        "frequency_penalty": 0,
        "logit_bias": None,
        "logprobs": None,
        "max_tokens": 4,
        "n": 1,
        "presence_penalty": 0,
        "seed": None,
        "stop": None,
        "stream": False,
        "stream_options": None,
        "suffix": None,
        "temperature": 1,
        "top_p": 1,
        "user": "someone",
    },
    "lm-eval": {
        "model": "demo",
        "prompt": [[1, 2]],
        "temperature": 0,
        "max_tokens": 1,
        "logprobs": 1,
        "seed": 1234,
        "echo": True,
    },
    "guided": {"prompt": "hi", "response_format": {"type": "text"}, "extra_key": "", "rid": None},
}


@pytest.mark.parametrize("client", GENERATE_BODIES)
def test_bodies_of_generate_that_clients_send_are_taken(server: Server, client: str) -> None:
    body = msgspec.json.decode(msgspec.json.encode(GENERATE_BODIES[client]))
    (prompt,) = server.manager.check(body).prompts
    assert prompt.sampling_params.max_new_tokens == body["sampling_params"]["max_new_tokens"]


@pytest.mark.parametrize("client", COMPLETION_BODIES)
def test_bodies_of_completions_that_clients_send_are_taken(server: Server, client: str) -> None:
    raw = msgspec.json.encode(COMPLETION_BODIES[client])
    request = parse_struct(raw, CompletionRequest, UNSUPPORTED)
    (prompt,) = server.manager.check(to_generate_body(request, prompts_of(request))).prompts
    most = COMPLETION_BODIES[client].get("max_tokens")
    assert prompt.has_default_length == (most is None)
    assert most in (None, prompt.sampling_params.max_new_tokens)


def test_a_body_made_in_python_takes_fields_of_sglang_that_ask_for_nothing() -> None:
    nothing = {"image_data": None, "lora_path": None, "return_routed_experts": False}
    body = GenerateReqInput(input_ids=[1], rid="a", **nothing)
    assert body == GenerateReqInput(input_ids=[1], rid="a")
    assert msgspec.structs.replace(body, rid="b").rid == "b"
    for name, reason in (("lora_path", "is not supported here"), ("colour", "is not a known")):
        with pytest.raises(RequestError, match=rf"^{name}: {reason}"):
            GenerateReqInput(input_ids=[1], **{name: "x"})
