"""Ways to the same streams, all driven by `engine_load.closed_loop`: an Engine's, and a server's
over HTTP. Each way awaits whole streams, and what it and its server take of a core is counted."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

import sglang
from benchmark.engine_load import closed_loop
from benchmark.sse_client import StreamClient, StreamError

Answer = dict[str, Any]
FRONT_END = "front_end"  # of an Engine with its clients
ROLES = {"scheduler": "scheduler", "paced_server": "scheduler", "detokenizer": "detokenizer"}


@dataclass(frozen=True)
class Route:
    """How a route is asked for a stream.

    Attributes:
        body: from prompt and sampling parameters of `/generate`.
        last_field: of the last event, where the number of tokens is.
    """

    path: str
    body: Callable[[list[int], dict[str, Any]], dict[str, Any]]
    last_field: str

    def request(self, prompt: list[int], params: dict[str, Any]) -> bytes:
        """The body, as it is sent."""
        return json.dumps({**self.body(prompt, params), "stream": True}).encode()


def _openai_fields(params: dict[str, Any]) -> dict[str, Any]:
    fields = {**params, "max_tokens": params["max_new_tokens"]}
    del fields["max_new_tokens"]
    return {**fields, "stream_options": {"include_usage": True}}


ROUTES = {
    "/generate": Route(
        "/generate",
        lambda prompt, params: {"input_ids": prompt, "sampling_params": params},
        "meta_info",
    ),
    "/v1/completions": Route(
        "/v1/completions",
        lambda prompt, params: {"model": "default", "prompt": prompt, **_openai_fields(params)},
        "usage",
    ),
    "/v1/chat/completions": Route(
        "/v1/chat/completions",
        lambda prompt, params: {
            "model": "default",
            "messages": [],
            "input_ids": prompt,
            **_openai_fields(params),
        },
        "usage",
    ),
}


class EngineStreams:
    """Streams of an Engine.

    Attributes:
        num_chunks: that came so far.
    """

    def __init__(self, engine: sglang.Engine) -> None:
        self._engine = engine
        self.num_chunks = 0

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> Answer:
        """The last chunk of a stream."""
        last: Answer = {}
        chunks = await self._engine.async_generate(
            input_ids=input_ids, sampling_params=sampling_params, stream=True
        )
        async for chunk in chunks:
            last = chunk
            self.num_chunks += 1
        return last

    async def async_abort_request(self, *, abort_all: bool) -> int:
        return await self._engine.async_abort_request(abort_all=abort_all)


class HttpStreams:
    """Streams of a route, on connections that stay open."""

    def __init__(self, port: int, route: Route, clients: Sequence[StreamClient]) -> None:
        self._port = port
        self._route = route
        self._clients = clients
        self._free = list(clients)

    @property
    def num_chunks(self) -> int:
        """Events that came so far."""
        return sum(client.num_events for client in self._clients)

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> Answer:
        """What a load asks of an answer: as many places as there are tokens, and how it ended.

        Raises:
            StreamError: if the request fails.
        """
        client = self._free.pop()
        body = self._route.request(input_ids, sampling_params)
        answer = await client.stream(self._route.path, body, self._route.last_field)
        self._free.append(client)
        num_tokens = answer.last[self._route.last_field]["completion_tokens"]
        is_whole = num_tokens == sampling_params["max_new_tokens"]
        reason = {"type": "length" if is_whole else "abort"}
        return {"output_ids": range(num_tokens), "meta_info": {"finish_reason": reason}}

    async def async_abort_request(self, *, abort_all: bool) -> int:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        body = json.dumps({"abort_all": abort_all})
        head = "POST /abort_request HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n"
        writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        answer = await reader.read()
        writer.close()
        if not answer.startswith(b"HTTP/1.1 200"):
            raise StreamError(answer[:500].decode(errors="replace"))
        return 0


@dataclass
class CpuMeter:
    """Seconds of CPU of processes, and of the thread that asks, between two times.

    Attributes:
        processes: by what they are called.
        chunks: how many had come, at each reading.
    """

    processes: dict[str, psutil.Process]
    readings: list[dict[str, float]] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)

    @property
    def num_chunks(self) -> int:
        """That came between the first and the last reading."""
        return self.chunks[-1] - self.chunks[0]

    def read(self, num_chunks: int) -> None:
        """Notes the times now."""
        self.chunks.append(num_chunks)
        found = {"wall": time.perf_counter(), "client": time.thread_time()}
        for name, process in self.processes.items():
            times = process.cpu_times()
            found[name] = times.user + times.system
        self.readings.append(found)

    def shares(self) -> dict[str, float]:
        """Of a core, between the first and the last reading."""
        first, last = self.readings[0], self.readings[-1]
        spent = {name: last[name] - first[name] for name in first}
        wall_s = spent.pop("wall")
        return {name: round(seconds / wall_s, 3) for name, seconds in spent.items()}


def server_processes(pid: int) -> dict[str, psutil.Process]:
    """The processes of a server, by what they do."""
    server = psutil.Process(pid)
    found = {FRONT_END: server}
    for child in server.children():
        try:
            command = child.cmdline()
        except psutil.Error:  # it has ended
            continue
        module = command[-1].rpartition(".")[2].removesuffix("_process") if command else ""
        if module in ROLES:
            found[ROLES[module]] = child
    return found


@dataclass(frozen=True)
class Load:
    """What all ways are given.

    Attributes:
        num_laps: that count; each is one pass through the prompts.
    """

    prompts: list[list[int]]
    params: dict[str, Any]
    num_clients: int
    num_laps: int


async def run_engine(engine: sglang.Engine, load: Load, pid: int) -> dict[str, Any]:
    """Figures of an Engine's streams; `pid` is of the process that it is in."""
    return await _run(EngineStreams(engine), load, pid)


async def run_http(port: int, route: Route, load: Load, pid: int) -> dict[str, Any]:
    """Figures of a route's streams; `pid` is the server's.

    Raises:
        StreamError: if a request fails.
    """
    clients = [await StreamClient.connect(port) for _ in range(load.num_clients)]
    try:
        return await _run(HttpStreams(port, route, clients), load, pid)
    finally:
        for client in clients:
            client.close()


async def _run(ways: EngineStreams | HttpStreams, load: Load, pid: int) -> dict[str, Any]:
    """Tokens per second, and what processes took of a core meanwhile."""
    meter = CpuMeter(server_processes(pid))

    async def on_edge() -> None:
        meter.read(ways.num_chunks)

    found = await closed_loop(
        ways, load.prompts, load.params, load.num_clients, load.num_laps, on_edge=on_edge
    )
    return {
        "tok_s": round(found.tok_s, 1),
        "tokens_per_chunk": round(found.num_tokens / meter.num_chunks, 3),
        "cpu_shares": meter.shares(),
    }
