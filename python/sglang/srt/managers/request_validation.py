"""From a request's body to checked items: pure functions, no tokenizer, no state.

Every breach is a `RequestError` that names the field; messages never repeat the input at length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.managers.body_parsing import (
    field_error,
    is_neutral,
    require_object,
    shorten,
    type_error,
)
from sglang.srt.managers.return_options import (
    RETURN_FIELDS,
    ReturnLimits,
    ReturnOptions,
    check_return_options,
)
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.stops import compile_expression

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
MAX_RID_CHARS = 256
MAX_ID_DIGITS = 9

HANDLED_FIELDS = RETURN_FIELDS | {
    "text",
    "input_ids",
    "sampling_params",
    "rid",
    "stream",
    "custom_labels",
    "no_logs",
}
# Fields of SGLang's /generate that this runtime does not have (yet), with the values, beside
# null, false and empty, that ask for nothing.
NEUTRAL_FIELDS: dict[str, tuple[Any, ...]] = {
    "input_embeds": (),
    "image_data": (),
    "video_data": (),
    "audio_data": (),
    "modalities": (),
    "max_dynamic_patch": (),
    "min_dynamic_patch": (),
    "image_max_dynamic_patch": (),
    "video_max_dynamic_patch": (),
    "use_audio_in_video": (),
    "return_routed_experts": (),
    "routed_experts_start_len": (0,),
    "return_sampling_mask": (),
    "return_prompt_token_ids": (),
    "return_entropy": (),
    "return_bytes": (),
    "lora_path": (),
    "lora_id": (),
    "session_id": (),
    "session_params": (),
    "custom_logit_processor": (),
    "routing_key": (),
    "log_metrics": (True,),
    "conversation_id": (),
    "data_parallel_rank": (0,),
    "routed_dp_rank": (0,),
    "disagg_prefill_dp_rank": (0,),
    "bootstrap_host": (),
    "bootstrap_port": (),
    "bootstrap_room": (),
    "bootstrap_pair_key": (),
    "decode_tp_size": (),
    "background": (),
    "require_reasoning": (),
    "external_trace_header": (),
    "received_time": (),
}
SAMPLING_FIELDS = frozenset(SamplingParams.__struct_fields__)
NEUTRAL_SAMPLING_FIELDS: dict[str, tuple[Any, ...]] = {
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "structural_tag": (),
    "custom_params": (),
    "beam_width": (1,),
}


@dataclass(frozen=True, kw_only=True)
class RequestLimits:
    """What one request may ask for.

    Attributes:
        vocab_size: width of the logits; token ids at or above it are refused.
        max_req_len: prompt plus max_new_tokens at most, in tokens.
        max_req_len_reason: what sets `max_req_len`, and the remedy.
        max_batch_size: prompts times n at most.
        max_stop_strings: entries of `stop`, and of `stop_token_ids`, at most.
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
    returns: ReturnLimits


@dataclass(frozen=True)
class CheckedPrompt:
    """One prompt: `text` or `input_ids` is set, and its sampling parameters hold."""

    text: str | None
    input_ids: list[int] | None
    sampling_params: SamplingParams
    rid: str | None
    returns: ReturnOptions


@dataclass(frozen=True)
class CheckedRequest:
    """The body of a `/generate` call, checked; only the prompts' lengths are still unknown.

    Attributes:
        is_batch: the client sent a list of prompts and gets a list, be it of one.
    """

    prompts: list[CheckedPrompt]
    is_batch: bool
    stream: bool


def check_generate_request(body: Any, limits: RequestLimits) -> CheckedRequest:
    """Checks a parsed body of `/generate`.

    Raises:
        RequestError: naming the first field that breaks a rule.
    """
    fields = require_object(body)
    check_known_fields(fields, HANDLED_FIELDS, NEUTRAL_FIELDS, "")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise field_error("stream", "must be true or false")
    texts, ids, is_batch = _check_prompts(fields, limits)
    num_prompts = len(texts) if texts is not None else len(ids or [])
    if num_prompts > limits.max_batch_size:
        _refuse_batch("text" if texts is not None else "input_ids", num_prompts, limits)
    params = _check_sampling_list(fields.get("sampling_params"), num_prompts, is_batch, limits)
    rids = _check_rids(fields.get("rid"), num_prompts, is_batch)
    returns = check_return_options(fields, num_prompts, is_batch, limits.returns)
    num_samples = sum(item.n for item in params)
    if num_samples > limits.max_batch_size:
        _refuse_batch("sampling_params.n", num_samples, limits)
    prompts = [
        CheckedPrompt(
            texts[i] if texts is not None else None,
            ids[i] if ids is not None else None,
            params[i],
            rids[i],
            returns[i],
        )
        for i in range(num_prompts)
    ]
    return CheckedRequest(prompts, is_batch, bool(stream))


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


