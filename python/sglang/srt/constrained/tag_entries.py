"""Reads structural tags: objects of a client, field by field, and errors that name the field."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

MAX_NAME_CHARS = 40  # of an unknown field, in a message
TYPE_NAMES = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}


class StructuralTagError(ValueError):
    """A structural tag that cannot be used; says where and why."""


class Entry:
    """An object within a structural tag, read field by field.

    Args:
        place: as the client knows it.
        renamed: fields to what the client calls them.
    """

    def __init__(self, value: Any, place: str, renamed: Mapping[str, str] | None = None) -> None:
        if not isinstance(value, dict):
            raise StructuralTagError(f"{place or 'it'} must be an object")
        self.value: dict[str, Any] = value
        self._place = place
        self._renamed = renamed or {}
        self._known = {"type"}

    def take(self, name: str, kind: Any, default: Any = None) -> Any:
        """A field of a type; it must be there if there is no default."""
        self._known.add(name)
        found = self.value.get(name, default)
        if not isinstance(found, kind):
            raise self.error(name, f"must be {TYPE_NAMES.get(kind, 'a JSON schema')}")
        return found

    def entries(self, name: str) -> list[Entry]:
        """A list of objects, which has one at least."""
        found = self.take(name, list)
        if not found:
            raise self.error(name, "must have at least one entry")
        return [Entry(item, f"{self.of(name)}[{index}]") for index, item in enumerate(found)]

    def refuse_others(self) -> None:
        """Refuses fields that were not taken."""
        for name in self.value:
            if name not in self._known:
                raise self.error(name[:MAX_NAME_CHARS], "is not there; leave it out")

    def of(self, name: str) -> str:
        """The client's name of a field."""
        theirs = self._renamed.get(name, name)
        return f"{self._place}.{theirs}" if self._place else theirs

    def error(self, name: str, reason: str) -> StructuralTagError:
        return StructuralTagError(f"{self.of(name)} {reason}")


class Tag(NamedTuple):
    """Text that begins and ends so, with a content of a format.

    Attributes:
        entry: where the client wrote it.
    """

    begin: str
    content: Entry
    end: str
    entry: Entry


class Number(NamedTuple):
    """Reads how many tags there are: one at least, one at most."""

    at_least_one: bool
    stop_after_first: bool


def tag_of(entry: Entry) -> Tag:
    if entry.value.get("type", "tag") != "tag":
        raise entry.error("type", 'must be "tag"')
    content = Entry(entry.take("content", dict), entry.of("content"))
    tag = Tag(entry.take("begin", str), content, entry.take("end", str), entry)
    entry.refuse_others()
    return tag


def tag_of_structure(entry: Entry) -> Tag:
    schema = entry.take("schema", dict | bool)
    content = {"type": "json_schema", "json_schema": schema}
    place = entry.of("schema").removesuffix(".schema")
    inner = Entry(content, place, {"json_schema": "schema"})
    tag = Tag(entry.take("begin", str), inner, entry.take("end", str), entry)
    entry.refuse_others()
    return tag


def number_of(form: Entry) -> Number:
    names = ("at_least_one", "stop_after_first")
    return Number(*(form.take(name, bool, default=False) for name in names))
