"""Tests that long work for one request does not keep the event loop from other requests."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from fake_backend import LENGTH, LIMITS, Backend, answer_of, run
from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt import stop_expressions
from sglang.srt.entrypoints import http_io
from sglang.srt.entrypoints.http_io import answer_response
from sglang.srt.frontend import (
    body_parsing,
    generate_body,
    tokenizer_bodies,
    work_in_threads,
)
from sglang.srt.frontend.body_parsing import parse_json_object
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.generate_body import check_generate_request
from sglang.srt.frontend.logprobs_and_hidden_lists import LogprobsAndHiddenLists
from sglang.srt.managers.detokenizer_manager import DetokenizerManager
from sglang.srt.messages.requests import (
    BatchTokenIDOutput,
    DecodeOptions,
    PositionLogprobs,
    ReqOutput,
)
from sglang.srt.tokenizer import Tokenizer, load_tokenizer


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture
def server(model_dir: Path, tokenizer: Tokenizer) -> Server:
    return Server(str(model_dir), tokenizer)


class Held:
    """Stands for a function that takes until the test lets it go on."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self.begun, self.go_on = threading.Event(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(10), "the event loop was held up"
        return self._function(*args, **kwargs)


async def health_while_held(server: Server, held: Held, path: str, body: Any) -> httpx.Response:
    """The answer to a request of which /health was answered while it was worked on."""
    slow = asyncio.create_task(server.send("POST", path, json=body))
    assert await asyncio.to_thread(held.begun.wait, 10)
    health = await server.send("GET", "/health")
    assert health.status_code == 200
    assert not slow.done()
    held.go_on.set()
    return await slow


# ---------------------------------------------------------------- stop expressions


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
def test_health_answers_while_an_expression_compiles(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    held = Held(stop_expressions.check_expression)
    monkeypatch.setattr(stop_expressions, "check_expression", held)
    body = {"text": "a", "sampling_params": {"stop_regex": "("}}
    if path != "/generate":
        body = {"prompt": "a", "stop_regex": "("}
    response = asyncio.run(health_while_held(server, held, path, body))
    assert response.status_code == 400
    assert "stop_regex: is not a usable regular expression" in response.text
    assert response.json()["error"]["param"].endswith("stop_regex")


@pytest.mark.parametrize("expression", ["(", "x*", r"\L<a>"])
def test_expression_that_cannot_be_used_is_refused_before_anything_is_sent(
    tokenizer: Tokenizer, expression: str
) -> None:
    async def scenario(backend: Backend) -> None:
        params = [{}, {"stop_regex": ["fine", expression]}]
        with pytest.raises(RequestError) as caught:
            await answer_of(backend, text=["a", "b"], sampling_params=params)
        assert caught.value.field == "sampling_params.stop_regex"
        assert not backend.sent

    run(tokenizer, scenario)


def test_expressions_of_a_batch_are_bounded_together_and_the_same_one_once() -> None:
    def check(expressions: list[str]) -> None:
        params = [{"stop_regex": text} for text in expressions]
        body = {"text": ["a"] * len(params), "sampling_params": params}
        check_generate_request(body, LIMITS)

    check([".{3000}"] * 8)
    with pytest.raises(RequestError, match=r"sampling_params.stop_regex: too large.*give fewer"):
        check([".{3000}a", ".{3000}b", ".{3000}c", ".{3000}d"])


def test_batch_and_samples_of_the_same_expression_compile_it_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(stop_expressions, "check_expression", checked.append)

    async def scenario(backend: Backend) -> None:
        params = {"n": 2, "stop_regex": ["a+b", "b+a", "a+b"]}
        task = asyncio.create_task(answer_of(backend, text=["a"] * 3, sampling_params=params))
        await backend.wait_sent(6)
        for request in backend.requests:
            backend.put(request.req_id, "x", (1,), LENGTH)
        await task

    run(tokenizer, scenario)
    assert checked == ["a+b", "b+a"]


# ---------------------------------------------------------------- large bodies


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": "x" * 900}),
        ("/v1/completions", {"prompt": "x" * 900}),
        ("/tokenize", {"prompt": "x" * 900}),
        ("/detokenize", {"tokens": [5] * 900}),
        ("/abort_request", {"rid": "x" * 900}),
        ("/update_weights_from_disk", {"model_path": "x" * 900}),
        ("/update_weights_from_tensor", {"safetensors": "x" * 300}),
    ],
)
def test_health_answers_while_a_large_body_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    held = Held(body_parsing.require_object)
    monkeypatch.setattr(body_parsing, "require_object", held)
    monkeypatch.setattr(work_in_threads, "CHECK_IN_THREAD_BYTES", 300)
    wrong = "suffix" if path == "/v1/completions" else "unknown"
    response = asyncio.run(health_while_held(server, held, path, {**body, wrong: 1}))
    assert (response.status_code, response.json()["error"]["param"]) == (400, wrong)


def test_large_body_that_is_no_json_is_not_parsed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_parsing, "MAX_EXPLAINED_BYTES", 30)
    with pytest.raises(RequestError, match="finite"):
        parse_json_object(b'{"a": [1, NaN]}')
    monkeypatch.setattr(json, "loads", None)
    with pytest.raises(RequestError, match="not valid JSON"):
        parse_json_object(b'{"a": [1, 1, 1, 1, 1, 1, 1, NaN]}')


