"""The body of `/generate`: its fields with their types and ranges, and the rules beyond those.

A new field is one line of `GenerateReqInput`, which accepts it, checks it and documents it in
`/openapi.json`, and a line where it has its effect: that place reads `CheckedRequest.body`. A field
with a value for each prompt goes into `CheckedPrompt` too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang.srt.frontend.body_parsing import check_known_fields, convert_fields, require_object
from sglang.srt.frontend.errors import field_error
from sglang.srt.frontend.request_limits import (
    RequestLimits,
    TokenId,
    check_batch_size,
    check_encodable,
    check_id_lists,
    check_short_text,
    check_text_allowed,
)
from sglang.srt.frontend.sampling_validation import (
    RETURN_KEPT,
    SAMPLING_FIELDS,
    check_sampling_params,
    check_stop_sizes,
)
from sglang.srt.frontend.unknown_fields import NOT_KNOWN
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sglang_surface import is_neutral, neutral_fields

MAX_INT32 = 2**31 - 1

NotEmpty = Meta(min_length=1)
Text = Annotated[str, NotEmpty]
TokenIds = Annotated[list[TokenId], NotEmpty]
Position = Annotated[int, Meta(ge=-1, le=MAX_INT32)]
Count = Annotated[int, Meta(ge=0)]
Priority = Annotated[int, Meta(ge=-MAX_INT32, le=MAX_INT32)]
# Checked field by field in `check_sampling_params`.
Sampling = Annotated[
    dict[str, Any], Meta(extra_json_schema={"$ref": "#/components/schemas/SamplingParams"})
]
HiddenStates = bool | Annotated[str, Meta(extra_json_schema={"enum": ["last", "file"]})]
HIDDEN_STATES: dict[bool | str, Literal["none", "all", "last"]] = {
    False: "none",
    True: "all",
    "last": "last",
    "file": "all",
}
# Rules that its types cannot express, as JSON Schema.
_IDS: dict[str, Any] = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_IDS_OR_LISTS = {"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]}
ONE_PROMPT: dict[str, Any] = {
    "oneOf": [
        {"required": ["text"], "properties": {"text": {"type": ["string", "array"]}}},
        {"required": ["input_ids"], "properties": {"input_ids": _IDS_OR_LISTS}},
    ]
}


class _TakesSGLangFields(msgspec.StructMeta):
    """Accepts further fields of SGLang's body at neutral values, and drops them."""

    def __call__(cls, **given: Any) -> Any:
        known = cls.__struct_fields__
        check_known_fields(given, known, neutral_fields("generate"), "")
        return super().__call__(**{k: v for k, v in given.items() if k in known})


class GenerateReqInput(msgspec.Struct, kw_only=True, metaclass=_TakesSGLangFields):
    """Body of `/generate`: exactly one of `text` and `input_ids`, single or a list (a batch).

    A batch may give a list of values, one per prompt, where the type allows that. Null stands for
    the default of any field.

    Raises:
        RequestError: naming a field that is unknown, or that SGLang has and this runtime does not.

    Attributes:
        rid: the client's label; a single one names the whole batch.
        logprob_start_len: first prompt position whose logprob is returned; -1: outputs only.
        return_prompt_token_ids: each answer gets `prompt_token_ids`, with a BOS that was added.
        token_ids_logprob: ids whose logprobs are returned at every position.
        priority: larger ones go first (with --enable-priority-scheduling).
        cache_salt, extra_key: KV is shared only between requests that have the same.
        custom_labels: copied to the request log.
        no_logs: leave the request out of the request log.
        log_metrics: count the request in the metrics.
    """

    text: str | Annotated[list[str], NotEmpty] | None = None
    input_ids: Annotated[list[TokenId | TokenIds], NotEmpty] | None = None
    sampling_params: Sampling | list[Sampling | None] = {}
    rid: Text | list[Text] | None = None
    stream: bool = False
    return_logprob: bool | list[bool] = False
    logprob_start_len: Position | list[Position] = -1
    top_logprobs_num: Count | list[Count] = 0
    token_ids_logprob: list[TokenId | list[TokenId]] = []
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    return_hidden_states: HiddenStates = False
    priority: Priority = 0
    cache_salt: str = ""
    extra_key: str = ""
    custom_labels: dict[str, str] = {}
    no_logs: bool = False
    log_metrics: bool = True


# Null means the default in every field. In these fields false, 0 and an empty value do too.
FALSE_IS_DEFAULT = frozenset(("priority", "custom_labels", "no_logs"))
# In these fields every value that `is_neutral` accepts does too, such as a list of empty texts.
NEUTRAL_IS_DEFAULT = frozenset(("return_hidden_states", "cache_salt", "extra_key"))
# In these fields an empty list does too.
EMPTY_LIST_IS_DEFAULT = frozenset(
    ("sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num")
)