def check_known_fields(
    fields: dict[str, Any],
    handled: frozenset[str],
    neutral: dict[str, tuple[Any, ...]],
    prefix: str,
) -> None:
    """Refuses unknown fields, and known ones that ask for what is not supported."""
    for name, value in fields.items():
        if name in handled:
            continue
        if name not in neutral:
            raise field_error(prefix + shorten(name), "is not a known field")
        if not is_neutral(value, neutral[name]):
            raise field_error(prefix + name, "is not supported yet; leave it out")


def _refuse_batch(field: str, num_samples: int, limits: RequestLimits) -> None:
    raise field_error(
        field,
        f"prompts x n is {num_samples}, more than {limits.max_batch_size}"
        " (--max-batch-size-per-request)",
    )


def _check_prompts(
    fields: dict[str, Any], limits: RequestLimits
) -> tuple[list[str] | None, list[list[int]] | None, bool]:
    """(texts, ids, is_batch); one of texts and ids is None."""
    text, input_ids = fields.get("text"), fields.get("input_ids")
    if (text is None) == (input_ids is None):
        raise field_error("text", "give exactly one of text and input_ids")
    if text is not None:
        is_batch = isinstance(text, list)
        return _check_texts(text if is_batch else [text], is_batch), None, is_batch
    if not isinstance(input_ids, list) or not input_ids:
        raise field_error("input_ids", "must be a list of token ids, or of such lists, not empty")
    is_batch = any(isinstance(item, list) for item in input_ids)
    prompts = input_ids if is_batch else [input_ids]
    for index, ids in enumerate(prompts):
        name = f"input_ids[{index}]" if is_batch else "input_ids"
        if not isinstance(ids, list) or not ids:
            raise field_error(name, "must be a list of token ids, not empty")
        check_token_ids(name, ids, limits.vocab_size)
    return None, prompts, is_batch


def _check_texts(texts: list[Any], is_batch: bool) -> list[str]:
    if not texts:
        raise field_error("text", "the list of prompts is empty")
    for index, text in enumerate(texts):
        name = f"text[{index}]" if is_batch else "text"
        if not isinstance(text, str):
            raise field_error(name, "must be a string, or text a list of strings")
        if not text:
            raise field_error(name, "the prompt is empty")
        if not text.isascii():
            _check_encodable(name, text)
    return texts


