"""Flags as fields of a dataclass, and their values from the words of a command line."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import MISSING, Field, asdict, field, fields
from typing import Any, get_args


def flag(
    default: Any,
    help: str,
    *,
    aliases: tuple[str, ...] = (),
    choices: tuple[str, ...] | None = None,
    secret: bool = False,
    section: str | None = None,
) -> Any:
    """Makes a dataclass field that carries what argparse needs to know about it.

    Args:
        section: the section of --help that this field begins; it goes on to the next one's first.
    """
    metadata = {
        "help": help,
        "aliases": aliases,
        "choices": choices,
        "secret": secret,
        "section": section,
    }
    if default is MISSING:
        return field(metadata=metadata)
    return field(default=default, repr=not secret, metadata=metadata)


def value_type(hint: Any) -> Callable[[str], Any]:
    """Returns the function that reads the value of a flag of this type: `int` of `int | None`."""
    types = [member for member in get_args(hint) or (hint,) if member is not type(None)]
    if {int, str} <= {*types}:
        return number_or_word
    return finite_number if types[0] is float else types[0]


def number_or_word(text: str) -> int | str:
    """The integer that a text stands for, or the text."""
    try:
        return int(text)
    except ValueError:
        return text


def finite_number(text: str) -> float:
    """The number that a text stands for.

    Raises:
        argparse.ArgumentTypeError: if it stands for none, or for infinity.
    """
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise argparse.ArgumentTypeError(f"{text!r} is no finite number")
    return number


def flags_of(flags_class: Any) -> dict[str, Field[Any]]:
    """Gives the fields of a dataclass that are `flag`s, by name: its own ones, then inherited ones.

    Args:
        flags_class: the dataclass, or one of it.
    """
    own = (flags_class if isinstance(flags_class, type) else type(flags_class)).__annotations__
    ordered = sorted(fields(flags_class), key=lambda entry: entry.name not in own)
    return {entry.name: entry for entry in ordered if entry.metadata}


def as_flag(name: str, value: Any = True) -> str:
    """Spells a field of flags as on a command line; a value of True stands for none."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return flag
    values = value if isinstance(value, list) else [value]
    return " ".join([flag, *map(str, values)])


def check_finite(flags: Any) -> None:
    """Refuses numbers that are not finite.

    Args:
        flags: of a dataclass of `flag`s.

    Raises:
        ValueError: for a number that is not finite; the text names it.
    """
    for name, value in asdict(flags).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, not {value}.")


def public_fields(flags: Any) -> dict[str, Any]:
    """Gives the values of a dataclass of `flag`s by name, without those that are secret."""
    secret = {name for name, entry in flags_of(flags).items() if entry.metadata["secret"]}
    return {name: value for name, value in asdict(flags).items() if name not in secret}
