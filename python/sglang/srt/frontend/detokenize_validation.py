"""From a body of `/detokenize` to checked token ids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang.srt.frontend.body_parsing import field_error, parse_struct
from sglang.srt.frontend.request_limits import RequestLimits, check_token_ids
from sglang.srt.messages.requests import DetokenizeReqInput
from sglang.srt.sglang_surface import neutral_fields


@dataclass(frozen=True)
class CheckedTokens:
    """What `/detokenize` turns into text.

    Attributes:
        is_list: the client sent a list of lists and gets a list, be it of one.
    """

    lists: list[Any]
    is_list: bool
    skip_special_tokens: bool


def check_detokenize(raw: bytes, limits: RequestLimits) -> CheckedTokens:
    """Parses and checks a body.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    body = parse_struct(raw, DetokenizeReqInput, neutral_fields("/detokenize"))
    is_list = any(isinstance(item, list) for item in body.tokens)
    lists: list[Any] = body.tokens if is_list else [body.tokens]
    if len(lists) > limits.max_batch_size:
        raise field_error(
            "tokens",
            f"has {len(lists)} lists, more than {limits.max_batch_size}"
            " (--max-batch-size-per-request)",
        )
    for index, ids in enumerate(lists):
        name = f"tokens[{index}]" if is_list else "tokens"
        if not isinstance(ids, list):
            raise field_error(name, "must be a list of token ids, as the others are")
        check_token_ids(name, ids, limits.vocab_size)
    return CheckedTokens(lists, is_list, body.skip_special_tokens)