def _check_encodable(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise field_error(name, "holds half a surrogate pair, which is not text") from None


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


def _check_sampling_list(
    value: Any, num_prompts: int, is_batch: bool, limits: RequestLimits
) -> list[SamplingParams]:
    if not isinstance(value, list):
        return [check_sampling_params(value, limits, "sampling_params")] * num_prompts
    if not is_batch:
        raise field_error("sampling_params", "must be one object for one prompt")
    if len(value) != num_prompts:
        raise field_error("sampling_params", f"has {len(value)} entries for {num_prompts} prompts")
    return [
        check_sampling_params(item, limits, f"sampling_params[{index}]")
        for index, item in enumerate(value)
    ]


def check_sampling_params(value: Any, limits: RequestLimits, name: str) -> SamplingParams:
    """Checks one `sampling_params` object; null is the defaults, for a field as for the whole.

    Args:
        name: the field as the client knows it, such as `sampling_params[3]`.

    Raises:
        RequestError: naming the field that breaks a rule.
    """
    if value is None:
        return SamplingParams()
    if not isinstance(value, dict):
        raise field_error(name, "must be an object")
    check_known_fields(value, SAMPLING_FIELDS, NEUTRAL_SAMPLING_FIELDS, f"{name}.")
    given = {k: v for k, v in value.items() if k in SAMPLING_FIELDS and v is not None}
    for key, number in given.items():
        if isinstance(number, int) and not INT64_MIN <= number <= INT64_MAX:
            raise field_error(f"{name}.{key}", "must fit in 64 bits")
    try:
        params = msgspec.convert(given, SamplingParams)
    except msgspec.ValidationError as error:
        raise type_error(error, f"{name}.") from None
    problem = params.problem()
    if problem is not None:
        field, _, reason = problem.partition(": ")
        raise field_error(f"{name}.{field}", reason)
    _check_sampling_limits(params, limits, name)
    # Rows are as wide as the vocabulary: a larger top_k keeps all.
    keeps_all = params.top_k >= limits.vocab_size
    return msgspec.structs.replace(params, top_k=-1) if keeps_all else params


def _check_sampling_limits(params: SamplingParams, limits: RequestLimits, name: str) -> None:
    stops, stop_ids = params.stop_strings, params.stop_token_ids or []
    if params.n > limits.max_n:
        raise field_error(f"{name}.n", f"must be at most {limits.max_n} (--max-n)")
    regexes = params.stop_regexes
    for field, entries in (("stop", stops), ("stop_token_ids", stop_ids), ("stop_regex", regexes)):
        if len(entries) > limits.max_stop_strings:
            raise field_error(
                f"{name}.{field}",
                f"has {len(entries)} entries, more than {limits.max_stop_strings}"
                " (--max-stop-strings)",
            )
    for stop in stops:
        _check_encodable(f"{name}.stop", stop)
        if len(stop) > limits.max_stop_string_chars:
            raise field_error(
                f"{name}.stop",
                f"has an entry of {len(stop)} characters, more than"
                f" {limits.max_stop_string_chars} (--max-stop-string-chars)",
            )
    check_token_ids(f"{name}.stop_token_ids", stop_ids, limits.vocab_size)
    for expression in params.stop_regexes:
        _check_encodable(f"{name}.stop_regex", expression)
        if len(expression.encode()) > limits.max_stop_regex_bytes:
            raise field_error(
                f"{name}.stop_regex",
                f"has more than {limits.max_stop_regex_bytes} bytes (--max-stop-regex-bytes)",
            )
        try:
            compile_expression(expression)
        except ValueError as error:
            raise field_error(f"{name}.stop_regex", shorten(str(error))) from None
    _check_logit_bias(f"{name}.logit_bias", params.logit_bias or {}, limits)


def _check_logit_bias(name: str, bias: dict[str, float], limits: RequestLimits) -> None:
    if len(bias) > limits.max_logit_bias:
        raise field_error(
            name, f"has {len(bias)} entries, more than {limits.max_logit_bias} (--max-logit-bias)"
        )
    for key in bias:
        is_id = key.isascii() and key.isdecimal() and len(key) <= MAX_ID_DIGITS
        if not is_id or int(key) >= limits.vocab_size:
            raise field_error(name, f"keys must be token ids from 0 to {limits.vocab_size - 1}")


def _check_rids(value: Any, num_prompts: int, is_batch: bool) -> list[str | None]:
    """One label per prompt; a single one for a batch names all of it."""
    if not isinstance(value, list):
        return [None if value is None else check_rid(value, "rid")] * num_prompts
    if not is_batch:
        raise field_error("rid", "must be one string for one prompt")
    if len(value) != num_prompts:
        raise field_error("rid", f"has {len(value)} entries for {num_prompts} prompts")
    return [check_rid(item, f"rid[{index}]") for index, item in enumerate(value)]


def check_rid(value: Any, name: str) -> str:
    """Checks a client's label of a request; it need not be unique."""
    if not isinstance(value, str) or not value:
        raise field_error(name, "must be a string that is not empty")
    if len(value) > MAX_RID_CHARS:
        raise field_error(name, f"must have at most {MAX_RID_CHARS} characters")
    _check_encodable(name, value)
    return value


def expand_samples(params: SamplingParams) -> list[SamplingParams]:
    """One set of parameters per sample; the j-th of a seeded request uses seed + j (int64)."""
    seed = params.sampling_seed
    if seed is None:
        return [params] * params.n
    seeds = [(seed + j - INT64_MIN) % 2**64 + INT64_MIN for j in range(params.n)]
    return [msgspec.structs.replace(params, sampling_seed=value) for value in seeds]
