"""The rules of access: what a web page may do, and what the keys must be."""

from __future__ import annotations

import logging
import socket
from typing import Any

import pytest

from scheduler_infos import scheduler_info
from sglang.srt.entrypoints.access import Access, AccessRules, Refusal, refusal_of
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.entrypoints.server_info import describe_server
from sglang.srt.entrypoints.server_process import _warn_if_open
from sglang.srt.flag_values import public_fields
from sglang.srt.server_args import ServerArgs

USER_KEY, ADMIN_KEY = "user-Kkey-1", "admin-Kkey-2"
BOTH = {"api_key": USER_KEY, "admin_api_key": ADMIN_KEY}
UI = "https://chat.example"
OPEN, USER, ADMIN = Access


def rules_of(**flags: Any) -> AccessRules:
    return AccessRules.of(ServerArgs(model_path="m", **flags))


def decide(rules: AccessRules, access: Access, **headers: str) -> int:
    """The status of a refusal, or 200; `sec_fetch_site` stands for `sec-fetch-site`."""
    raw = [(name.replace("_", "-").encode(), text.encode()) for name, text in headers.items()]
    refusal = refusal_of(rules, access, raw)
    return 200 if refusal is None else refusal.status_code


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


@pytest.mark.parametrize("origin", ["http://[::1", "http://[abc]:3000"])
def test_an_odd_origin_is_no_crash(origin: str) -> None:
    assert decide(rules_of(allowed_origins=origin), USER, host="127.0.0.1:1", origin=origin) == 200


@pytest.mark.parametrize("access", Access)
@pytest.mark.parametrize("name", ["Authorization", "Host", "Origin", "Sec-Fetch-Site"])
def test_a_header_that_decides_is_refused_if_it_comes_twice(access: Access, name: str) -> None:
    """Whatever the two say, in either order, and with a value that alone would be let in; but a key
    may come twice, as routers send it."""
    right = {
        "Authorization": f"Bearer {ADMIN_KEY if access is ADMIN else USER_KEY}",
        "Host": "127.0.0.1:30000",
        "Origin": "http://127.0.0.1:30000",
        "Sec-Fetch-Site": "same-origin",
    }
    sent = [(key.lower().encode(), value.encode()) for key, value in right.items()]
    assert refusal_of(rules_of(**BOTH), access, sent) is None
    for value in (right[name].encode(), b"other", b""):
        more = name.lower().encode(), value
        for headers in ([*sent, more], [more, *sent]):
            refusal = refusal_of(rules_of(**BOTH), access, headers)
            if name == "Authorization" and value == right[name].encode():
                assert refusal is None
                continue
            assert refusal is not None
            assert refusal.status_code == 400
            assert f"`{name}`" in refusal.message


@pytest.mark.parametrize("access", Access)
def test_a_followed_link_may_read(access: Access) -> None:
    link = {"sec_fetch_site": "cross-site", "sec_fetch_mode": "navigate"}
    status = decide(rules_of(), access, host="127.0.0.1:30000", **link)
    assert status == (403 if access is ADMIN else 200)
    if access is USER:
        assert decide(rules_of(), access, host="rebound.example", **link) == 403


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
    resolved = {"path": "m", "schedule": {"chunked_prefill_size": 1}, "num_draft_steps": 0}
    info = scheduler_info(resolved=resolved)
    texts = (args, AccessRules.of(args), public_fields(args), describe_server(args, info, {}))
    for text in map(repr, texts):
        assert USER_KEY not in text
        assert ADMIN_KEY not in text


def test_a_refusal_names_the_key_and_does_not_say_it() -> None:
    rules = rules_of(**BOTH)
    user, admin = (refusal_of(rules, access, []) for access in (USER, ADMIN))
    assert isinstance(user, Refusal)
    assert isinstance(admin, Refusal)
    assert " --api-key" in user.message
    assert " --admin-api-key" in admin.message
    for key in (USER_KEY, ADMIN_KEY):
        assert key not in user.message + admin.message


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
