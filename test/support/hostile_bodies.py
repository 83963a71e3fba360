"""Bodies of every route that a server's OpenAPI document describes, made hostile."""

from __future__ import annotations

import json
import random
import re
import tempfile
from contextlib import ExitStack
from typing import Any
from urllib.parse import quote

from mutations import as_json, mutated, nasty
from serving_utils import running_server

# Routes that may have bodies of any length of output.
GENERATES = ("/generate", "/v1/completions", "/v1/chat/completions")
MAX_TOKENS = 8
TIMEOUT_S = 30.0
FLAGS = ("--context-length", "96", "--max-batch-size-per-request", "4", "--page-size", "4")
FLAGS += ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--log-level", "error")
HEADERS = ("authorization", "host", "origin", "content-type", "accept-language", "x-request-id")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", 1]}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TEXT: dict[str, Any] = {"role": "user", "content": "hello"}
EXAMPLES: dict[str, list[Any]] = {
    "/generate": [
        {"text": "hello", "sampling_params": {"temperature": 0, "stop": ["a"], "n": 2}},
        {"input_ids": [[1, 2, 3], [4]], "sampling_params": [{"top_p": 0.5}, {"top_k": 3}]},
        {"text": "x", "sampling_params": {"json_schema": json.dumps(SCHEMA)}, "stream": True},
        {"text": "x", "sampling_params": {"regex": "[a-c]{2,4}", "stop_regex": "b+"}},
        {"text": "x", "return_logprob": True, "top_logprobs_num": 2, "logprob_start_len": 0},
        {"text": "x", "sampling_params": {"mtp_enabled": True, "mtp_k": 3, "logit_bias": {"5": 1}}},
    ],
    "/v1/completions": [
        {"prompt": ["a", "b"], "logprobs": 2, "echo": True, "n": 2, "seed": 3},
        {"prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}},
    ],
    "/v1/chat/completions": [
        {"messages": [TEXT], "tools": [TOOL], "tool_choice": "auto", "stream": True},
        {"messages": [TEXT, {"role": "assistant", "tool_calls": [CALL]}, TEXT], "logprobs": True},
        {"messages": [TEXT], "response_format": {"type": "json_schema", "json_schema": {
            "name": "n", "schema": SCHEMA, "strict": True}}},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "n": 2},
    ],
}  # fmt: skip


def shorten(body: dict[str, Any], path: str) -> None:
    """Keeps a body from running for long."""
    wait_s = body.get("timeout_s", 60.0)
    if "group" in path and isinstance(wait_s, float):
        body["timeout_s"] = min(wait_s, 0.01)  # no trainer will come
    holders, names = [body], ["max_tokens", "max_completion_tokens"]
    if path == "/generate":
        sampling = body.setdefault("sampling_params", {})
        holders = sampling if isinstance(sampling, list) else [sampling]
        names = ["max_new_tokens"]
    for fields in holders if path in GENERATES else ():
        if isinstance(fields, dict):
            if not any(name in fields for name in names):
                fields[names[0]] = MAX_TOKENS  # the default is longer
            for name in names:
                if isinstance(fields.get(name), int):
                    fields[name] = min(fields[name], MAX_TOKENS)


