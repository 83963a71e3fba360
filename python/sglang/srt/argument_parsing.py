"""How words of a command line are read: our own flags, flags of SGLang alone, and misspelt ones."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_type_hints

from sglang.srt.flag_values import value_type
from sglang.srt.sglang_arguments import (
    all_arguments,
    as_flag,
    missing_arguments,
    own_arguments,
)


def add_flags(parser: argparse.ArgumentParser, flags_class: type) -> None:
    """Adds one option per field of a dataclass of `flag`s, in the sections of --help, and those
    that SGLang has beside them.

    An option's name is the field's name with dashes.
    """
    hints = get_type_hints(flags_class)
    group: argparse._ArgumentGroup | argparse.ArgumentParser = parser
    for entry in fields(flags_class):
        if entry.metadata["section"]:
            group = parser.add_argument_group(entry.metadata["section"])
        names = (f"--{entry.name.replace('_', '-')}", *entry.metadata["aliases"])
        kwargs: dict[str, Any] = {"dest": entry.name, "help": entry.metadata["help"]}
        if hints[entry.name] is bool:
            kwargs["action"] = "store_true"
        else:
            kwargs["type"] = value_type(hints[entry.name])
            if choices := entry.metadata["choices"]:
                kwargs["metavar"] = f"{{{','.join(choices)}}}"
        if entry.default is MISSING:
            kwargs["required"] = True
        else:
            kwargs["default"] = entry.default
            if entry.default is not None and hints[entry.name] is not bool:
                kwargs["help"] += f" (default: {entry.default})"
        group.add_argument(*names, **kwargs)
    _add_missing_flags(parser, [entry.name for entry in fields(flags_class)])


def _add_missing_flags(parser: argparse.ArgumentParser, own: Collection[str]) -> None:
    """Adds flags that SGLang has beside `own`, hidden in --help. Without one the namespace has
    SGLang's default."""
    for argument in missing_arguments(own).values():
        kwargs: dict[str, Any] = {
            "dest": argument.name,
            "default": argument.default,
            "help": argparse.SUPPRESS,
        }
        refusing = [flag for flag in argument.flags if flag.startswith("--no-")]
        asking = [flag for flag in argument.flags if flag not in refusing]
        if refusing:
            parser.add_argument(*refusing, action="store_false", **kwargs)
        if asking and argument.takes == 0:
            parser.add_argument(*asking, action="store_true", **kwargs)
        elif asking:
            nargs = None if argument.takes == 1 else argument.takes
            const = True if nargs == "?" else None
            kwargs |= {"type": argument.value_of, "nargs": nargs, "const": const}
            parser.add_argument(*asking, **kwargs)


def parse_flags(
    parser: argparse.ArgumentParser, argv: list[str] | None, flags_class: type
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parses a command line with flags of `flags_class` and of SGLang.

    Returns:
        All that was parsed, and the arguments of `flags_class` among it.

    Raises:
        SystemExit: on a flag that is refused, or a value that its flag cannot have; the reason is
            printed.
    """
    namespace = parser.parse_args(argv)
    try:
        return namespace, own_arguments_of(namespace, flags_class)
    except ValueError as error:
        parser.error(str(error))


def own_arguments_of(namespace: argparse.Namespace, flags_class: type) -> dict[str, Any]:
    """Gives the arguments of `flags_class` among what was parsed; see `own_arguments`."""
    known = {entry.name for entry in fields(flags_class)} | all_arguments().keys()
    given = {name: value for name, value in vars(namespace).items() if name in known}
    return own_arguments(given, flags_class, as_flag)


class SuggestingParser(argparse.ArgumentParser):
    """Names the flag that an unknown one was probably meant to be; no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def refuse_unknown(self, argv: list[str]) -> None:
        """Exits with 2 at the first flag that does not exist."""
        known = {name: action for action in self._actions for name in action.option_strings}
        ours = [name for name, action in known.items() if action.help != argparse.SUPPRESS]
        for word in argv:
            name = word.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in known:
                near = difflib.get_close_matches(name, ours, n=1)
                self.error(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee --help.\n")
