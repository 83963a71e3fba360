"""The corpus of `--speculative-algorithm NGRAM`: a file of texts that every request may draft from,
read and tokenized at the start."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from sglang.srt.model_config import ModelConfig
from sglang.srt.plain_files import open_regular
from sglang.srt.processes.config_error import ConfigError, Refusal
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.ngram_texts import joined_texts
from sglang.srt.tokenizer import TokenizerError, load_tokenizer

logger = logging.getLogger(__name__)

PATH_FLAG = "--speculative-ngram-external-corpus-path"
MAX_TOKENS_FLAG = "--speculative-ngram-external-corpus-max-tokens"


class _Line(msgspec.Struct):
    """An object in a line; what else it has is not looked at."""

    text: str


def corpus_from_flags(
    args: ServerArgs, model: ModelConfig, reads_all: bool = True
) -> np.ndarray | None:
    """[K] int32; see `NgramMemory.corpus`. None without a path.

    Args:
        reads_all: False only looks whether the file begins as a corpus, and returns None.

    Raises:
        Refusal: for a file that is no corpus, or that has too many tokens.
    """
    path = args.speculative_ngram_external_corpus_path
    if path is None:
        return None
    place = f"{PATH_FLAG} {path!r}"
    if args.skip_tokenizer_init:
        raise Refusal(place, "needs a tokenizer", "leave out --skip-tokenizer-init")
    if not reads_all:
        next(_texts(path, place), None)
        return None
    try:
        tokenizer = load_tokenizer(args.tokenizer_path or model.path)
    except TokenizerError as error:
        raise ConfigError(f"{place} needs a tokenizer. {error}") from None
    texts, num_tokens = list[list[int]](), 0
    most = args.speculative_ngram_external_corpus_max_tokens
    for text in _texts(path, place):
        # Whatever a tokenizer puts around a text is not in the midst of one.
        texts.append(tokenizer.encode(text, add_special_tokens=False))
        num_tokens += len(texts[-1])
        if num_tokens > most:
            problem = f"is exceeded: {path} has {num_tokens} tokens in its first {len(texts)} texts"
            raise Refusal(f"{MAX_TOKENS_FLAG} {most}", problem, "raise it, or shorten the file")
    if max(map(len, texts), default=0) < 2:
        problem = "has no text of two tokens, so nothing follows anything"
        raise Refusal(place, problem, "leave the flag out")
    corpus = joined_texts(texts)
    if corpus.max() >= model.vocab_size:
        problem = f"has token {corpus.max()}, and the model has {model.vocab_size} tokens"
        raise Refusal(place, problem, "name the model's own tokenizer with --tokenizer-path")
    logger.info("%s: %d tokens in %d texts.", place, num_tokens, len(texts))
    return corpus


def _texts(path: str, place: str) -> Iterator[str]:
    """Those of a file's lines; empty lines are none.

    Raises:
        Refusal: if it cannot be read, or a line is something else.
    """
    for number, line in enumerate(_lines(path, place), 1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line, type=str | _Line)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            problem = 'must be a JSON string, or an object with a string "text"'
            raise Refusal(f"{place}: line {number}", problem, "mend the line") from None
        yield value if isinstance(value, str) else value.text


def _lines(path: str, place: str) -> Iterator[bytes]:
    """One after the other, so that a file need not fit in memory.

    Raises:
        Refusal: if it cannot be read.
    """
    try:
        with open_regular(Path(path)) as file:
            yield from file
    except (OSError, TypeError, ValueError) as error:  # the last two: no name of a file
        reason = (isinstance(error, OSError) and error.strerror) or error
        remedy = "name a file with a JSON string in each line"
        raise Refusal(place, f"cannot be read: {reason}", remedy) from None