def value_of(chooser: random.Random, schema: Any, known: dict[str, Any], depth: int = 0) -> Any:
    """Draws a value that an OpenAPI schema allows, or nearly.

    Args:
        known: schemas by their references.
    """
    if not isinstance(schema, dict) or depth > 8:
        return nasty(chooser)
    if "$ref" in schema:
        return value_of(chooser, known[schema["$ref"]], known, depth + 1)
    for kind in ("anyOf", "oneOf"):
        if kind in schema:
            return value_of(chooser, chooser.choice(schema[kind]), known, depth + 1)
    if "const" in schema or "enum" in schema:
        return chooser.choice(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "object":
            fields = schema.get("properties", {})
            needed = schema.get("required", [])
            taken = [name for name in fields if name in needed or chooser.random() < 0.2]
            return {name: value_of(chooser, fields[name], known, depth + 1) for name in taken}
        case "array":
            part = schema.get("items", {})
            return [value_of(chooser, part, known, depth + 1) for _ in range(chooser.randrange(4))]
        case "string":
            return chooser.choice(["hello", "", "default", "demo", "a b", "f"])
        case "integer":
            return chooser.choice([0, 1, 2, 5, 100, schema.get("minimum", -1)])
        case "number":
            return chooser.choice([0.0, 0.5, 1.0, 2.0, schema.get("maximum", 10)])
        case "boolean":
            return chooser.random() < 0.5
    return nasty(chooser)


class Bodies:
    """Sends bodies to a server of its own, with all its processes. What one pauses or releases goes
    on before the next."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        folder = self._stack.enter_context(tempfile.TemporaryDirectory())
        flags = (*FLAGS, "--served-model-name", "demo")
        self._server = self._stack.enter_context(running_server("demo", *flags, TMPDIR=folder))
        document = self._server.client.get("/openapi.json").json()
        schemas = document["components"]["schemas"]
        self._known = {f"#/components/schemas/{name}": each for name, each in schemas.items()}
        self._routes = [
            (method.upper(), path, operation)
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        ]

    def draw(self, chooser: random.Random) -> bytes:
        """Returns method and path, headers as JSON, and the body, in three parts by line ends."""
        method, path, operation = chooser.choice(self._routes)
        if chooser.random() < 0.6:
            path = chooser.choice(GENERATES)
            method, path, operation = next(each for each in self._routes if each[1] == path)
        content, headers = b"", {"content-type": "application/json"}
        if "requestBody" in operation:
            schema = operation["requestBody"]["content"]["application/json"]["schema"]
            value = value_of(chooser, schema, self._known)
            if path in EXAMPLES and chooser.random() < 0.5:
                value = chooser.choice(EXAMPLES[path])
            value = mutated(chooser, value)
            if isinstance(value, dict):
                shorten(value, path)
            content = as_json(chooser, value)
        if chooser.random() < 0.05:
            headers[chooser.choice(HEADERS)] = chooser.choice(["", "*", "é", "a" * 3000, "null"])
        if chooser.random() < 0.05:
            path += chooser.choice(["?", "/", "%00", "/..", "?a=%ff", "?reset=1&timeout=x"])
        name = quote(str(nasty(chooser))[:99], errors="replace")
        path = re.sub(r"\{\w+\}", lambda _: name, path)
        return b"\n".join([f"{method} {path}".encode(), json.dumps(headers).encode(), content])

    def feed(self, raw: bytes) -> bool:
        """Sends it.

        Raises:
            AssertionError: for an answer of 500 or more, or none.
        """
        line, headers, content = raw.split(b"\n", 2)
        method, path = line.decode().split(" ", 1)
        sent = {name: value.encode() for name, value in json.loads(headers).items()}
        client, status = self._server.client, 0
        with client.stream(
            method, path, content=content, headers=sent, timeout=TIMEOUT_S
        ) as response:
            status = response.status_code
            text = response.read().decode("utf-8", "replace")
        assert status < 500, f"{status}: {text[:300]}"
        if not path.startswith(GENERATES):
            for route in ("/resume_memory_occupation", "/continue_generation"):
                client.post(route, json={}, timeout=TIMEOUT_S)
        assert self._server.process.poll() is None, "the server has ended"
        return status < 400

    def close(self) -> None:
        """Checks that all is free, and ends the server.

        Raises:
            AssertionError: if something is not.
        """
        try:
            state = self._server.wait_idle(TIMEOUT_S)
            assert state["orphan_token_count"] == state["legacy_missing_tokens"] == 0
            assert state["ledger_repair_count"] == 0
        finally:
            self._stack.close()
