"""Who may use which route: keys for every route there is, and what a web page may do."""

from __future__ import annotations

import asyncio
import logging
import socket
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.routing import Route

from fake_server import Server
from serving_utils import make_model_dir
from sglang.srt.entrypoints.access import (
    ROUTE_ACCESS,
    Access,
    AccessRules,
    Refusal,
    refusal_of,
)
from sglang.srt.entrypoints.guard import Guard, add_guard
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.server_info import describe_server
from sglang.srt.entrypoints.server_process import _warn_if_open
from sglang.srt.managers.control_messages import MemoryOccupationReq, PauseGenerationReq
from sglang.srt.managers.io_struct import SchedulerInfo
from sglang.srt.server_args import ServerArgs, public_fields
from sglang.srt.tokenizer import load_tokenizer

USER_KEY, ADMIN_KEY = "user-Kkey-1", "admin-Kkey-2"
BOTH = {"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}
UI = "https://chat.example"
LAN = "http://192.168.1.5:30000"
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


def rules_of(**flags: Any) -> AccessRules:
    return AccessRules.of(ServerArgs(model_path="m", **flags))


def decide(rules: AccessRules, access: Access, **headers: str) -> int:
    """The status of a refusal, or 200; `sec_fetch_site` stands for `sec-fetch-site`."""
    raw = {name.replace("_", "-").encode(): text.encode() for name, text in headers.items()}
    refusal = refusal_of(rules, access, raw)
    return 200 if refusal is None else refusal.status_code


def bearer(key: str | None) -> dict[str, str]:
    return {} if key is None else {"authorization": f"Bearer {key}"}


# ---------------------------------------------------------------- what a web page may do


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize(
    "host",
    ["127.0.0.1:30000", "my-pod.ns.svc:30000", "10.0.0.7:30000", "[::1]:30000", "gpu7.lan", ""],
)
def test_a_client_that_is_no_browser_may_use_any_name(access: Access, host: str) -> None:
    assert decide(rules_of(), access, host=host) == 200
    assert decide(rules_of(), access, host=host, accept="*/*", user_agent="curl/8.5.0") == 200
    node = {"accept_language": "*", "sec_fetch_mode": "cors", "user_agent": "node"}
    assert decide(rules_of(), access, host=host, **node) == 200


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "https://evil.example"},
        {"origin": "null"},
        {"origin": ""},
        {"origin": "http://localhost:8888"},
        {"origin": "http://127.0.0.1:30001"},
        {"origin": "http://127.0.0.1:30000.evil.example"},
        {"origin": "http://evil.example/http://127.0.0.1:30000"},
        {"origin": "https://evil.example", "sec_fetch_site": "same-origin"},
        {"origin": "http://127.0.0.1:30000", "sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "cross-site"},
        {"sec_fetch_site": "same-site"},
        {"sec_fetch_site": "CROSS-SITE "},
        {"sec_fetch_site": "something new"},
    ],
)
def test_a_page_of_another_origin_may_do_nothing(access: Access, headers: dict[str, str]) -> None:
    assert decide(rules_of(), access, host="127.0.0.1:30000", **headers) == 403


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1:30000",
        "192.168.1.5:30000",
        "[fe80::1]:30000",
        "localhost:9999",
        "LOCALHOST",
        "localhost.",
        "sglang.localhost:30000",
        "gpu7.lan:30000",
        socket.gethostname(),
    ],
)
def test_a_page_of_the_server_itself_is_let_in_by_known_names(access: Access, host: str) -> None:
    rules = rules_of(host="gpu7.lan")
    own = {"host": host, "origin": f"http://{host}".lower(), "accept_language": "en"}
    assert decide(rules, access, **own) == 200
    assert decide(rules, access, **own, sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize("access", [USER, ADMIN])
@pytest.mark.parametrize(
    "host",
    [
        "evil.example:30000",
        "127.0.0.1.evil.example:30000",
        "localhost.evil.example",
        "notlocalhost",
        "127.0.0.1 evil.example",
        "[evil.example]",
        "",
        ":30000",
    ],
)
def test_a_browser_may_not_use_names_that_a_page_can_own(access: Access, host: str) -> None:
    """DNS rebinding: the page's own name leads to this server, so all is of the same origin."""
    assert decide(rules_of(), access, host=host, origin=f"http://{host}") == 403
    assert decide(rules_of(), access, host=host, sec_fetch_site="same-origin") == 403
    assert decide(rules_of(), access, host=host, accept_language="en") == 403


def test_probes_by_any_name_are_answered_even_if_they_look_like_browsers() -> None:
    assert decide(rules_of(), OPEN, host="llm.example", accept_language="en") == 200


def test_a_person_may_read_but_an_image_changes_nothing() -> None:
    for headers in ({}, {"sec_fetch_site": "none"}, {"sec_fetch_site": "same-origin"}):
        browser = {"host": "192.168.1.5:30000", "accept_language": "en", **headers}
        assert decide(rules_of(), USER, **browser) == 200
        assert decide(rules_of(), ADMIN, **browser) == 403


def test_pages_of_allowed_origins_may_do_what_others_may() -> None:
    rules = rules_of(allowed_origins=f" {UI} , HTTP://localhost:3000,")
    for access in Access:
        page = {"origin": UI, "sec_fetch_site": "cross-site", "accept_language": "en"}
        assert decide(rules, access, host="127.0.0.1:30000", **page) == 200
        assert decide(rules, access, host="gpu7.lan", **page) == 200
        assert decide(rules, access, host="127.0.0.1", origin="http://localhost:3000") == 200
        assert decide(rules, access, host="127.0.0.1", origin="http://chat.example") == 403
        assert decide(rules, access, host="127.0.0.1", origin=f"{UI}.evil") == 403
    # Behind a proxy of that name a page reads without an Origin.
    assert decide(rules, USER, host="chat.example", sec_fetch_site="same-origin") == 200


@pytest.mark.parametrize("text", ["*", "chat.example", "https://", f"{UI}/path", f"{UI}/", "null"])
def test_what_is_no_origin_fails_the_start(text: str) -> None:
    with pytest.raises(LaunchError, match="--allowed-origins"):
        rules_of(allowed_origins=text)


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
    assert "--allowed-origins" in error["message"] or "POST" in error["message"]
    assert not [name for name in answer.headers if name.startswith("access-control")]
    assert not server.sent


def test_clients_change_the_server_by_get_and_by_forms_as_before(model_path: Path) -> None:
    """What curl -d, python-requests and trainers send, by a name that the server cannot know."""
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


# ---------------------------------------------------------------- keys


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
        "/docs",
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


def test_a_key_of_other_letters_works() -> None:
    rules = rules_of(api_key="schlüssel-ключ")
    assert decide(rules, USER, authorization="Bearer schlüssel-ключ") == 200
    assert decide(rules, USER, authorization="Bearer schlussel") == 401


@pytest.mark.parametrize("key", ["", " ", " s3cret", "s3cret\n", "s\n3cret", "s\0", "\udcff"])
@pytest.mark.parametrize("flag", ["api_key", "admin_api_key"])
def test_a_key_that_nobody_can_send_fails_the_start(flag: str, key: str) -> None:
    """Above all the empty one: a variable that is not set must not open the server."""
    with pytest.raises(LaunchError, match=f"--{flag.replace('_', '-')} ") as failure:
        rules_of(**{flag: key})
    assert key.strip() == "" or key not in str(failure.value)


def test_keys_are_in_no_text_that_others_read() -> None:
    args = ServerArgs(model_path="m", **BOTH)
    resolved = {"schedule": {"chunked_prefill_size": 1}}
    info = SchedulerInfo(
        vocab_size=1,
        context_len=1,
        max_total_num_tokens=1,
        max_req_len=1,
        max_req_len_reason="",
        max_running_requests=1,
        eos_token_ids=[],
        resolved=resolved,
    )
    texts = (args, AccessRules.of(args), public_fields(args), describe_server(args, info, {}))
    for text in map(repr, texts):
        assert USER_KEY not in text
        assert ADMIN_KEY not in text


def test_a_refusal_names_the_key_and_does_not_say_it() -> None:
    rules = rules_of(**BOTH)
    user, admin = (refusal_of(rules, access, {}) for access in (USER, ADMIN))
    assert isinstance(user, Refusal)
    assert isinstance(admin, Refusal)
    assert " --api-key" in user.message
    assert " --admin-api-key" in admin.message
    for key in (USER_KEY, ADMIN_KEY):
        assert key not in user.message + admin.message


# ---------------------------------------------------------------- the gate itself


def test_a_websocket_is_closed_and_the_lifespan_passes(model_path: Path) -> None:
    seen: list[Any] = []

    async def inner(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope["type"])

    guard = Guard(inner, [], rules_of())
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
    asyncio.run(Guard(inner, [], rules_of())(scope, receive, send))
    assert given == [receive, send]


def test_a_route_without_a_class_is_never_served() -> None:
    app = FastAPI(docs_url=None)

    @app.get("/new/{name}")
    async def new(request: Request) -> Response:
        return Response()

    add_guard(app, rules_of(**BOTH))
    with pytest.raises(KeyError):
        status_of(app, "/new/x", f"Bearer {USER_KEY}")


@pytest.mark.parametrize(
    ("address", "flags", "lines"),
    [
        ("127.0.0.1", {}, 0),
        ("::1", {}, 0),
        ("0.0.0.0", {}, 1),
        ("::", {}, 1),
        ("192.168.1.5", {}, 1),
        ("fe80::1%eth0", {}, 1),
        ("0.0.0.0", {"api_key": USER_KEY}, 0),
        ("0.0.0.0", {"admin_api_key": ADMIN_KEY}, 0),
    ],
)
def test_an_open_address_without_a_key_is_one_warning(
    caplog: pytest.LogCaptureFixture, address: str, flags: dict[str, str], lines: int
) -> None:
    class Listener:
        def getsockname(self) -> tuple[str, int]:
            return address, 30000

    with caplog.at_level(logging.WARNING):
        _warn_if_open(ServerArgs(model_path="m", **flags), Listener())  # type: ignore[arg-type]
    assert len(caplog.records) == lines
    assert all("--api-key" in text and "\n" not in text for text in caplog.messages)
