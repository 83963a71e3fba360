"""Structural tags as grammars of llguidance: texts of a given form, alone or within free text.

A structural tag is an object: `structures` and `triggers`, or a `format`, as SGLang's users write
them. What each means is in docs/structured_outputs.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang.srt.sampling.grammar import STRUCTURAL_TAG

MAX_DEPTH = 16  # of formats within formats
MAX_NAME_CHARS = 40  # of an unknown field, in a message
ANYTHING = "(?s:.*)"
TYPE_NAMES = {str: "a text", dict: "an object", list: "a list", bool: "true or false"}


class StructuralTagError(ValueError):
    """A structural tag that cannot be used; says where and why."""


@dataclass(frozen=True)
class SpecialTokens:
    """Tokens that no ordinary text is made of: a grammar has to name them.

    Attributes:
        ids: by their texts, which are not empty.
        ends: those that end an output.
    """

    ids: Mapping[str, int] = field(default_factory=dict)
    ends: frozenset[int] = frozenset()

    def split(self, text: str) -> list[str | int]:
        """A text as ordinary texts and special tokens; of several at a place the longest."""
        longest_first = sorted((name for name in self.ids if name in text), key=len, reverse=True)
        if not longest_first:
            return [text] if text else []
        parts = re.split(f"({'|'.join(map(re.escape, longest_first))})", text)
        return [self.ids.get(part, part) for part in parts if part]

    def may_be_spelled(self, lark: str) -> bool:
        """Whether a grammar has the text of one, escaped or not."""
        plain = lark.replace("\\", "")
        escaped = (json.dumps(name)[1:-1].replace("\\", "") for name in self.ids)
        return any(name in plain for name in (*self.ids, *escaped))


class SchemaPlace(NamedTuple):
    """A JSON schema, and where in the structural tag it is."""

    place: str
    schema: dict[str, Any] | bool


class TagGrammar(NamedTuple):
    """A grammar in the library's form of Lark, and the schemas in it."""

    lark: str
    schemas: list[SchemaPlace]


def tag_grammar(value: Any, special: SpecialTokens, white_space: str) -> TagGrammar:
    """The grammar of a structural tag.

    Args:
        white_space: an expression; what may stand between two parts of a JSON text.

    Raises:
        StructuralTagError: naming the entry that is wrong.
    """
    writer = _Writer(special, white_space)
    whole = _Entry(value, "")
    if whole.take("type", str) != STRUCTURAL_TAG:
        raise whole.error("type", f'must be "{STRUCTURAL_TAG}"')
    if "format" in whole.value:
        form = _Entry(whole.take("format", dict), "format")
        whole.refuse_others()
        start = writer.whole_format(form)
    else:
        whole.take("triggers", list)
        tags = [_tag_of_structure(entry) for entry in whole.entries("structures")]
        whole.refuse_others()
        start = writer.triggered(whole, tags, _Number(False, False))
    return TagGrammar("\n".join([f"start: {start}", *writer.rules]), writer.schemas)


def json_rule(schema: dict[str, Any] | bool, white_space: str) -> str:
    """What matches the JSON of a schema that is not false, in a rule. `x-guidance` at the top of a
    schema sets the library's options, which are not the client's to choose."""
    given = {} if isinstance(schema, bool) else schema
    options = {"whitespace_pattern": white_space}
    return f"%json {json.dumps({**given, 'x-guidance': options})}"


class _Entry:
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

    def entries(self, name: str) -> list[_Entry]:
        """A list of objects, which has one at least."""
        found = self.take(name, list)
        if not found:
            raise self.error(name, "must have at least one entry")
        return [_Entry(item, f"{self.of(name)}[{index}]") for index, item in enumerate(found)]

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


class _Tag(NamedTuple):
    """Text that begins and ends so, with a content of a format.

    Attributes:
        entry: where the client wrote it.
    """

    begin: str
    content: _Entry
    end: str
    entry: _Entry


