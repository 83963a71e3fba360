"""How words of a command line are read: our own flags, flags of SGLang alone, and misspelt ones."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_type_hints

from sglang.srt.flag_values import value_type
from sglang.srt.sglang_surface import SGLangArgument


def add_flags(parser: argparse.ArgumentParser, flags_class: type) -> None:
    """Adds one option per field of a dataclass of `flag`s, in the sections of --help.

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
            kwargs["choices"] = entry.metadata["choices"]
        if entry.default is MISSING:
            kwargs["required"] = True
        else:
            kwargs["default"] = entry.default
            if entry.default is not None and hints[entry.name] is not bool:
                kwargs["help"] += f" (default: {entry.default})"
        group.add_argument(*names, **kwargs)


def add_missing_flags(parser: argparse.ArgumentParser, arguments: Iterable[SGLangArgument]) -> None:
    """Adds flags that SGLang has and this runtime does not, hidden in --help."""
    for argument in arguments:
        if argument.flags:
            parser.add_argument(*argument.flags, action=MissingFlag, argument=argument)


class MissingFlag(argparse.Action):
    """A flag of SGLang without an effect here: accepted at neutral values, else refused."""

    def __init__(self, option_strings: list[str], dest: str, argument: SGLangArgument) -> None:
        nargs = None if argument.takes == 1 else argument.takes
        hidden = argparse.SUPPRESS
        super().__init__(option_strings, hidden, nargs=nargs, default=hidden, help=hidden)
        self._argument = argument

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if problem := self._argument.problem_of_flag(option_string or "", values):
            parser.error(problem)


class SuggestingParser(argparse.ArgumentParser):
    """Names the flag that an unknown one was probably meant to be; no abbreviations."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(allow_abbrev=False, **kwargs)

    def refuse_unknown(self, argv: list[str]) -> None:
        """Exits with 2 at the first flag that does not exist."""
        known = {name: action for action in self._actions for name in action.option_strings}
        ours = [name for name, action in known.items() if not isinstance(action, MissingFlag)]
        for word in argv:
            name = word.partition("=")[0]
            if name.startswith("--") and name != "--" and name not in known:
                near = difflib.get_close_matches(name, ours, n=1)
                self.error(f"unknown flag {name}" + (f", did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\nSee --help.\n")
