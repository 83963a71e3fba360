"""A paused server: health, readiness, metrics, new requests, aborts, leases, clients that leave."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from serving_utils import (
    ENDLESS_DEMO,
    RunningServer,
    events,
    open_request,
    running_server,
    wait_for_running,
    wait_for_waiting,
)

pytestmark = pytest.mark.long_matrix

NUM_NEW = 100
LONG = {"temperature": 0, "max_new_tokens": NUM_NEW, "ignore_eos": True}


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with running_server("demo") as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> Iterator[RunningServer]:
    yield running
    running.post("/abort_request", {"abort_all": True})
    running.post("/continue_generation")
    running.wait_idle()


def pause(server: RunningServer, **fields: Any) -> dict[str, Any]:
    response = server.post("/pause_generation", fields)
    assert response.status_code == 200, response.text
    return response.json()


def resume(server: RunningServer) -> None:
    assert server.post("/continue_generation", {}).status_code == 200


def send(pool: ThreadPoolExecutor, server: RunningServer, **fields: Any) -> Future[httpx.Response]:
    body = {"text": "def add(a, b):\n", "sampling_params": LONG, **fields}
    return pool.submit(httpx.post, f"{server.url}/generate", json=body, timeout=30)


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "in-place", "drain"])
def test_a_paused_server_is_healthy_and_not_ready(server: RunningServer, mode: str) -> None:
    get = server.client.get
    assert pause(server, mode=mode)["status"] == "ok"
    assert [get(path).status_code for path in ("/health", "/health_generate", "/ready")] == [
        200,
        200,
        503,
    ]
    assert "sglang:paused" in get("/metrics").text
    assert metric(server) == 1
    resume(server)
    assert [get(path).status_code for path in ("/health", "/health_generate", "/ready")] == [
        200,
        200,
        200,
    ]
    assert metric(server) == 0


def metric(server: RunningServer) -> float:
    lines = server.client.get("/metrics").text.splitlines()
    return float(next(line for line in lines if line.startswith("sglang:paused")).split()[-1])


def test_a_pause_without_a_body_aborts(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = send(pool, server, sampling_params=ENDLESS_DEMO)
        wait_for_running(server, 1, answer)
        reply = server.client.post("/pause_generation").json()
        assert reply["message"] == "Generation paused successfully."
        assert (reply["mode"], reply["aborted"]) == ("abort", 1)
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_requests_wait_for_the_end_of_the_pause(server: RunningServer) -> None:
    pause(server)
    with ThreadPoolExecutor(1) as pool:
        answer = send(pool, server)
        wait_for_waiting(server, 1, answer)
        assert server.post("/flush_cache").status_code == 200
        resume(server)
        assert len(answer.result().json()["output_ids"]) == NUM_NEW


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_waiting_and_frozen_requests_are_aborted_at_once(server: RunningServer, mode: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        frozen = send(pool, server, rid="job-1", sampling_params=ENDLESS_DEMO)
        wait_for_running(server, 1, frozen)
        pause(server, mode=mode)
        waiting = [send(pool, server, rid=rid) for rid in ("job-10", "job-11")]
        wait_for_waiting(server, 2 if mode == "in_place" else 3, frozen, *waiting)
        for body, count in (
            ({"rid": "nobody"}, 0),
            ({"rid": "job-1"}, 1),
            ({"rid": "job-1", "prefix": True}, 2),
        ):
            response = server.post("/abort_request", body)
            assert (response.status_code, response.json()) == (200, {"aborted": count})
            if count == 1:
                partial = frozen.result(10).json()
        assert partial["meta_info"]["finish_reason"]["type"] == "abort"
        assert len(partial["output_ids"]) > 0
        for answer in waiting:
            assert answer.result(10).json()["output_ids"] == []
        assert server.internal_state()["engine_paused"]


def test_a_client_that_leaves_during_a_pause_is_noticed(server: RunningServer) -> None:
    pause(server, mode="retract")
    for stream in (False, True):
        body = {"text": "x", "sampling_params": LONG, "stream": stream}
        with open_request(server, body):
            wait_for_waiting(server, 1)
        wait_for_waiting(server, 0)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_stream_goes_on_after_a_pause_with_the_text_of_an_undisturbed_one(
    server: RunningServer, mode: str
) -> None:
    body = {"text": "import os\n", "sampling_params": LONG}
    right = server.post("/generate", body).json()
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        chunks = events(response.iter_lines())
        for _ in range(7):
            next(chunks)
        with httpx.Client(base_url=server.url) as second:
            second.post("/pause_generation", json={"mode": mode})
            time.sleep(0.2)
            second.post("/continue_generation", json={})
        last = [chunk for chunk in chunks if chunk != "[DONE]"][-1]
    assert last["text"] == right["text"]
    assert last["output_ids"] == right["output_ids"]


def test_a_lease_ends_the_pause_of_an_owner_that_is_gone(server: RunningServer) -> None:
    pause(server, mode="retract", lease_s=0.5)
    with ThreadPoolExecutor(1) as pool:
        answer = send(pool, server)
        assert len(answer.result(15).json()["output_ids"]) == NUM_NEW
    assert server.client.get("/ready").status_code == 200
    assert server.internal_state()["num_lease_expiries"] >= 1


def test_drain_finishes_what_runs(server: RunningServer) -> None:
    """If the request ends before the drain comes, a longer one does not."""
    for num_new in (NUM_NEW, 4 * NUM_NEW, 16 * NUM_NEW):
        params = {**LONG, "max_new_tokens": num_new}
        body = {"text": "import os\n", "sampling_params": params, "stream": True}
        with server.client.stream("POST", "/generate", json=body) as response:
            chunks = events(response.iter_lines())
            next(chunks)
            reply = pause(server, mode="drain", drain_timeout_s=20)
            *_, last, _ = chunks
        if reply["finished"]:
            break
        resume(server)
    assert (reply["finished"], reply["retracted"]) == (1, 0)
    assert last["meta_info"]["finish_reason"] == {"type": "length", "length": num_new}


def test_flush_with_a_timeout_waits_for_running_requests(server: RunningServer) -> None:
    def flush(timeout_s: float) -> httpx.Response:
        return server.client.post("/flush_cache", params={"timeout": timeout_s})

    with ThreadPoolExecutor(2) as pool:
        answer = send(pool, server, rid="runs", sampling_params=ENDLESS_DEMO)
        wait_for_running(server, 1, answer)
        begin = time.monotonic()
        for timeout_s in (0.0, 0.3):
            hasty = flush(timeout_s)
            assert hasty.status_code == 400
            assert "1 requests are running" in hasty.text
        assert time.monotonic() - begin >= 0.3
        patient = pool.submit(flush, 20)
        assert server.post("/abort_request", {"rid": "runs"}).json() == {"aborted": 1}
        assert patient.result().status_code == 200
        assert answer.result().json()["meta_info"]["finish_reason"]["type"] == "abort"


def test_new_requests_get_503_where_that_is_wanted_and_a_paused_server_ends_on_request() -> None:
    flags = ("--paused-requests", "reject", "--shutdown-timeout-s", "0.3")
    with running_server("demo", *flags) as server, ThreadPoolExecutor(1) as pool:
        waiting = send(pool, server, sampling_params=ENDLESS_DEMO)
        wait_for_running(server, 1, waiting)
        pause(server, mode="retract")
        wait_for_waiting(server, 1, waiting)
        refused = server.generate()
        assert refused.status_code == 503
        assert int(refused.headers["Retry-After"]) > 0
        assert "paused" in refused.text
        resume(server)
        assert server.generate().status_code == 200
        pause(server, mode="retract")
        wait_for_waiting(server, 1, waiting)
        server.process.terminate()
        assert server.exit_code() == 0
        assert waiting.result(10).status_code in (200, 503)
