"""From a request's body to checked items: pure functions, no tokenizer, no state.

Every breach is a `RequestError` that names the field; messages never repeat the input at length.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.frontend.body_parsing import (
    check_known_fields,
    field_error,
    require_object,
)
from sglang.srt.frontend.request_limits import (
    RequestLimits,
    check_encodable,
    check_token_ids,
)
from sglang.srt.frontend.return_options import (
    RETURN_FIELDS,
    ReturnOptions,
    check_return_options,
)
from sglang.srt.frontend.sampling_validation import check_sampling_params, check_stop_sizes
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sglang_surface import neutral_fields

HANDLED_FIELDS = RETURN_FIELDS | {
    "text",
    "input_ids",
    "sampling_params",
    "rid",
    "stream",
    "custom_labels",
    "no_logs",
}


@dataclass(frozen=True)
class CheckedPrompt:
    """One prompt: `text` or `input_ids` is set, and its sampling parameters hold.

    Attributes:
        has_default_length: nobody set max_new_tokens, so it gives way to a long prompt.
    """

    text: str | None
    input_ids: list[int] | None
    sampling_params: SamplingParams
    rid: str | None
    returns: ReturnOptions
    has_default_length: bool = False

    def params_for(self, num_prompt_tokens: int, limits: RequestLimits) -> SamplingParams:
        """The sampling parameters, once the prompt's length is known."""
        params, room = self.sampling_params, limits.max_req_len - num_prompt_tokens
        if not self.has_default_length or params.max_new_tokens <= room:
            return params
        return msgspec.structs.replace(params, max_new_tokens=room)


@dataclass(frozen=True)
class CheckedRequest:
    """The body of a `/generate` call, checked; only the prompts' lengths are still unknown.

    Attributes:
        is_batch: the client sent a list of prompts and gets a list, be it of one.
    """

    prompts: list[CheckedPrompt]
    is_batch: bool
    stream: bool
    labels: dict[str, str]
    no_logs: bool


def check_generate_request(body: Any, limits: RequestLimits) -> CheckedRequest:
    """Checks a parsed body of `/generate`.

    Raises:
        RequestError: naming the first field that breaks a rule.
    """
    fields = require_object(body)
    check_known_fields(fields, HANDLED_FIELDS, neutral_fields("generate"), "")
    stream = fields.get("stream")
    if stream is not None and not isinstance(stream, bool):
        raise field_error("stream", "must be true or false")
    texts, ids, is_batch = _check_prompts(fields, limits)
    num_prompts = len(texts) if texts is not None else len(ids or [])
    params = _check_sampling_list(fields.get("sampling_params"), num_prompts, is_batch, limits)
    rids = _check_rids(fields.get("rid"), num_prompts, is_batch, limits.max_label_chars)
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
            _has_default_length(fields.get("sampling_params"), i, limits),
        )
        for i in range(num_prompts)
    ]
    labels = _check_labels(fields.get("custom_labels"), limits)
    no_logs = fields.get("no_logs") or False
    if not isinstance(no_logs, bool):
        raise field_error("no_logs", "must be true or false")
    return CheckedRequest(prompts, is_batch, bool(stream), labels, no_logs)


def _check_labels(value: Any, limits: RequestLimits) -> dict[str, str]:
    """Labels for the request log: few and short."""
    labels = value or {}
    if not isinstance(labels, dict) or len(labels) > limits.max_custom_labels:
        raise field_error(
            "custom_labels", f"must be an object of at most {limits.max_custom_labels} strings"
        )
    for key, label in labels.items():
        if not isinstance(label, str) or max(len(key), len(label)) > limits.max_label_chars:
            raise field_error(
                "custom_labels", f"must hold strings of at most {limits.max_label_chars} characters"
            )
        check_encodable("custom_labels", key + label)
    return labels


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
    if text is not None and input_ids is not None:  # an empty one beside the other asks for nothing
        text, input_ids = text or None, input_ids or None
    if (text is None) == (input_ids is None):
        raise field_error("text", "give exactly one of text and input_ids")
    if text is not None:
        is_batch = isinstance(text, list)
        if is_batch and len(text) > limits.max_batch_size:
            _refuse_batch("text", len(text), limits)
        return _check_texts(text if is_batch else [text], is_batch), None, is_batch
    if not isinstance(input_ids, list) or not input_ids:
        raise field_error("input_ids", "must be a list of token ids, or of such lists, not empty")
    is_batch = any(isinstance(item, list) for item in input_ids)
    prompts = input_ids if is_batch else [input_ids]
    if len(prompts) > limits.max_batch_size:
        _refuse_batch("input_ids", len(prompts), limits)
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
            check_encodable(name, text)
    return texts


def _check_sampling_list(
    value: Any, num_prompts: int, is_batch: bool, limits: RequestLimits
) -> list[SamplingParams]:
    if not isinstance(value, list) or not value:
        value = None if value == [] else value
        params = check_sampling_params(value, limits, "sampling_params")
        check_stop_sizes([params], "sampling_params")
        return [params] * num_prompts
    if not is_batch:
        raise field_error("sampling_params", "must be one object for one prompt")
    if len(value) != num_prompts:
        raise field_error("sampling_params", f"has {len(value)} entries for {num_prompts} prompts")
    params_list = [
        check_sampling_params(item, limits, f"sampling_params[{index}]")
        for index, item in enumerate(value)
    ]
    check_stop_sizes(params_list, "sampling_params")
    return params_list


def _has_default_length(value: Any, index: int, limits: RequestLimits) -> bool:
    given = value[index] if isinstance(value, list) and value else value
    own = (given or {}).get("max_new_tokens")
    return own is None and limits.preferred_sampling_params.get("max_new_tokens") is None


def _check_rids(value: Any, num_prompts: int, is_batch: bool, max_chars: int) -> list[str | None]:
    """One label per prompt; a single one for a batch names all of it."""
    if not isinstance(value, list):
        return [None if value is None else check_rid(value, "rid", max_chars)] * num_prompts
    if not is_batch:
        raise field_error("rid", "must be one string for one prompt")
    if len(value) != num_prompts:
        raise field_error("rid", f"has {len(value)} entries for {num_prompts} prompts")
    return [check_rid(item, f"rid[{index}]", max_chars) for index, item in enumerate(value)]


def check_rid(value: Any, name: str, max_chars: int) -> str:
    """Checks a client's label of a request; it need not be unique."""
    if not isinstance(value, str) or not value:
        raise field_error(name, "must be a string that is not empty")
    if len(value) > max_chars:
        raise field_error(name, f"must have at most {max_chars} characters")
    check_encodable(name, value)
    return value
