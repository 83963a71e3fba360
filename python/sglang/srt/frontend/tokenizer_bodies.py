"""The bodies of `/tokenize` and `/detokenize`, and their rules."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from sglang.srt.frontend.body_parsing import parse_struct
from sglang.srt.frontend.request_limits import (
    RequestLimits,
    TokenId,
    check_batch_size,
    check_id_lists,
    check_num_tokens,
    check_text_allowed,
)
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
    """The tokens that `/detokenize` turns into text.

    Attributes:
        is_list: the client sent a list of lists and gets a list, even if it has one entry.
    """

    lists: list[list[int]]
    is_list: bool
    skip_special_tokens: bool


def check_tokenize(raw: bytes, limits: RequestLimits) -> TokenizeReqInput:
    """Parses and checks a body; the number of tokens of its texts is still unknown.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    check_text_allowed("prompt", limits, "tokenize it yourself")
    body = parse_struct(raw, TokenizeReqInput, neutral_fields("/tokenize"), limits)
    if isinstance(body.prompt, list):
        check_batch_size("prompt", len(body.prompt), limits, "the number of texts")
    return body


def check_detokenize(raw: bytes, limits: RequestLimits) -> CheckedTokens:
    """Parses and checks a body.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    check_text_allowed("tokens", limits, "decode them yourself")
    limits = limits.of_texts
    body = parse_struct(raw, DetokenizeReqInput, neutral_fields("/detokenize"), limits)
    lists, is_list = check_id_lists("tokens", body.tokens, limits.vocab_size)
    check_batch_size("tokens", len(lists), limits, "the number of lists")
    for index, ids in enumerate(lists):
        check_num_tokens(f"tokens[{index}]" if is_list else "tokens", len(ids), limits)
    return CheckedTokens(lists, is_list, body.skip_special_tokens)
