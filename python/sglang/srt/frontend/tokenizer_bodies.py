"""The bodies of `/tokenize` and `/detokenize`, and their rules."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.errors import field_error
from sglang.srt.frontend.request_limits import RequestLimits, TokenId, check_id_lists
from sglang.srt.sglang_surface import neutral_fields


class TokenizeReqInput(msgspec.Struct, kw_only=True):
    """Body of `/tokenize`. `prompt` may be a list; the answer then holds lists."""

    prompt: str | list[str]
    add_special_tokens: bool = True


class DetokenizeReqInput(msgspec.Struct, kw_only=True):
    """Body of `/detokenize`. `tokens` may be a list of lists; the answer then holds a list."""

    tokens: list[TokenId | list[TokenId]]
    skip_special_tokens: bool = True


@dataclass(frozen=True)
class CheckedTokens:
    """What `/detokenize` turns into text.

    Attributes:
        is_list: the client sent a list of lists and gets a list, be it of one.
    """

    lists: list[list[int]]
    is_list: bool
    skip_special_tokens: bool


def check_detokenize(raw: bytes, limits: RequestLimits) -> CheckedTokens:
    """Parses and checks a body.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    body = parse_struct(raw, DetokenizeReqInput, neutral_fields("/detokenize"))
    lists, is_list = check_id_lists("tokens", body.tokens, limits.vocab_size)
    if len(lists) > limits.max_batch_size:
        raise field_error(
            "tokens",
            f"has {len(lists)} lists, more than {limits.max_batch_size}"
            " (--max-batch-size-per-request)",
        )
    return CheckedTokens(lists, is_list, body.skip_special_tokens)
