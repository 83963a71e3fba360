"""A headless Chromium, driven by its DevTools protocol over two pipes."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root has none of
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--disable-component-update",
    "--no-first-run",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
TIMEOUT_S = 30.0


def find_browser() -> str | None:
    """The path of a Chromium of this machine."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Page:
    """One tab of a browser.

    Attributes:
        events: what Chromium has told of the tab, oldest first: method and parameters.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._to_browser = to_browser
        self._from_browser = from_browser
        self._received = b""
        self._ids = itertools.count(1)
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Calls a method of the protocol and returns its result."""
        message: dict[str, Any] = {"id": next(self._ids), "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to_browser, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, (method, answer)
                return dict(answer["result"])
            if "method" in answer:
                self.events.append((answer["method"], answer["params"]))

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._from_browser], [], [], TIMEOUT_S)
            assert ready, f"Chromium has said nothing for {TIMEOUT_S} s."
            news = os.read(self._from_browser, 1 << 16)
            assert news, "Chromium has ended."
            self._received += news
        message, _, self._received = self._received.partition(b"\0")
        return dict(json.loads(message))

    def open(self, url: str) -> None:
        """Opens an address and waits until it is loaded."""
        self.call("Page.navigate", url=url)
        self.wait_for("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression of JavaScript, or that of the promise that it is."""
        answer = self.call(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, (script, answer["exceptionDetails"])
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = TIMEOUT_S) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(script)):
            if time.monotonic() > deadline:
                text = self.run("document.body.innerText")
                raise AssertionError(f"not so after {timeout_s} s: {script}\n{text}")
            time.sleep(0.02)
        return value

    def fill(self, element_id: str, value: str) -> None:
        """Gives a field a value, and tells the page."""
        self.run(
            f"document.getElementById({json.dumps(element_id)}).value = {json.dumps(value)};"
            f"document.getElementById({json.dumps(element_id)}).dispatchEvent(new Event('change'))"
        )

    def click(self, element_id: str) -> None:
        """Clicks on an element that can be clicked on."""
        element = f"document.getElementById({json.dumps(element_id)})"
        self.wait_for(f"!{element}.disabled")
        self.run(f"{element}.click()")

    def text(self, element_id: str) -> str:
        """Gives what an element shows."""
        return str(self.run(f"document.getElementById({json.dumps(element_id)}).innerText"))

    def requested_urls(self) -> list[str]:
        """The addresses that the tab has asked for."""
        name = "Network.requestWillBeSent"
        return [params["request"]["url"] for method, params in self.events if method == name]

    def complaints(self) -> list[str]:
        """Errors of scripts, and of the browser about the page, such as of its policy."""
        found = [str(params) for method, params in self.events if method.endswith("Thrown")]
        entries = [p["entry"] for method, p in self.events if method == "Log.entryAdded"]
        return found + [
            entry["text"]
            for entry in entries
            if entry["level"] in ("warning", "error") and entry["source"] != "network"
        ]

    def screenshot(self) -> bytes:
        """The visible part of the tab, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def open_browser(path: str, flags: Sequence[str] = ()) -> Iterator[Page]:
    """A tab of a browser of its own, whose profile is new; ended, by force if needed."""
    to_browser, from_page = os.pipe()
    to_page, from_browser = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        # The browser reads from 3 and writes to 4.
        command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "-"]
        command += [path, *FLAGS, f"--user-data-dir={profile}", *flags]
        with subprocess.Popen(
            command,
            pass_fds=(to_browser, from_browser),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            os.close(to_browser)
            os.close(from_browser)
            try:
                yield Page(from_page, to_page)
            finally:
                os.close(from_page)  # which ends it
                os.close(to_page)
                try:
                    process.wait(5)
                except subprocess.TimeoutExpired:
                    process.kill()
