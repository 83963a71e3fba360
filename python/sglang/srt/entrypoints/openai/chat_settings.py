"""What the server's flags and the model's folder say of chats."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.function_call.formats import CALL_FORMATS, CallFormat
from sglang.srt.model_config import resolve_model_path
from sglang.srt.parser.chat_templates import ChatTemplates
from sglang.srt.parser.reasoning_parser import REASONING_FORMATS, ReasoningFormat
from sglang.srt.parser.template_files import FLAG, TemplateFileError, find_templates
from sglang.srt.server_args import ServerArgs

T = TypeVar("T")


@dataclass(frozen=True)
class ChatSettings:
    """How chats are rendered, and how answers are divided.

    Attributes:
        calls: None: functions cannot be called.
        reasoning: None: what the model thinks is content.
    """

    templates: ChatTemplates
    calls: CallFormat | None = None
    reasoning: ReasoningFormat | None = None


def chat_settings_of(args: ServerArgs) -> ChatSettings:
    """The settings of a server.

    Raises:
        LaunchError: if the file of --chat-template cannot be used, or a parser has no such name.
    """
    folder = Path(args.tokenizer_path or resolve_model_path(args.model_path))
    try:
        files = find_templates(folder, args.chat_template)
    except TemplateFileError as error:
        raise LaunchError(f"{FLAG}: {error}.") from None
    return ChatSettings(
        ChatTemplates(files),
        _named("--tool-call-parser", args.tool_call_parser, CALL_FORMATS),
        _named("--reasoning-parser", args.reasoning_parser, REASONING_FORMATS),
    )


def _named(flag: str, name: str | None, known: Mapping[str, T]) -> T | None:
    if name is not None and name not in known:
        raise LaunchError(f"{flag}: there is no {name!r}; there are {', '.join(known)}.")
    return None if name is None else known[name]
