"""`/v1/completions` says what `/generate` says, in OpenAI's form."""

from __future__ import annotations

from typing import Any

import pytest

from serving_utils import RunningServer, events

GREEDY = {"temperature": 0, "max_tokens": 12, "ignore_eos": True}
TEXT = "import os\n\ndef "


@pytest.fixture(scope="module")
def server(openai_server: RunningServer) -> RunningServer:
    return openai_server


def complete(server: RunningServer, **body: Any) -> dict[str, Any]:
    response = server.post("/v1/completions", {"prompt": TEXT, **GREEDY, **body})
    assert response.status_code == 200, response.text
    return response.json()


def native(server: RunningServer, text: str = TEXT, **fields: Any) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    return server.post("/generate", {"text": text, "sampling_params": params, **fields}).json()


def stream(server: RunningServer, **body: Any) -> list[Any]:
    body = {"prompt": TEXT, **GREEDY, "stream": True, **body}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response.iter_lines()))
    assert chunks.pop() == "[DONE]"
    return chunks


def test_answer_equals_generate(server: RunningServer) -> None:
    answer, expected = complete(server), native(server)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    choice = answer["choices"][0]
    assert choice["text"] == expected["text"]
    assert choice["finish_reason"] == "length"
    prompt_tokens = expected["meta_info"]["prompt_tokens"]
    assert answer["usage"]["prompt_tokens"] == prompt_tokens
    assert answer["usage"]["completion_tokens"] == 12
    assert answer["usage"]["total_tokens"] == prompt_tokens + 12


def test_stream_pieces_are_the_answer_and_usage_comes_last(server: RunningServer) -> None:
    answer = complete(server)
    chunks = stream(server, stream_options={"include_usage": True})
    usage = chunks.pop()
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == 12
    assert "".join(c["choices"][0]["text"] for c in chunks) == answer["choices"][0]["text"]
    reasons = [c["choices"][0]["finish_reason"] for c in chunks]
    assert reasons[-1] == "length"
    assert set(reasons[:-1]) == {None}


def test_every_form_of_prompt(server: RunningServer) -> None:
    ids = server.post("/tokenize", {"prompt": TEXT}).json()["tokens"]
    expected = complete(server)["choices"][0]["text"]
    for prompt in (ids, [ids], [TEXT]):
        assert complete(server, prompt=prompt)["choices"][0]["text"] == expected
    both = complete(server, prompt=[TEXT, "class A"], n=2, seed=3, temperature=0.8)
    assert [choice["index"] for choice in both["choices"]] == [0, 1, 2, 3]


def test_echo_with_logprobs_scores_the_prompt(server: RunningServer) -> None:
    """Sends what evaluation harnesses do: prompt and output come with one logprob each, the first
    null."""
    choice = complete(server, echo=True, logprobs=2)["choices"][0]
    expected = native(
        server, return_logprob=True, logprob_start_len=0, return_text_in_logprobs=True
    )["meta_info"]
    entries = expected["input_token_logprobs"] + expected["output_token_logprobs"]
    logprobs = choice["logprobs"]
    assert choice["text"].startswith(TEXT)
    assert logprobs["tokens"] == [text for _, _, text in entries]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx([e[0] for e in entries[1:]], abs=1e-4)
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert logprobs["text_offset"][0] == 0


def test_streamed_logprobs_are_those_of_the_answer(server: RunningServer) -> None:
    expected = complete(server, logprobs=1)["choices"][0]["logprobs"]
    chunks = [c["choices"][0]["logprobs"] for c in stream(server, logprobs=1)]
    tokens = [token for c in chunks for token in c["tokens"]]
    assert tokens == expected["tokens"]
    assert chunks[0]["text_offset"][0] == 0


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt": []}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [99999]}, "prompt[0][0]"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 100_000}, "max_tokens"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"seed": 1.5}, "seed"),
        ({"logprobs": 1000}, "logprobs"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"best_of": 2}, "best_of"),
        ({"suffix": "x"}, "suffix"),
        ({"custom_params": {"mtp_enabled": True, "mtp_k": 99}}, "custom_params.mtp_k"),
    ],
)
def test_bad_fields_are_named_in_openais_terms(
    server: RunningServer, change: dict[str, Any], field: str
) -> None:
    response = server.post("/v1/completions", {"prompt": TEXT, **GREEDY, **change})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == field
    assert error["message"].startswith(field)
    assert server.generate().status_code == 200


def test_other_content_types_are_refused(server: RunningServer) -> None:
    response = server.client.post(
        "/v1/completions", content=b"{}", headers={"content-type": "text/plain"}
    )
    assert response.status_code == 400


def test_models(server: RunningServer) -> None:
    listed = server.client.get("/v1/models").json()
    assert [model["id"] for model in listed["data"]] == ["tiny"]
    assert server.client.get("/v1/models/tiny").json() == listed["data"][0]
    assert server.client.get("/v1/models/other").status_code == 404


def test_a_full_context_without_output_is_answered(server: RunningServer) -> None:
    answer = complete(server, max_tokens=0, echo=True)
    assert answer["choices"][0]["text"] == TEXT
    assert answer["usage"]["completion_tokens"] == 0
