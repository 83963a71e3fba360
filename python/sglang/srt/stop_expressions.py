"""Finds how large a stop expression becomes when it is compiled, without compiling it, and compiles
it.

The regex module copies what is repeated as often as it must match at least: `.{1000}` becomes 1,000
nodes, and the counts of nested repeats multiply. Compiling is C code that no other thread can
interrupt, so what keeps it short is the bound on this size: a program of `MAX_PROGRAM_SIZE` takes
about 3 MB, and some milliseconds for each expression. The time limit of `check_expression_list`,
looked at between two expressions, is the second line of defence.

The size is an upper bound, in parts of the program of at most about 300 bytes. What would make it
uncertain where a group or a set ends, or what a count repeats, is refused: the flags x, f and V1,
comments, and fuzzy matching. Named lists need a list that cannot be given.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Iterable
from weakref import WeakValueDictionary

import regex

MAX_PROGRAM_SIZE = 10_000  # of all expressions of a request together
MAX_GROUPS = 64
NUM_CHECKED = 1024  # expressions that were found to be good and are remembered
COMPILE_TIMEOUT_S = 1.0  # CPU time of all expressions of a request together
EMPTY_MATCH_TIMEOUT_S = 0.05

_CLASS_PART = r"\\.|\[:\^?[A-Za-z0-9]+:\]|\[(?!:)"
_TOKEN = re.compile(
    r"(?P<refused>\(\?(?:\#|[A-Za-z0-9-]*?(?:[xf]|V1))|\{[0-9]*[deis<])"
    r"|(?P<flags>\(\?[A-Za-z0-9]*(?:-[A-Za-z]+)?\))"
    rf"|(?P<set>\[\^?(?:{_CLASS_PART}|[^\[\\])(?:{_CLASS_PART}|[^\[\]\\])*\])"
    r"|(?P<repeat>(?:\{(?P<least>[0-9]+)(?:,[0-9]*)?\}|\{,[0-9]*\}|(?P<plus>\+)|[*?])[?+]?)"
    r"|(?P<long>\\[XR])|(?P<item>\\.|[^\[\\])",
    re.DOTALL,
)
_GROUP_CALL = re.compile(r"\(\?(?:R|[+-]?[0-9]|&|P[>&])")
_PARTS_OF_LONG_ESCAPE = 8
_compiled: WeakValueDictionary[str, regex.Pattern[str]] = WeakValueDictionary()


def compiled(text: str) -> regex.Pattern[str]:
    """The compiled expression, shared by all requests of the process that use it at a time, and
    freed when none does."""
    pattern = _compiled.get(text)
    if pattern is None:
        pattern = _compiled[text] = regex.compile(text, cache_pattern=False)
    return pattern


def program_size(text: str) -> int:
    """Upper bound of the parts of the compiled expression.

    Raises:
        ValueError: if it cannot be told.
    """
    if text.count("(") > MAX_GROUPS:
        raise ValueError(f"has more than {MAX_GROUPS} groups; use fewer")
    sizes, last, place = [1], 0, 0  # of the open groups, and of what a repeat would repeat
    while place < len(text):
        token = _TOKEN.match(text, place)
        if token is None:
            raise ValueError("has a set or an escape that does not end, or [: in a set; write \\[:")
        place = token.end()
        if token["refused"]:
            raise ValueError(
                "must not use comments, the flags x, f and V1, or fuzzy matching; write it"
                " without, and a literal brace as \\{"
            )
        if token["flags"]:  # a repeat after them repeats what is before them
            continue
        if token["repeat"]:
            added = last * (int(token["least"] or 0) + bool(token["plus"]))
            sizes[-1] += added
            last += added
        elif token["item"] == "(":
            sizes.append(2)
            last = 0
        elif token["item"] == ")":
            if len(sizes) == 1:
                raise ValueError("is not a usable regular expression (unbalanced parenthesis)")
            last = sizes.pop()
            sizes[-1] += last
        else:
            last = _PARTS_OF_LONG_ESCAPE if token["long"] else len(token["set"] or "1")
            sizes[-1] += last
            last = 0 if token["item"] == "|" else last
    # A group that is called is compiled once more, and so are the groups in it.
    copies = 1 + 2 * text.count("(") if _GROUP_CALL.search(text) else 1
    return copies * sum(sizes)


def check_size(expressions: Iterable[str]) -> None:
    """Refuses expressions that would be large together; the same one counts once.

    Raises:
        ValueError: if they are, or if that cannot be told.
    """
    total = 0
    for text in dict.fromkeys(expressions):
        total += program_size(text)
        if total > MAX_PROGRAM_SIZE:
            raise ValueError(
                f"too large once compiled: {shown(total)} parts in all, more than"
                f" {MAX_PROGRAM_SIZE}; repeat less (x{{n,}} is n copies, nested counts multiply) or"
                " give fewer"
            )


def shown(number: int) -> str:
    """A number that may have hundreds of digits, for a message."""
    return str(number) if number < 10**12 else "over 10**12"


def check_expression_list(expressions: Iterable[str]) -> None:
    """Compiles expressions that `check_size` has let pass, in any thread.

    Raises:
        ValueError: if one cannot be used.
        TimeoutError: if that takes too long.
    """
    end_s = time.thread_time() + COMPILE_TIMEOUT_S
    for text in dict.fromkeys(expressions):
        if time.thread_time() > end_s:
            raise TimeoutError("takes too long to compile; use fewer or simpler expressions")
        check_expression(text)


@functools.lru_cache(NUM_CHECKED)
def check_expression(text: str) -> None:
    """Refuses an expression that is none, or that matches the empty text: it would end every
    output.

    Raises:
        ValueError: saying why.
    """
    try:
        pattern = regex.compile(text, cache_pattern=False)
        matches_empty = pattern.search("", timeout=EMPTY_MATCH_TIMEOUT_S) is not None
    except Exception as error:  # noqa: BLE001 - a client's text; the library's errors are many
        raise ValueError(f"is not a usable regular expression ({error})") from None
    if matches_empty:
        raise ValueError("matches the empty text")
