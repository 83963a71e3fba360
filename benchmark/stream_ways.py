"""Streams of a server's routes over HTTP, for `engine_load.closed_loop`."""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmark.sse_client import StreamClient

Answer = dict[str, Any]
Params = dict[str, Any]


def _openai_fields(params: Params) -> dict[str, Any]:
    fields = {"model": "default", **params, "max_tokens": params["max_new_tokens"]}
    del fields["max_new_tokens"]
    return {**fields, "stream_options": {"include_usage": True}}


# By route: the body of a prompt and sampling parameters, and the last event's field with the
# number of tokens.
ROUTES: dict[str, tuple[Callable[[list[int], Params], dict[str, Any]], str]] = {
    "/generate": (
        lambda prompt, params: {"input_ids": prompt, "sampling_params": params},
        "meta_info",
    ),
    "/v1/completions": (
        lambda prompt, params: {"prompt": prompt, **_openai_fields(params)},
        "usage",
    ),
    "/v1/chat/completions": (
        lambda prompt, params: {
            "messages": [],
            "input_ids": prompt,
            **_openai_fields(params),
        },
        "usage",
    ),
}


@dataclass(frozen=True)
class HttpStreams:
    """Streams of a route, each on a connection of its own."""

    port: int
    route: str

    async def async_generate(self, *, input_ids: list[int], sampling_params: Params) -> Answer:
        """Returns what a load asks of an answer: as many places as there are tokens, and how it
        ended.

        Raises:
            StreamError: if the request fails.
        """
        make_body, last_field = ROUTES[self.route]
        body = json.dumps({**make_body(input_ids, sampling_params), "stream": True}).encode()
        client = await StreamClient.connect(self.port)
        try:
            answer = await client.stream(self.route, body, last_field)
        finally:
            client.close()
        num_tokens = answer.last[last_field]["completion_tokens"]
        is_whole = num_tokens == sampling_params["max_new_tokens"]
        reason = {"type": "length" if is_whole else "abort"}
        return {"output_ids": range(num_tokens), "meta_info": {"finish_reason": reason}}

    async def async_abort_request(self, *, abort_all: bool) -> int:
        body = json.dumps({"abort_all": abort_all}).encode()
        url = f"http://127.0.0.1:{self.port}/abort_request"
        (await asyncio.to_thread(urllib.request.urlopen, url, body)).close()
        return 0


def server_command(flags: Mapping[str, Any]) -> list[str]:
    """Gives the command of a server with an Engine's flags."""
    words = [sys.executable, "-m", "sglang.launch_server"]
    for name, value in flags.items():
        if value is not None:
            words.append(f"--{name.replace('_', '-')}")
            words += [] if value is True else [str(value)]
    return words
