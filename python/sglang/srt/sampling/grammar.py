"""What an output must match."""

from __future__ import annotations

import msgspec

JSON_SCHEMA, REGEX, EBNF = "json_schema", "regex", "ebnf"  # sampling parameters, too
GRAMMAR_FIELDS = (JSON_SCHEMA, REGEX, EBNF)


class Grammar(msgspec.Struct, frozen=True):
    """A grammar as the client wrote it.

    Attributes:
        kind: one of GRAMMAR_FIELDS.
    """

    kind: str
    text: str
