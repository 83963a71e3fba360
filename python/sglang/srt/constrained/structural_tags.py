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

from sglang.srt.constrained.tag_entries import (
    Entry,
    Number,
    StructuralTagError,
    Tag,
    number_of,
    tag_of,
    tag_of_structure,
)
from sglang.srt.sampling.grammar import STRUCTURAL_TAG
from sglang.srt.sampling.json_schemas import keepable

MAX_DEPTH = 16  # of formats within formats
ANYTHING = "(?s:.*)"


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
        """Tells whether a grammar has the text of one, escaped or not."""
        plain = lark.replace("\\", "")
        escaped = (json.dumps(name)[1:-1].replace("\\", "") for name in self.ids)
        return any(name in plain for name in (*self.ids, *escaped))


class Part(NamedTuple):
    """A client's schema, expression or grammar, and where in the structural tag it is.

    Attributes:
        lark: its grammar, which can be compiled alone.
    """

    place: str
    lark: str


class TagGrammar(NamedTuple):
    """A grammar in the library's form of Lark.

    Attributes:
        parts: of the client's own within it.
        nested: grammars that it names.
    """

    lark: str
    parts: list[Part]
    nested: dict[str, str]


class Languages(NamedTuple):
    """Writes what a client gives in other languages as grammars in the library's form of Lark.

    Attributes:
        schema: of a JSON schema that is not false, as an expression in a rule.
        regex: of a regular expression, likewise.
        ebnf: of a whole grammar; raises ValueError if it is none.
    """

    schema: Callable[[dict[str, Any] | bool], str]
    regex: Callable[[str], str]
    ebnf: Callable[[str], str]


def tag_grammar(value: Any, special: SpecialTokens, languages: Languages) -> TagGrammar:
    """The grammar of a structural tag.

    Raises:
        StructuralTagError: naming the entry that is wrong.
    """
    writer = _Writer(special, languages)
    whole = Entry(value, "")
    if whole.take("type", str) != STRUCTURAL_TAG:
        raise whole.error("type", f'must be "{STRUCTURAL_TAG}"')
    start = writer.structural_tag(whole, _Place(0, is_last=True))
    whole.refuse_others()
    return TagGrammar("\n".join([f"start: {start}", *writer.rules]), writer.parts, writer.nested)


def json_rule(schema: dict[str, Any] | bool, white_space: str) -> str:
    """Writes the JSON of a schema that is not false, in a rule. `x-guidance` at the top of a
    schema sets the library's options, which are not the client's to choose."""
    given = {} if isinstance(schema, bool) else keepable(schema)
    options = {"whitespace_pattern": white_space}
    return f"%json {json.dumps({**given, 'x-guidance': options})}"


class _Place(NamedTuple):
    """The place where a format stands.

    Attributes:
        is_last: nothing follows it.
        end: of the tag that it is the content of.
    """

    depth: int
    is_last: bool
    end: str = ""

    def within(self, is_last: bool = False, end: str = "") -> _Place:
        """A place one deeper."""
        return _Place(self.depth + 1, is_last, end)


class _FreeText(NamedTuple):
    """Free text, as expressions.

    Attributes:
        plain: ordinary text without marks, not empty.
        special: such text or none, and a special token that is no mark; None: there is none.
        heads: by their marks, such text or none, and the mark.
    """

    plain: str
    special: str | None
    heads: dict[str, str]


