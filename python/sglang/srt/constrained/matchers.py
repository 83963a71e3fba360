"""Grammars over llguidance: from a text to what may come next. In a process of its own, since a
hostile grammar may take very long to compile, or all of the stack."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from, regex_to_lark

from sglang.srt.constrained.structural_tags import (
    Languages,
    SpecialTokens,
    TagGrammar,
    json_rule,
    tag_grammar,
)
from sglang.srt.constrained.tag_entries import StructuralTagError
from sglang.srt.sampling.grammar import (
    EBNF,
    JSON_SCHEMA,
    JSON_WHITESPACE,
    STRUCTURAL_TAG,
    Grammar,
)

BYTES_OF_ENTRY = 4  # of a bitmask
NUM_CHECKED_TOKENS = 4
MAX_ERROR_CHARS = 300
ASCII_CLASSES = "dws"  # of a regex: \\d, \\w and \\s are ASCII alone
ERROR_LINE = "error: "
NO_TEXT = "NoExtension"  # as the library calls it
PANIC, BACKTRACE = "panic: ", "<backtrace>"
# Where in a grammar an error is, and the lines around it.
PLACE_IN_LARK = re.compile(r"\A(at )?\d+\(\d+\): |\n +\d+ \| .*", re.DOTALL)
# Text that must come is given as the tokenizer divides it, which is shorter, but in special tokens
# too, which are no text, and in tokens that the model may lack. This leaves the model to divide it.
NO_FORCING = '%llguidance {"no_forcing": true}'
LIMITS = LLParserLimits(verbose_errors=False)


class GrammarError(ValueError):
    """A grammar that cannot be used, or an output that does not follow it; says why."""


class LibraryPanic(GrammarError):
    """The library has failed. What it shares with other requests of the grammar may be broken."""


class Matcher:
    """A request's place in its grammar.

    Args:
        matcher: at the beginning of the output.
        nothing_more: [ceil(V / 32)] int32 as bytes: the end-of-text ids.
        everything: likewise, all ids.
        never_allowed: likewise, what nothing may emit.
    """

    def __init__(
        self, matcher: LLMatcher, nothing_more: bytes, everything: bytes, never_allowed: list[int]
    ) -> None:
        self._matcher = matcher
        self._nothing_more = nothing_more
        self._everything = everything
        self._never_allowed = never_allowed
        self._refuse_error()

    def copy(self) -> Matcher:
        return Matcher(
            self._matcher.deep_copy(), self._nothing_more, self._everything, self._never_allowed
        )

    def consume(self, tokens: Sequence[int]) -> None:
        """Takes in tokens of the output. What follows its end means nothing, and is left out.

        Raises:
            GrammarError: if the grammar does not allow one of them.
        """
        for token in tokens:
            if self._matcher.is_stopped():
                return
            if not self._matcher.consume_token(token):
                self._refuse_error()
                raise GrammarError(f"the output has token {token}, which the grammar forbids")

    def masks(self, drafts: Sequence[int] = (), parents: Sequence[int] = ()) -> bytes:
        """Returns masks of the tokens that may follow the output, and each draft: 1 + len(drafts)
        rows of ceil(V / 32) int32. After a draft that is not allowed itself, anything may be set.

        Args:
            parents: of each draft the one that it follows, 0 for the output, j + 1 for draft j.

        Raises:
            GrammarError: if that takes too much, or nothing at all may come.
        """
        rows = [self._everything] * (1 + len(drafts))
        children: list[list[int]] = [[] for _ in rows]
        for index, parent in enumerate(parents):
            children[parent].append(index + 1)
        self._visit(0, drafts, children, rows)
        return b"".join(rows)

    def _visit(
        self, node: int, drafts: Sequence[int], children: list[list[int]], rows: list[bytes]
    ) -> None:
        rows[node] = self._mask()
        for child in children[node]:
            token = drafts[child - 1]
            is_allowed = 0 <= token < 8 * len(rows[node]) and is_set(rows[node], token)
            if is_allowed and not self._matcher.is_stopped():
                if not self._matcher.consume_token(token):
                    self._refuse_error()
                self._visit(child, drafts, children, rows)
                if not self._matcher.rollback(1):
                    self._refuse_error()

    def _mask(self) -> bytes:
        if self._matcher.is_stopped():
            self._refuse_error()
            return self._nothing_more
        mask = self._matcher.compute_bitmask()[: len(self._everything)]
        self._refuse_error()
        if any(is_set(mask, token) for token in self._never_allowed):
            mask = without(mask, self._never_allowed)
        if not mask.strip(b"\0"):
            raise GrammarError("no token of the model continues an output of this grammar")
        return mask

    def _refuse_error(self) -> None:
        """Raises GrammarError if there is an error: the matcher never leaves that state."""
        if self._matcher.is_error():
            raise _error(self._matcher.get_error())


class GrammarCompiler:
    """Compiles grammars for one tokenizer.

    Args:
        tokenizer_json: text of the tokenizer's file.
        vocab_size: V, the width of the logits. The tokenizer may have more tokens: those are never
            allowed.

    Raises:
        GrammarError: if the tokenizer cannot be used.
    """

    def __init__(
        self,
        tokenizer_json: str,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        never_allowed: Sequence[int] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._tokenizer = _read_tokenizer(tokenizer_json, vocab_size, eos_token_ids)
        num_bytes = -(-vocab_size // 32) * BYTES_OF_ENTRY
        self._everything = b"\xff" * num_bytes
        self._ends = ends = frozenset(eos_token_ids) or frozenset((self._tokenizer.eos_token,))
        self._nothing_more = bytes(
            sum(1 << bit for bit in range(8) if 8 * place + bit in ends)
            for place in range(num_bytes)
        )
        # A mask goes by whole entries, so that some tokens beyond V have bits in the last one.
        beyond = range(vocab_size, min(8 * num_bytes, self._tokenizer.vocab_size))
        self._never_allowed = [*(token for token in never_allowed if token < vocab_size), *beyond]
        self._special: SpecialTokens | None = None

    def compile(self, grammar: Grammar) -> Matcher:
        """The matcher of an empty output.

        Raises:
            GrammarError: if the text is none, or asks for what is not there.
        """
        if grammar.kind != STRUCTURAL_TAG:
            return self._matcher(_to_lark(grammar), shows_place=grammar.kind == EBNF)
        found = _tag_grammar(grammar.text, self._special_tokens())
        try:
            return self._matcher(found.lark, found.nested)
        except GrammarError:
            self._check_parts(found)
            raise

    def _matcher(
        self, lark: str, nested: Mapping[str, str] | None = None, shows_place: bool = False
    ) -> Matcher:
        """The matcher of a grammar; an error shows the place in it only if the client knows it.

        Args:
            nested: grammars that this one names.
        """
        others = nested or {}
        is_larger = self._tokenizer.vocab_size > self._vocab_size
        may_be_spelled = self._special_tokens().may_be_spelled
        if is_larger or any(map(may_be_spelled, (lark, *others.values()))):
            lark = f"{lark}\n{NO_FORCING}\n"
        named = [{"name": name, "lark_grammar": text} for name, text in others.items()]
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}, *named]})
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=LIMITS)
        if matcher.is_error() and not shows_place:
            raise _error(PLACE_IN_LARK.sub("", matcher.get_error()))
        return Matcher(matcher, self._nothing_more, self._everything, self._never_allowed)

    def _check_parts(self, found: TagGrammar) -> None:
        """Raises GrammarError with the place of the client's first part that is wrong alone."""
        first_places: dict[str, str] = {}
        for place, lark in found.parts:
            first_places.setdefault(lark, place)
        for lark, place in first_places.items():
            try:
                self._walk(self._matcher(lark))
            except GrammarError as error:
                raise GrammarError(one_line(f"{place}: {error}")) from None

    def _special_tokens(self) -> SpecialTokens:
        """Those of the tokenizer that the model has; looked for once."""
        if self._special is None:
            tokenizer = self._tokenizer
            num_ids = min(tokenizer.vocab_size, self._vocab_size)
            ids = (i for i in range(num_ids) if tokenizer.is_special_token(i))
            named = {tokenizer.decode_str([i]): i for i in ids}
            named.pop("", None)
            self._special = SpecialTokens(named, self._ends)
        return self._special

    def check(self, grammar: Grammar) -> None:
        """Compiles a grammar and walks a few tokens along: some are too large only then. The parts
        of a structural tag are walked, too: where free text is before them, the whole does not come
        to them.

        Raises:
            GrammarError: if it cannot be used.
        """
        self._walk(self.compile(grammar))
        if grammar.kind == STRUCTURAL_TAG:
            self._check_parts(_tag_grammar(grammar.text, self._special_tokens()))

    def _walk(self, matcher: Matcher) -> None:
        """Raises GrammarError if a mask on the way is not to be had."""
        for _ in range(1 + NUM_CHECKED_TOKENS):
            mask = matcher.masks()
            if mask == self._nothing_more:
                break
            matcher.consume([_first(mask, but=self._nothing_more)])


