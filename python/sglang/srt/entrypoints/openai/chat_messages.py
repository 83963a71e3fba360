"""Messages and tools of a chat, checked, in the form that chat templates read."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.tool_choice import tool_choice_of
from sglang.srt.frontend.body_parsing import check_known_fields, convert_fields
from sglang.srt.frontend.errors import field_error, shorten
from sglang.srt.function_call.call_tags import HeldFunction
from sglang.srt.sampling.json_schemas import without_annotations, without_nulls

MAX_TOOLS = 1024
MAX_ENTRIES = 16_384  # messages of a chat, and parts and calls of one message
TOOL_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")


class FunctionOfCall(msgspec.Struct, kw_only=True):
    name: str
    arguments: Any = None


class ToolCall(msgspec.Struct, kw_only=True):
    """A call that the assistant made earlier."""

    function: FunctionOfCall
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None


class Part(msgspec.Struct, kw_only=True):
    """A part of a content; only texts are read."""

    type: Annotated[str, Meta(extra_json_schema={"enum": ["text"]})]
    text: str | None = None


class Message(msgspec.Struct, kw_only=True):
    """A message. The last fields are OpenAI's own, which clients send back as they got them.

    Attributes:
        reasoning_content, reasoning: two names for what the assistant thought.
        tool_call_id: the call that a tool's message answers.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


_NEUTRAL: dict[str, tuple[Any, ...]] = dict.fromkeys(
    ("refusal", "annotations", "audio", "function_call", "parsed", "prefix"), ()
)


class Function(msgspec.Struct, kw_only=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: Literal["function"]
    function: Function


@dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The functions of a chat and how they are to be used.

    Attributes:
        tools: as the client gave them, without nulls in parameters; None if the model is not to
            know of any.
        names: of the functions that may be called.
        must_call: the answer has to be a call.
        max_calls: None for any number.
        held: functions whose calls a grammar holds: those that may be called if one must, else
            all that may be called if one is strict, not all may, or the content has a form.
        strict: where the client asks for the first strict one.
    """

    tools: list[dict[str, Any]] | None = None
    names: frozenset[str] = field(default_factory=frozenset)
    must_call: bool = False
    max_calls: int | None = None
    held: tuple[HeldFunction, ...] = ()
    strict: str | None = None


def messages_of(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """The messages as templates read them: no nulls, arguments of calls as objects.

    Raises:
        RequestError: naming the entry that is wrong.
    """
    if not request.messages:
        raise field_error("messages", "must hold at least one message")
    _check_number("messages", request.messages)
    found = [_message(item, f"messages[{i}]") for i, item in enumerate(request.messages)]
    last = found[-1]
    if request.continue_final_message and (last["role"] != "assistant" or not last.get("content")):
        raise field_error(
            "continue_final_message", "the last message must be the assistant's, with a text"
        )
    return found


def _message(item: dict[str, Any], name: str) -> dict[str, Any]:
    check_known_fields(item, Message.__struct_fields__, _NEUTRAL, f"{name}.")
    given = {key: item[key] for key in Message.__struct_fields__ if item.get(key) is not None}
    message = convert_fields(given, Message, f"{name}.")
    reasoning = message.reasoning_content or message.reasoning
    has_other = message.role == "assistant" and (message.tool_calls or reasoning)
    if message.content is None and not has_other and message.role != "tool":
        raise field_error(f"{name}.content", "is missing; give a text or a list of text parts")
    role = "system" if message.role == "developer" else message.role
    found: dict[str, Any] = {"role": role}
    if message.content is not None:
        found["content"] = _content(message.content, f"{name}.content")
    elif not message.tool_calls:
        found["content"] = ""
    optional = {
        "name": message.name,
        "reasoning_content": reasoning,
        "tool_call_id": message.tool_call_id,
    }
    found |= {key: value for key, value in optional.items() if value is not None}
    if message.tool_calls:
        _check_number(f"{name}.tool_calls", message.tool_calls)
        found["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return found


def _check_number(name: str, entries: list[Any]) -> None:
    if len(entries) > MAX_ENTRIES:
        raise field_error(name, f"must have at most {MAX_ENTRIES} entries")


def _content(content: str | list[Part], name: str) -> str | list[dict[str, Any]]:
    if isinstance(content, str):
        return content
    if not content:
        return ""
    _check_number(name, content)
    for index, part in enumerate(content):
        if part.type != "text":
            raise field_error(
                f"{name}[{index}].type",
                f"{shorten(part.type)} is not supported: this server reads text alone",
            )
        if part.text is None:
            raise field_error(f"{name}[{index}].text", "is missing")
    return [{"type": "text", "text": part.text} for part in content]


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """A call with its arguments as an object, which is what templates put into JSON. A model may
    have written something else, and clients send it back: that is an empty object."""
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = msgspec.json.decode(arguments)
        except (msgspec.DecodeError, UnicodeError, RecursionError):
            arguments = None
    if not isinstance(arguments, dict):
        arguments = {}
    found = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return found if call.id is None else {"id": call.id, **found}


def tool_use_of(request: ChatCompletionRequest) -> ToolUse:
    """Returns the client's wishes about tools.

    Raises:
        RequestError: naming what is wrong.
    """
    if len(request.tools) > MAX_TOOLS:
        raise field_error("tools", f"must have at most {MAX_TOOLS} entries")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(request.tools)]
    names = frozenset(function.name for function in functions)
    choice = tool_choice_of(request.tool_choice, names)
    if not names or choice is None:
        return ToolUse()
    strict = next((i for i, function in enumerate(functions) if function.strict), None)
    may_have_form = not choice.must_call and bool(request.content_grammars)
    is_held = choice.must_call or choice.is_part or strict is not None or may_have_form
    held = [
        HeldFunction(function.name, _arguments_schema(function, choice.must_call, place), place)
        for i, function in enumerate(functions)
        if is_held and function.name in choice.names
        for place in (f"tools[{i}].function.parameters",)
    ]
    return ToolUse(
        tools=[_without_nulls(tool) for tool in request.tools],
        names=choice.names,
        must_call=choice.must_call,
        max_calls=1 if choice.is_single or not request.parallel_tool_calls else None,
        held=tuple(held),
        strict=None if strict is None else f"tools[{strict}].function.strict",
    )


def _arguments_schema(function: Function, must_call: bool, place: str) -> dict[str, Any]:
    """The schema that the arguments of a call are held to; they are an object in any case."""
    if not must_call and not function.strict:
        return {"type": "object"}
    if function.parameters is None:
        return {"type": "object", "additionalProperties": False}
    kinds = function.parameters.get("type") or "object"
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        raise field_error(f"{place}.type", "must be object, as the arguments of a call are one")
    return {**without_annotations(function.parameters), "type": "object"}


def _without_nulls(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool as templates read it: no nulls in its parameters."""
    function = tool["function"]
    if function.get("parameters") is None:
        return tool
    return {**tool, "function": {**function, "parameters": without_nulls(function["parameters"])}}


def _function(tool: dict[str, Any], name: str) -> Function:
    """A tool's function, checked."""
    function = convert_fields(tool, Tool, f"{name}.").function
    if TOOL_NAME.fullmatch(function.name) is None:
        raise field_error(
            f"{name}.function.name", "must be 1 to 128 letters, digits and any of _ . : / -"
        )
    return function