class _Writer:
    """Writes a grammar. Its methods give expressions that may stand in a rule.

    Attributes:
        rules: that the expressions need, one a line.
        parts: as they were met.
        nested: grammars by the names that expressions have for them.
    """

    def __init__(self, special: SpecialTokens, languages: Languages) -> None:
        self.rules: list[str] = []
        self.parts: list[Part] = []
        self.nested: dict[str, str] = {}
        self._special = special
        self._languages = languages
        self._formats: dict[str, Callable[[Entry, _Place], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "any_text": self._any_text,
            "sequence": self._sequence,
            "or": self._or,
            "tag": self._tag_format,
            "tags_with_separator": self._tags_with_separator,
            "triggered_tags": self._triggered_tags,
            STRUCTURAL_TAG: self.structural_tag,
        }

    def structural_tag(self, whole: Entry, place: _Place) -> str:
        """Writes the grammar of a structural tag."""
        if "format" in whole.value:
            form = Entry(whole.take("format", dict), whole.of("format"))
            return self._format(form, place.within(place.is_last))
        whole.take("triggers", list)
        tags = [tag_of_structure(entry) for entry in whole.entries("structures")]
        return self._triggered(whole, place, tags, Number(False, False))

    def _triggered_tags(self, form: Entry, place: _Place) -> str:
        form.take("triggers", list)
        tags = [tag_of(entry) for entry in form.entries("tags")]
        return self._triggered(form, place, tags, number_of(form))

    def _triggered(self, form: Entry, place: _Place, tags: list[Tag], number: Number) -> str:
        """Free text, in which each of the form's triggers begins one of its tags."""
        if not place.is_last:
            raise form.error("type", "is free text with tags, which only the last part may be")
        triggers = self._triggers_of(form)
        rests: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in tags:
            trigger = next((item for item in triggers if tag.begin.startswith(item)), None)
            if trigger is None:
                raise tag.entry.error("begin", "begins with none of the triggers")
            rests[trigger].append(self._tag(tag, place, tag.begin.removeprefix(trigger)))
        idle = next((trigger for trigger, found in rests.items() if not found), None)
        if idle is not None:
            raise form.error("triggers", "must each begin one of the tags")
        free = self._free_text(triggers)
        tagged = [
            f"{free.heads[trigger]} ({' | '.join(found)})" for trigger, found in rests.items()
        ]
        return _repeated(self._rule(" | ".join(tagged)), free.special, free.plain, number)

    def _free_text(self, marks: Sequence[str]) -> _FreeText:
        """Free text that ends where the first of these marks is."""
        ids = {item: self._special.ids[item] for item in marks if item in self._special.ids}
        texts = [mark for mark in marks if mark not in ids]
        plain = self._plain_text(texts)
        chars = "".join(_as_regex(text) for text in texts if _is_byte(text))
        before = f"[^{chars}]*" if chars else ANYTHING
        heads = {mark: f"{plain}? {self._text(mark)}" for mark in marks}
        for mark in texts:
            if not _is_byte(mark):
                # Lazy: it ends where the mark is there for the first time. The library panics
                # where one byte is such a rule and what stands before it could go on.
                heads[mark] = self._rule(f"/{before}{_as_regex(mark)}/", options="[lazy]")
        others = self._free_tokens({*ids.values()})
        return _FreeText(plain, f"{plain}? {others}" if others else None, heads)

    def _triggers_of(self, form: Entry) -> Sequence[str]:
        triggers = form.value["triggers"]
        if not triggers or not all(isinstance(item, str) and item for item in triggers):
            raise form.error("triggers", "must be a list of texts that are not empty")
        for index, trigger in enumerate(triggers):
            if any(trigger in other or other in trigger for other in triggers[:index]):
                raise form.error(f"triggers[{index}]", "is in another one, or holds one")
            self._refuse_mixed(form, f"triggers[{index}]", trigger)
        return triggers

    def _refuse_mixed(self, form: Entry, name: str, mark: str) -> None:
        if len(self._special.split(mark)) > 1:
            reason = "is a special token and more; give the token or the text alone"
            raise form.error(name, reason)

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

    def _format(self, form: Entry, place: _Place) -> str:
        """Returns the grammar that matches a format."""
        kind = form.take("type", str)
        if place.depth > MAX_DEPTH:
            raise form.error("type", f"is nested more than {MAX_DEPTH} deep")
        if kind not in self._formats:
            known = ", ".join(self._formats)
            raise form.error("type", f"is none of those that are there: {known}")
        found = self._formats[kind](form, place)
        form.refuse_others()
        return found

    def _const_string(self, form: Entry, place: _Place) -> str:
        return self._text(form.take("value", str))

    def _json_schema(self, form: Entry, place: _Place) -> str:
        schema = form.take("json_schema", dict | bool)
        if schema is False:
            raise form.error("json_schema", "must be an object, or true; no text is of false")
        return self._part(form.of("json_schema"), self._languages.schema(schema))

    def _regex(self, form: Entry, place: _Place) -> str:
        return self._part(form.of("pattern"), self._languages.regex(form.take("pattern", str)))

    def _grammar(self, form: Entry, place: _Place) -> str:
        text, name = form.take("grammar", str), f"nested_{len(self.nested)}"
        try:
            self.nested[name] = self._languages.ebnf(text)
        except ValueError as error:
            raise StructuralTagError(f"{form.of('grammar')}: {error}") from None
        self.parts.append(Part(form.of("grammar"), self.nested[name]))
        return f"@{name}"

    def _any_text(self, form: Entry, place: _Place) -> str:
        """Free text and the end of the tag that it is the content of."""
        if not place.end:
            raise form.error("type", "any_text may only be the content of a tag that has an end")
        free = self._free_text([place.end])
        before = f"({free.special})* " if free.special else ""
        return self._rule(f"{before}{free.heads[place.end]}")

    def _part(self, place: str, body: str) -> str:
        self.parts.append(Part(place, f"start: {body}"))
        return self._rule(body)

    def _sequence(self, form: Entry, place: _Place) -> str:
        *others, last = form.entries("elements")
        parts = [self._format(item, place.within()) for item in others]
        return " ".join([*parts, self._format(last, place.within(place.is_last))])

    def _or(self, form: Entry, place: _Place) -> str:
        items = form.entries("elements")
        parts = [self._format(item, place.within(place.is_last)) for item in items]
        return self._rule(" | ".join(parts))

    def _tag_format(self, form: Entry, place: _Place) -> str:
        tag = tag_of(form)
        return self._tag(tag, place, tag.begin)

    def _tags_with_separator(self, form: Entry, place: _Place) -> str:
        tags = [tag_of(entry) for entry in form.entries("tags")]
        tag = self._rule(" | ".join(self._tag(tag, place, tag.begin) for tag in tags))
        separator, number = self._text(form.take("separator", str)), number_of(form)
        found = tag if number.stop_after_first else f"{tag} ({separator} {tag})*"
        return self._rule(found if number.at_least_one else f"({found})?")

    def _tag(self, tag: Tag, place: _Place, begin: str) -> str:
        """A tag.

        Args:
            begin: what is not there yet of its beginning.
        """
        is_free = tag.content.value.get("type") == "any_text"  # which has the end in it
        if is_free:
            self._refuse_mixed(tag.entry, "end", tag.end)
        content = self._format(tag.content, place.within(end=tag.end))
        end = "" if is_free else f" {self._text(tag.end)}"
        return self._rule(f"{self._text(begin)} {content}{end}")

    def _text(self, text: str) -> str:
        parts = self._special.split(text) or [""]
        return " ".join(
            f"<[{part}]>" if isinstance(part, int) else json.dumps(part) for part in parts
        )

    def _rule(self, body: str, options: str = "", name: str = "rule") -> str:
        name = f"{name}_{len(self.rules)}"
        self.rules.append(f"{name}{options}: {body}")
        return name


def _repeated(tag: str, free: str | None, plain: str, number: Number) -> str:
    """Tags in free text; `free` is such text with a special token after it."""
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
