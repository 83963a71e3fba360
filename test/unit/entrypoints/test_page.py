"""The page at / and /docs: what every browser must be told, whoever asks."""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Any

import httpx
import pytest

from fake_server import Server
from serving_utils import ROOT, make_model_dir
from sglang.srt.entrypoints.page import FILES, PATHS, SCRIPTS
from sglang.srt.tokenizer import load_tokenizer

MAX_BYTES = 100_000
MAX_SCREENSHOT_BYTES = 500_000
# Ways by which text becomes markup or code, and places where a key would outlive the page.
FORBIDDEN = re.compile(
    r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|createContextualFragment|DOMParser"
    r"|\beval\b|\bFunction\(|javascript:|\bon\w+\s*=\s*[\"']|srcdoc"
    r"|localStorage|sessionStorage|indexedDB|\bcookie|history\.|location\.(hash|search|href)"
)
BOTH_KEYS = {"api_key": "user-key", "admin_api_key": "admin-key"}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


def make_server(model_path: Path, **flags: Any) -> Server:
    return Server(str(model_path), load_tokenizer(model_path), **flags)


@pytest.fixture(scope="module")
def server(model_path: Path) -> Server:
    return make_server(model_path, **BOTH_KEYS)


@pytest.fixture(scope="module")
def answer(server: Server) -> httpx.Response:
    return server.request("GET", "/")


def policy_of(answer: httpx.Response) -> dict[str, list[str]]:
    """The sources of each directive of the page's policy."""
    rules = answer.headers["content-security-policy"].split("; ")
    return {name: sources for name, *sources in map(str.split, rules)}


@pytest.mark.parametrize("path", PATHS)
def test_it_needs_no_key_and_no_scheduler(server: Server, path: str) -> None:
    server.state.manager = None  # as while the server starts
    try:
        answer = server.request("GET", path)
    finally:
        server.state.manager = server.manager
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert server.request("HEAD", path).headers["content-length"] == str(len(answer.content))
    assert not server.sent


def test_a_link_from_another_site_may_open_it(server: Server) -> None:
    link = {"sec-fetch-site": "cross-site", "sec-fetch-mode": "navigate", "accept-language": "en"}
    assert server.request("GET", "/", headers=link).status_code == 200


def test_it_is_small_and_asks_for_no_other_file(answer: httpx.Response) -> None:
    assert len(answer.content) < MAX_BYTES
    assert "://" not in answer.text
    assert not re.search(r"\b(src|href|action)=|@import|url\(", answer.text)


@pytest.mark.parametrize(("tag", "directive"), [("script", "script-src"), ("style", "style-src")])
def test_the_policy_allows_its_own_script_and_style_by_their_hash_alone(
    answer: httpx.Response, tag: str, directive: str
) -> None:
    (content,) = re.findall(rf"<{tag}>(.*?)</{tag}>", answer.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
    assert policy_of(answer)[directive] == [f"'sha256-{digest}'"]


def test_the_policy_allows_nothing_but_its_own_server(answer: httpx.Response) -> None:
    policy = policy_of(answer)
    assert policy["connect-src"] == ["'self'"]
    for directive in ("default-src", "base-uri", "form-action", "frame-ancestors", "trusted-types"):
        assert policy[directive] == ["'none'"]
    assert policy["require-trusted-types-for"] == ["'script'"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


def test_no_text_becomes_markup_and_no_key_is_kept(answer: httpx.Response) -> None:
    assert not FORBIDDEN.findall(answer.text)
    assert FORBIDDEN.search("element.innerHTML = text")
    assert FORBIDDEN.search("localStorage.key = key")


def test_screenshots_of_it_are_small() -> None:
    sizes = [path.stat().st_size for path in (ROOT / "docs").glob("page*.png")]
    assert 0 < sum(sizes) < MAX_SCREENSHOT_BYTES


def test_all_files_are_part_of_the_page() -> None:
    assert {path.name for path in FILES.iterdir()} == {"index.html", "style.css", *SCRIPTS}


def test_the_flag_turns_it_off_and_no_key_is_asked_for(model_path: Path) -> None:
    server = make_server(model_path, disable_ui=True, **BOTH_KEYS)
    assert [server.request("GET", path).status_code for path in PATHS] == [404, 404]


def test_it_is_no_part_of_the_documented_routes(model_path: Path) -> None:
    paths = make_server(model_path).request("GET", "/openapi.json").json()["paths"]
    assert not set(PATHS) & set(paths)
