"""Clients of a server under test: one request each, timed."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx

from sglang.benchmark.datasets import BenchPrompt
from sglang.benchmark.metrics import RequestResult


@dataclass(frozen=True)
class RequestOptions:
    """The options that all requests of a run have in common."""

    model: str
    stream: bool
    ignore_eos: bool
    extra_body: dict[str, Any]


Build = Callable[[BenchPrompt, RequestOptions], dict[str, Any]]
Read = Callable[[dict[str, Any], RequestResult], str]


def native_body(prompt: BenchPrompt, options: RequestOptions) -> dict[str, Any]:
    """A body of `/generate`."""
    params = {
        "temperature": 0.0,
        "max_new_tokens": prompt.output_len,
        "ignore_eos": options.ignore_eos,
    }
    source = {"text": prompt.text} if prompt.ids is None else {"input_ids": prompt.ids}
    return {**source, "sampling_params": params, "stream": options.stream, **options.extra_body}


def completion_body(prompt: BenchPrompt, options: RequestOptions) -> dict[str, Any]:
    """A body of `/v1/completions`."""
    body: dict[str, Any] = {
        "model": options.model,
        "prompt": prompt.text if prompt.ids is None else prompt.ids,
        "temperature": 0.0,
        "max_tokens": prompt.output_len,
        "stream": options.stream,
        "ignore_eos": options.ignore_eos,
    }
    if options.stream:
        body["stream_options"] = {"include_usage": True}
    return {**body, **options.extra_body}


def read_native(chunk: dict[str, Any], result: RequestResult) -> str:
    """Takes in a (cumulative) answer of `/generate`; returns its text so far."""
    result.prompt_len = chunk["meta_info"]["prompt_tokens"]
    result.output_len = chunk["meta_info"]["completion_tokens"]
    return chunk["text"]


def read_completion(chunk: dict[str, Any], result: RequestResult) -> str:
    """Takes in a piece of `/v1/completions`; returns the text so far."""
    usage = chunk.get("usage")
    if usage:
        result.prompt_len, result.output_len = usage["prompt_tokens"], usage["completion_tokens"]
    return result.text + "".join(choice["text"] for choice in chunk["choices"])


BACKENDS: dict[str, tuple[str, Build, Read]] = {
    "sglang": ("/generate", native_body, read_native),
    "sglang-native": ("/generate", native_body, read_native),
    "sglang-oai": ("/v1/completions", completion_body, read_completion),
    "vllm": ("/v1/completions", completion_body, read_completion),
}


async def send(
    client: httpx.AsyncClient, backend: str, prompt: BenchPrompt, options: RequestOptions
) -> RequestResult:
    """Sends one request and waits for its end; a failure is a result with an error."""
    path, build, read = BACKENDS[backend]
    result = RequestResult()
    start = latest = time.perf_counter()
    num_before = 0
    try:
        async with client.stream("POST", path, json=build(prompt, options)) as response:
            if response.status_code != 200:
                await response.aread()
                result.error = f"HTTP {response.status_code}: {response.text[:200]}"
                return result
            async for chunk in _chunks(response, options.stream):
                if "error" in chunk:
                    result.error = str(chunk["error"])[:200]
                    return result
                now = time.perf_counter()
                text = read(chunk, result)
                if not result.ttft:
                    result.ttft = now - start
                elif text != result.text or result.output_len > num_before:
                    result.itl.append(now - latest)
                result.text, latest, num_before = text, now, result.output_len
        result.latency = time.perf_counter() - start
    except (httpx.HTTPError, ValueError, KeyError) as error:
        result.error = f"{type(error).__name__}: {error}"
    return result


async def _chunks(response: httpx.Response, stream: bool) -> AsyncIterator[dict[str, Any]]:
    if not stream:
        yield json.loads(await response.aread())
        return
    async for line in response.aiter_lines():
        data = line.removeprefix("data:").strip()
        if data and data != "[DONE]":
            yield json.loads(data)
