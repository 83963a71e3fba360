"""Bodies of OpenAI's routes, and their translation to `/generate`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar, get_type_hints

import msgspec
from msgspec import Meta

from sglang.srt.frontend.body_parsing import check_known_fields, parse_json_object, struct_of
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.frontend.request_limits import RequestLimits
from sglang.srt.frontend.sampling_validation import CUSTOM_PARAMS, RETURN_KEPT, take_custom_params
from sglang.srt.frontend.speculative_field import read_speculative
from sglang.srt.frontend.unknown_fields import REFUSED, UnknownFields
from sglang.srt.sampling.grammar import GRAMMAR_FIELDS, JSON_SCHEMA, STRUCTURAL_TAG, Grammar
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.sglang_surface import ANYTHING, is_neutral, neutral_fields

Count = Annotated[int, Meta(ge=0)]
Body = TypeVar("Body", bound=msgspec.Struct)

# OpenAI's names of sampling parameters that we call otherwise.
RENAMED = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
NOT_IN_COMPLETIONS = frozenset(("spaces_between_special_tokens", "stream_interval", RETURN_KEPT))
# Sampling parameters of a completion: our names to those in its body.
SAMPLING = {
    name: RENAMED.get(name, name)
    for name in SamplingParams.__struct_fields__
    if name not in NOT_IN_COMPLETIONS
}
# Fields that are accepted at neutral values only; the last two are OpenAI's, for its own records.
RECORDS: dict[str, tuple[Any, ...]] = {"metadata": (ANYTHING,), "store": (ANYTHING,)}
UNSUPPORTED = neutral_fields("/v1/completions") | RECORDS


DEFAULT_MAX_TOKENS = 16  # of a completion, as in OpenAI's API; fewer after a long prompt
ANY_JSON_OBJECT = '{"type":"object"}'


class StreamOptions(msgspec.Struct, kw_only=True):
    """Says whether a stream reports usage; null is false.

    Attributes:
        include_usage: a last chunk with the usage of the whole request.
        continuous_usage_stats: each chunk has the usage of its choice so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


_TYPES = get_type_hints(SamplingParams, include_extras=True)
# All of SAMPLING with the types and ranges of `SamplingParams`; null is the default.
SamplingFields: Any = msgspec.defstruct(
    "SamplingFields",
    [(theirs, _TYPES[ours] | None, None) for ours, theirs in SAMPLING.items()],
    kw_only=True,
)


class CompletionRequest(SamplingFields, msgspec.Struct, kw_only=True):
    """Body of `/v1/completions`, in addition to the sampling parameters.

    Attributes:
        prompt: a text, token ids, or a list of either.
        logprobs: best tokens per position; any number asks for log-probabilities.
        return_token_ids: each choice gets `prompt_token_ids` and `token_ids`.
        response_format: text, json_object, json_schema or structural_tag.
        echo: put the prompt before each output, and its log-probabilities too.
        custom_params: may hold `mtp_*`, `speculative` and `deterministic`, for routers that drop
            these elsewhere.
    """

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: Count | None = None
    echo: bool = False
    return_token_ids: bool = False
    response_format: dict[str, Any] | None = None
    rid: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    priority: int | None = None
    custom_labels: dict[str, str] | None = None
    custom_params: dict[str, Any] | None = None


def parse_completion(
    raw: bytes, unknown: UnknownFields = REFUSED, limits: RequestLimits | None = None
) -> CompletionRequest:
    """Reads a body of `/v1/completions`, as `parse_openai` does."""
    return parse_openai(raw, CompletionRequest, UNSUPPORTED, unknown, limits)


def parse_openai(
    raw: bytes,
    kind: type[Body],
    unsupported: Mapping[str, tuple[Any, ...]],
    unknown: UnknownFields = REFUSED,
    limits: RequestLimits | None = None,
) -> Body:
    """Reads a body of one of OpenAI's routes that generate.

    Args:
        kind: a struct with SamplingFields, `stream_options` and `custom_params`.
        unsupported: fields that are accepted at neutral values only.
        unknown: what becomes of unknown fields.
        limits: of the prompts.

    Raises:
        RequestError: naming the field that is unknown, not supported, too large or of a wrong type.
    """
    body = parse_json_object(raw, limits)
    custom = body.get(CUSTOM_PARAMS)
    if isinstance(custom, dict):
        given = {name: item for name, item in custom.items() if name != RETURN_KEPT}
        if custom.get(RETURN_KEPT):
            raise field_error(f"{CUSTOM_PARAMS}.{RETURN_KEPT}", "goes with /generate only")
        _, names = take_custom_params({CUSTOM_PARAMS: given}, "", unknown)
        body[CUSTOM_PARAMS] = {name: custom[name] for name in names}
        read_speculative(body[CUSTOM_PARAMS], f"{CUSTOM_PARAMS}.", unknown)
    elif is_neutral(custom, ()):
        body[CUSTOM_PARAMS] = None
    read_stream_options(body, unknown)
    read_speculative(body, "", unknown)
    return struct_of(body, kind, unsupported, unknown)


