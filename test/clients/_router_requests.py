"""The requests of `check_routers.py`, one function for each kind: what they send, and what of an
answer has to be the same wherever it comes from."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from _example_chats import NAME, calling_chat

NUM_TOKENS = 96
# Up to four kinds meet in a load, so that with five prompts each of them meets each kind.
PROMPTS = [
    f"def function_{i}(value):\n    return value + {i}\n\n\ndef other_{i}(" for i in range(5)
]
Answers = dict[str, dict[str, str]]  # by kind and prompt


def generate(url: str, prompt: str) -> str:
    """The text of one answer of /generate."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0}}
    answer = json.loads(post(url + "/generate", body, raises=True)[1])
    return str(answer["text"])


def complete(url: str, prompt: str) -> str:
    """The text of one answer of /v1/completions."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    answer = json.loads(post(url + "/v1/completions", body, raises=True)[1])
    return str(answer["choices"][0]["text"])


def stream(url: str, prompt: str) -> str:
    """The last text of a stream of /generate; raises ValueError unless it ends as it should."""
    body = {"text": prompt, "sampling_params": {"max_new_tokens": NUM_TOKENS, "temperature": 0}}
    chunks = data_of(post(url + "/generate", {**body, "stream": True}, raises=True)[1].decode())
    if len(chunks) < 2 or chunks[-1] != "[DONE]":
        raise ValueError("the stream has no end")
    last = json.loads(chunks[-2])
    if last.get("meta_info", {}).get("finish_reason", {}).get("type") not in ("stop", "length"):
        raise ValueError("the stream ended early")
    return str(last["text"])


def stream_completion(url: str, prompt: str) -> str:
    """The joined text of a stream of /v1/completions."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0}
    raw = post(url + "/v1/completions", {**body, "stream": True}, raises=True)[1].decode()
    chunks = data_of(raw)
    if not chunks or chunks[-1] != "[DONE]":
        raise ValueError("the stream has no end")
    return "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1])


def chat(url: str, prompt: str) -> str:
    """Returns the text of an answer of /v1/chat/completions."""
    return _chat(url, _question(prompt))


def stream_chat(url: str, prompt: str) -> str:
    """Returns the text of a stream of /v1/chat/completions."""
    return _stream_chat(url, _question(prompt))


def call_tools(url: str, prompt: str) -> str:
    """A call of a tool, and how the answer ends."""
    return _chat(url, _calling(prompt))


def stream_tools(url: str, prompt: str) -> str:
    """The same, streamed."""
    return _stream_chat(url, _calling(prompt))


def _question(prompt: str) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "demo", "messages": messages, "max_tokens": NUM_TOKENS, "temperature": 0}


def _calling(prompt: str) -> dict[str, Any]:
    name = prompt.partition("(")[0].removeprefix("def ")
    return {"model": "demo", **calling_chat(f"{name}.txt")}


def _chat(url: str, body: dict[str, Any]) -> str:
    (choice,) = json.loads(post(url + "/v1/chat/completions", body, raises=True)[1])["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message["tool_calls"] or []]
    return _in_short(message["content"], calls, choice["finish_reason"])


def _stream_chat(url: str, body: dict[str, Any]) -> str:
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    chunks = data_of(post(url + "/v1/chat/completions", body, raises=True)[1].decode())
    if len(chunks) < 3 or chunks[-1] != "[DONE]" or "usage" not in json.loads(chunks[-2]):
        raise ValueError("the stream has no end")
    choices = [json.loads(chunk)["choices"][0] for chunk in chunks[:-2]]
    deltas = [choice["delta"] for choice in choices]
    calls = [call["function"] for delta in deltas for call in delta.get("tool_calls") or []]
    content = "".join(delta.get("content") or "" for delta in deltas)
    return _in_short(content, calls, choices[-1]["finish_reason"])


def _in_short(content: str | None, calls: list[dict[str, Any]], reason: str) -> str:
    found = [[call["name"], json.loads(call["arguments"])] for call in calls]
    return json.dumps([content or "", found, reason])


def data_of(events: str) -> list[str]:
    """Returns the data of each event of a stream."""
    lines = events.split("\n\n")
    return [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]


REQUESTS: dict[str, Callable[[str, str], str]] = {
    "generate": generate,
    "completions": complete,
    "stream": stream,
    "completions stream": stream_completion,
    "chat": chat,
    "chat stream": stream_chat,
    "tools": call_tools,
    "tools stream": stream_tools,
}
# Streams, and what says the same in one piece.
UNSTREAMED = {
    "stream": "generate",
    "completions stream": "completions",
    "chat stream": "chat",
    "tools stream": "tools",
}


def expected_answers(url: str) -> Answers:
    """Returns the answers that a server gives by itself, in one piece.

    Raises:
        SystemExit: the model calls no tool, so that calls cannot be checked.
    """
    asked = {kind: UNSTREAMED.get(kind, kind) for kind in REQUESTS}
    found = {
        kind: {prompt: REQUESTS[kind](url, prompt) for prompt in PROMPTS}
        for kind in set(asked.values())
    }
    for answer in found["tools"].values():
        _, calls, _ = json.loads(answer)
        if [name for name, _ in calls] != [NAME]:
            raise SystemExit(f"The model was to call {NAME}, and wrote {answer}.")
    return {kind: found[source] for kind, source in asked.items()}


def get(url: str) -> tuple[int, bytes]:
    """(status, body); 0 for a server that cannot be reached."""
    try:
        with urllib.request.urlopen(url, timeout=30) as answer:
            return answer.status, answer.read()
    except urllib.error.HTTPError as error:
        return error.code, error.read()
    except OSError:
        return 0, b""


def post(url: str, body: dict[str, Any], raises: bool = False) -> tuple[int, bytes]:
    """(status, body) of a JSON body; `raises` makes an error of any status but 200."""
    try:
        return send("POST", url, body)
    except urllib.error.HTTPError as error:
        if raises:
            raise
        return error.code, error.read()


def send(method: str, url: str, body: dict[str, Any] | None) -> tuple[int, bytes]:
    """(status, body) of an answer; raises HTTPError for an error."""
    headers = {"content-type": "application/json"}
    raw = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, raw, headers, method=method)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.status, answer.read()