@dataclass(frozen=True)
class CheckedPrompt:
    """One prompt: `text` or `input_ids` is set, and its sampling parameters are checked.

    Attributes:
        logprobs: None for none; its `start_len` may be -1, for outputs only.
        has_default_length: max_new_tokens was not set, so it gives way to a long prompt.
    """

    text: str | None
    input_ids: list[int] | None
    sampling_params: SamplingParams
    rid: str | None
    logprobs: LogprobOptions | None
    has_default_length: bool

    def params_for(self, num_prompt_tokens: int, limits: RequestLimits) -> SamplingParams:
        """Returns the sampling parameters, once the prompt's length is known."""
        params, room = self.sampling_params, limits.max_req_len - num_prompt_tokens
        if not self.has_default_length or params.max_new_tokens <= room:
            return params
        return msgspec.structs.replace(params, max_new_tokens=room)

    def logprobs_for(self, num_prompt_tokens: int) -> LogprobOptions | None:
        """Returns the log-probabilities to ask the scheduler for, once the prompt's length is
        known.

        Raises:
            RequestError: if logprob_start_len is outside the prompt.
        """
        options = self.logprobs
        if options is None:
            return None
        if options.start_len >= num_prompt_tokens:
            raise field_error(
                "logprob_start_len", f"must be less than the prompt's {num_prompt_tokens} tokens"
            )
        if options.start_len >= 0:
            return options
        return msgspec.structs.replace(options, start_len=num_prompt_tokens - 1)


@dataclass(frozen=True)
class CheckedRequest:
    """The checked body of a `/generate` call; only the prompts' lengths are still unknown.

    Attributes:
        body: has the fields that hold for all prompts; its `sampling_params` are empty, since each
            prompt has its own checked ones.
        is_batch: the client sent a list of prompts and gets a list, even if it has one entry.
    """

    body: GenerateReqInput
    prompts: list[CheckedPrompt]
    is_batch: bool


def check_generate_request(
    body: Any, limits: RequestLimits, defaults: Mapping[str, Any] = {}
) -> CheckedRequest:
    """Checks a parsed body of `/generate`.

    Args:
        defaults: default sampling parameters of the body's route, if they differ from those of
            `/generate`.

    Raises:
        RequestError: naming the first field that breaks a rule; it never repeats the input at
            length.
    """
    fields = require_object(body)
    known = GenerateReqInput.__struct_fields__
    neutral, unknown = neutral_fields("generate"), limits.unknown_fields
    check_known_fields(fields, known, neutral, "", unknown, _where_it_belongs)
    given = {k: v for k, v in fields.items() if k in known and not _is_default(k, v)}
    _check_one_kind_of_prompts(given, limits)
    request = convert_fields(given, GenerateReqInput)
    prompts, is_batch = _prompts_of(request, limits)
    num_prompts = len(prompts)
    given_params = _per_prompt("sampling_params", request.sampling_params, num_prompts, is_batch)
    params = _check_sampling(request, given_params, limits, defaults)
    check_batch_size("sampling_params.n", sum(item.n for item in params), limits)
    rids = _per_prompt("rid", request.rid, num_prompts, is_batch)
    logprobs = _logprobs_of(request, params, is_batch, limits)
    _check_labels(request, limits)
    _check_permissions(request, limits)
    has_preferred_length = limits.preferred_sampling_params.get("max_new_tokens") is not None
    checked = [
        CheckedPrompt(
            prompt if isinstance(prompt, str) else None,
            None if isinstance(prompt, str) else prompt,
            params[i],
            rids[i],
            logprobs[i],
            not has_preferred_length and (given_params[i] or {}).get("max_new_tokens") is None,
        )
        for i, prompt in enumerate(prompts)
    ]
    return CheckedRequest(msgspec.structs.replace(request, sampling_params={}), checked, is_batch)


def _where_it_belongs(name: str) -> str:
    return "is a field of sampling_params" if name in SAMPLING_FIELDS else NOT_KNOWN


def _is_default(name: str, value: Any) -> bool:
    if name in FALSE_IS_DEFAULT:
        return not value
    if name in NEUTRAL_IS_DEFAULT:
        return is_neutral(value, ())
    return value is None or (name in EMPTY_LIST_IS_DEFAULT and value == [])


def _check_one_kind_of_prompts(given: dict[str, Any], limits: RequestLimits) -> None:
    """Leaves one of text and input_ids in `given`, and counts a batch before it checks its
    entries."""
    if "text" in given and "input_ids" in given:  # an empty one beside the other asks for nothing
        for name in ("text", "input_ids"):
            if not given[name]:
                del given[name]
    if ("text" in given) == ("input_ids" in given):
        raise field_error("text", "give exactly one of text and input_ids")
    name = "text" if "text" in given else "input_ids"
    if name == "text":
        check_text_allowed(name, limits, "give input_ids")
    items = given[name]
    is_batch = isinstance(items, list) and (name == "text" or list in map(type, items[:1]))
    if is_batch:
        check_batch_size(name, len(items), limits)


