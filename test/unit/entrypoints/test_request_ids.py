"""`x-request-id`: the client's, or else the server's, names a request in answers and logs."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.types import Message, Receive, Scope, Send

from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt.entrypoints.connection_limits import LimitedRequests
from sglang.srt.entrypoints.http_io import EventStream, OutermostApp
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import TokenizedGenerateReqInput
from sglang.srt.observability.log_format import NamedRequests
from sglang.srt.observability.request_log import RequestLog
from sglang.srt.tokenizer import load_tokenizer

MAX_ID_CHARS = 40
HEADER = "x-request-id"
OWN = "team/7:a-b_c.d=e@f"


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model_path: Path) -> Server:
    """The application as the web server calls it; the scheduler never answers a request."""
    server = Server(str(model_path), load_tokenizer(model_path), api_key="key")
    server.held = {TokenizedGenerateReqInput, AbortReq}
    limited: Any = LimitedRequests(server.app, 2000)
    outermost: Any = OutermostApp(limited, lambda: "The server is shutting down.", MAX_ID_CHARS)
    server.app = outermost
    return server


KEY = {"authorization": "Bearer key"}


def test_every_answer_has_an_id(server: Server) -> None:
    answers = [
        server.request("GET", path, headers=headers)
        for path, headers in [
            ("/health", {}),
            ("/model_info", KEY),
            ("/model_info", {}),
            ("/nothing", KEY),
            ("/generate", KEY),
            ("/health", {"x": "a" * 3000}),
            ("/health", {"origin": "https://evil.example"}),
        ]
    ]
    assert [each.status_code for each in answers] == [200, 200, 401, 404, 405, 431, 403]
    assert len({each.headers[HEADER] for each in answers}) == len(answers)
    again = [server.request("GET", "/health", headers={HEADER: OWN}) for _ in range(2)]
    assert [each.headers.get_list(HEADER) for each in again] == [[OWN], [OWN]]


@pytest.mark.parametrize(
    "values",
    [[""], ["a b"], ["a\tb"], ['a"b'], ["a\\b"], ["<b>"], ["é"], ["a" * 41], ["one", "two"]],
)
def test_an_id_that_is_not_safe_or_too_long_is_replaced(server: Server, values: list[str]) -> None:
    headers = [(HEADER.encode(), value.encode()) for value in values]
    (found,) = server.request("GET", "/health", headers=headers).headers.get_list(HEADER)
    assert found not in values
    assert found.isalnum()
    longest = "a" * MAX_ID_CHARS
    assert server.request("GET", "/health", headers={HEADER: longest}).headers[HEADER] == longest


BODIES = [
    ("/generate", {"text": "a"}),
    ("/v1/completions", {"prompt": "a"}),
    ("/generate", {"text": ["a", "b"]}),
]


async def sent_rids(
    server: Server, path: str, body: dict[str, Any], headers: dict[str, str]
) -> list[str]:
    """Names of the samples that a request brings to the scheduler."""
    before = len(server.sent)
    asking = asyncio.create_task(server.send("POST", path, json=body, headers={**KEY, **headers}))
    num_prompts = len(body["text"]) if isinstance(body.get("text"), list) else 1
    while len(server.sent) < before + num_prompts:
        await asyncio.sleep(0.001)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    return [m.rid for m in server.sent[before:] if isinstance(m, TokenizedGenerateReqInput)]


@pytest.mark.parametrize(("path", "body"), BODIES)
def test_the_id_is_the_rid_unless_the_body_has_one(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    async def scenario() -> None:
        names = await sent_rids(server, path, body, {HEADER: OWN})
        assert set(names) == {OWN}
        named = await sent_rids(server, path, {**body, "rid": "mine"}, {HEADER: OWN})
        assert set(named) == {"mine"}
        made = await sent_rids(server, path, body, {}) + await sent_rids(server, path, body, {})
        assert len(set(made)) == len(made) == 2 * len(names)

    asyncio.run(asyncio.wait_for(scenario(), 10))


def test_a_request_is_aborted_by_its_id_and_its_log_line_has_it(
    server: Server, tmp_path: Path
) -> None:
    log = RequestLog(str(tmp_path / "log"), 0)
    server.manager._request_log = log

    async def scenario() -> None:
        for body in ({"text": "a"}, {"text": "a", "rid": "mine"}):
            await sent_rids(server, "/generate", body, {HEADER: OWN})
        made = asyncio.create_task(
            server.send("POST", "/generate", json={"text": "a"}, headers=KEY)
        )
        while len([m for m in server.sent if isinstance(m, TokenizedGenerateReqInput)]) < 3:
            await asyncio.sleep(0.001)
        rid = server.sent[-1].rid
        abort = await server.send("POST", "/abort_request", json={"rid": rid}, headers=KEY)
        assert abort.json() == {"aborted": 1}
        server.manager.fail_all("The scheduler has ended.")
        answer = await made
        assert (answer.status_code, answer.headers[HEADER]) == (503, rid)

    asyncio.run(asyncio.wait_for(scenario(), 10))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert [(line["rid"], line["request_id"]) for line in lines[:2]] == [(OWN, OWN), ("mine", OWN)]


def stream_failing_with(error: Exception) -> Any:
    """An application whose stream has one event and then fails."""

    async def chunks() -> AsyncGenerator[Any, None]:
        raise error
        yield

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await EventStream({"text": "a"}, chunks())(scope, receive, send)

    return app


def test_a_stream_has_the_id_and_so_has_the_server_log(caplog: pytest.LogCaptureFixture) -> None:
    app = OutermostApp(stream_failing_with(KeyError("x")), lambda: "", MAX_ID_CHARS)
    caplog.handler.addFilter(NamedRequests())
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def run() -> None:
        scope = {"type": "http", "path": "/", "headers": [(HEADER.encode(), OWN.encode())]}
        await app(scope, asyncio.Event().wait, send)  # type: ignore[arg-type]
        logging.getLogger("other").warning("later")

    asyncio.run(run())
    assert (HEADER.encode(), OWN.encode()) in sent[0]["headers"]
    assert len(sent) == 4  # the start, an event, an error, the end
    named = {record.getMessage(): record.request for record in caplog.records}  # type: ignore[attr-defined]
    assert named["A stream failed."] == f" [{OWN}]"


def test_requests_at_once_keep_their_own_ids(server: Server) -> None:
    async def scenario() -> None:
        ids = [f"request-{index}" for index in range(20)]
        asked = (server.send("GET", "/health", headers={HEADER: each}) for each in ids)
        answers: list[httpx.Response] = await asyncio.gather(*asked)
        assert [answer.headers[HEADER] for answer in answers] == ids

    asyncio.run(scenario())
