"""Bodies of OpenAI's routes, and their translation to `/generate`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from sglang.srt.frontend.body_parsing import RequestError, field_error
from sglang.srt.sglang_surface import ANYTHING, neutral_fields

# Our names of sampling parameters that OpenAI's body calls otherwise.
RENAMED = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "n",
    "stop",
    "stop_token_ids",
    "stop_regex",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
)
# Fields that are accepted at neutral values only; the last two are OpenAI's, for its own records.
MISSING = neutral_fields("/v1/completions") | {"metadata": (ANYTHING,), "store": (ANYTHING,)}


class StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """What a stream says of usage; null is false.

    Attributes:
        include_usage: a last chunk with the usage of the whole request.
        continuous_usage_stats: each chunk has the usage of its choice so far.
    """

    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CompletionRequest(msgspec.Struct, kw_only=True):
    """Body of `/v1/completions`.

    Attributes:
        prompt: a text, token ids, or a list of either.
        logprobs: best tokens per position; any number asks for log-probabilities.
        echo: put the prompt before each output, and its log-probabilities too.
    """

    prompt: str | list[str | int | list[int]]
    model: str | None = None
    max_tokens: int = 16
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: int | None = None
    echo: bool = False
    stop: str | list[str] | None = None
    seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    rid: str | list[str] | None = None
    cache_salt: str | list[str] | None = None
    extra_key: str | list[str] | None = None
    priority: int | None = None
    custom_labels: dict[str, str] | None = None


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


def to_generate_body(request: CompletionRequest, prompts: Prompts) -> dict[str, Any]:
    """The body of `/generate` that a completion is; always a batch."""
    sampling: dict[str, Any] = {
        name: getattr(request, name) for name in SAMPLING if getattr(request, name) is not None
    }
    sampling["max_new_tokens"] = request.max_tokens
    if request.min_tokens is not None:
        sampling["min_new_tokens"] = request.min_tokens
    if request.seed is not None:
        sampling["sampling_seed"] = request.seed
    body: dict[str, Any] = {
        "sampling_params": sampling,
        "stream": request.stream,
        "rid": request.rid,
        "cache_salt": request.cache_salt,
        "extra_key": request.extra_key,
        "priority": request.priority,
        "custom_labels": request.custom_labels,
    }
    body["text" if prompts.texts is not None else "input_ids"] = prompts.texts or prompts.ids
    if request.logprobs is not None:
        body |= {
            "return_logprob": True,
            "top_logprobs_num": request.logprobs,
            "return_text_in_logprobs": True,
            "logprob_start_len": 0 if request.echo else -1,
        }
    return body


def in_openai_terms(error: RequestError) -> RequestError:
    """An error of `/generate` with the name that the field has in OpenAI's body."""
    field = error.field
    if field is None:
        return error
    ours = field.removeprefix("sampling_params.")
    names = {ours_name: theirs for theirs, ours_name in RENAMED.items()}
    names |= {"top_logprobs_num": "logprobs", "text": "prompt", "input_ids": "prompt"}
    head, bracket, rest = ours.partition("[")
    theirs = names.get(head, head) + bracket + rest
    return RequestError(theirs, error.message.replace(field, theirs, 1), error.status_code)
