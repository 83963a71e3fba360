"""Text to token ids and back: one tokenizer, and incremental decoding of a growing output.

Used by the front end (encode), by the detokenizer (streams of text) and by the scheduler (stop
strings). It needs neither torch nor transformers for a model that has a `tokenizer.json`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers

from sglang.srt.stops import StopSet

OTHER_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "spiece.model", "tokenizer_config.json")
# An unfinished UTF-8 character is at most 3 bytes, so at most 3 replacement characters can change.
REPLACEMENT, MAX_PENDING_CHARS = "\ufffd", 3

DECODE_ALONE_IDS = 10_000  # fewer take a few milliseconds, for which other threads can wait


class TokenizerError(ValueError):
    """A tokenizer that is missing or cannot be read; the message names the remedy."""


class Tokenizer:
    """Encodes and decodes with the tokenizer of one model. Safe to use from several threads.

    Attributes:
        vocabulary: gives the id of each token, added ones too.
    """

    def __init__(
        self,
        encode_ids: Callable[[str, bool], list[int]],
        decode_ids: Callable[[list[int]], str],
        special_ids: frozenset[int],
        max_chars_per_token: int | None = None,
        vocabulary: Callable[[], dict[str, int]] = dict,
    ) -> None:
        self.vocabulary = vocabulary
        self._encode_ids = encode_ids
        self._decode_ids = decode_ids
        self._special_ids = special_ids
        self._max_chars_per_token = max_chars_per_token
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

    def decode_stream(self, skip_special_tokens: bool = True) -> DecodeStream:
        """A decoder for ids that arrive bit by bit."""
        return DecodeStream(self, skip_special_tokens)

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

    The pieces that `push` and `flush` return, appended, are the text of all ids. No piece holds
    half a UTF-8 character: its bytes wait for the next ids.
    """

    def __init__(self, tokenizer: Tokenizer, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._window: list[int] = []  # ids decoded together: some context, then the new ones
        self._context_len = 0  # ids of the window whose text is out; they only give context
        self._num_chars_out = 0  # characters of the window's text that are out

    def push(self, ids: Sequence[int]) -> str:
        """Adds ids and returns the text that is certain now and was not before."""
        self._window.extend(self._tokenizer.shown_ids(ids, self._skip_special_tokens))
        if len(self._window) == self._context_len:
            return ""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        num_pending = len(text) - len(text.rstrip(REPLACEMENT))
        # With byte fallback an unfinished character spoils the bytes of the context before it too.
        end = len(text) - min(num_pending, MAX_PENDING_CHARS + self._context_len)
        piece = text[self._num_chars_out : end]
        self._num_chars_out = max(end, self._num_chars_out)
        if num_pending == 0 and piece:
            self._start_new_window()
        return piece

    def flush(self) -> str:
        """The text held back: an unfinished character, as replacement characters."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        piece = text[self._num_chars_out :]
        self._num_chars_out = len(text)
        return piece

    def _start_new_window(self) -> None:
        """Keeps the last pushed ids as context, since some decoders treat a first id specially."""
        del self._window[: self._context_len]
        self._context_len = len(self._window)
        text = self._tokenizer.decode(self._window, skip_special_tokens=False)
        self._num_chars_out = len(text)


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
    from the text.
    """

    def __init__(self, tokenizer: Tokenizer, stops: StopSet, skip_special_tokens: bool) -> None:
        self._stream = tokenizer.decode_stream(skip_special_tokens)
        self._stops = stops
        self._text = ""

    def push(self, ids: Sequence[int]) -> StopMatch | None:
        """Adds the ids of one step (1 or more); None as long as no stop is in the text.

        Raises:
            TimeoutError: if a stop expression takes too long.
        """
        for index, token_id in enumerate(ids):
            num_seen = len(self._text)
            self._text += self._stream.push([token_id])
            if len(self._text) == num_seen:
                continue
            found = self._stops.find(self._text, num_seen)
            if found is not None:
                return StopMatch(index + 1, found.matched)
        return None


def has_tokenizer(path: str | os.PathLike[str]) -> bool:
    """Whether a model directory has files of a tokenizer."""
    return any((Path(path) / name).is_file() for name in ("tokenizer.json", *OTHER_TOKENIZER_FILES))


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model directory.

    Raises:
        TokenizerError: if there is none or it cannot be read.
    """
    directory = Path(path)
    if (directory / "tokenizer.json").is_file():
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
    if (directory / "tokenizer.json").is_file():
        backend = _read_backend(directory / "tokenizer.json")
    else:
        tokenizer = _read_with_transformers(directory)
        if not tokenizer.is_fast:
            raise TokenizerError(f"{directory} has a tokenizer that has no form as tokenizer.json.")
        backend = tokenizer.backend_tokenizer
    return str(_plain(backend).to_str())


def _load_tokenizer_json(path: Path) -> Tokenizer:
    return _wrap(_read_backend(path))


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # noqa: BLE001 - the library raises plain Exception
        reason = str(error).splitlines()[0][:200]
        raise TokenizerError(f"{path} is not a tokenizer that can be read: {reason}.") from None


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
    )


def _max_chars_per_token(backend: tokenizers.Tokenizer) -> int | None:
    """Characters that one token can stand for, or None where there is no such limit."""
    added = backend.get_added_tokens_decoder().values()
    byte_level = isinstance(backend.decoder, tokenizers.decoders.ByteLevel)
    if not byte_level or backend.normalizer or any(token.lstrip or token.rstrip for token in added):
        return None
    return max(map(len, backend.get_vocab(with_added_tokens=True)))


def _read_with_transformers(directory: Path) -> Any:
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
        reason = str(error).splitlines()[0][:200]
        raise TokenizerError(f"The tokenizer in {directory} cannot be read: {reason}") from None


def _load_with_transformers(directory: Path) -> Tokenizer:
    tokenizer = _read_with_transformers(directory)
    if tokenizer.is_fast:
        return _wrap(tokenizer.backend_tokenizer)

    def encode_ids(text: str, add_special_tokens: bool) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def decode_ids(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=False))

    special_ids = frozenset(tokenizer.all_special_ids)
    return Tokenizer(encode_ids, decode_ids, special_ids, vocabulary=tokenizer.get_vocab)
