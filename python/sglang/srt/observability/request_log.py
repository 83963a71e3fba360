"""The request log: one line at the end of each request. Off by default."""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
from pathlib import Path
from typing import Any

import msgspec

logger = logging.getLogger(__name__)

QUEUE_LINES = 10_000  # beyond it lines are dropped and counted, so a slow disk holds up no request
CLOSE_TIMEOUT_S = 5.0


class RequestLog:
    """Writes lines from a thread of its own, so the event loop never waits for a disk.

    Everything that a client chose is inside JSON strings, so no line can be forged.

    Args:
        target: `stdout` or a file, which is appended to.
        level: 0 figures and labels; 1 sampling parameters too; 2 prompts and outputs too.
        line_format: `json`, or `text`: the local time, then each field as name=JSON.

    Attributes:
        num_dropped: lines that found the queue full.
        num_failed: lines that could not be written.
    """

    def __init__(self, target: str, level: int, line_format: str = "json") -> None:
        self.level = level
        self._format = _text if line_format == "text" else _json
        self.num_dropped = 0
        self.num_failed = 0
        self._target = target
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUE_LINES)
        self._thread = threading.Thread(target=self._write_all, name="request-log", daemon=True)
        if target != "stdout":
            with Path(target).open("ab"):  # a bad path fails the start, not the first request
                pass
        self._thread.start()

    def write(self, fields: dict[str, Any]) -> None:
        """Queues one line."""
        try:
            self._lines.put_nowait(self._format(time.time(), fields))
        except queue.Full:
            self.num_dropped += 1

    def close(self) -> None:
        """Writes what is queued and ends the thread; a disk that hangs is not waited for."""
        try:
            self._lines.put(None, timeout=CLOSE_TIMEOUT_S)
        except queue.Full:
            logger.warning("The request log cannot be written; its last lines are lost.")
            return
        self._thread.join(CLOSE_TIMEOUT_S)

    def _write_all(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                self._write_line(line.decode() + "\n")
            except OSError as error:
                self.num_failed += 1
                if self.num_failed == 1:
                    logger.warning("Lines of the request log are lost: %s", error)

    def _write_line(self, line: str) -> None:
        if self._target == "stdout":
            sys.stdout.write(line)
            sys.stdout.flush()
            return
        with Path(self._target).open("a", encoding="utf-8") as file:
            file.write(line)


def _json(now_s: float, fields: dict[str, Any]) -> bytes:
    return msgspec.json.encode({"time": now_s, **fields})


def _text(now_s: float, fields: dict[str, Any]) -> bytes:
    when = time.strftime("[%Y-%m-%d %H:%M:%S]", time.localtime(now_s)).encode()
    parts = (b"%s=%s" % (name.encode(), msgspec.json.encode(fields[name])) for name in fields)
    return b" ".join((when, *parts))
