"""Finds the tokenizer that the flags name."""

from __future__ import annotations

from pathlib import Path

from sglang.srt.model_config import resolve_model_path
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer, load_tokenizer, no_tokenizer


def tokenizer_folder(args: ServerArgs) -> Path | None:
    """Finds the directory of the server's tokenizer; None: it is to have none.

    Raises:
        ModelPathError: if the model's directory is missing.
    """
    if args.skip_tokenizer_init:
        return None
    if args.tokenizer_path is not None:
        return resolve_model_path(args.tokenizer_path, "--tokenizer-path")
    return resolve_model_path(args.model_path)


def tokenizer_from_flags(args: ServerArgs) -> Tokenizer:
    """Loads the server's tokenizer, or makes the one of no tokens.

    Raises:
        ModelPathError: if the model's directory is missing.
        TokenizerError: if the tokenizer is missing or cannot be read.
    """
    folder = tokenizer_folder(args)
    return no_tokenizer() if folder is None else load_tokenizer(folder)
