"""The gate in front of the routes: no page and no spelling of a path goes around it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route

from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt.entrypoints.access import ROUTE_ACCESS, Access, AccessRules
from sglang.srt.entrypoints.guard import Guard, add_guard
from sglang.srt.messages.control import MemoryOccupationReq, PauseGenerationReq
from sglang.srt.tokenizer import load_tokenizer

USER_KEY, ADMIN_KEY = "user-Kkey-1", "admin-Kkey-2"
BOTH = {"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}
UI = "https://chat.example"
IMAGE = {"accept": "image/avif,*/*", "accept-language": "en", "user-agent": "Mozilla/5.0"}
OPEN, USER, ADMIN = Access


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def make_server(model_path: Path, **flags: Any) -> Server:
    return Server(str(model_path), load_tokenizer(model_path), **flags)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Server:
    return make_server(model_path)


@pytest.fixture(scope="module")
def locked(model_path: Path) -> Server:
    """A server with both keys."""
    return make_server(model_path, **BOTH)


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


@pytest.mark.parametrize(
    ("method", "path", "headers"),
    [
        ("GET", "/release_memory_occupation", {**IMAGE, "sec-fetch-site": "cross-site"}),
        ("GET", "/release_memory_occupation", {**IMAGE, "host": "192.168.1.5:30000"}),
        ("GET", "/release_memory_occupation", {**IMAGE, "host": "evil.example:30000"}),
        (
            "POST",
            "/pause_generation",
            {"content-type": "text/plain", "origin": "https://evil.example"},
        ),
        (
            "POST",
            "/pause_generation",
            {"host": "evil.example:30000", "origin": "http://evil.example:30000"},
        ),
        ("POST", "/generate", {"content-type": "text/plain", "origin": "null"}),
        ("PUT", "/generate", {"origin": "https://evil.example"}),
        ("OPTIONS", "/generate", {"origin": UI, "access-control-request-method": "POST"}),
    ],
)
def test_a_page_is_answered_403_with_the_remedy(
    server: Server, method: str, path: str, headers: dict[str, str]
) -> None:
    answer = server.request(method, f"http://127.0.0.1:30000{path}", headers=headers, content="{}")
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (403, 403)
    assert any(remedy in error["message"] for remedy in ("--allowed-origins", "Send an Origin"))
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert not server.sent


@pytest.mark.parametrize("name", ["authorization", "origin"])
def test_a_header_that_decides_is_answered_400_if_it_comes_twice(locked: Server, name: str) -> None:
    right = {**bearer(ADMIN_KEY), "origin": "http://127.0.0.1:30000"}
    headers = [*right.items(), (name, "other")]
    answer = locked.request(
        "POST", "http://127.0.0.1:30000/pause_generation", headers=headers, content="{}"
    )
    assert answer.status_code == 400
    assert name in answer.json()["error"]["message"].lower()
    assert not locked.sent


def test_clients_change_the_server_by_get_and_by_forms_as_before(model_path: Path) -> None:
    """Sends what curl -d, python-requests and trainers do, by a name that the server cannot
    know."""
    server = make_server(model_path)
    base = "http://my-pod.ns.svc:30000"
    assert server.request("GET", f"{base}/release_memory_occupation").status_code == 200
    form = {"content-type": "application/x-www-form-urlencoded", "user-agent": "curl/8.5.0"}
    kwargs: dict[str, Any] = {"headers": form, "content": '{"mode": "retract"}'}
    assert server.request("POST", f"{base}/pause_generation", **kwargs).status_code == 200
    assert server.only(MemoryOccupationReq)
    assert server.only(PauseGenerationReq).mode == "retract"


def test_an_allowed_page_gets_cors_answers_and_another_gets_none(model_path: Path) -> None:
    server = make_server(model_path, allowed_origins=UI, **BOTH)
    for origin, status in ((UI, 200), ("https://evil.example", 400)):
        asked = {"origin": origin, "access-control-request-method": "POST"}
        asked["access-control-request-headers"] = "authorization"
        preflight = server.request("OPTIONS", "/generate", headers=asked)
        assert preflight.status_code == status
        assert preflight.headers.get("access-control-allow-origin") == (
            UI if origin == UI else None
        )
    answer = server.request("GET", "/model_info", headers={"origin": UI, **bearer(USER_KEY)})
    assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, UI)
    assert server.request("GET", "/model_info", headers={"origin": UI}).status_code == 401
    evil = {"origin": "https://evil.example", **bearer(USER_KEY)}
    refused = server.request("GET", "/model_info", headers=evil)
    assert refused.status_code == 403
    assert "access-control-allow-origin" not in refused.headers


def registered(server: Server) -> list[tuple[str, str]]:
    """Every method and path that the application has."""
    found = []
    for route in server.app.routes:
        assert isinstance(route, Route), f"{route} is of a kind that the guard does not know"
        found += [(method, route.path) for method in sorted(route.methods or ())]
    return found


def test_every_route_has_a_class_and_every_class_a_route(model_path: Path) -> None:
    paths = {path for _, path in registered(make_server(model_path))}
    assert paths == set(ROUTE_ACCESS)


@pytest.mark.parametrize(
    ("flags", "lets_in"),
    [
        ({}, {OPEN: "nuao", USER: "nuao", ADMIN: "nuao"}),
        ({"api_key": USER_KEY}, {OPEN: "nuao", USER: "u", ADMIN: "u"}),
        ({"admin_api_key": ADMIN_KEY}, {OPEN: "nuao", USER: "nuao", ADMIN: "a"}),
        (BOTH, {OPEN: "nuao", USER: "u", ADMIN: "a"}),
    ],
    ids=["no keys", "api key", "admin key", "both"],
)
def test_every_route_asks_for_its_key(
    model_path: Path,
    flags: dict[str, str],
    lets_in: dict[Access, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """n, u, a, o: no key, the user's, the admin's, another. A 401 never reaches the route."""
    server = make_server(model_path, **flags)
    # The scheduler of this server generates nothing.
    monkeypatch.setattr(server.manager, "health_generate", server.manager.health_ping)
    keys = {"n": None, "u": USER_KEY, "a": ADMIN_KEY, "o": "wrong"}

    async def reached(method: str, path: str, key: str | None) -> bool:
        count = len(server.sent)
        path = path.replace("{model:path}", "some/model")
        # A wrong type in every body keeps the routes from doing anything.
        answer = await server.send(method, path, headers=bearer(key), json=[])
        if answer.status_code == 401:
            assert len(server.sent) == count
            assert answer.headers["www-authenticate"] == "Bearer"
        return answer.status_code != 401

    async def all_routes() -> None:
        for method, path in registered(server):
            wanted = lets_in[ROUTE_ACCESS[path]]
            got = "".join([name for name in keys if await reached(method, path, keys[name])])
            assert got == wanted, (method, path)
            for other in ("GET", "HEAD", "OPTIONS", "POST", "DELETE", "get", "TRACE"):
                if wanted != "nuao":
                    assert not await reached(other, path, None), (other, path)

    asyncio.run(all_routes())


@pytest.mark.parametrize(
    "path",
    [
        "/health/../pause_generation",
        "/metrics/../pause_generation",
        "/health/",
        "/healthy",
        "/health_generate/x",
        "/HEALTH",
        "//health",
        "//pause_generation",
        "/pause_generation/",
        "/pause_generation%0A",
        "/pause%5Fgeneration",
        "/PAUSE_GENERATION",
        "/pause_generation;x",
        "/v1/models/../../pause_generation",
        "/v1/models/%0A",
        "/docs/",
        "/redoc",
        "/openapi.json",
        "/nothing",
        "*",
        "",
    ],
)
def test_no_spelling_of_a_path_goes_around_the_keys(locked: Server, path: str) -> None:
    assert status_of(locked.app, path) == 401
    assert status_of(locked.app, path, f"Bearer {ADMIN_KEY}x") == 401
    # What leads to an admin's route asks for the admin's key.
    with_user_key = status_of(locked.app, path, f"Bearer {USER_KEY}")
    leads_to_pause = path in ("/pause_generation%0A", "/pause%5Fgeneration")
    assert (with_user_key == 401) == leads_to_pause
    assert not locked.sent


def status_of(app: Any, path: str, authorization: str | bytes | None = None) -> int:
    """A POST as a server hands it on: the path decoded, headers as bytes."""
    headers = [(b"host", b"127.0.0.1:30000")]
    if authorization is not None:
        value = authorization.encode() if isinstance(authorization, str) else authorization
        headers.append((b"authorization", value))
    scope = {
        "type": "http",
        "method": "POST",
        "path": unquote(path),
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": headers,
        "scheme": "http",
        "http_version": "1.1",
        "server": ("127.0.0.1", 30000),
        "client": ("127.0.0.1", 5000),
        "root_path": "",
    }
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"[]", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(app(scope, receive, send))
    return int(sent[0]["status"])


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"Bearer",
        b"Bearer ",
        b"Bearer\t" + USER_KEY.encode(),
        USER_KEY.encode(),
        b"Basic " + USER_KEY.encode(),
        b"Bearer " + USER_KEY.encode() + b",x",
        b"Bearer " + USER_KEY.upper().encode(),
        "Bearer schlüssel".encode(),
        b"Bearer \xff\xfe\x00",
        b"\xff",
        b"Bearer " + b"x" * 60_000,
    ],
)
def test_a_strange_header_is_401_and_no_more(locked: Server, value: bytes) -> None:
    assert status_of(locked.app, "/generate", value) == 401
    assert status_of(locked.app, "/generate", b"bearer  " + USER_KEY.encode()) == 400


def test_a_websocket_is_closed_and_the_lifespan_passes(model_path: Path) -> None:
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guard = Guard(inner, [], AccessRules())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def scenario() -> None:
        for kind in ("websocket", "lifespan"):
            await guard({"type": kind, "path": "/generate", "headers": []}, send, send)

    asyncio.run(scenario())
    assert [message["type"] for message in sent] == ["websocket.close"]
    assert seen == ["lifespan"]


def test_streams_pass_the_gate_untouched() -> None:
    """The route gets the very `receive` and `send` of the server: nothing is read or buffered."""
    given: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        given.extend((receive, send))

    async def receive() -> Any:
        raise AssertionError

    async def send(message: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "path": "/generate", "headers": []}
    asyncio.run(Guard(inner, [], AccessRules())(scope, receive, send))
    assert given == [receive, send]


def test_a_route_without_a_class_is_never_served() -> None:
    app = FastAPI(docs_url=None)

    @app.get("/new/{name}")
    async def new(request: Request) -> Response:
        return Response()

    add_guard(app, AccessRules(USER_KEY.encode(), ADMIN_KEY.encode()))
    with pytest.raises(KeyError):
        status_of(app, "/new/x", f"Bearer {USER_KEY}")
