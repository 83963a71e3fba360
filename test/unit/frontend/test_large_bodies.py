"""Limits of prompts hold on every route, and before a large body is decoded."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fake_backend import LIMITS, Backend, answer_of, run
from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt import garbage
from sglang.srt.frontend import large_bodies, work_in_threads
from sglang.srt.frontend.errors import RequestError
from sglang.srt.frontend.large_bodies import decode_body
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

MOST_IDS, MOST_PROMPTS = LIMITS.max_req_len, LIMITS.max_batch_size
WIDE = dataclasses.replace(LIMITS, max_req_len=10**9, max_batch_size=10**9)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def tokenizer(model_dir: Path) -> Tokenizer:
    return load_tokenizer(model_dir)


@pytest.fixture(scope="module")
def server(model_dir: Path, tokenizer: Tokenizer) -> Server:
    return Server(str(model_dir), tokenizer, max_request_bytes=100_000)


class DecodeSpy:
    """Records what is decoded to values; a body that is only divided into fields is not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.decoded: list[bytes] = []
        self._decode = msgspec.json.decode
        monkeypatch.setattr(msgspec.json, "decode", self)
        monkeypatch.setattr(large_bodies, "COUNTED_BYTES", 200)

    def __call__(self, raw: bytes, **options: Any) -> Any:
        if not options:
            self.decoded.append(raw)
        return self._decode(raw, **options)


# ---------------------------------------------------------------- reading

TEXTS = st.text(st.sampled_from('a",\\[]{}é\n\u2028'), max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=12,
)
IDS = st.lists(st.integers(0, 999), min_size=1, max_size=5)
PROMPTS = IDS | st.lists(IDS, min_size=1, max_size=5) | st.lists(TEXTS, max_size=5) | TEXTS


@given(
    body=st.dictionaries(TEXTS, VALUES, max_size=4),
    prompts=PROMPTS,
    name=st.sampled_from(sorted(large_bodies.PROMPT_FIELDS)),
    indent=st.sampled_from([None, 1]),
    is_ascii=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_a_large_body_has_the_values_that_python_reads(
    body: dict[str, Any], prompts: Any, name: str, indent: int | None, is_ascii: bool
) -> None:
    """Oracle: the parser of Python."""
    raw = json.dumps({**body, name: prompts}, indent=indent, ensure_ascii=is_ascii).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "COUNTED_BYTES", 0)
        assert decode_body(raw, WIDE) == json.loads(raw)


@given(texts=st.lists(TEXTS, min_size=1, max_size=8), indent=st.sampled_from([None, 1]))
@settings(max_examples=80, deadline=None)
def test_texts_are_counted_whatever_they_hold(texts: list[str], indent: int | None) -> None:
    raw = json.dumps({"prompt": texts}, indent=indent).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(large_bodies, "COUNTED_BYTES", 0)
        enough = dataclasses.replace(LIMITS, max_batch_size=len(texts))
        assert decode_body(raw, enough) == {"prompt": texts}
        with pytest.raises(RequestError, match=rf"is {len(texts)}, more than {len(texts) - 1}"):
            decode_body(raw, dataclasses.replace(LIMITS, max_batch_size=len(texts) - 1))


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ([[1] * 200, 7, [2]], "prompt"),
        ([[1] * 200, [[2]]], "prompt[1]"),
        ([[1] * 200, {}, [2]], "prompt"),
        ([7, [1] * 200], "prompt"),
        ([[1] * 200, 7], "prompt"),
    ],
)
def test_ids_that_are_no_lists_of_ids_are_named(
    monkeypatch: pytest.MonkeyPatch, prompt: Any, field: str
) -> None:
    monkeypatch.setattr(large_bodies, "COUNTED_BYTES", 200)
    with pytest.raises(RequestError, match="token ids") as caught:
        decode_body(json.dumps({"prompt": prompt}).encode(), LIMITS)
    assert caught.value.field == field


# ---------------------------------------------------------------- limits

ROUTES = {
    "/generate": ("input_ids", {}),
    "/v1/completions": ("prompt", {}),
    "/detokenize": ("tokens", {}),
}
LONG_LIST, MANY_LISTS = [7] * (MOST_IDS + 1), [[7]] * (MOST_PROMPTS + 1)
TOO_MUCH = [
    *((path, name, ids) for path, (name, _) in ROUTES.items() for ids in (LONG_LIST, MANY_LISTS)),
    *((path, name, [[5], LONG_LIST]) for path, (name, _) in ROUTES.items()),
    ("/v1/chat/completions", "input_ids", LONG_LIST),
    ("/generate", "text", ["text"] * (MOST_PROMPTS + 1)),
    ("/v1/completions", "prompt", ["text"] * (MOST_PROMPTS + 1)),
    ("/tokenize", "prompt", ["text"] * (MOST_PROMPTS + 1)),
]