def read_stream_options(body: dict[str, Any], unknown: UnknownFields) -> None:
    """Leaves what is known in the `stream_options` of a body; raises as `parse_openai` does."""
    options = body.get("stream_options")
    if isinstance(options, dict):
        known = StreamOptions.__struct_fields__
        check_known_fields(options, known, {}, "stream_options.", unknown)
        body["stream_options"] = {name: options[name] for name in known if name in options}


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts of a completion: one of texts and ids is set."""

    texts: list[str] | None
    ids: list[list[int]] | None

    def __len__(self) -> int:
        return len(self.texts if self.texts is not None else self.ids or [])


def prompts_of(request: CompletionRequest) -> Prompts:
    """Tells the four forms of `prompt` apart.

    Raises:
        RequestError: if it is empty or mixes forms.
    """
    prompt = request.prompt
    if isinstance(prompt, str):
        return Prompts([prompt], None)
    if prompt and all(isinstance(item, str) for item in prompt):
        return Prompts([item for item in prompt if isinstance(item, str)], None)
    if prompt and all(isinstance(item, int) for item in prompt):
        return Prompts(None, [[item for item in prompt if isinstance(item, int)]])
    if prompt and all(isinstance(item, list) for item in prompt):
        return Prompts(None, [item for item in prompt if isinstance(item, list)])
    raise field_error("prompt", "must be a text, token ids, or a list of texts or of token ids")


def grammar_of_format(value: dict[str, Any] | None) -> Grammar | None:
    """The grammar that `response_format` asks for; None: any text will do.

    Raises:
        RequestError: naming what is wrong.
    """
    kind = "text" if value is None else value.get("type")
    if value is None or kind == "text":
        return None
    if kind == "json_object":
        return Grammar(JSON_SCHEMA, ANY_JSON_OBJECT)
    if kind == STRUCTURAL_TAG:
        return Grammar(STRUCTURAL_TAG, msgspec.json.encode(value).decode())
    if kind != JSON_SCHEMA:
        raise field_error(
            "response_format.type", "must be text, json_object, json_schema or structural_tag"
        )
    inner = value.get("json_schema")
    schema = inner.get("schema") if isinstance(inner, dict) else None
    if not isinstance(schema, dict | bool):
        raise field_error("response_format.json_schema.schema", "must be a JSON schema")
    return Grammar(JSON_SCHEMA, msgspec.json.encode(schema).decode())


def names_of_format(value: dict[str, Any] | None) -> dict[str, str]:
    """Returns the names that a body with this `response_format` gives the grammar."""
    grammar = grammar_of_format(value)
    return {} if grammar is None else {grammar.kind: "response_format"}


def common_body(request: Any) -> dict[str, Any]:
    """Returns the fields that all of OpenAI's routes hand on to `/generate` alike.

    Args:
        request: a struct with SamplingFields, and the fields that are read here.
    """
    sampling = {ours: getattr(request, theirs) for ours, theirs in SAMPLING.items()}
    sampling[CUSTOM_PARAMS] = request.custom_params
    grammar = grammar_of_format(request.response_format)
    if grammar is not None:
        for name in GRAMMAR_FIELDS:
            if sampling.get(name) is not None:
                message = f"stands beside {name}; give one of them"
                raise field_error("response_format", message)
        sampling[grammar.kind] = grammar.text
    return {
        "sampling_params": {name: value for name, value in sampling.items() if value is not None},
        "stream": request.stream,
        "rid": request.rid,
        "cache_salt": request.cache_salt,
        "extra_key": request.extra_key,
        "priority": request.priority,
        "custom_labels": request.custom_labels,
    }


def to_generate_body(request: CompletionRequest, prompts: Prompts) -> dict[str, Any]:
    """The body of `/generate` that a completion is; always a batch."""
    body = common_body(request)
    # Places of the output's tokens depend on those of the prompt.
    body["return_prompt_token_ids"] = request.return_token_ids or request.logprobs is not None
    body["text" if prompts.texts is not None else "input_ids"] = prompts.texts or prompts.ids
    if request.logprobs is not None:
        body |= {
            "return_logprob": True,
            "top_logprobs_num": request.logprobs,
            "return_text_in_logprobs": True,
            "logprob_start_len": 0 if request.echo else -1,
        }
    return body


def possible(top: list[Any] | None) -> list[Any]:
    """Returns the best tokens at a position that can be drawn: a grammar may leave fewer than are
    asked for, and the others have no log-probability that JSON knows."""
    return [entry for entry in top or [] if entry[0] is None or entry[0] > -math.inf]


COMPLETION_NAMES = RENAMED | {"top_logprobs_num": "logprobs", "text": "prompt"}
COMPLETION_NAMES |= {"input_ids": "prompt"}


def in_openai_terms(
    error: RequestError, names: Mapping[str, str] = COMPLETION_NAMES
) -> RequestError:
    """An error of `/generate` with the name that the field has in OpenAI's body.

    Args:
        names: fields of `/generate` that the route calls otherwise, to what it calls them.
    """
    field = error.field
    if field is None:
        return error
    ours = field.removeprefix("sampling_params.")
    head, bracket, rest = ours.partition("[")
    theirs = names.get(head, head) + bracket + rest
    message = error.message.replace(field, theirs, 1).replace("sampling_params.", "")
    for our_name, their_name in RENAMED.items():
        message = message.replace(our_name, their_name)
    return error.in_terms(theirs, message)
