"""Reads words of a command line: our own flags, flags of SGLang alone, and misspelt ones."""

from __future__ import annotations

import argparse
import difflib
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING
from typing import Any, NoReturn, get_type_hints

from sglang.srt.flag_file import with_flags_of_files
from sglang.srt.flag_values import as_flag, flags_of, value_type
from sglang.srt.sglang_arguments import (
    SGLangArgument,
    dest_of,
    missing_arguments,
    names_by_spelling,
    own_arguments,
    refusal,
    written_table,
)
from sglang.srt.sglang_surface import is_neutral

MOST_IN_HELP = 3  # flags of one sentence in --help
HELP_WIDTH = 96
AddOption = Callable[..., object]  # `add_argument` of a parser or of a group


def add_flags(section: Callable[[str], AddOption], flags_class: type) -> None:
    """Adds one option per `flag` of a dataclass, and those that SGLang has beside them.

    An option's name is the field's name with dashes.

    Args:
        section: gives what adds the options of a section of --help.
    """
    hints = get_type_hints(flags_class)
    flags = flags_of(flags_class)
    add: AddOption = section("options")
    for argument in missing_arguments(flags).values():
        for flag in argument.flags:
            # Each name is an option of its own, so that a refusal has the one that was given, and
            # whoever reads what was parsed finds SGLang's default by any of them.
            add(flag, action=MissingFlag, dest=dest_of(flag), argument=argument, word=flag)
    for name, entry in flags.items():
        if entry.metadata["section"]:
            add = section(entry.metadata["section"])
        names = (as_flag(name), *entry.metadata["aliases"])
        kwargs: dict[str, Any] = {"dest": name, "help": entry.metadata["help"]}
        if hints[name] is bool:
            kwargs["action"] = "store_true"
        else:
            kwargs["type"] = value_type(hints[name])
            if choices := entry.metadata["choices"]:
                kwargs["metavar"] = f"{{{','.join(choices)}}}"
        if entry.default is MISSING:
            kwargs["required"] = True
        else:
            kwargs["default"] = entry.default
            if entry.default is not None and hints[name] is not bool:
                kwargs["help"] += f" (default: {entry.default})"
        add(*names, **kwargs)


class MissingFlag(argparse.Action):
    """A flag that SGLang has and this runtime does not, hidden in --help; refused as it is read, so
    that no parser of a launcher, which may drop what it does not know, hides that.

    Args:
        word: its name in SGLang; a launcher's parser may have put a prefix before it.
    """

    def __init__(
        self, option_strings: list[str], dest: str, argument: SGLangArgument, word: str
    ) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=None if argument.takes == 1 else argument.takes,
            const=True if argument.takes == "?" else None,
            default=argument.default,
            type=None if argument.takes == 0 else argument.value_of,
            help=argparse.SUPPRESS,
        )
        self._argument, self._word = argument, word

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        value = not self._word.startswith("--no-") if self._argument.takes == 0 else values
        setattr(namespace, self.dest, value)
        if is_neutral(value, (self._argument.default,)):
            return
        said = as_flag(dest_of(self._word), value)
        if problem := refusal(self._argument.name, value, False, said):
            parser.exit(2, f"{parser.prog}: error: {problem}\n")


def parse_flags(
    parser: argparse.ArgumentParser, argv: list[str] | None, flags_class: type
) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Parses a command line with flags of `flags_class` and SGLang, and those of `--config` files.

    Returns:
        All that was parsed, and the arguments of `flags_class` among it.

    Raises:
        SystemExit: on a flag that is refused, or a value that its flag cannot have; the reason is
            printed.
    """
    try:
        words = with_flags_of_files(sys.argv[1:] if argv is None else argv, options_of(parser))
        namespace = parser.parse_args(words)
        return namespace, own_arguments_of(namespace, flags_class)
    except ValueError as error:
        parser.exit(2, f"{parser.prog}: error: {error}\n")


def options_of(parser: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    """Gives a parser's options by each of their flags."""
    return {name: action for action in parser._actions for name in action.option_strings}


def own_arguments_of(namespace: argparse.Namespace, flags_class: type) -> dict[str, Any]:
    """Gives the arguments of `flags_class` among what was parsed; see `own_arguments`."""
    known = {*flags_of(flags_class), *names_by_spelling()}
    given = {name: value for name, value in vars(namespace).items() if name in known}
    return own_arguments(given, flags_class, as_flag)


def sglang_section(flags_class: type) -> str:
    """Writes what --help says of SGLang's flags beside those of `flags_class`."""
    lines = ["SGLang's other flags are in one of three classes; docs/flags.md names each:"]
    table = written_table(flags_of(flags_class))
    for kind, entries in table.items():
        lines.append(f"  {kind}:")
        for says, flags in entries:
            more = len(flags) - MOST_IN_HELP
            named = ", ".join(flags[:MOST_IN_HELP]) + (f" and {more} more" if more > 0 else "")
            lines += textwrap.wrap(
                f"{named}: {says}",
                HELP_WIDTH,
                initial_indent=" " * 4,
                subsequent_indent=" " * 6,
                break_on_hyphens=False,
            )
    return "\n".join(lines)


class SuggestingParser(argparse.ArgumentParser):
    """Names the flag that an unknown one was probably meant to be; no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        formatter = argparse.RawDescriptionHelpFormatter
        super().__init__(allow_abbrev=False, formatter_class=formatter, **kwargs)

    def refuse_unknown(self, argv: list[str]) -> None:
        """Exits with 2 at the first flag that does not exist."""
        known = options_of(self)
        ours = [name for name, action in known.items() if action.help != argparse.SUPPRESS]
        for word in argv:
            name = word.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in known:
                near = difflib.get_close_matches(name, ours, n=1)
                self.error(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee --help.\n")
