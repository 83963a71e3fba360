"""Says how arguments of SGLang's ServerArgs that this runtime does not have are taken: what
`sglang_flags.py` says of each, on a command line and in Python alike."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import Field, dataclass
from functools import cache
from typing import Any

from sglang.srt.flag_values import flags_of
from sglang.srt.sglang_flags import FORMER, MORE_NAMES, TABLE, Entry
from sglang.srt.sglang_surface import facts, is_neutral

logger = logging.getLogger(__name__)

WORKS, NO_EFFECT, REFUSED = TABLE  # the classes
LEAVE_OUT = Entry("leave it out", "")
Spelling = Callable[[str, Any], str]


@dataclass(frozen=True, slots=True)
class SGLangArgument:
    """An argument of SGLang's ServerArgs.

    Attributes:
        flags: its names on a command line; none for an argument of Python alone.
        takes: values of a flag: 0, 1, `?` or `*`.
    """

    name: str
    flags: tuple[str, ...]
    takes: int | str
    default: Any

    def value_of(self, word: str) -> Any:
        """Reads a word of a command line: as a number if the default is one."""
        if isinstance(self.default, int | float):
            for read in (int, float):
                try:
                    return read(word)
                except ValueError:
                    continue
        return word


@cache
def all_arguments() -> dict[str, SGLangArgument]:
    """SGLang's arguments by name, with those of former versions."""
    found = {**FORMER, **facts()["flags"]}
    return {
        name: SGLangArgument(name, (*flags, *MORE_NAMES.get(name, ())), takes, default)
        for name, (flags, takes, default) in found.items()
    }


def missing_arguments(own: Collection[str]) -> dict[str, SGLangArgument]:
    """SGLang's arguments beside these, by name."""
    return {name: found for name, found in all_arguments().items() if name not in own}


def dest_of(flag: str) -> str:
    """Gives the name that what is parsed of a flag has: `--no-x` is that of `--x`."""
    return flag.removeprefix("--").removeprefix("no-").replace("-", "_")


@cache
def names_by_spelling() -> dict[str, str]:
    """SGLang's arguments by their own name and by those of their flags."""
    spellings = {
        dest_of(flag): name for name, found in all_arguments().items() for flag in found.flags
    }
    return {**spellings, **{name: name for name in all_arguments()}}


@cache
def _entries_by_name() -> dict[str, list[tuple[str, Entry]]]:
    found: dict[str, list[tuple[str, Entry]]] = {}
    for kind, entries in TABLE.items():
        for entry in entries:
            for name in entry.names.split():
                found.setdefault(name, []).append((kind, entry))
    return found


def class_of(name: str, value: Any, is_own: bool) -> tuple[str, Entry]:
    """Finds the class of an argument at a value, and the sentence on it.

    Args:
        is_own: this runtime has the argument, so only entries for some of its values are looked at.
    """
    for kind, entry in _entries_by_name().get(name, ()):
        if entry.has(value) if entry.values else not is_own:
            return kind, entry
    return (WORKS, Entry("", name)) if is_own else (REFUSED, LEAVE_OUT)


def refusal(name: str, value: Any, is_own: bool, said: str) -> str | None:
    """Says why an argument is refused, and the remedy; None for one that is not.

    Args:
        is_own: see `class_of`.
        said: the argument as the user wrote it.
    """
    kind, entry = class_of(name, value, is_own)
    if kind != REFUSED:
        return None
    return f"{said}: SGLang has this and this runtime does not; {entry.says}."


def written_table(own: Collection[str]) -> dict[str, list[tuple[str, list[str]]]]:
    """Gives each sentence of the table with the flags that it is on, by class, as people write
    them; the last one is on what the table does not name.

    Args:
        own: the arguments that this runtime has.
    """
    missing, named = missing_arguments(own), set[str]()
    found: dict[str, list[tuple[str, list[str]]]] = {}
    for kind, entries in TABLE.items():
        found[kind] = []
        for entry in entries:
            names = [name for name in entry.names.split() if name in missing or entry.values]
            named.update(names)
            flags = [_written(name, entry.values) for name in names]
            found[kind] += [(entry.says, flags)] if flags else []
    rest = [_written(name, ()) for name in missing if name not in named]
    found[REFUSED].append((LEAVE_OUT.says, rest))
    return found


def _written(name: str, values: tuple[Any, ...]) -> str:
    argument = all_arguments()[name]
    flag = argument.flags[0] if argument.flags else name
    return f"{flag} {' | '.join(map(str, values))}" if values else flag


def as_argument(name: str, value: Any) -> str:
    """Spells an argument as in a call."""
    return f"{name}={value!r}"


def own_arguments(given: Mapping[str, Any], flags_class: type, spell: Spelling) -> dict[str, Any]:
    """Makes arguments of SGLang those of `flags_class`, a dataclass of `flag`s.

    What SGLang has beside them is left out, and so is None, which is a default. A warning says
    which have no effect here.

    Args:
        spell: writes an argument for people.

    Raises:
        ValueError: for an argument that is refused, or outside the choices of its flag; the text
            names it and the remedy.
    """
    own = flags_of(flags_class)
    missing = missing_arguments(own)
    kept: dict[str, Any] = {}
    idle: dict[Entry, list[str]] = {}
    for spelling, value in given.items():
        name = names_by_spelling().get(spelling, spelling)
        if value is None or (name in missing and is_neutral(value, (missing[name].default,))):
            continue
        said = spell(spelling, value)
        if problem := refusal(name, value, name not in missing, said):
            raise ValueError(problem)
        kind, entry = class_of(name, value, name not in missing)
        if kind == NO_EFFECT:
            idle.setdefault(entry, []).append(said)
        if kind == NO_EFFECT or entry.values:
            value = entry.becomes
        if name not in missing and value is not None:
            _check_choice(own.get(name), value, said)
            kept[name] = value
    for entry, names in idle.items():
        verb = "has" if len(names) == 1 else "have"
        logger.warning("%s %s no effect here: %s.", ", ".join(names), verb, entry.says)
    return kept


def _check_choice(entry: Field[Any] | None, value: Any, said: str) -> None:
    """Refuses a value outside the choices of its flag. An unknown name has none."""
    choices = None if entry is None else entry.metadata["choices"]
    if choices and value not in choices:
        raise ValueError(f"{said} must be one of {', '.join(choices)}.")


class TakesSGLangArguments(type):
    """The type of a dataclass of `flag`s that takes SGLang's arguments as `own_arguments` says."""

    def __call__(cls, **given: Any) -> Any:
        return super().__call__(**own_arguments(given, cls, as_argument))
