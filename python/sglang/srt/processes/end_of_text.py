"""The token ids that end outputs: those of the model's files, and the tokenizer's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from sglang.srt.model_config import ModelConfig
from sglang.srt.plain_files import UnreadableFileError
from sglang.srt.tokenizer import Tokenizer
from sglang.srt.tokenizer_config import read_tokenizer_config, special_tokens

NO_END_OF_TEXT = (
    "The model has no end-of-text id: its generation_config.json and config.json name none that it"
    " can draw as eos_token_id, nor does the tokenizer as eos_token. Outputs end at max_new_tokens"
    " or at a request's own stops."
)


def with_tokenizer_eos(
    model: ModelConfig, folder: Path | None, tokenizer: Tokenizer
) -> ModelConfig:
    """Adds the `eos_token` of the tokenizer in `folder`, if there is one, to the ids that end
    outputs. What cannot be added is a warning, and so is a model without any such id."""
    ids, warnings, text = model.eos_token_ids, model.warnings, None
    try:
        if folder is not None:
            text = special_tokens(read_tokenizer_config(folder)).get("eos_token")
    except UnreadableFileError as error:
        warnings = (*warnings, f"eos_token of the tokenizer is not known: {error}.")
    token_id = None if text is None else tokenizer.vocabulary().get(text)
    if token_id is not None and token_id < model.vocab_size:
        ids = tuple(dict.fromkeys((*ids, token_id)))
    elif text is not None:
        reason = "the tokenizer does not know it"
        if token_id is not None:
            reason = f"its id {token_id} is outside of the model's vocab_size {model.vocab_size}"
        warnings = (*warnings, f"eos_token: ignoring {text!r} of {folder}: {reason}.")
    if not ids:
        warnings = (*warnings, NO_END_OF_TEXT)
    return replace(model, eos_token_ids=ids, warnings=warnings)
