"""Describes the bodies of OpenAI's routes in `/openapi.json`, beyond the types of their fields."""

from __future__ import annotations

from typing import Any

from sglang.srt.entrypoints.openai.chat_messages import TOOL_NAME, Message, Tool
from sglang.srt.entrypoints.openai.chat_protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.protocol import CompletionRequest
from sglang.srt.entrypoints.openapi_schema import REF, body_of


def _list_of(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": schema, "minItems": 1}


def _object(**properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "required": list(properties), "properties": properties}


_NULL = {"type": "null"}
_TEXT = {"type": "string", "minLength": 1}
_TEXT_OR_NULL = {"anyOf": [_TEXT, _NULL]}
_IDS = _list_of({"type": "integer", "minimum": 0})
_NAMED_FUNCTION = _object(
    type={"const": "function"}, function=_object(name={"type": "string", "minLength": 1})
)
_NAME = {"type": "string", "pattern": f"^{TOOL_NAME.pattern}$"}

COMPLETION_BODY = body_of(
    CompletionRequest,
    takes_others=True,
    more={
        "CompletionRequest": {
            "properties": {
                "prompt": {"anyOf": [_TEXT, _list_of(_TEXT), _IDS, _list_of(_IDS)]},
                "cache_salt": _TEXT_OR_NULL,
                "extra_key": _TEXT_OR_NULL,
            }
        }
    },
)
CHAT_BODY = body_of(
    ChatCompletionRequest,
    refers_to=[Message, Tool],
    takes_others=True,
    more={
        "ChatCompletionRequest": {
            "properties": {
                "messages": {"type": "array", "items": {"$ref": REF.format(name="Message")}},
                "tools": {"type": "array", "items": {"$ref": REF.format(name="Tool")}},
                "tool_choice": {
                    "anyOf": [{"enum": ["none", "auto", "required"]}, _NAMED_FUNCTION, _NULL]
                },
                "response_format": {"anyOf": [_object(type={"const": "text"}), _NULL]},
            },
            "anyOf": [
                {"properties": {"messages": {"minItems": 1}}},
                {"required": ["input_ids"], "properties": {"input_ids": _IDS}},
            ],
        },
        "Message": {
            "anyOf": [
                _object(content={"type": ["string", "array"]}),
                _object(role={"const": "assistant"}, tool_calls={"type": "array", "minItems": 1}),
                _object(role={"const": "assistant"}, reasoning_content=_TEXT),
            ]
        },
        "Function": {"properties": {"name": _NAME}},
    },
)
