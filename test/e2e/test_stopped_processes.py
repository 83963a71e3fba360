"""A child that is stopped: routes answer at once and name it, nothing is lost when it goes on."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack

import httpx
import psutil
import pytest

from serving_utils import (
    ENDLESS_DEMO,
    RunningServer,
    events,
    in_background,
    open_request,
    running_server,
    stopped,
    stream_body,
    wait_until,
)

pytestmark = pytest.mark.long_matrix

AT_ONCE_S = 2.0
READ = ("/metrics", "/server_info", "/v1/loads", "/get_load")
CHANGE = (
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/update_weights_from_disk",
)
GENERATE = ("/generate", "/v1/completions", "/v1/chat/completions")
BODIES = {
    "/generate": {"text": "hello", "sampling_params": {"max_new_tokens": 4}},
    "/v1/completions": {"prompt": "hello"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/update_weights_from_disk": {"model_path": "demo"},
}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("demo", "--skip-server-warmup", "--watchdog-timeout", "3") as server:
        yield server


def refusal(server: RunningServer, method: str, path: str) -> str:
    """Why a route answers with 503, which it must at once."""
    answer = server.client.request(method, path, json=BODIES.get(path), timeout=AT_ONCE_S)
    assert answer.status_code == 503, (path, answer.text)
    return str(answer.json()["message"])


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_every_route_answers_at_once_and_names_the_stopped_process(
    server: RunningServer, victim: str
) -> None:
    server.internal_state()
    start_s = time.monotonic()
    with stopped(server.children()[victim]):
        for path in ("/health", "/health_generate", "/ready"):
            assert f"The {victim} process" in refusal(server, "GET", path)
        for path in GENERATE:
            assert f"The {victim} process" in refusal(server, "POST", path)
        for path in CHANGE if victim == "scheduler" else ():
            assert "The scheduler process" in refusal(server, "POST", path)
        for path in READ:
            answer = server.client.get(path, timeout=AT_ONCE_S)
            assert answer.status_code == 200
            assert ("state_age" in answer.text) or victim != "scheduler"
        stopped_s = time.monotonic() - start_s
        state = server.internal_state()
        assert state["stopped_process"] == victim
        is_old = state["state_age_s"] > stopped_s / 2
        assert is_old == (victim == "scheduler"), state["state_age_s"]
        assert "process_stopped{" in (metrics := server.client.get("/metrics").text)
        assert 'process_stopped{model_name="demo"} 1' in metrics
    wait_until(lambda: server.client.get("/ready").status_code == 200, timeout_s=AT_ONCE_S)
    assert server.client.get("/health").status_code == 200
    assert server.internal_state()["stopped_process"] is None
    assert server.generate().status_code == 200


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
def test_requests_wait_for_a_stopped_process_and_lose_nothing(
    server: RunningServer, victim: str
) -> None:
    params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
    body = {"text": "import os\n", "sampling_params": params}
    right = server.post("/generate", body).json()
    with ExitStack() as stack:
        streams = []
        for _ in range(2):
            call = server.client.stream("POST", "/generate", json={**body, "stream": True})
            streams.append(events(stack.enter_context(call).iter_lines()))
            next(streams[-1])
        with stopped(server.children()[victim]):
            time.sleep(0.3)
        for chunks in streams:
            *_, last, done = chunks
            assert done == "[DONE]"
            assert last["output_ids"] == right["output_ids"]
            assert last["text"] == right["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_half_closed_client_of_a_server_gets_its_answer(
    server: RunningServer, stream: bool
) -> None:
    params = {"temperature": 0, "max_new_tokens": 8}
    with open_request(server, {"text": "x", "sampling_params": params, "stream": stream}) as client:
        client.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: client.recv(4096), b""))
    assert received.startswith(b"HTTP/1.1 200 OK")
    assert b'"finish_reason"' in received
    assert received.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") == stream


def test_a_process_that_does_not_go_on_ends_the_server_with_an_error(
    server: RunningServer,
) -> None:
    """In the middle of a stream and of a pause. The last test of this server."""
    children = server.children()
    body = stream_body(**ENDLESS_DEMO)
    with (
        server.client.stream("POST", "/generate", json=body) as response,
        httpx.Client(base_url=server.url, timeout=30) as other,
    ):
        chunks = events(response.iter_lines())
        next(chunks)
        waiting = in_background(lambda: other.post("/pause_generation", json={"mode": "drain"}))
        wait_until(lambda: server.client.get("/ready").status_code == 503)
        os.kill(children["scheduler"], signal.SIGSTOP)
        *_, error, done = chunks
        assert "The scheduler process" in error["error"]["message"]
        assert done == "[DONE]"
        assert waiting.result().status_code == 503
    assert server.exit_code(10) == 1
    assert not any(psutil.pid_exists(pid) for pid in children.values())
