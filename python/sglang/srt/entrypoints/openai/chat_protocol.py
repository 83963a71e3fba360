"""Body of `/v1/chat/completions`, and its translation to `/generate`."""

from __future__ import annotations

from typing import Any

import msgspec

from sglang.srt.entrypoints.openai.protocol import (
    RECORDS,
    RENAMED,
    Count,
    SamplingFields,
    StreamOptions,
    common_body,
    grammar_of_format,
    names_of_format,
)
from sglang.srt.frontend.errors import RequestError, field_error
from sglang.srt.frontend.generate_body import TokenIds
from sglang.srt.sampling.grammar import EBNF, JSON_SCHEMA, REGEX, STRUCTURAL_TAG, Grammar
from sglang.srt.sglang_surface import ANYTHING, neutral_fields

# OpenAI's, for its own records, beside those that completions have too.
_RECORDS = RECORDS | dict.fromkeys(
    ("user", "service_tier", "safety_identifier", "prompt_cache_key"), (ANYTHING,)
)
# OpenAI's, without an effect here at these values.
_OF_OPENAI: dict[str, tuple[Any, ...]] = {
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "functions": (),
    "function_call": ("none",),
    "web_search_options": (),
    "verbosity": (),
}
UNSUPPORTED = neutral_fields("/v1/chat/completions") | _RECORDS | _OF_OPENAI
# What templates get from this module; a client's own variables have other names.
RESERVED = frozenset(
    ("messages", "tools", "add_generation_prompt", "continue_final_message", "chat_template")
)
_PROMPT, _ONE_OF_BATCH = "input_ids", "input_ids[0]"  # the one prompt is sent as a batch


class ChatCompletionRequest(SamplingFields, msgspec.Struct, kw_only=True):
    """Body of `/v1/chat/completions`, in addition to the sampling parameters.

    Attributes:
        messages: `chat_messages.Message` says what each may hold.
        max_completion_tokens, max_tokens: two names of one number; as many as fit by default.
        logprobs: whether log-probabilities are wanted.
        top_logprobs: best tokens per position.
        tools: functions that the model may call (with --tool-call-parser).
        tool_choice: none, auto, required, a function by name, or allowed_tools.
        parallel_tool_calls: false: one call at most.
        response_format: text, json_object, json_schema or structural_tag: the content's form.
        continue_final_message: the answer goes on with the last message, of the assistant.
        add_generation_prompt: the template begins the assistant's message; by default unless a
            message is continued.
        chat_template_kwargs: more variables for the template.
        reasoning_effort: a variable for the template, which may not read it.
        separate_reasoning: put reasoning into `reasoning_content` (with --reasoning-parser).
        stream_reasoning: false: send it in one piece.
        input_ids: the prompt as token ids; messages are then not looked at.
        return_prompt_token_ids: each choice gets `prompt_token_ids`.
        return_token_ids: each choice gets these and `response_token_ids`.
        return_meta_info: each choice gets the `meta_info` of `/generate`.
        custom_params: may hold `mtp_*`, `speculative` and `deterministic`, for routers that drop
            these elsewhere.
    """

    messages: list[dict[str, Any]]
    model: str | None = None
    max_completion_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: list[dict[str, Any]] = []
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool = True
    response_format: dict[str, Any] | None = None
    continue_final_message: bool = False
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] = {}
    reasoning_effort: str | int | float | None = None
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    input_ids: TokenIds | None = None
    return_prompt_token_ids: bool = False
    return_token_ids: bool = False
    return_meta_info: bool = False
    rid: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    priority: int | None = None
    custom_labels: dict[str, str] | None = None
    custom_params: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """The rules that types cannot say.

        Raises:
            RequestError: naming the field.
        """
        if self.top_logprobs and not self.logprobs:
            raise field_error("top_logprobs", "needs logprobs: true")
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise field_error(
                "max_completion_tokens", "is another number than max_tokens; give one of them"
            )
        if self.continue_final_message and self.add_generation_prompt:
            raise field_error(
                "add_generation_prompt", "begins a new message; not with continue_final_message"
            )
        for name in self.chat_template_kwargs:
            if name in RESERVED:
                raise field_error(
                    f"chat_template_kwargs.{name}", "is set by the server; leave it out"
                )
        others = (name for name, form in self.content_grammars if form.kind != JSON_SCHEMA)
        other = next(others, None)
        if other is not None and self.tools and self.tool_choice != "none":
            raise field_error(
                other,
                "leaves no room for calls of tools; give a JSON schema, beside which there may be"
                ' calls, or set tool_choice "none"',
            )

    @property
    def max_new_tokens(self) -> int | None:
        """The number by either of its names."""
        other = self.max_completion_tokens
        return self.max_tokens if other is None else other

    @property
    def content_grammars(self) -> list[tuple[str, Grammar]]:
        """Gives what the content must match, and the field that says so; two are refused later."""
        form = grammar_of_format(self.response_format)
        texts = {
            JSON_SCHEMA: self.json_schema,
            REGEX: self.regex,
            EBNF: self.ebnf,
            STRUCTURAL_TAG: self.structural_tag,
        }
        found = [] if form is None else [("response_format", form)]
        return found + [(kind, Grammar(kind, text)) for kind, text in texts.items() if text]

    @property
    def gives_prompt_ids(self) -> bool:
        return self.return_prompt_token_ids or self.return_token_ids

    @property
    def begins_message(self) -> bool:
        """Tells whether the template begins the assistant's message."""
        if self.add_generation_prompt is None:
            return not self.continue_final_message
        return self.add_generation_prompt


def to_generate_body(
    request: ChatCompletionRequest, shows_special: bool, calls: dict[str, Any] | None = None
) -> dict[str, Any]:
    """The body of `/generate` that a chat is, with a prompt that stands for the real one.

    Args:
        calls: the structural tag that holds calls of functions, and the content's form if it may
            be content too.
        shows_special: special tokens are needed in the text, whatever the client says.
    """
    body = common_body(request)
    params = body["sampling_params"]
    params.pop("max_new_tokens", None)
    if request.max_new_tokens is not None:
        params["max_new_tokens"] = request.max_new_tokens
    if calls is not None:
        params.pop(JSON_SCHEMA, None)
        params[STRUCTURAL_TAG] = msgspec.json.encode(calls).decode()
    if shows_special:
        params["skip_special_tokens"] = False
    body["input_ids"] = [request.input_ids or [0]]
    if request.logprobs:
        body |= {
            "return_logprob": True,
            "top_logprobs_num": request.top_logprobs or 0,
            "return_text_in_logprobs": True,
        }
    return body


def names_in(request: ChatCompletionRequest) -> dict[str, str]:
    """Fields of `/generate` to what this body calls them."""
    prompt = "messages" if request.input_ids is None else "input_ids"
    length = "max_tokens" if request.max_completion_tokens is None else "max_completion_tokens"
    return RENAMED | {
        "input_ids": prompt,
        "max_new_tokens": length,
        "top_logprobs_num": "top_logprobs",
        **names_of_format(request.response_format),
    }


def without_batch(error: RequestError) -> RequestError:
    """An error without the place of the one prompt in its batch."""
    field = error.field
    if field is None or not field.startswith(_ONE_OF_BATCH):
        return error
    plain = _PROMPT + field.removeprefix(_ONE_OF_BATCH)
    return error.in_terms(plain, error.message.replace(field, plain, 1))
