"""Sets the limits of requests, from flags and from what the scheduler found out."""

from __future__ import annotations

import dataclasses
from typing import Any

from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.openai.sampling_defaults import sampling_defaults_of
from sglang.srt.frontend.body_parsing import parse_json_object
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.frontend.request_limits import NO_MASK_TOKEN, RequestLimits
from sglang.srt.frontend.sampling_validation import (
    check_sampling_params,
    check_stop_sizes,
    take_custom_params,
)
from sglang.srt.frontend.speculative_field import read_speculative
from sglang.srt.frontend.unknown_fields import REFUSED, UnknownFields
from sglang.srt.messages.requests import SchedulerInfo
from sglang.srt.model_config import ModelConfig
from sglang.srt.processes.determinism import refusal_of_requests
from sglang.srt.processes.grammar_flags import grammar_refusal
from sglang.srt.server_args import ServerArgs
from sglang.srt.stop_expressions import check_expression_list

MIN_REQ_LEN = 2  # one token in, one out
PREFERRED_FLAG = "--preferred-sampling-params"


def limits_from_flags(
    server_args: ServerArgs, info: SchedulerInfo, model: ModelConfig | None = None
) -> RequestLimits:
    """Returns what one request may ask for, by the flags and by what the scheduler found out.

    Args:
        model: gives OpenAI's routes their sampling defaults; None where there are no such routes.

    Raises:
        LaunchError: if --preferred-sampling-params breaks a rule, or no request has room.
    """
    if info.max_req_len < MIN_REQ_LEN:
        raise LaunchError(
            f"There is room for {max(info.max_req_len, 0)} tokens per request, prompt and output"
            f" together, and at least {MIN_REQ_LEN} are needed: {info.max_req_len_reason}."
        )
    limits = RequestLimits(
        vocab_size=info.vocab_size,
        max_req_len=info.max_req_len,
        max_req_len_reason=info.max_req_len_reason,
        has_tokenizer=not server_args.skip_tokenizer_init,
        max_text_tokens=server_args.max_tokenize_tokens,
        max_batch_size=server_args.max_batch_size_per_request,
        max_n=server_args.max_n,
        max_stop_strings=server_args.max_stop_strings,
        max_stop_string_chars=server_args.max_stop_string_chars,
        max_stop_regex_bytes=server_args.max_stop_regex_bytes,
        max_grammar_bytes=server_args.max_grammar_bytes,
        grammar_refusal=grammar_refusal(server_args),
        max_logit_bias=server_args.max_logit_bias,
        max_label_chars=server_args.max_label_chars,
        max_custom_labels=server_args.max_custom_labels,
        mtp_max_k=info.mtp_max_k,
        mtp_refusal=info.mtp_refusal or NO_MASK_TOKEN,
        deterministic_refusal=refusal_of_requests(server_args),
        all_are_deterministic=server_args.enable_deterministic_inference,
        drafters=info.drafters,
        max_top_logprobs=server_args.max_top_logprobs,
        max_token_ids_logprob=server_args.max_token_ids_logprob,
        max_cache_key_chars=server_args.max_cache_key_chars,
        allow_hidden_states=server_args.enable_return_hidden_states,
        allow_hidden_files=server_args.hidden_states_folder is not None,
        allow_priority=server_args.enable_priority_scheduling,
        unknown_fields=UnknownFields(server_args.unknown_fields != "ignore"),
        unknown_openai_fields=UnknownFields(server_args.unknown_fields == "refuse"),
    )
    preferred = _preferred_sampling_params(server_args, limits)
    defaults: dict[str, Any] = {}
    if model is not None and server_args.sampling_defaults == "model":
        defaults = sampling_defaults_of(model, limits)
    return dataclasses.replace(
        limits, preferred_sampling_params=_merged(preferred), openai_sampling_defaults=defaults
    )


def _preferred_sampling_params(server_args: ServerArgs, limits: RequestLimits) -> dict[str, Any]:
    try:
        preferred = _read_preferred(server_args.preferred_sampling_params)
        strict = dataclasses.replace(limits, unknown_fields=REFUSED)
        params = check_sampling_params(preferred, strict, PREFERRED_FLAG)
        check_stop_sizes([params], PREFERRED_FLAG)
        check_expression_list(params.stop_regexes)
    except RequestError as error:
        raise LaunchError(error.message) from None
    except (ValueError, TimeoutError) as error:
        raise LaunchError(f"{PREFERRED_FLAG}.stop_regex: {error}.") from None
    return preferred


def _merged(preferred: dict[str, Any]) -> dict[str, Any]:
    """Returns checked parameters as those of requests are merged over them."""
    found, _ = take_custom_params(preferred, f"{PREFERRED_FLAG}.", REFUSED)
    read_speculative(found, f"{PREFERRED_FLAG}.", REFUSED)
    return found


def _read_preferred(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        return parse_json_object(text.encode())
    except RequestError as error:
        raise field_error(PREFERRED_FLAG, f"must be a JSON object ({error.message})") from None
