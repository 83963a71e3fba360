"""Formats lines of the log: with colours in a terminal, plain in a file."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from typing import TextIO

from sglang.srt.request_id import CURRENT

FIGURES = {"has_figures": True}  # `extra` of a record whose numbers stand out
LEVEL_CODES = {"DEBUG": "2", "INFO": "32", "WARNING": "33", "ERROR": "31", "CRITICAL": "1;31"}
NUMBER = re.compile(r"\d[\d.,]*\d%?|\d%?")
LINE, DEFAULTS = " %(levelname)s%(request)s %(message)s", {"request": ""}
RANK_VARIABLE = "SGLANG_DP_RANK"  # the number of a server among several of --dp-size
HEAD, DATES = "[%(asctime)s {role}]", "%Y-%m-%d %H:%M:%S"


def make_handler(
    stream: TextIO, role: str, environ: Mapping[str, str] = os.environ
) -> logging.Handler:
    """Makes what writes lines of a process to `stream`: time, role, level and message. The role is
    that of a server's number, too, where `RANK_VARIABLE` has one."""
    number = environ.get(RANK_VARIABLE)
    head = HEAD.format(role=role if number is None else f"DP{number} {role}")
    handler = logging.StreamHandler(stream)
    handler.addFilter(NamedRequests())
    if has_colours(stream, environ):
        handler.setFormatter(ColourFormatter(head))
    else:
        handler.setFormatter(logging.Formatter(head + LINE, DATES, defaults=DEFAULTS))
    return handler


class NamedRequests(logging.Filter):
    """Gives each record `request`: ` [ID]` of the request in whose task it was made, or nothing."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record through."""
        request_id = CURRENT.get()
        record.request = "" if request_id is None else f" [{request_id.text}]"
        return True


def has_colours(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Tells whether colours may be written: to a terminal that has them, where no setting forbids
    it."""
    return stream.isatty() and not environ.get("NO_COLOR") and environ.get("TERM") != "dumb"


class ColourFormatter(logging.Formatter):
    """Dims the head of a line and colours the level, and the numbers of a line of figures."""

    def __init__(self, head: str) -> None:
        super().__init__(_in("2", head) + LINE, DATES, defaults=DEFAULTS)

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Formats a record, which stays as it is for other handlers."""
        shown = logging.makeLogRecord(vars(record))
        shown.levelname = _in(LEVEL_CODES.get(record.levelname, "0"), record.levelname)
        if vars(record).get("has_figures"):
            shown.message = NUMBER.sub(lambda found: _in("1", found.group()), record.message)
        return super().formatMessage(shown)


def _in(code: str, text: str) -> str:
    return f"\x1b[{code}m{text}\x1b[0m"
