"""The limits of one request, and the checks that several fields share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import Meta

from sglang.srt.frontend.errors import CONTEXT_LENGTH_EXCEEDED, RequestError, field_error
from sglang.srt.frontend.unknown_fields import REFUSED, UnknownFields

MAX_NEW_TOKENS = "sampling_params.max_new_tokens"
TokenId = Annotated[int, Meta(ge=0)]  # `check_id_lists` knows the vocabulary's size


NO_TOKENIZER = "the server has no tokenizer (--skip-tokenizer-init)"
NO_MASK_TOKEN = (
    "the model has no mask token: start the server with --mtp-mask-token-id, or with a model whose"
    " config.json has mtp_mask_token_id"
)


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """The limits of one request.

    Attributes:
        vocab_size: width of the logits; token ids at or above it are refused.
        max_req_len: limit of prompt plus max_new_tokens, in tokens.
        max_req_len_reason: the reason for `max_req_len`, and the remedy.
        has_tokenizer: requests may have texts, and answers do.
        measured: name, in messages, of the length that `max_req_len` limits.
        max_text_tokens: limit of a text of /tokenize and of a list of /detokenize; None:
            `max_req_len`.
        max_batch_size: limit of prompts times n.
        max_stop_strings: limit of the entries of `stop`, and of `stop_token_ids`.
        max_grammar_bytes: limit of the size of a grammar.
        grammar_refusal: why no request may have a grammar, and the remedy; None: requests may.
        max_top_logprobs, max_token_ids_logprob: limits of one prompt.
        max_cache_key_chars: limit of `cache_salt`, and of `extra_key`.
        mtp_max_k: limit of tokens predicted per step; 0 where no request may predict several.
        mtp_refusal: why no request may, and the remedy.
        deterministic_refusal: why no request may be `deterministic`, and the remedy; None: requests
            may.
        all_are_deterministic: whether they ask for it or not.
        drafters: names by which requests choose a drafter, in lower case, each with the server's
            own name of it.
        preferred_sampling_params: values of parameters that a request leaves out.
        openai_sampling_defaults: values in `/v1/*` where both leave a parameter out.
        unknown_fields, unknown_openai_fields: handling of unknown fields, in `/generate` and in
            `/v1/*`.
    """

    vocab_size: int
    max_req_len: int
    max_req_len_reason: str
    has_tokenizer: bool = True
    measured: str = "prompt"
    max_text_tokens: int | None = None
    max_batch_size: int
    max_n: int
    max_stop_strings: int
    max_stop_string_chars: int
    max_stop_regex_bytes: int = 256
    max_grammar_bytes: int = 65_536
    grammar_refusal: str | None = None
    max_logit_bias: int = 1024
    max_label_chars: int = 256
    max_custom_labels: int = 32
    max_top_logprobs: int
    max_token_ids_logprob: int
    max_cache_key_chars: int
    allow_hidden_states: bool
    allow_hidden_files: bool = False
    allow_priority: bool = True
    mtp_max_k: int = 0
    mtp_refusal: str = NO_MASK_TOKEN
    deterministic_refusal: str | None = None
    all_are_deterministic: bool = False
    drafters: Mapping[str, str] = field(default_factory=dict)
    preferred_sampling_params: dict[str, Any] = field(default_factory=dict)
    openai_sampling_defaults: dict[str, Any] = field(default_factory=dict)
    unknown_fields: UnknownFields = REFUSED
    unknown_openai_fields: UnknownFields = field(default_factory=lambda: UnknownFields(False))

    @property
    def of_texts(self) -> RequestLimits:
        """Returns the limits of texts that are only tokenized."""
        if self.max_text_tokens is None:
            reason = f"{self.max_req_len_reason}; see --max-tokenize-tokens"
            return replace(self, max_req_len_reason=reason, measured="text")
        most, reason = self.max_text_tokens, "--max-tokenize-tokens"
        return replace(self, max_req_len=most, max_req_len_reason=reason, measured="text")


def check_text_allowed(field: str | None, limits: RequestLimits, remedy: str) -> None:
    """Refuses a field, or a whole body, if it needs a tokenizer and the server has none.

    Args:
        remedy: tells the client what to send instead.
    """
    if not limits.has_tokenizer:
        raise field_error(field, f"{NO_TOKENIZER}; {remedy}")


def check_length(
    field: str,
    num_prompt_tokens: int,
    max_new_tokens: int,
    limits: RequestLimits,
    is_counted: bool = True,
) -> None:
    """Checks the length of a prompt with its output.

    Args:
        field: name of the prompt.
        is_counted: the number of tokens is exact; otherwise the prompt has at least as many.

    Raises:
        RequestError: if the prompt is empty or too long, or if prompt and output together are too
            long.
    """
    if num_prompt_tokens == 0:
        raise field_error(field, "the prompt has no tokens; give at least one")
    if num_prompt_tokens + max_new_tokens > limits.max_req_len:
        prompt_fits = num_prompt_tokens < limits.max_req_len
        raise field_error(
            MAX_NEW_TOKENS if prompt_fits else field,
            f"{'the prompt' if prompt_fits else 'the prompt is too long: it'}"
            f" ({_tokens(num_prompt_tokens, is_counted)}) and max_new_tokens"
            f" ({max_new_tokens}) are together more than {limits.max_req_len} tokens"
            f" ({limits.max_req_len_reason})",
            CONTEXT_LENGTH_EXCEEDED,
        )


def check_num_tokens(
    field: str, num_tokens: int, limits: RequestLimits, is_counted: bool = True
) -> None:
    """Checks the number of tokens of a text or of a list of ids alone; see `check_length`."""
    if num_tokens > limits.max_req_len:
        raise field_error(
            field,
            f"the {limits.measured} is too long: it has {_tokens(num_tokens, is_counted)}, more"
            f" than {limits.max_req_len} ({limits.max_req_len_reason})",
            CONTEXT_LENGTH_EXCEEDED,
        )


def _tokens(num_tokens: int, is_counted: bool) -> str:
    return (
        f"{num_tokens} tokens" if is_counted else f"at least {num_tokens} tokens, not all counted"
    )


def check_batch_size(
    field: str, size: int, limits: RequestLimits, what: str = "prompts x n"
) -> None:
    """Checks how many prompts, samples or lists a request has.

    Args:
        field: the field that the client must change.
    """
    if size > limits.max_batch_size:
        reason = f"{what} is {size}, more than {limits.max_batch_size}"
        raise field_error(field, f"{reason} (--max-batch-size-per-request)")


def check_id_lists(name: str, value: list[Any], vocab_size: int) -> tuple[list[list[int]], bool]:
    """Returns lists of token ids, from one list of integers or from a list of such lists.

    Args:
        value: integers that are not negative, as `TokenId` says, or lists of them.

    Returns:
        The lists, and whether the client sent a list of lists.

    Raises:
        RequestError: naming an entry that is outside the vocabulary, or no list while others are.
    """
    if _are_below(vocab_size, value):
        return [value], False
    if list not in map(type, value):
        raise _outside(name, value, vocab_size)
    for index, ids in enumerate(value):
        if not isinstance(ids, list):
            raise field_error(f"{name}[{index}]", "must be a list of token ids, as the others are")
        if not _are_below(vocab_size, ids):
            raise _outside(f"{name}[{index}]", ids, vocab_size)
    return value, True


def _are_below(limit: int, values: list[Any]) -> bool:
    """Tells whether all are integers below the limit. One pass: a prompt may have 100,000 ids."""
    try:
        return max(values, default=-1) < limit
    except TypeError:  # lists cannot be compared with integers
        return False


def check_token_ids(name: str, ids: list[int], vocab_size: int) -> None:
    """Checks that all are in [0, vocab_size).

    Raises:
        RequestError: naming the first entry that is not.
    """
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        raise _outside(name, ids, vocab_size)


def _outside(name: str, ids: list[int], vocab_size: int) -> RequestError:
    """Returns the error for the first id outside of the vocabulary."""
    index = next(i for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    return field_error(f"{name}[{index}]", f"is outside the vocabulary, 0..{vocab_size - 1}")


def check_short_text(name: str, text: str, max_chars: int) -> None:
    """Checks a text of the client that is only compared and shown."""
    if len(text) > max_chars:
        raise field_error(name, f"must have at most {max_chars} characters")
    check_encodable(name, text)


def check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise field_error(name, "holds half a surrogate pair, which is not text") from None
