"""The request log outlives what a disk does to it."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from sglang.srt.observability import request_log
from sglang.srt.observability.request_log import RequestLog


def test_transient_disk_error_costs_its_lines_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    num_failures = 2
    path, opens, append = tmp_path / "log", Path.open, threading.Event()

    def broken_open(self: Path, mode: str, **kwargs: Any) -> Any:
        nonlocal num_failures
        if mode == "a" and num_failures:
            num_failures -= 1
            if not num_failures:
                append.set()
            raise OSError(28, "No space left on device")
        return opens(self, mode, **kwargs)

    log = RequestLog(str(path), 0)
    monkeypatch.setattr(Path, "open", broken_open)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            log.write({"number": number})
            if number == 1:
                assert append.wait(10)
        log.close()
    assert path.read_text().count("\n") == 1
    assert '"number":2' in path.read_text()
    assert log.num_failed == 2
    assert caplog.text.count("No space left") == 1


def test_close_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, opens = threading.Event(), Path.open

    def slow_open(self: Path, mode: str, **kwargs: Any) -> Any:
        hanging.wait(30)
        return opens(self, mode, **kwargs)

    monkeypatch.setattr(request_log, "QUEUE_LINES", 2)
    monkeypatch.setattr(request_log, "CLOSE_TIMEOUT_S", 0.05, raising=False)
    log = RequestLog(str(tmp_path / "log"), 0)
    monkeypatch.setattr(Path, "open", slow_open)
    for number in range(5):
        log.write({"number": number})
    closing = threading.Thread(target=log.close, daemon=True)
    closing.start()
    closing.join(10)
    has_closed = not closing.is_alive()
    hanging.set()
    assert has_closed
    assert log.num_dropped >= 2
    log._thread.join(10)


@pytest.mark.parametrize("line_format", ["json", "text"])
def test_no_client_forges_a_line(tmp_path: Path, line_format: str) -> None:
    path = tmp_path / "log"
    log = RequestLog(str(path), 0, line_format)
    log.write({"rid": 'a\nrid="b"', "tokens": 3})
    log.close()
    (line,) = path.read_text().splitlines()
    if line_format == "json":
        fields = json.loads(line)
        assert fields.pop("time") > 0
        assert fields == {"rid": 'a\nrid="b"', "tokens": 3}
    else:
        when, _, rest = line.partition("] ")
        assert time.strptime(when, "[%Y-%m-%d %H:%M:%S")
        assert rest == r'rid="a\nrid=\"b\"" tokens=3'