@pytest.mark.parametrize(("path", "name", "value"), TOO_MUCH)
def test_what_is_too_much_is_refused_before_it_is_decoded(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, name: str, value: list[Any]
) -> None:
    spy = DecodeSpy(monkeypatch)
    response = server.post(path, {name: value})
    error = response.json()["error"]
    assert response.status_code == 400
    long_one = value if value is LONG_LIST else value[-1]
    if long_one is LONG_LIST:
        assert f"has {MOST_IDS + 1} tokens, more than {MOST_IDS}" in error["message"]
        assert error["param"] == (name if value is LONG_LIST else f"{name}[1]")
    else:
        assert f"is {MOST_PROMPTS + 1}, more than {MOST_PROMPTS}" in error["message"]
        assert error["param"] == name
    assert all(len(raw) <= 10 for raw in spy.decoded)


@pytest.mark.parametrize("value", [[[]] * 31, ["a"] * 31, {str(i): i for i in range(31)}, [0] * 31])
def test_values_of_other_fields_are_bounded_too(
    server: Server, monkeypatch: pytest.MonkeyPatch, value: Any
) -> None:
    spy = DecodeSpy(monkeypatch)
    monkeypatch.setattr(large_bodies, "COUNTED_BYTES", 30)
    monkeypatch.setattr(large_bodies, "MAX_VALUES", 30)
    monkeypatch.setattr(large_bodies, "MAX_FIELDS", 2)
    for path in ("/generate", "/abort_request", "/pause_generation", "/v1/chat/completions"):
        response = server.post(path, {"mode": value})
        assert "mode: has more than 30 values" in response.json()["error"]["message"]
        response = server.post(path, dict.fromkeys("abc", "x" * 30))
        assert "more than 2 fields" in response.json()["error"]["message"]
    assert spy.decoded == []


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize"])
def test_a_small_body_has_the_same_limits(server: Server, path: str) -> None:
    name, at_most = ("prompt", "x") if path == "/tokenize" else ("tokens", [7])
    assert server.post(path, {name: [at_most] * MOST_PROMPTS}).status_code == 200
    many = server.post(path, {name: [at_most] * (MOST_PROMPTS + 1)})
    assert f"is {MOST_PROMPTS + 1}, more than {MOST_PROMPTS}" in many.json()["error"]["message"]
    if path == "/detokenize":
        long = server.post(path, {name: [[5], LONG_LIST]})
        assert long.json()["error"]["param"] == "tokens[1]"
        assert f"has {MOST_IDS + 1} tokens" in long.json()["error"]["message"]