class _Number(NamedTuple):
    """How many tags there are: one at least, one at most."""

    at_least_one: bool
    stop_after_first: bool


def _tag_of(entry: _Entry) -> _Tag:
    if entry.value.get("type", "tag") != "tag":
        raise entry.error("type", 'must be "tag"')
    content = _Entry(entry.take("content", dict), entry.of("content"))
    tag = _Tag(entry.take("begin", str), content, entry.take("end", str), entry)
    entry.refuse_others()
    return tag


def _tag_of_structure(entry: _Entry) -> _Tag:
    schema = entry.take("schema", dict | bool)
    content = {"type": "json_schema", "json_schema": schema}
    place = entry.of("schema").removesuffix(".schema")
    inner = _Entry(content, place, {"json_schema": "schema"})
    tag = _Tag(entry.take("begin", str), inner, entry.take("end", str), entry)
    entry.refuse_others()
    return tag


def _number_of(form: _Entry) -> _Number:
    names = ("at_least_one", "stop_after_first")
    return _Number(*(form.take(name, bool, default=False) for name in names))


class _Writer:
    """Writes a grammar. Its methods give expressions that may stand in a rule.

    Attributes:
        rules: that the expressions need, one a line.
        schemas: as they were met.
    """

    def __init__(self, special: SpecialTokens, white_space: str) -> None:
        self.rules: list[str] = []
        self.schemas: list[SchemaPlace] = []
        self._special = special
        self._white_space = white_space
        self._formats: dict[str, Callable[[_Entry, int], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag_format,
            "tags_with_separator": self._tags_with_separator,
        }

    def whole_format(self, form: _Entry) -> str:
        """What matches a format that nothing stands around."""
        if form.value.get("type") != "triggered_tags":
            return self._format(form, 0)
        form.take("triggers", list)
        tags, number = [_tag_of(entry) for entry in form.entries("tags")], _number_of(form)
        form.refuse_others()
        return self.triggered(form, tags, number)

    def triggered(self, form: _Entry, tags: list[_Tag], number: _Number) -> str:
        """Free text, in which each of the form's triggers begins one of its tags."""
        triggers = self._triggers_of(form)
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            trigger = next((item for item in triggers if tag.begin.startswith(item)), None)
            if trigger is None:
                raise tag.entry.error("begin", "begins with none of the triggers")
            rests[trigger].append(self._tag(tag, 0, tag.begin.removeprefix(trigger)))
        idle = next((trigger for trigger, found in rests.items() if not found), None)
        if idle is not None:
            raise form.error("triggers", "must each begin one of the tags")
        ids = {item: self._special.ids[item] for item in triggers if item in self._special.ids}
        texts = [trigger for trigger in triggers if trigger not in ids]
        plain = self._plain_text(texts)
        chars = "".join(_as_regex(text) for text in texts if _is_byte(text))
        before = f"[^{chars}]*" if chars else ANYTHING
        tagged = []
        for trigger, found in rests.items():
            head = f"{plain}? {self._text(trigger)}"
            if trigger in texts and not _is_byte(trigger):
                # Lazy: it ends where the trigger is there for the first time. The library panics
                # where one byte is such a rule and what stands before it could go on.
                head = self._rule(f"/{before}{_as_regex(trigger)}/", options="[lazy]")
            tagged.append(f"{head} ({' | '.join(found)})")
        others = self._free_tokens({*ids.values()})
        free = f"{plain}? {others}" if others else None
        return _repeated(self._rule(" | ".join(tagged)), free, plain, number)

    def _triggers_of(self, form: _Entry) -> Sequence[str]:
        triggers = form.value["triggers"]
        if not triggers or not all(isinstance(item, str) and item for item in triggers):
            raise form.error("triggers", "must be a list of texts that are not empty")
        for index, trigger in enumerate(triggers):
            if any(trigger in other or other in trigger for other in triggers[:index]):
                raise form.error(f"triggers[{index}]", "is in another one, or holds one")
            parts = self._special.split(trigger)
            if len(parts) > 1:
                raise form.error(
                    f"triggers[{index}]",
                    "is a special token and more; give the token or the text alone",
                )
        return triggers

    def _plain_text(self, triggers: list[str]) -> str:
        """A terminal: ordinary text, not empty, without these triggers."""
        body = "/(?s:.+)/"
        if triggers:
            body += f" & ~/{ANYTHING}({'|'.join(map(_as_regex, triggers))}){ANYTHING}/"
        return self._rule(body, name="PLAIN")

    def _free_tokens(self, triggers: set[int]) -> str | None:
        """The special tokens that free text may have, such as those around reasoning."""
        free = sorted({*self._special.ids.values()} - triggers - self._special.ends)
        return f"<[{','.join(map(str, free))}]>" if free else None

    def _format(self, form: _Entry, depth: int) -> str:
        """What matches a format."""
        kind = form.take("type", str)
        if depth > MAX_DEPTH:
            raise form.error("type", f"is nested more than {MAX_DEPTH} deep")
        if kind == "triggered_tags":
            raise form.error("type", "triggered_tags may only be the whole format")
        if kind not in self._formats:
            known = ", ".join((*self._formats, "triggered_tags"))
            raise form.error("type", f"is none of those that are there: {known}")
        found = self._formats[kind](form, depth)
        form.refuse_others()
        return found

    def _const_string(self, form: _Entry, depth: int) -> str:
        return self._text(form.take("value", str))

    def _json_schema(self, form: _Entry, depth: int) -> str:
        schema = form.take("json_schema", dict | bool)
        if schema is False:
            raise form.error("json_schema", "must be an object, or true; no text is of false")
        self.schemas.append(SchemaPlace(form.of("json_schema"), schema))
        return self._rule(json_rule(schema, self._white_space))

    def _sequence(self, form: _Entry, depth: int) -> str:
        return " ".join(self._format(item, depth + 1) for item in form.entries("elements"))

    def _or(self, form: _Entry, depth: int) -> str:
        parts = [self._format(item, depth + 1) for item in form.entries("elements")]
        return self._rule(" | ".join(parts))

    def _tag_format(self, form: _Entry, depth: int) -> str:
        tag = _tag_of(form)
        return self._tag(tag, depth, tag.begin)

    def _tags_with_separator(self, form: _Entry, depth: int) -> str:
        tags = [_tag_of(entry) for entry in form.entries("tags")]
        tag = self._rule(" | ".join(self._tag(tag, depth, tag.begin) for tag in tags))
        separator, number = self._text(form.take("separator", str)), _number_of(form)
        found = tag if number.stop_after_first else f"{tag} ({separator} {tag})*"
        return self._rule(found if number.at_least_one else f"({found})?")

    def _tag(self, tag: _Tag, depth: int, begin: str) -> str:
        """A tag.

        Args:
            begin: what is not there yet of its beginning.
        """
        content = self._format(tag.content, depth + 1)
        return self._rule(f"{self._text(begin)} {content} {self._text(tag.end)}")

    def _text(self, text: str) -> str:
        parts = self._special.split(text) or [""]
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts
        )

    def _rule(self, body: str, options: str = "", name: str = "rule") -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _repeated(tag: str, free: str | None, plain: str, number: _Number) -> str:
    """Tags in free text; `free` is such text with a special token behind it."""
    before, around = (f"({free})*", f"({tag} | {free})*") if free else ("", f"({tag})*")
    if number.stop_after_first:
        first = f"{before} {tag}"
        return first if number.at_least_one else f"{first} | {before} {plain}?"
    return f"{before} {tag} {around} {plain}?" if number.at_least_one else f"{around} {plain}?"


def _is_byte(text: str) -> bool:
    return len(text.encode()) == 1


def _as_regex(text: str) -> str:
    """An expression for this text alone, to stand between slashes."""
    return "".join(
        char if char.isascii() and char.isalnum() else f"\\x{{{ord(char):x}}}" for char in text
    )
