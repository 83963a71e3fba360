"""How words of a command line are read: our own flags, flags of SGLang alone, and misspelt ones."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable
from dataclasses import MISSING, fields
from typing import Any, NoReturn, get_type_hints

from sglang.srt.flag_values import value_type
from sglang.srt.sglang_surface import SGLangArgument, own_arguments

AddOption = Callable[..., object]


def flag_names(flags_class: type) -> list[str]:
    """The fields of a dataclass that are `flag`s; others are no options."""
    return [entry.name for entry in fields(flags_class) if entry.metadata]


class TakesSGLangArguments(type):
    """What SGLang's ServerArgs have beside ours is taken at neutral values, and dropped."""

    def __call__(cls, **given: Any) -> Any:
        return super().__call__(**own_arguments(given, flag_names(cls)))


def add_flags(section: Callable[[str], AddOption], flags_class: type) -> None:
    """Adds one option per `flag` of a dataclass. Its name is the field's name with dashes.

    Args:
        section: gives what adds the options of a section of --help, `add_argument` of a parser or
            of a group.
    """
    hints = get_type_hints(flags_class)
    add: AddOption = section("options")
    for entry in fields(flags_class):
        if not entry.metadata:
            continue
        if entry.metadata["section"]:
            add = section(entry.metadata["section"])
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
        add(*names, **kwargs)


def add_missing_flags(add: AddOption, arguments: Iterable[SGLangArgument]) -> None:
    """Adds flags that SGLang has and this runtime does not, hidden in --help.

    Each name of a flag is an option of its own, so that whoever reads the parsed arguments finds
    its default by any of them: `tp_size` and `tensor_parallel_size`.
    """
    for argument in arguments:
        for word in argument.flags:
            add(word, action=MissingFlag, argument=argument, word=word)


class MissingFlag(argparse.Action):
    """A flag of SGLang without an effect here: accepted at neutral values, else refused.

    Args:
        word: its name in SGLang; a trainer's parser may have put a prefix before it.
    """

    def __init__(
        self, option_strings: list[str], dest: str, argument: SGLangArgument, word: str
    ) -> None:
        nargs = None if argument.takes == 1 else argument.takes
        default = argument.neutral[0]
        super().__init__(option_strings, dest, nargs, default=default, help=argparse.SUPPRESS)
        self._argument, self._word = argument, word

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        if problem := self._argument.problem_of_flag(self._word, values):
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
