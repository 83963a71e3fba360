"""The server as a client sees it: real processes, a small model of random weights."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from serving_utils import (
    DUMMY,
    ENDLESS,
    LONG,
    VOCAB_SIZE,
    RunningServer,
    events,
    in_background,
    make_model_dir,
    running_server,
    stream_body,
    wait_for_running,
    wait_for_waiting,
)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def server(model_dir: Path) -> Iterator[RunningServer]:
    """One server for all tests that leave it running; it may run 2 requests and queue 4."""
    flags = ("--max-running-requests", "2", "--max-queued-requests", "4")
    flags += ("--max-request-bytes", "200000", "--max-batch-size-per-request", "4")
    with running_server(model_dir, *DUMMY, *flags) as running:
        yield running


@pytest.mark.long_matrix
def test_a_model_without_a_chat_template_says_which_flag(server: RunningServer) -> None:
    body = {"messages": [{"role": "user", "content": "hello"}]}
    response = server.post("/v1/chat/completions", body)
    assert response.status_code == 400
    assert "--chat-template FILE" in response.json()["error"]["message"]
    assert server.generate().status_code == 200


# ---------------------------------------------------------------- generate


def test_answer_has_sglangs_form(server: RunningServer) -> None:
    answer = server.generate("hello world", max_new_tokens=4).json()
    assert set(answer) == {"text", "output_ids", "meta_info"}
    assert len(answer["output_ids"]) == 4
    meta = answer["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 4}
    assert meta["completion_tokens"] == 4
    assert {"id", "prompt_tokens", "cached_tokens", "num_retractions", "e2e_latency"} <= set(meta)


def test_stream_is_cumulative_and_ends_like_the_answer(server: RunningServer) -> None:
    answer = server.generate(max_new_tokens=12).json()
    body = stream_body(max_new_tokens=12)
    with server.client.stream("POST", "/generate", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        chunks = list(events(response.iter_lines()))
    assert chunks.pop() == "[DONE]"
    for before, after in itertools.pairwise(chunks):
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    assert (chunks[-1]["text"], chunks[-1]["output_ids"]) == (answer["text"], answer["output_ids"])


def test_batch_and_samples_come_in_order(server: RunningServer) -> None:
    single = [server.generate(text).json()["output_ids"] for text in ("hello", "world")]
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True, "n": 2}
    body = {"text": ["hello", "world"], "sampling_params": params}
    answers = server.post("/generate", body).json()
    assert [item["output_ids"] for item in answers] == [single[0]] * 2 + [single[1]] * 2
    with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
        chunks = list(events(response.iter_lines()))
    last = {chunk["index"]: chunk["output_ids"] for chunk in chunks[:-1]}
    assert [last[i] for i in range(4)] == [item["output_ids"] for item in answers]


def test_input_ids_and_text_are_the_same_request(server: RunningServer) -> None:
    tokens = server.post("/tokenize", {"prompt": "hello world"}).json()["tokens"]
    params = {"temperature": 0, "max_new_tokens": 8}
    by_ids = server.client.put("/generate", json={"input_ids": tokens, "sampling_params": params})
    by_text = server.post("/generate", {"text": "hello world", "sampling_params": params})
    assert by_ids.json()["output_ids"] == by_text.json()["output_ids"]


def test_seeded_samples_repeat(server: RunningServer) -> None:
    first, again = (server.generate(temperature=1.0, sampling_seed=5, n=2).json() for _ in range(2))
    assert [item["output_ids"] for item in first] == [item["output_ids"] for item in again]
    assert first[0]["output_ids"] != first[1]["output_ids"]


def test_stop_string_is_cut_off_unless_told(server: RunningServer) -> None:
    full = server.generate(max_new_tokens=20, temperature=1.0, sampling_seed=3).json()["text"]
    at = next(i for i in range(4, len(full)) if full[i].isascii() and full.index(full[i]) == i)
    for trim, expected in ((False, full[:at]), (True, full[: at + 1])):
        answer = server.generate(
            max_new_tokens=20, temperature=1.0, sampling_seed=3, stop=full[at], no_stop_trim=trim
        ).json()
        assert answer["meta_info"]["finish_reason"] == {"type": "stop", "matched": full[at]}
        assert answer["text"].startswith(expected)
        assert trim or answer["text"] == expected


# ---------------------------------------------------------------- bad input

BAD_REQUESTS: list[tuple[bytes, str | None]] = [
    (b"{", None),
    (b"", None),
    (b"[]", None),
    (b'{"text": "\xff"}', None),
    (b"[" * 100_000, None),
    (b"{}", "text"),
    (b'{"text": "a", "input_ids": [1]}', "text"),
    (b'{"text": 5}', "text"),
    (b'{"input_ids": [1, %d]}' % VOCAB_SIZE, "input_ids[1]"),
    (b'{"input_ids": [true]}', "input_ids[0]"),
    (b'{"text": ["a", "b", "c", "d", "e"]}', "text"),
    (b'{"text": "a", "rid": 7}', "rid"),
    (b'{"text": "a", "sampling_params": {"n": 1000000}}', "sampling_params.n"),
    (b'{"text": "a", "sampling_params": {"n": 5}}', "sampling_params.n"),
    (b'{"text": "a", "sampling_params": {"foo": 1}}', "sampling_params.foo"),
    (b'{"text": "a", "sampling_params": {"temperature": NaN}}', "sampling_params.temperature"),
    (
        b'{"text": "a", "sampling_params": {"max_new_tokens": 99999}}',
        "sampling_params.max_new_tokens",
    ),
    (
        b'{"text": "a", "sampling_params": {"stop": %s}}' % json.dumps(["x"] * 33).encode(),
        "sampling_params.stop",
    ),
    (b'{"text": "a", "return_logprob": 1}', "return_logprob"),
    (b'{"text": "a", "foo": 1}', "foo"),
]


@pytest.mark.parametrize(("raw", "field"), BAD_REQUESTS)
def test_bad_request_is_400_and_names_the_field(
    server: RunningServer, raw: bytes, field: str | None
) -> None:
    for body in (raw, raw.replace(b'"text": "a"', b'"stream": true, "text": "a"')):
        response = server.client.post("/generate", content=body)
        error = response.json()["error"]
        is_length = field == "sampling_params.max_new_tokens"
        code = "context_length_exceeded" if is_length else 400
        assert (response.status_code, error["code"], error["param"]) == (400, code, field)
        assert error["type"] == "BadRequestError"
        assert len(error["message"]) < 250
    assert server.generate(max_new_tokens=1).status_code == 200


def test_a_model_without_a_mask_token_says_so(server: RunningServer) -> None:
    params = {"mtp_enabled": True, "mtp_k": 3}
    refused = server.post("/generate", {"text": "hello", "sampling_params": params})
    assert refused.status_code == 400
    assert "no mask token" in refused.json()["error"]["message"]
    assert server.generate().status_code == 200


def test_prompt_at_the_limit_is_taken_and_one_more_token_is_not(server: RunningServer) -> None:
    limit = server.client.get("/server_info").json()["max_req_len"]
    for length, status in ((limit - 1, 200), (limit, 400)):
        body = {"input_ids": [7] * length, "sampling_params": {"max_new_tokens": 1}}
        assert server.post("/generate", body).status_code == status


def test_large_body_is_413(server: RunningServer) -> None:
    assert server.generate("x" * 300_000).status_code == 413
    chunks = (b" " * 1000 for _ in range(300))  # no content-length
    assert server.client.post("/generate", content=chunks).status_code == 413


def test_other_routes_refuse_bad_bodies(server: RunningServer) -> None:
    cases = [
        ("/abort_request", {"rid": 5}, "rid"),
        ("/abort_request", {"rid": "", "prefix": True}, "rid"),
        ("/abort_request", {"prefix": True}, "rid"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/detokenize", {"tokens": [VOCAB_SIZE]}, "tokens[0]"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": [[1], 2]}, "tokens[1]"),
    ]
    for path, body, field in cases:
        response = server.post(path, body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, field)
    assert server.client.get("/nothing").json()["error"]["code"] == 404
    assert server.client.get("/generate").json()["error"]["code"] == 405


# ---------------------------------------------------------------- other routes


def test_health_and_info(server: RunningServer) -> None:
    for path in ("/health", "/health_generate", "/ready"):
        assert server.client.get(path).status_code == 200
    named = server.client.get("/health", headers={"x-request-id": "job-1"})
    assert named.headers.get_list("x-request-id") == ["job-1"]
    model = server.client.get("/model_info").json()
    assert model == server.client.get("/get_model_info").json()
    assert model["is_generation"] is True
    info = server.client.get("/get_server_info").json()
    assert info["model_path"] == model["model_path"] == info["resolved"]["path"]
    assert info["max_running_requests"] == 2
    assert info["chunked_prefill_size"] == 2048
    assert info["resolved"]["schedule"]["max_step_ms"] == 0.0
    assert info["internal_states"][0]["running_batch_size"] == 0


def test_openapi_documents_the_bodies(server: RunningServer) -> None:
    document = server.client.get("/openapi.json").json()
    body = document["paths"]["/generate"]["post"]["requestBody"]
    reference = body["content"]["application/json"]["schema"]["$ref"]
    schema = document["components"]["schemas"][reference.rpartition("/")[2]]
    assert "sampling_params" in schema["properties"]
    assert "SamplingParams" in document["components"]["schemas"]


def test_tokenize_and_detokenize_are_inverse(server: RunningServer) -> None:
    one = server.post("/tokenize", {"prompt": "hello world"}).json()
    assert one["count"] == len(one["tokens"])
    two = server.post("/tokenize", {"prompt": ["hello world", "fox"]}).json()
    assert two["tokens"][0] == one["tokens"]
    assert server.post("/detokenize", {"tokens": one["tokens"]}).json()["text"] == "hello world"
    texts = server.post("/detokenize", {"tokens": two["tokens"]}).json()["text"]
    assert texts == ["hello world", "fox"]


def test_flush_cache_says_what_it_did(server: RunningServer) -> None:
    server.generate("hello world the quick brown fox")
    text = server.client.post("/flush_cache").text
    assert text.startswith("Cache flushed.\nPlease check backend logs for more details. ")
    assert "Flushed items: " in text
    with server.client.stream("POST", "/generate", json=stream_body()) as response:
        lines = response.iter_lines()
        next(lines)
        refused = server.client.get("/flush_cache")
        assert refused.status_code == 400
        assert "Reason: " in refused.text
    server.wait_idle()


# ---------------------------------------------------------------- aborts, disconnects, overload


def test_abort_gives_the_partial_output(server: RunningServer) -> None:
    body = {"text": "hello", "rid": "victim", "sampling_params": ENDLESS}
    victim = in_background(lambda: server.post("/generate", body))
    wait_for_running(server, 1, victim)
    assert server.post("/abort_request", {"rid": "vict"}).json() == {"aborted": 0}
    assert server.post("/abort_request", {"rid": "victim"}).json() == {"aborted": 1}
    assert victim.result().status_code == 200
    meta = victim.result().json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert 0 < meta["completion_tokens"] < LONG


def test_abort_all_ends_streams_with_a_last_chunk(server: RunningServer) -> None:
    with server.client.stream("POST", "/generate", json=stream_body()) as response:
        chunks = events(response.iter_lines())
        next(chunks)
        assert server.post("/abort_request", {"abort_all": True}).json() == {"aborted": 1}
        *_, last, done = chunks
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert done == "[DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_disconnect_aborts_at_once(server: RunningServer, stream: bool) -> None:
    async def leave() -> None:
        async with httpx.AsyncClient(base_url=server.url) as client:
            call = client.post("/generate", json={**stream_body(), "stream": stream})
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(call, 0.5)

    asyncio.run(leave())
    server.wait_idle(timeout_s=2.0)


def test_full_queue_is_503_with_retry_after(server: RunningServer) -> None:
    """2 run, 4 wait, the next is refused, streamed or not; the others are not harmed."""
    body = {"text": "hello", "sampling_params": ENDLESS}

    def post() -> httpx.Response:
        return server.post("/generate", body)

    background = [in_background(post) for _ in range(2)]
    wait_for_running(server, 2, *background)
    background += [in_background(post) for _ in range(4)]
    wait_for_waiting(server, 4, *background)
    for stream in (False, True):
        refused = server.post("/generate", {**body, "stream": stream})
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == 503
    server.post("/abort_request", {"abort_all": True})
    for call in background:
        assert call.result().json()["meta_info"]["finish_reason"]["type"] == "abort"
    assert server.wait_idle()["orphan_token_count"] == 0


def test_storm_of_disconnects_leaves_nothing_behind(server: RunningServer) -> None:
    """Clients leave at random times, streaming or not, running or queued; the rest is exact."""
    expected = server.generate(max_new_tokens=40).json()["output_ids"]
    moments = random.Random(1)

    async def leave(client: httpx.AsyncClient, stream: bool) -> None:
        body = {**stream_body(), "stream": stream}
        with suppress(TimeoutError):
            await asyncio.wait_for(client.post("/generate", json=body), moments.random() * 0.5)

    async def storm() -> list[int]:
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            leaving = [asyncio.ensure_future(leave(client, bool(i % 2))) for i in range(40)]
            await asyncio.gather(*leaving)
            params = {"temperature": 0, "max_new_tokens": 40, "ignore_eos": True}
            body = {"text": "hello", "sampling_params": params}
            while (answer := await client.post("/generate", json=body)).status_code == 503:
                await asyncio.sleep(0.05)  # the queue is full of those who have just left
            assert answer.status_code == 200, answer.text
            return answer.json()["output_ids"]

    assert asyncio.run(storm()) == expected
    state = server.wait_idle()
    assert (state["orphan_token_count"], state["legacy_missing_tokens"]) == (0, 0)
