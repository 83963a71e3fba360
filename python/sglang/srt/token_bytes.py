"""Bytes of single tokens: what each adds to a text.

The bytes of a text's tokens, put together, are the text in UTF-8, although a token may be a part of
a character. So a growing output is decoded token by token, and each token's bytes are known to
clients.
"""

from __future__ import annotations

import codecs
import functools
import re
from collections.abc import Callable

REPLACEMENT = "\ufffd"
BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")  # in vocabularies of SentencePiece
NUM_TRIED_IDS = 10_000
REPLACE_EACH_BYTE = "sglang.replace_each_byte"


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(REPLACE_EACH_BYTE, _replace_each_byte)


def _bytes_of_chars() -> dict[str, int]:
    """The byte that each character stands for in a byte-level vocabulary: printable characters of
    Latin-1 stand for themselves, those from 256 on for the other bytes in their order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTES_OF_CHARS = _bytes_of_chars()


class TokenBytes:
    """Bytes of the tokens of one vocabulary.

    Args:
        decode_ids: text of token ids. It may treat the first id specially, and no other: decoders
            of SentencePiece's layouts strip a space there.
        token_of: a token as the vocabulary writes it; None for an id that it does not know.

    Attributes:
        of: bytes of a token after others, cached.
    """

    def __init__(
        self, decode_ids: Callable[[list[int]], str], token_of: Callable[[int], str | None]
    ) -> None:
        self._decode_ids = decode_ids
        self._token_of = token_of
        self.of: Callable[[int], bytes] = functools.cache(self._behind_others)

    def of_first(self, token_id: int) -> bytes:
        """Bytes of a token at the start of a text."""
        return self._to_bytes(token_id, self._decode_ids([token_id]))

    def _behind_others(self, token_id: int) -> bytes:
        ids, text = self._other
        return self._to_bytes(token_id, self._decode_ids([*ids, token_id])[len(text) :])

    @functools.cached_property
    def _other(self) -> tuple[list[int], str]:
        """The first id that is a word of its own, with its text; nothing if there is none."""
        for token_id in range(NUM_TRIED_IDS):
            text = self._decode_ids([token_id])
            if text.isalnum() and not BYTE_TOKEN.fullmatch(self._token_of(token_id) or ""):
                return [token_id], text
        return [], ""

    def _to_bytes(self, token_id: int, text: str) -> bytes:
        if REPLACEMENT not in text:
            return text.encode()
        token = self._token_of(token_id) or ""
        if byte := BYTE_TOKEN.fullmatch(token):
            return bytes.fromhex(byte[1])
        if token and all(char in BYTES_OF_CHARS for char in token):
            return bytes(BYTES_OF_CHARS[char] for char in token)
        return text.encode()
