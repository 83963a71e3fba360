"""Text to token ids and back: one tokenizer, and incremental decoding of a growing output.

Used by the front end (encode), by the detokenizer (streams of text) and by the scheduler (stop
strings). It needs neither torch nor transformers for a model that has a `tokenizer.json`.
"""

from __future__ import annotations

import codecs
import os
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from sglang.srt.plain_files import UnreadableFileError, check_folder, read_bytes
from sglang.srt.stops import StopSet
from sglang.srt.token_bytes import REPLACE_EACH_BYTE, TokenBytes

OTHER_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
# Last ids of a prompt that the text after it depends on. The bytes of one character are at most 4
# tokens; among them may be ids that are not shown.
NUM_CONTEXT_IDS = 32
MAX_TOKENIZER_BYTES = 1 << 30  # of tokenizer.json; those of 256k tokens have 40 MB
MAX_REASON_CHARS = 400
REMEDY = "Is the download complete? --tokenizer-path names another folder with a tokenizer.json."
PANIC = "PanicException"  # of a library in Rust; no Exception, and nowhere to be imported from
DECODE_ALONE_IDS = 10_000  # fewer take a few milliseconds, for which other threads can wait


class TokenizerError(ValueError):
    """A tokenizer that is missing or cannot be read; the message names the remedy."""


class Tokenizer:
    """Encodes and decodes with the tokenizer of one model. Safe to use from several threads.

    Attributes:
        vocabulary: gives the id of each token, added ones too.
        token_bytes: what each token adds to a text, in UTF-8.
        errors: how bytes that are no UTF-8 are replaced: a name that `bytes.decode` takes.
    """

    def __init__(
        self,
        encode_ids: Callable[[str, bool], list[int]],
        decode_ids: Callable[[list[int]], str],
        special_ids: frozenset[int],
        max_chars_per_token: int | None = None,
        vocabulary: Callable[[], dict[str, int]] = dict,
        token_of: Callable[[int], str | None] = lambda token_id: None,
        errors: str = "replace",
    ) -> None:
        self.vocabulary = vocabulary
        self.errors = errors
        self._encode_ids = encode_ids
        self._decode_ids = decode_ids
        self._special_ids = special_ids
        self._max_chars_per_token = max_chars_per_token
        self.token_bytes = TokenBytes(decode_ids, token_of)
        self.bos_token_id = self._find_bos()

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. A BOS that the text already begins with is not added again."""
        ids = self._encode_ids(text, add_special_tokens)
        if add_special_tokens and self.bos_token_id is not None:
            twice = len(ids) >= 2 and ids[0] == ids[1] == self.bos_token_id
            return ids[1:] if twice else ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; ids that the tokenizer does not know have none."""
        return self._decode_ids(self.shown_ids(ids, skip_special_tokens))

    def decode_stream(
        self, skip_special_tokens: bool = True, context_ids: Sequence[int] = ()
    ) -> DecodeStream:
        """A decoder for ids that arrive bit by bit.

        Args:
            context_ids: ids before them, whose text is not wanted: the prompt of an output, or its
                last NUM_CONTEXT_IDS.
        """
        return DecodeStream(self, skip_special_tokens, context_ids)

    def token_text(self, token_id: int) -> str:
        """Gives what a token adds to a text; replacement characters for parts of a character."""
        return self.token_bytes.of(token_id).decode(errors=self.errors)

    def shown_ids(self, ids: Sequence[int], skip_special_tokens: bool) -> list[int]:
        """The ids that have a text in the output."""
        if not skip_special_tokens:
            return list(ids)
        return [token_id for token_id in ids if token_id not in self._special_ids]

    def min_num_tokens(self, text: str) -> int:
        """A lower bound, without encoding, of how many tokens a text has."""
        return len(text) // self._max_chars_per_token if self._max_chars_per_token else 0

    def _find_bos(self) -> int | None:
        """The id that encoding puts before every text, if there is one."""
        with_special, plain = self._encode_ids("a", True), self._encode_ids("a", False)
        starts_alike = not with_special or with_special[:1] == plain[:1]
        return None if starts_alike else with_special[0]


