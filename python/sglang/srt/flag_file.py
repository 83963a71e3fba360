"""Flags from a YAML file: `--config FILE` stands for the flags that the file names."""

from __future__ import annotations

import difflib
import json
from argparse import SUPPRESS, Action
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from sglang.srt.plain_files import read_text

FLAG = "--config"
MAX_BYTES = 1024 * 1024
HELP = (
    f"{FLAG} FILE reads flags from a YAML file, such as `port: 30000` or `log-requests: true`;"
    "\nwhat the command line says itself wins.\n\n"
)


def with_flags_of_files(argv: Sequence[str], options: Mapping[str, Action]) -> list[str]:
    """Puts the flags of each `--config` file before those of the command line, which so win.

    Args:
        options: the parser's options by flag.

    Raises:
        ValueError: for a file that cannot be read, is no YAML of flags and values, or has a key
            that is no flag; the text names the file and the key.
    """
    from_files: list[str] = []
    rest: list[str] = []
    words = iter(argv)
    for word in words:
        flag, equals, path = word.partition("=")
        if flag != FLAG:
            rest.append(word)
            continue
        if path := path if equals else next(words, ""):
            from_files += _words_of(Path(path), options)
    return [*from_files, *rest]


def _words_of(path: Path, options: Mapping[str, Action]) -> list[str]:
    text = read_text(path, MAX_BYTES)
    try:
        content = yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: of a date
        reason = " ".join(str(error).split()) or "it is nested too deeply"
        raise ValueError(f"{path} is not valid YAML: {reason}") from None
    if not isinstance(content, dict | None):
        raise ValueError(f"{path} must hold flags with their values, such as `port: 30000`.")
    words: list[str] = []
    for key, value in (content or {}).items():
        flag = f"--{str(key).removeprefix('--').replace('_', '-')}"
        if flag not in options or flag == FLAG:
            ours = [name for name, option in options.items() if option.help != SUPPRESS]
            near = difflib.get_close_matches(flag, ours, n=1)
            hint = f", did you mean {near[0].removeprefix('--')}?" if near else "."
            raise ValueError(f"{path}: unknown key {key}{hint}")
        try:
            words += _words_for(flag, value, options[flag])
        except ValueError as error:
            raise ValueError(f"{path}: {key}: {error}") from None
    return words


def _words_for(flag: str, value: Any, option: Action) -> list[str]:
    """Writes a flag with its value as on a command line; null asks for nothing."""
    if value is None:
        return []
    if option.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"is a switch, true or false, not {value!r}.")
        return [flag] if value else []
    match value:
        case bool():
            raise ValueError(f"takes a value, not {str(value).lower()}; a word goes in quotes.")
        case dict():
            return [f"{flag}={json.dumps(value)}"]
        case list() if option.nargs == "*":
            return [flag, *map(str, value)]
        case str() | int() | float():
            return [f"{flag}={value}"]
    raise ValueError(f"takes one value, not {value!r}.")