def test_texts_may_be_longer_than_prompts_where_a_flag_says_so(
    model_dir: Path, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Evaluations count documents that they cut into prompts."""
    monkeypatch.setattr(large_bodies, "COUNTED_BYTES", 200)
    server, most = Server(str(model_dir), tokenizer), 2 * MOST_IDS
    text, ids = "x y " * 100, [7] * most
    assert server.post("/tokenize", {"prompt": text}).status_code == 400
    server.manager.limits = dataclasses.replace(LIMITS, max_text_tokens=most)
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert (answer["count"] > MOST_IDS, answer["max_model_len"]) == (True, MOST_IDS)
    assert server.post("/detokenize", {"tokens": ids}).json()["text"] == tokenizer.decode(ids)
    for path, body in (("tokenize", {"prompt": text * 9}), ("detokenize", {"tokens": [*ids, 7]})):
        message = server.post(f"/{path}", body).json()["error"]["message"]
        assert f"more than {most} (--max-tokenize-tokens)" in message
    assert server.post("/generate", {"text": text}).status_code == 400


def test_a_client_that_leaves_tokenize_or_detokenize_ends_the_work_at_the_next_text(
    server: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, calls = threading.Event(), threading.Event(), list[Any]()

    def held(*args: Any) -> Any:
        calls.append(args)
        begun.set()
        assert go_on.wait(10)
        return [] if isinstance(args[0], str) else ""

    monkeypatch.setattr(work_in_threads, "TOKENIZE_IN_THREAD_CHARS", 1)
    monkeypatch.setattr(tokenizer, "encode", held)
    monkeypatch.setattr(tokenizer, "decode", held)

    async def scenario(path: str, body: bytes) -> None:
        messages = [{"type": "http.request", "body": body, "more_body": False}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            await asyncio.to_thread(begun.wait)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            assert message.get("status", 499) == 499

        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        await server.app(scope, receive, send)
        go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert len(calls) == 1

    for path, body in (
        ("/tokenize", {"prompt": ["a"] * 9}),
        ("/detokenize", {"tokens": [[5]] * 9}),
    ):
        begun.clear(), go_on.clear(), calls.clear()
        asyncio.run(scenario(path, json.dumps(body).encode()))


# ---------------------------------------------------------------- long texts


class EncodeSpy:
    """Records the texts that are encoded, and the threads that do it."""

    def __init__(self, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lens: list[int] = []
        self.threads: set[int] = set()
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._encode = tokenizer.encode
        monkeypatch.setattr(tokenizer, "encode", self)
        monkeypatch.setattr(work_in_threads, "PIECE_CHARS", 50)

    def __call__(self, text: str, add_special_tokens: bool = True) -> list[int]:
        self.lens.append(len(text))
        self.threads.add(threading.get_ident())
        self.begun.set()
        assert self.go_on.wait(10)
        return self._encode(text, add_special_tokens)


LONG_TEXT = "def f(x): return x\n" * 500


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
def test_a_text_of_very_many_tokens_is_never_encoded_as_a_whole(
    server: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(tokenizer, "min_num_tokens", lambda text: 0)
    spy = EncodeSpy(tokenizer, monkeypatch)
    name = "text" if path == "/generate" else "prompt"
    response = server.post(path, {name: ["short", LONG_TEXT]})
    message = response.json()["error"]["message"]
    assert response.status_code == 400
    what = "text" if path == "/tokenize" else "prompt"
    assert message.startswith(f"{name}[1]: the {what} is too long")
    assert f"has at least {MOST_IDS + 1} tokens, not all counted" in message
    assert set(spy.lens) == {50}
    assert sum(spy.lens) < len(LONG_TEXT) / 2
    assert threading.get_ident() not in spy.threads


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/tokenize"])
def test_the_number_of_tokens_in_a_message_is_true(
    server: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """Oracle: the tokenizer. A bound that nobody has counted says so."""
    name, text = "text" if path == "/generate" else "prompt", "x y " * 200
    count = len(tokenizer.encode(text))
    monkeypatch.setattr(tokenizer, "min_num_tokens", lambda text: 0)
    message = server.post(path, {name: text}).json()["error"]["message"]
    assert f"{count} tokens" in message
    assert "counted" not in message
    monkeypatch.setattr(tokenizer, "min_num_tokens", lambda text: MOST_IDS + 1)
    message = server.post(path, {name: text}).json()["error"]["message"]
    assert f"at least {MOST_IDS + 1} tokens, not all counted" in message


def test_a_long_text_that_has_few_tokens_is_taken(
    server: Server, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work_in_threads, "USUAL_CHARS_PER_TOKEN", 0)
    monkeypatch.setattr(work_in_threads, "PIECE_CHARS", 7)
    text = "def f(x): return x\n" * 10
    answer = server.post("/tokenize", {"prompt": text}).json()
    assert answer["tokens"] == tokenizer.encode(text)


def test_a_client_that_leaves_ends_the_work_at_the_next_piece(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizer, "min_num_tokens", lambda text: 0)
    spy = EncodeSpy(tokenizer, monkeypatch)
    spy.go_on.clear()

    async def scenario(backend: Backend) -> None:
        task = asyncio.create_task(answer_of(backend, text=LONG_TEXT))
        await asyncio.to_thread(spy.begun.wait)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        spy.go_on.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        assert len(spy.lens) == 1

    run(tokenizer, scenario)


@pytest.mark.parametrize(("num_chars", "count"), [(99_999, 0), (100_000, 1)])
def test_memory_goes_back_behind_large_texts(
    monkeypatch: pytest.MonkeyPatch, num_chars: int, count: int
) -> None:
    calls: list[int] = []
    monkeypatch.setattr(work_in_threads, "FREED_CHARS", 100_000)
    monkeypatch.setattr(work_in_threads, "return_freed_memory", lambda: calls.append(1))
    asyncio.run(work_in_threads.map_texts(len, ["x"], num_chars))
    assert len(calls) == count


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="Linux says how much it is")
def test_freed_memory_goes_back_to_the_system() -> None:
    """Frees memory in a thread around blocks that live on: by itself the C library keeps such
    memory."""
    kept: list[bytes] = []

    def fill() -> None:
        blocks = [bytes(2000) for _ in range(40_000)]
        kept.extend(blocks[::1000])

    before = resident_mib()
    thread = threading.Thread(target=fill)
    thread.start()
    thread.join()
    garbage.return_freed_memory()
    assert resident_mib() - before < 20
    assert len(kept) == 40


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"text": LONG_TEXT}),
        ("/generate", {"input_ids": LONG_LIST, "stream": True}),
        ("/generate", {"text": ["a", LONG_TEXT]}),
        ("/v1/completions", {"prompt": LONG_TEXT}),
        ("/v1/completions", {"prompt": LONG_LIST, "stream": True}),
        ("/v1/chat/completions", {"input_ids": LONG_LIST, "messages": []}),
    ],
)
@pytest.mark.parametrize("is_counted", [True, False])
def test_a_prompt_that_is_too_long_is_told_as_clients_look_for_it(
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
    is_counted: bool,
) -> None:
    """OpenAI's code for langchain and pydantic-ai, these words for litellm."""
    monkeypatch.setattr(large_bodies, "COUNTED_BYTES", 30 if is_counted else 10**6)
    error = server.post(path, body).json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "the prompt is too long" in error["message"]


def test_too_many_new_tokens_have_the_code_too_but_other_words(server: Server) -> None:
    error = server.post("/v1/completions", {"prompt": "a", "max_tokens": 10**6}).json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "too long" not in error["message"]
