"""The page at / in a headless Chromium, over a real server."""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from browser import Page, find_browser, open_browser
from serving_utils import ENDLESS_DEMO, RunningServer, free_port, running_server

BROWSER = find_browser()
pytestmark = [
    pytest.mark.long_matrix,
    pytest.mark.skipif(BROWSER is None, reason="there is no Chromium: apt-get install chromium"),
]
USER_KEY, ADMIN_KEY = "every-user", "only-the-admin-ß"
FLAGS = ("--api-key", USER_KEY, "--admin-api-key", ADMIN_KEY)
NUM_STREAMS = 20
PROMPT = "import os\n\ndef "
ATTACK = "<script>document.title = 'taken over'</script><img src=x onerror=document.title=1>"
IS_DONE = "!document.getElementById('send').disabled && !toDraw.size"
OUTPUTS = "[...document.querySelectorAll('#outputs pre')].map((place) => place.textContent)"


class Servers:
    """A server that may be killed and started again, always at the same port."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.port = free_port()
        self.server = self.start()

    def start(self) -> RunningServer:
        """Starts one behind the last, which is gone."""
        self.server = self._stack.enter_context(running_server("demo", *FLAGS, port=self.port))
        self.server.client.headers["authorization"] = f"Bearer {USER_KEY}"
        return self.server


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    with ExitStack() as stack:
        yield Servers(stack)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    assert BROWSER is not None
    with open_browser(BROWSER) as page:
        yield page


@pytest.fixture
def page(servers: Servers, browser: Page) -> Iterator[Page]:
    """The page, just opened, with the key; at the end, what the browser had to say of it."""
    browser.events.clear()
    browser.open(f"{servers.server.url}/")
    wait_for_status(browser, "Needs the API key")
    assert browser.run("document.getElementById('keys').open")
    browser.fill("api-key", USER_KEY)
    wait_for_status(browser, "Ready")
    assert browser.text("notice") == ""
    yield browser
    assert browser.complaints() == []
    own = f"{servers.server.url}/"
    assert [url for url in browser.requested_urls() if not url.startswith(own)] == []


def wait_for_status(page: Page, status: str) -> None:
    page.wait_for(f"document.getElementById('status').innerText === {json.dumps(status)}")


def set_parameters(page: Page, **params: object) -> None:
    page.fill("extra", json.dumps(params))


def test_twenty_streams_show_the_tokens_of_each_step(page: Page, servers: Servers) -> None:
    strategy = {"mtp_enabled": True, "mtp_strategy": ["conf_adapt", 0.9], "mtp_k": 8}
    params = {"max_new_tokens": 24, **strategy}
    told = servers.server.post("/generate", {"text": PROMPT, "sampling_params": params}).json()
    effective_k = told["meta_info"]["mtp_effective_k"]
    page.fill("prompt", PROMPT)
    page.fill("streams", str(NUM_STREAMS))
    page.fill("max-tokens", "24")
    page.fill("prediction", "confident")
    page.click("send")
    page.wait_for(IS_DONE)
    assert page.text("problem") == ""
    titles = page.run("[...document.querySelectorAll('#outputs h3')].map((each) => each.innerText)")
    assert len(titles) == NUM_STREAMS
    mean = sum(effective_k) / len(effective_k)
    shown = re.compile(rf"#\d+ · 24 tokens · {mean:.2f} per step · .* · length")
    assert all(map(shown.fullmatch, titles)), titles
    # The tokens of an output's runs are all of its tokens.
    counts = page.run(
        "[...document.querySelectorAll('#outputs pre')].map((place) =>"
        " [...place.children].reduce((sum, run) => sum + parseInt(run.title), 0))"
    )
    assert counts == [24] * NUM_STREAMS


@pytest.mark.parametrize("route", ["generate", "chat"])
def test_markup_in_an_output_is_text(page: Page, route: str) -> None:
    page.fill("route", route)
    page.fill("prompt", ATTACK)
    set_parameters(page, regex=re.escape(ATTACK))
    page.click("send")
    page.wait_for(IS_DONE)
    assert page.text("problem") == ""
    assert page.run(OUTPUTS) == [ATTACK]
    if route == "chat":
        said = "[...document.querySelectorAll('#conversation pre')].map((each) => each.innerText)"
        assert page.run(said) == [ATTACK, ATTACK]
    assert page.run("document.title") == "sglang-adaptive"
    assert page.run("document.querySelectorAll('main script, main img').length") == 0


def test_a_wrong_field_is_named_and_a_stream_can_be_stopped(page: Page) -> None:
    set_parameters(page, top_p=7)
    page.click("send")
    assert "top_p" in page.wait_for("document.getElementById('problem').textContent")
    set_parameters(page, **ENDLESS_DEMO)
    page.click("send")
    page.wait_for(f"({OUTPUTS}[0] || '').length > 20")
    page.click("stop")
    page.wait_for(IS_DONE)
    assert "stopped" in page.run("document.querySelector('#outputs h3').innerText")
    assert page.text("problem") == ""


def test_the_admin_pauses_and_goes_on_with_the_key_alone(page: Page, servers: Servers) -> None:
    answer = "document.getElementById('control-answer').innerText"
    page.click("pause")
    page.wait_for(f"{answer}.includes('--admin-api-key')")
    page.fill("admin-key", ADMIN_KEY)
    page.click("pause")
    wait_for_status(page, "Paused")
    assert servers.server.internal_state()["engine_paused"]
    page.click("continue")
    wait_for_status(page, "Ready")
    page.click("flush")
    page.wait_for(f"{answer} === 'Cache flushed.'")
    assert ADMIN_KEY not in page.run(
        "document.cookie + location.href + JSON.stringify({...localStorage})"
    )


def test_docs_lists_the_routes_and_the_fields_of_their_bodies(page: Page, servers: Servers) -> None:
    page.open(f"{servers.server.url}/docs")
    listed = "[...document.querySelectorAll('#operation-list code')].map((each) => each.innerText)"
    page.fill("api-key", USER_KEY)
    page.wait_for(f"{listed}.length")
    paths = servers.server.client.get("/openapi.json").json()["paths"]
    assert page.run(listed) == [path for path in paths for _ in paths[path]]
    page.run("document.querySelector('#operation-list details').open = true")
    assert "max_new_tokens" in page.wait_for(
        "document.querySelectorAll('#operation-list table').length > 1"
        " && document.getElementById('operation-list').innerText"
    )


def test_nobody_is_asked_while_the_page_is_hidden(page: Page) -> None:
    hide = "Object.defineProperty(document, 'hidden', {configurable: true, get: () => %s})"
    shown = "document.dispatchEvent(new Event('visibilitychange'))"
    page.run(hide % "true")
    page.wait_for("timer === null")
    num_asked = len(page.requested_urls())
    page.run(f"new Promise((resolve) => setTimeout(resolve, {1100}))")
    assert len(page.requested_urls()) == num_asked
    page.run(f"{hide % 'false'}; {shown}")
    page.wait_for("timer !== null")
    assert len(page.requested_urls()) > num_asked


def test_the_page_goes_on_after_a_restart_and_says_so(page: Page, servers: Servers) -> None:
    set_parameters(page, **ENDLESS_DEMO)
    page.click("send")
    page.wait_for(f"({OUTPUTS}[0] || '').length > 20")
    servers.server.process.send_signal(signal.SIGKILL)
    assert "cut off" in page.wait_for("document.getElementById('problem').textContent")
    wait_for_status(page, "No answer")
    servers.start()
    wait_for_status(page, "Ready")
    assert "answers again" in page.text("notice")
    set_parameters(page)
    page.fill("max-tokens", "4")
    page.click("send")
    page.wait_for(IS_DONE)
    assert page.text("problem") == ""
    assert page.run(OUTPUTS)[0]
