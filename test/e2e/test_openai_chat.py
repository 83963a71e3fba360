"""`/v1/chat/completions` of a real server."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs
import pytest
from transformers import AutoTokenizer

from grammar_cases import PERSON
from serving_utils import RunningServer, events
from sglang.srt.model_config import resolve_model_path

PROMPT = {"prompt": "x = "}
MESSAGES = [{"role": "user", "content": "Read a file.\nIt is small."}]
GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(openai_server: RunningServer) -> RunningServer:
    return openai_server


def chat(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def stream(server: RunningServer, **body: Any) -> list[Any]:
    body = {"messages": MESSAGES, **GREEDY, "stream": True, **body}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(events(response.iter_lines()))


def test_answer_is_generate_s_of_the_prompt_that_transformers_makes(server: RunningServer) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(resolve_model_path("demo")))
    ids = tokenizer.apply_chat_template(
        MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False
    )
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    native = server.post("/generate", {"input_ids": ids, "sampling_params": params}).json()
    answer = chat(server, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["prompt_token_ids"] == ids
    assert choice["response_token_ids"] == native["output_ids"]
    assert choice["message"]["content"] == native["text"]
    assert answer["model"] == "tiny"


def test_stream_is_the_answer(server: RunningServer) -> None:
    *chunks, usage, done = stream(server, stream_options={"include_usage": True})
    assert done == "[DONE]"
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    answer = chat(server)
    assert text == answer["choices"][0]["message"]["content"]
    assert usage["usage"]["completion_tokens"] == answer["usage"]["completion_tokens"]


def test_content_matches_the_schema_of_the_response_format(server: RunningServer) -> None:
    """Checks chats and completions, greedy and sampled, with log-probabilities that JSON can
    hold."""
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    body = {"response_format": wanted, "max_tokens": 400, "logprobs": True, "top_logprobs": 4}
    validator = jsonschema_rs.Draft202012Validator(PERSON)
    for how in ({}, {"temperature": 1.0, "seed": 3, "n": 2}):
        for choice in chat(server, **body, **how)["choices"]:
            assert choice["finish_reason"] == "stop"
            validator.validate(json.loads(choice["message"]["content"]))
            tops = [top for entry in choice["logprobs"]["content"] for top in entry["top_logprobs"]]
            assert all(top["logprob"] <= 0 for top in tops)
    body = {"prompt": "x = ", "response_format": wanted, "max_tokens": 400, "logprobs": 3}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["finish_reason"] == "stop"
    validator.validate(json.loads(choice["text"]))


def test_a_json_object_is_one_if_it_ends(server: RunningServer) -> None:
    """Nothing in this format says that it must."""
    found = []
    body = {"response_format": {"type": "json_object"}, "max_tokens": 100, "temperature": 1.0}
    for choice in chat(server, **body, n=8, seed=1)["choices"]:
        text = choice["message"]["content"]
        assert text.startswith("{")
        if choice["finish_reason"] == "stop":
            found.append(json.loads(text))
    assert found
    assert all(isinstance(value, dict) for value in found)


def test_structural_tags_are_kept_in_chats_completions_and_generate(server: RunningServer) -> None:
    """The end of a line is the trigger: behind each that is free the form stands."""
    schema = {"type": "object", "properties": {"é": {"enum": [1, 2]}}, "required": ["é"]}
    schema |= {"additionalProperties": False}
    structure = {"begin": "\nx = ", "schema": schema, "end": ";"}
    tag = {"type": "structural_tag", "structures": [structure], "triggers": ["\n"]}
    how = {"temperature": 1.0, "seed": 1, "n": 4, "max_tokens": 60, "response_format": tag}
    texts = [choice["message"]["content"] for choice in chat(server, **how)["choices"]]
    choices = server.post("/v1/completions", {**PROMPT, **how}).json()["choices"]
    texts += [choice["text"] for choice in choices]
    params = {"n": 4, "max_new_tokens": 60, "structural_tag": json.dumps(tag)}
    outputs = server.post("/generate", {"text": "x = ", "sampling_params": params}).json()
    texts += [output["text"] for output in outputs]
    num_checked = 0
    for text in texts:
        _, trigger, rest = text.partition("\n")
        while trigger and ";" in rest:  # else the output may be cut within
            assert rest.startswith("x = ")
            value, end = json.JSONDecoder().raw_decode(rest, len("x = "))
            jsonschema_rs.Draft202012Validator(schema).validate(value)
            assert rest[end] == ";"
            _, trigger, rest = rest[end:].partition("\n")
            num_checked += 1
    assert num_checked > 5


DAY = {"type": "object", "properties": {"day": {"enum": ["é", "Monday"]}}, "required": ["day"]}
DAY |= {"additionalProperties": False}
FUNCTIONS = {"weather": PERSON, "calendar": DAY}
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": schema, "strict": True}}
    for name, schema in FUNCTIONS.items()
]


@pytest.mark.long_matrix
@pytest.mark.parametrize("streams", [False, True])
def test_a_call_that_must_be_is_one_of_its_schema(server: RunningServer, streams: bool) -> None:
    named = [{"type": "function", "function": {"name": name}} for name in FUNCTIONS]
    how = {"tools": TOOLS, "max_tokens": 600, "temperature": 1.0, "n": 2, "ignore_eos": False}
    called = set()
    for choice, single in (
        ("required", False),
        ("required", True),
        (named[0], True),
        (named[1], True),
    ):
        parallel = choice != "required" or not single
        body = {**how, "tool_choice": choice, "parallel_tool_calls": parallel, "seed": 5}
        calls: dict[int, list[Any]] = {}
        if streams:
            for chunk in stream(server, **body)[:-1]:
                (part,) = chunk["choices"]
                assert not (single and part["delta"].get("content"))
                calls.setdefault(part["index"], []).extend(part["delta"].get("tool_calls") or [])
        else:
            for part in chat(server, **body)["choices"]:
                is_cut = part["finish_reason"] == "length" and not single
                assert is_cut or part["message"]["content"] is None
                assert is_cut or part["finish_reason"] == "tool_calls"
                calls[part["index"]] = part["message"]["tool_calls"]
        assert len(calls) == 2
        for found in calls.values():
            assert len(found) == 1 if single else found
            for call in found:
                function = call["function"]
                schema = jsonschema_rs.Draft202012Validator(FUNCTIONS[function["name"]])
                schema.validate(json.loads(function["arguments"]))
                called.add(function["name"])
                assert choice in (
                    "required",
                    {"type": "function", "function": {"name": function["name"]}},
                )
    assert called == {"weather", "calendar"}


@pytest.mark.parametrize("place", [0, 2])
@pytest.mark.parametrize("strict", [False, True])
def test_functions_whose_schema_cannot_be_kept_are_named(
    server: RunningServer, place: int, strict: bool
) -> None:
    parameters = {"type": "object", "not": {}}
    function = {"name": "f", "parameters": parameters, "strict": strict}
    tools = [*TOOLS[:place], {"type": "function", "function": function}, *TOOLS[place:]]
    body = {"messages": MESSAGES, "tools": tools, "tool_choice": "auto" if strict else "required"}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    error = response.json()["error"]
    name = f"tools[{place}].function.parameters"
    assert error["param"] == name
    assert error["message"].startswith(f"{name}: ")
    assert '["not"]' in error["message"]
    assert chat(server, **{**body, "tool_choice": "none"})


def test_a_format_that_cannot_be_kept_is_400_with_the_reason(server: RunningServer) -> None:
    schema = {"type": "array", "uniqueItems": True}
    wanted = {"type": "json_schema", "json_schema": {"name": "p", "schema": schema}}
    for route, prompt in (("chat/completions", {"messages": MESSAGES}), ("completions", PROMPT)):
        for stream in (False, True):
            body = {**prompt, "response_format": wanted, "stream": stream}
            response = server.post(f"/v1/{route}", body)
            assert response.status_code == 400
            error = response.json()["error"]
            assert error["param"] == "response_format"
            assert "uniqueItems" in error["message"]
    assert chat(server)["choices"]


def test_a_client_that_leaves_aborts_its_chat(server: RunningServer) -> None:
    body = {"messages": MESSAGES, "stream": True, "ignore_eos": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as response:
        next(response.iter_lines())
    server.wait_idle()


def test_errors_have_openais_envelope(server: RunningServer) -> None:
    response = server.post("/v1/chat/completions", {"messages": [{"role": "user"}]})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages[0].content"
    long = [{"role": "user", "content": "word " * 5000}]
    response = server.post("/v1/chat/completions", {"messages": long})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "messages"
    response = server.client.post(
        "/v1/chat/completions", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400