class DecodeStream:
    """Text of a growing list of ids.

    The pieces that `push` and `flush` return, appended, are what the ids add to the text of the
    context, however they are divided. No piece holds half a character: its bytes wait for the next
    ids. A character that the context has begun comes whole if the ids end it, and not at all
    otherwise.
    """

    def __init__(
        self, tokenizer: Tokenizer, skip_special_tokens: bool, context_ids: Sequence[int] = ()
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokenizer.errors)
        # A token has been shown. Of a long context the ids before the last ones are not looked at.
        self._has_begun = len(context_ids) >= NUM_CONTEXT_IDS
        self._begun_before = ""  # the character that the context has begun, if it is never ended
        self.push(context_ids[-NUM_CONTEXT_IDS:])
        self._begun_before = self._utf8.getstate()[0].decode(errors=tokenizer.errors)

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids and returns the text that is certain now and was not before."""
        shown = self._tokenizer.shown_ids(ids, self._skip_special_tokens)
        pieces = [*map(self._tokenizer.token_bytes.of, shown)]
        if not self._has_begun:
            self._begin(shown, pieces)
        return self._news(self._utf8.decode(b"".join(pieces)))

    def flush(self) -> str:
        """The text held back: an unfinished character, as replacement characters."""
        return self._news(self._utf8.decode(b"", final=True))

    def _begin(self, ids: list[int], pieces: list[bytes]) -> None:
        for index, piece in enumerate(pieces):
            if piece:
                self._has_begun = True
                pieces[index] = self._tokenizer.token_bytes.of_first(ids[index])
                break

    def _news(self, text: str) -> str:
        if text and self._begun_before:
            text = text.removeprefix(self._begun_before)
            self._begun_before = ""
        return text


class StopMatch(NamedTuple):
    """A stop string found in an output.

    Attributes:
        num_tokens: how many of the ids given to `StopFinder.push` the output keeps: up to
            and with the one that completes the match.
        matched: the stop string or expression.
    """

    num_tokens: int
    matched: str


class StopFinder:
    """Finds the stops of a request in its growing output: what the scheduler asks per step.

    `push` every accepted run; a match says how far to clip it. The detokenizer cuts the same match
    from the text. The token that completes a match comes after `min_new_tokens` others.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stops: StopSet,
        skip_special_tokens: bool,
        context_ids: Sequence[int] = (),
        min_new_tokens: int = 0,
    ) -> None:
        self._stream = tokenizer.decode_stream(skip_special_tokens, context_ids)
        self._stops = stops
        self._text = ""
        self._num_exempt_left = min_new_tokens

    def push(self, ids: Sequence[int]) -> StopMatch | None:
        """Adds the ids of one step (1 or more); None as long as no stop is in the text.

        Raises:
            TimeoutError: if a stop expression takes too long.
        """
        for index, token_id in enumerate(ids):
            num_seen = len(self._text)
            self._text += self._stream.push([token_id])
            if self._num_exempt_left > 0:
                self._num_exempt_left -= 1
                self._stops.num_exempt = len(self._text)
                continue
            if len(self._text) == num_seen:
                continue
            found = self._stops.find(self._text, num_seen)
            if found is not None:
                return StopMatch(index + 1, found.matched)
        return None


