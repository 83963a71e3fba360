"""What one request may ask for, and the checks that several fields share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from sglang.srt.frontend.body_parsing import field_error
from sglang.srt.frontend.return_options import ReturnLimits


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        vocab_size: width of the logits; token ids at or above it are refused.
        max_req_len: prompt plus max_new_tokens at most, in tokens.
        max_req_len_reason: what sets `max_req_len`, and the remedy.
        max_batch_size: prompts times n at most.
        max_stop_strings: entries of `stop`, and of `stop_token_ids`, at most.
        mtp_max_k: tokens predicted per step at most; 0 for a model that cannot.
        preferred_sampling_params: what holds where a request says nothing.
    """

    vocab_size: int
    max_req_len: int
    max_req_len_reason: str
    max_batch_size: int
    max_n: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_stop_regex_bytes: int = 256
    max_logit_bias: int = 1024
    max_label_chars: int = 256
    max_custom_labels: int = 32
    mtp_max_k: int = 0
    preferred_sampling_params: dict[str, Any] = field(default_factory=dict)
    returns: ReturnLimits


def check_length(
    field: str, num_prompt_tokens: int, max_new_tokens: int, limits: RequestLimits
) -> None:
    """Checks the length of a tokenized prompt with its output.

    Raises:
        RequestError: if the prompt is empty, or both together are too long.
    """
    if num_prompt_tokens == 0:
        raise field_error(field, "the prompt has no tokens; give at least one")
    if num_prompt_tokens + max_new_tokens > limits.max_req_len:
        raise field_error(
            field,
            f"the prompt ({num_prompt_tokens} tokens) and max_new_tokens ({max_new_tokens}) are"
            f" together more than {limits.max_req_len} tokens ({limits.max_req_len_reason})",
        )


def check_token_ids(name: str, ids: list[Any], vocab_size: int) -> None:
    """Checks that all are integers (no booleans) in [0, vocab_size).

    Raises:
        RequestError: naming the first entry that is not.
    """
    if all(type(token_id) is int for token_id in ids) and (
        not ids or (min(ids) >= 0 and max(ids) < vocab_size)
    ):
        return
    for index, token_id in enumerate(ids):
        if type(token_id) is not int:
            raise field_error(f"{name}[{index}]", "must be an integer token id")
        if not 0 <= token_id < vocab_size:
            raise field_error(f"{name}[{index}]", f"is outside the vocabulary, 0..{vocab_size - 1}")


def check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise field_error(name, "holds half a surrogate pair, which is not text") from None