def _prompts_of(
    request: GenerateReqInput, limits: RequestLimits
) -> tuple[Sequence[str | list[int]], bool]:
    """Returns (texts or lists of token ids, is_batch)."""
    text = request.text
    if text is None:
        return check_id_lists("input_ids", request.input_ids or [], limits.vocab_size)
    if isinstance(text, str):
        check_encodable("text", text)
        return [text], False
    for index, item in enumerate(text):
        check_encodable(f"text[{index}]", item)
    return text, True


def _per_prompt(name: str, value: Any, num_prompts: int, is_batch: bool) -> list[Any]:
    """Returns one value per prompt; a value that is no list holds for all of them."""
    if not isinstance(value, list):
        return [value] * num_prompts
    if not is_batch:
        raise field_error(name, "holds values for a batch, and there is one prompt: give its value")
    if len(value) != num_prompts:
        raise field_error(name, f"has {len(value)} entries for {num_prompts} prompts")
    return value


def _check_sampling(
    request: GenerateReqInput,
    given: list[dict[str, Any] | None],
    limits: RequestLimits,
    defaults: Mapping[str, Any],
) -> list[SamplingParams]:
    """Returns the parameters of each prompt; parameters that all share are checked once."""
    name = "sampling_params"
    if isinstance(request.sampling_params, dict):
        params = check_sampling_params(request.sampling_params, limits, name, defaults)
        check_stop_sizes([params], name)
        return [params] * len(given)
    checked = [
        check_sampling_params(item, limits, f"{name}[{index}]", defaults)
        for index, item in enumerate(given)
    ]
    check_stop_sizes(checked, name)
    return checked


def _logprobs_of(
    request: GenerateReqInput, params: list[SamplingParams], is_batch: bool, limits: RequestLimits
) -> list[LogprobOptions | None]:
    """Returns the log-probabilities that each prompt asks for; ids that all share are checked
    once."""
    num_prompts = len(params)
    wanted = _per_prompt("return_logprob", request.return_logprob, num_prompts, is_batch)
    starts = _per_prompt("logprob_start_len", request.logprob_start_len, num_prompts, is_batch)
    tops = _per_prompt("top_logprobs_num", request.top_logprobs_num, num_prompts, is_batch)
    if max(tops) > limits.max_top_logprobs:
        raise field_error(
            "top_logprobs_num",
            f"must be at most {limits.max_top_logprobs} (--max-top-logprobs)",
        )
    name = "token_ids_logprob"
    lists, is_nested = check_id_lists(name, request.token_ids_logprob, limits.vocab_size)
    num_ids, most = max(map(len, lists)), limits.max_token_ids_logprob
    if num_ids > most:
        raise field_error(name, f"has {num_ids} ids, more than {most} (--max-token-ids-logprob)")
    ids = _per_prompt(name, lists, num_prompts, is_batch) if is_nested else lists * num_prompts
    kept = [item.return_top_p_token_ids and item.has_filters for item in params]
    if any(item.return_top_p_token_ids and not w for item, w in zip(params, wanted, strict=True)):
        raise field_error("return_logprob", f"must be true with {RETURN_KEPT}")
    tops = [min(top, limits.vocab_size) for top in tops]
    return [
        LogprobOptions(starts[i], tops[i], ids[i], kept[i]) if wanted[i] else None
        for i in range(num_prompts)
    ]


def _check_labels(request: GenerateReqInput, limits: RequestLimits) -> None:
    """Checks the lengths of texts that are only labels and keys."""
    rids = [request.rid] if isinstance(request.rid, str) else request.rid or []
    for index, rid in enumerate(rids):
        name = f"rid[{index}]" if isinstance(request.rid, list) else "rid"
        check_short_text(name, rid, limits.max_label_chars)
    check_short_text("cache_salt", request.cache_salt, limits.max_cache_key_chars)
    check_short_text("extra_key", request.extra_key, limits.max_cache_key_chars)
    labels = request.custom_labels
    if len(labels) > limits.max_custom_labels:
        raise field_error("custom_labels", f"must have at most {limits.max_custom_labels} entries")
    for text in (*labels, *labels.values()):
        check_short_text("custom_labels", text, limits.max_label_chars)


def _check_permissions(request: GenerateReqInput, limits: RequestLimits) -> None:
    """Checks fields that a flag of the server must allow."""
    if request.priority and not limits.allow_priority:
        raise field_error("priority", "start the server with --enable-priority-scheduling")
    if request.return_text_in_logprobs:
        check_text_allowed("return_text_in_logprobs", limits, "leave it out")
    name, hidden_states = "return_hidden_states", request.return_hidden_states
    if hidden_states not in HIDDEN_STATES:
        raise field_error(name, 'must be true, false, "last" or "file"')
    if hidden_states == "file":
        if not limits.allow_hidden_files:
            raise field_error(name, "for files, start the server with --hidden-states-folder")
    elif hidden_states and not limits.allow_hidden_states:
        raise field_error(name, "start the server with --enable-return-hidden-states")