def test_garbage_is_not_collected_while_a_body_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A body of millions of lists would have them gone over again and again."""
    seen = []
    monkeypatch.setattr(body_parsing, "require_object", lambda body: seen.append(gc.isenabled()))
    parse_json_object(b"{}")
    assert seen == [False]
    assert gc.isenabled()


def test_ids_that_all_prompts_share_are_checked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = []
    check = generate_body.check_id_lists
    monkeypatch.setattr(
        generate_body, "check_id_lists", lambda *args: lists.append(args) or check(*args)
    )
    body = {"text": ["a"] * 3, "return_logprob": True, "token_ids_logprob": [5, 6]}
    prompts = check_generate_request(body, LIMITS).prompts
    assert [prompt.logprobs.token_ids for prompt in prompts if prompt.logprobs] == [[5, 6]] * 3
    assert len(lists) == 1


@pytest.mark.parametrize(("field", "prompt"), [("text", 5), ("input_ids", ["x"])])
def test_batch_is_counted_before_its_prompts_are_looked_at(field: str, prompt: Any) -> None:
    with pytest.raises(RequestError, match="prompts x n is 65"):
        check_generate_request({field: [prompt] * 65}, LIMITS)


def test_detokenize_takes_as_many_lists_as_a_batch() -> None:
    def check(num_lists: int) -> Any:
        raw = json.dumps({"tokens": [[5]] * num_lists}).encode()
        return tokenizer_bodies.check_detokenize(raw, LIMITS)

    assert len(check(64).lists) == 64
    with pytest.raises(RequestError, match="tokens: the number of lists is 65, more than 64"):
        check(65)


# ---------------------------------------------------------------- answers

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.text(max_size=3) | st.floats(-1, 1),
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=20,
)


async def answered(answer: Any) -> bytes:
    async def receive() -> Any:
        await asyncio.Event().wait()

    return bytes((await answer_response(Request({"type": "http"}, receive), answer)).body)


@given(answer=JSON)
@settings(max_examples=40, deadline=None)
def test_a_large_answer_is_the_same_json(answer: Any) -> None:
    """Oracle: the parser of Python."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http_io, "SMALL_PARTS", 3)
        assert json.loads(asyncio.run(answered(answer))) == answer


def test_a_large_answer_is_written_in_parts_beside_the_loop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parts: list[tuple[bool, int]] = []
    encode, loop_thread = http_io._encode, threading.get_ident()

    def spy(value: Any) -> bytes:
        size = str(value).count(",") + 1
        parts.append((threading.get_ident() == loop_thread, size))
        return encode(value)

    monkeypatch.setattr(http_io, "_encode", spy)
    monkeypatch.setattr(http_io, "SMALL_PARTS", 100)
    top = [None, *[[7] * 60] * 3]
    answer = {"choices": [{"ids": [7] * 250, "top": top}] * 3, "more": list(range(1000))}
    assert json.loads(asyncio.run(answered(answer))) == answer
    assert not any(is_loop for is_loop, _ in parts)
    assert max(size for _, size in parts) == 100
    asyncio.run(answered({"small": 1}))
    assert parts[-1] == (True, 1)


def test_log_probabilities_of_many_samples_come_in_several_messages(
    tokenizer: Tokenizer,
) -> None:
    sent: list[Any] = []
    position = PositionLogprobs(7, -1.0, top_logprobs=[-1.0] * 99, top_ids=[7] * 99)

    def outputs(num_positions: int) -> list[ReqOutput]:
        news = {
            "input_logprobs": [position] * num_positions,
            "options": DecodeOptions(skip_special_tokens=True, stop_strings=[], no_stop_trim=False),
        }
        return [ReqOutput(i, [5], None, 1, 1, 0, 0, **news) for i in range(6)]

    manager = DetokenizerManager(tokenizer, sent.append)
    for num_positions, sizes in ((0, [6]), (1, [6]), (50, [2, 2, 2]), (500, [1] * 6)):
        sent.clear()
        manager.handle(BatchTokenIDOutput(outputs=outputs(num_positions)))
        assert [len(message.outputs) for message in sent] == sizes
        assert [o.req_id for message in sent for o in message.outputs] == list(range(6))


@pytest.mark.parametrize("wish", ["return_logprob", "return_hidden_states"])
def test_log_probabilities_and_hidden_states_become_an_answer_in_a_thread(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, wish: str
) -> None:
    meta_info = LogprobsAndHiddenLists.meta_info
    held = Held(meta_info)
    monkeypatch.setattr(
        LogprobsAndHiddenLists,
        "meta_info",
        lambda lists, is_last: (held if lists.take_long else meta_info)(lists, is_last),
    )
    rows = [[1.5, -2.25], [0.1, 3e38]]
    stored = [array("f", row) for row in rows]

    async def scenario(backend: Backend) -> None:
        slow = asyncio.create_task(answer_of(backend, text="a", **{wish: True}))
        await backend.wait_sent(1)
        prompt = backend.requests[0].input_ids
        states = [row.tobytes() for row in (stored * len(prompt))[: len(prompt)]]
        backend.put(backend.requests[0].req_id, "x", (1,), LENGTH, hidden_states=states)
        assert await asyncio.to_thread(held.begun.wait, 10)
        other = asyncio.create_task(answer_of(backend, text="b"))
        await backend.wait_sent(2)
        backend.put(backend.requests[1].req_id, "y", (1,), LENGTH)
        assert (await other)["text"] == "y"
        assert not slow.done()
        held.go_on.set()
        meta = (await slow)["meta_info"]
        if wish == "return_logprob":
            assert meta["input_token_logprobs"] == [[None, prompt[-1], None]]
        else:
            expected = [row.tolist() for row in (stored * len(prompt))[: len(prompt)]]
            assert meta["hidden_states"] == [expected]

    run(tokenizer, scenario)
