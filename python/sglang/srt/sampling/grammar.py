"""The grammar that an output must match."""

from __future__ import annotations

import msgspec

# Names of sampling parameters, too.
JSON_SCHEMA, REGEX, EBNF, STRUCTURAL_TAG = "json_schema", "regex", "ebnf", "structural_tag"
GRAMMAR_FIELDS = (JSON_SCHEMA, REGEX, EBNF, STRUCTURAL_TAG)
# Between two parts of a JSON text. Without a bound a weak model may write spaces to the end.
JSON_WHITESPACE = r"[ \t\n\r]{0,32}"


class Grammar(msgspec.Struct, frozen=True):
    """A grammar as the client wrote it.

    Attributes:
        kind: one of GRAMMAR_FIELDS.
    """

    kind: str
    text: str