def _read_tokenizer(
    tokenizer_json: str, vocab_size: int, eos_token_ids: Sequence[int]
) -> LLTokenizer:
    """The library's tokenizer: of `vocab_size` tokens, or of all in the file if those are more.

    Raises:
        GrammarError: if it cannot be used.
    """
    ends = list(eos_token_ids) or None
    try:
        with suppress(ValueError):  # of a file with more tokens, too
            return LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
        return LLTokenizer(tokenizer_json, eos_token=ends)
    except (ValueError, RuntimeError) as error:
        raise GrammarError(f"the tokenizer cannot be used: {one_line(str(error))}") from None


def _read_json(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise GrammarError("is not JSON, or is nested too deeply") from None


def _tag_grammar(text: str, special: SpecialTokens) -> TagGrammar:
    try:
        return tag_grammar(_read_json(text), special, LANGUAGES)
    except (StructuralTagError, RecursionError) as error:
        raise GrammarError(one_line(str(error))) from None


def _to_lark(grammar: Grammar) -> str:
    """The grammar in the library's form of Lark."""
    if grammar.kind == JSON_SCHEMA:
        schema = _read_json(grammar.text)
        if schema is False or not isinstance(schema, dict | bool):
            raise GrammarError("must be an object, or true; no text is of the schema false")
        return f"start: {_schema_to_lark(schema)}"
    if grammar.kind == EBNF:
        return _ebnf_to_lark(grammar.text)
    return f"start: {_regex_to_lark(grammar.text)}"


def _schema_to_lark(schema: dict[str, Any] | bool) -> str:
    return json_rule(schema, JSON_WHITESPACE)


def _regex_to_lark(text: str) -> str:
    return f"/{regex_to_lark(text, ASCII_CLASSES)}/"


def _ebnf_to_lark(text: str) -> str:
    try:
        return grammar_from("ebnf", text)
    except (ValueError, IndexError, RecursionError) as error:
        raise GrammarError(one_line(str(error))) from None


LANGUAGES = Languages(_schema_to_lark, _regex_to_lark, _ebnf_to_lark)


def is_set(mask: bytes, token: int) -> bool:
    """Tells whether a mask allows a token."""
    return bool(mask[token >> 3] >> (token & 7) & 1)


def without(mask: bytes, tokens: Sequence[int]) -> bytes:
    """A mask that allows none of these."""
    changed = bytearray(mask)
    for token in tokens:
        changed[token >> 3] &= ~(1 << (token & 7))
    return bytes(changed)


def _first(mask: bytes, but: bytes) -> int:
    """The first token allowed that ends nothing; there is one."""
    rest = bytes(a & ~b for a, b in zip(mask, but, strict=True))
    place = len(rest) - len(rest.lstrip(b"\0"))
    return 8 * place + (rest[place] & -rest[place]).bit_length() - 1


def _error(message: str) -> GrammarError:
    """Returns the message of a matcher's error."""
    if message.startswith(PANIC):
        message = message.removeprefix(PANIC).split(BACKTRACE)[0]
        return LibraryPanic(one_line(f"the library failed: {message}"))
    return GrammarError("no text matches" if message.startswith(NO_TEXT) else one_line(message))


def one_line(text: str) -> str:
    """A library's message on one line, as much as a client needs of it: of a long one that shows
    the place, only what is wrong there."""
    text = next((line for line in text.splitlines() if line.startswith(ERROR_LINE)), text)
    plain = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    plain = plain.removesuffix("<non-verbose/>").strip()
    half = MAX_ERROR_CHARS // 2
    return plain if len(plain) <= MAX_ERROR_CHARS else f"{plain[:half]}...{plain[-half:]}"