def no_tokenizer() -> Tokenizer:
    """Makes one of no tokens, for a server without: every token id has an empty text."""
    return Tokenizer(lambda text, add_special_tokens: [], lambda ids: "", frozenset())


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Tells whether a model directory has files of a tokenizer."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", *OTHER_TOKENIZER_FILES))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model directory.

    Raises:
        TokenizerError: if there is none or it cannot be read.
    """
    directory = Path(path)
    if os.path.lexists(directory / "tokenizer.json"):
        return _load_tokenizer_json(directory / "tokenizer.json")
    if has_tokenizer(directory):
        return _load_with_transformers(directory)
    raise TokenizerError(
        f"{directory} holds no tokenizer.json. Give a directory that has one with --tokenizer-path."
    )


def read_tokenizer_json(path: str | os.PathLike[str]) -> str:
    """The tokenizer of a model directory as the text of a `tokenizer.json`.

    Raises:
        TokenizerError: if there is none, or it cannot be written as such a text.
    """
    directory = Path(path)
    if os.path.lexists(directory / "tokenizer.json"):
        backend = _read_backend(directory / "tokenizer.json")
    else:
        tokenizer = _read_with_transformers(directory)
        if not tokenizer.is_fast:
            raise TokenizerError(f"{directory} has a tokenizer that has no form as tokenizer.json.")
        backend = tokenizer.backend_tokenizer
    return str(_plain(backend).to_str())


def _load_tokenizer_json(path: Path) -> Tokenizer:
    with _errors_name(path):
        return _wrap(_read_backend(path))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    with _errors_name(path):
        return tokenizers.Tokenizer.from_buffer(read_bytes(path, MAX_TOKENIZER_BYTES))


@contextmanager
def _errors_name(path: Path) -> Iterator[None]:
    """Refuses a file at which the library fails in this block."""
    try:
        yield
    except TokenizerError:
        raise
    except UnreadableFileError as error:
        raise TokenizerError(f"{error}.") from None
    except BaseException as error:  # the library raises plain Exception, and panics
        if not isinstance(error, Exception) and type(error).__name__ != PANIC:
            raise
        raise TokenizerError(
            f"{path} is not a tokenizer that can be read: {_reason(error)}. {REMEDY}"
        ) from None


def _plain(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    backend.no_padding()
    backend.no_truncation()
    return backend


def _wrap(backend: tokenizers.Tokenizer) -> Tokenizer:
    _plain(backend)
    added = backend.get_added_tokens_decoder()

    def encode_ids(text: str, add_special_tokens: bool) -> list[int]:
        # The batch call lets other threads run meanwhile; `encode` does not. The fast one keeps no
        # places of tokens in the text.
        return backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def decode_ids(ids: list[int]) -> str:
        if len(ids) < DECODE_ALONE_IDS:
            return backend.decode(ids, skip_special_tokens=False)
        # Here too only the batch call lets other threads run.
        return backend.decode_batch([ids], skip_special_tokens=False)[0]

    special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
    return Tokenizer(
        encode_ids,
        decode_ids,
        special_ids,
        _max_chars_per_token(backend),
        lambda: backend.get_vocab(with_added_tokens=True),
        backend.id_to_token,
        _errors_of(backend.decoder),
    )


def _errors_of(decoder: tokenizers.decoders.Decoder | None) -> str:
    """Says how a decoder replaces broken bytes. With byte fallback each is one character.

    Raises:
        TokenizerError: if the text of a token depends on the tokens around it.
    """
    description = b"" if decoder is None else decoder.__getstate__()
    for name in ("BPEDecoder", "CTC"):
        if f'"{name}"'.encode() in description:
            raise TokenizerError(
                f"The tokenizer has a decoder of type {name}: the text of a token depends on the"
                " tokens around it, so outputs cannot be streamed. Use a tokenizer without it."
            )
    return REPLACE_EACH_BYTE if b'"ByteFallback"' in description else "replace"


def _max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Characters that one token can stand for, or None where there is no such limit."""
    added = backend.get_added_tokens_decoder().values()
    byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
    if not byte_level or backend.normalizer or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, backend.get_vocab(with_added_tokens=True)))


def _read_with_transformers(directory: Path) -> Any:
    try:
        check_folder(directory)
    except UnreadableFileError as error:
        raise TokenizerError(f"{error}.") from None
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise TokenizerError(
            f"{directory} has a tokenizer, but no tokenizer.json, and reading it needs"
            " transformers: pip install 'sglang-adaptive[transformers]', or save the tokenizer"
            " as tokenizer.json."
        ) from None
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except Exception as error:  # noqa: BLE001 - whatever it says, the start ends with one line
        raise TokenizerError(
            f"The tokenizer in {directory} cannot be read: {_reason(error)}. {REMEDY}"
        ) from None


def _reason(error: BaseException) -> str:
    """Returns what an error says, in one line that ends with a whole word."""
    return textwrap.shorten(str(error), MAX_REASON_CHARS, placeholder=" ...").rstrip(".")


def _load_with_transformers(directory: Path) -> Tokenizer:
    tokenizer = _read_with_transformers(directory)
    if tokenizer.is_fast:
        return _wrap(tokenizer.backend_tokenizer)

    def encode_ids(text: str, add_special_tokens: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode_ids(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    special_ids = frozenset(tokenizer.all_special_ids)
    return Tokenizer(
        encode_ids,
        decode_ids,
        special_ids,
        vocabulary=tokenizer.get_vocab,
        token_of=tokenizer.convert_ids_to_tokens,
    )
