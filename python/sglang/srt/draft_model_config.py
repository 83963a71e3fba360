"""Reads the folder of a draft model: a smaller model with the target's tokens; no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from sglang.srt.head_layouts import head_mark
from sglang.srt.model_config import (
    ModelConfig,
    ModelPathError,
    load_model_config,
    read_entries,
    resolve_model_path,
)
from sglang.srt.tokenizer import TokenizerError, has_tokenizer, load_tokenizer

logger = logging.getLogger(__name__)


def load_draft_config(
    path: str,
    target: ModelConfig,
    target_tokenizer: Path,
    flag: str = "--model-path",
    warn: Callable[..., None] = logger.warning,
) -> ModelConfig:
    """Reads the config.json of a model that drafts for another one, and compares their tokens.

    Args:
        target: the model that it drafts for.
        target_tokenizer: folder of the target's tokenizer.
        flag: what named the path.
        warn: takes a text and the values of its places, if a folder has no tokenizer, so that only
            the sizes of the vocabularies are compared.

    Raises:
        ModelPathError: for a folder that cannot be read, that is no whole model, or a model of
            other tokens than the target's; the text names the flag or the entry.
    """
    folder = resolve_model_path(path, flag)
    mark = head_mark(read_entries(folder))
    if mark:
        raise ModelPathError(
            f"{folder / 'config.json'} cannot be used: {mark} says that this is a head, no model;"
            " use --speculative-algorithm EAGLE, EAGLE3, NEXTN or DFLASH."
        )
    config = load_model_config(path, flag)
    if config.vocab_size != target.vocab_size:
        raise config.refusal(
            f"vocab_size is {config.vocab_size}, but that of the target is {target.vocab_size}; use"
            " a draft model with the target's tokenizer"
        )
    for each in (config.path, target_tokenizer):
        if not has_tokenizer(each):
            said = "%s %s: %s has no tokenizer, so only the sizes of the vocabularies are compared."
            warn(said, flag, config.path, each)
            return config
    check_same_tokens(config.path, target_tokenizer, flag)
    return config


def check_same_tokens(draft: Path, target: Path, flag: str) -> None:
    """Checks that each token has the same id in both folders' tokenizers.

    Raises:
        ModelPathError: if one differs, or a tokenizer cannot be read; the text names the flag and
            the first that differs.
    """
    try:
        of_draft = load_tokenizer(draft).vocabulary()
        of_target = load_tokenizer(target).vocabulary()
    except TokenizerError as error:
        raise ModelPathError(f"{flag}: {error}") from None
    difference = first_difference(of_draft, of_target)
    if difference is not None:
        raise ModelPathError(
            f"{flag} {str(draft)!r} has other tokens than the model: {difference}. Use a draft"
            " model with the model's tokenizer."
        )


def first_difference(of_draft: dict[str, int], of_target: dict[str, int]) -> str | None:
    """Describes the first token that is not the same in both; None if all are. The target's ids
    order them."""
    if of_draft == of_target:
        return None
    different = {
        token
        for token in of_draft.keys() | of_target.keys()
        if of_draft.get(token) != of_target.get(token)
    }

    def place(token: str) -> tuple[int, bool]:
        in_target = token in of_target
        return (of_target if in_target else of_draft)[token], not in_target

    token = min(different, key=place)
    ids = [names.get(token) for names in (of_draft, of_target)]
    draft_id, target_id = ("missing" if each is None else each for each in ids)
    return f"{token!r} is {draft_id} there and {target_id} in the model"
