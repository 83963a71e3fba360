"""The settings of chats, from the server's flags and the model's folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.openai.chat_protocol import RESERVED
from sglang.srt.function_call.formats import CALL_FORMATS, CallFormat
from sglang.srt.model_config import resolve_model_path
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS, ReasoningFormat
from sglang.srt.parser.template_files import (
    FLAG,
    NAME_FLAG,
    TemplateFileError,
    TemplateFiles,
    find_templates,
)
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")


@dataclass(frozen=True)
class ChatSettings:
    """The settings by which chats are rendered and answers divided.

    Attributes:
        calls: None: functions cannot be called.
        reasoning: None: what the model thinks is content.
        template_kwargs: variables for templates, where a chat does not say otherwise.
    """

    templates: ChatTemplates
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)


def chat_settings_of(args: ServerArgs) -> ChatSettings:
    """The settings of a server.

    Raises:
        LaunchError: if the file of --chat-template cannot be used, the model has no template of
            the name that is wanted, a parser has no such name, or the variables of templates are
            no object.
    """
    return ChatSettings(
        ChatTemplates(_template_files(args)),
        _named("--tool-call-parser", args.tool_call_parser, CALL_FORMATS),
        _named("--reasoning-parser", args.reasoning_parser, REASONING_FORMATS),
        _template_kwargs(args.default_chat_template_kwargs),
    )


def _template_files(args: ServerArgs) -> TemplateFiles:
    folder = Path(args.tokenizer_path or resolve_model_path(args.model_path))
    name = args.hf_chat_template_name
    if name is not None and args.chat_template is not None:
        raise LaunchError(f"{NAME_FLAG}: chooses one of the model's templates; leave out {FLAG}.")
    try:
        files = find_templates(folder, args.chat_template)
    except TemplateFileError as error:
        raise LaunchError(f"{FLAG}: {error}.") from None
    try:
        return files if name is None else files.with_only(name)
    except TemplateFileError as error:
        raise LaunchError(f"{NAME_FLAG}: {error}.") from None


def _template_kwargs(text: str | None) -> dict[str, Any]:
    """The variables of a flag's JSON."""
    flag = "--default-chat-template-kwargs"
    try:
        found = msgspec.json.decode(text or "{}")
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise LaunchError(f"{flag}: {error}; give a JSON object in quotes.") from None
    if not isinstance(found, dict):
        raise LaunchError(f"{flag}: must be a JSON object, such as '{{\"name\": true}}'.")
    for name in found.keys() & RESERVED:
        raise LaunchError(f"{flag}: {name} is set by the server; leave it out.")
    return found


def _named(flag: str, name: str | None, known: Mapping[str, T]) -> T | None:
    if name is not None and name not in known:
        names = ", ".join(known)
        raise LaunchError(f"{flag}: there is no {name!r}; take one of {names}, or leave it out.")
    return None if name is None else known[name]
