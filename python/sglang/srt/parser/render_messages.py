"""The messages between the front end and the process that renders chat templates."""

from __future__ import annotations

from typing import Any

import msgspec


class RenderSetup(msgspec.Struct, kw_only=True):
    """The first message: the templates by name, and what a chat may take."""

    templates: dict[str, str]
    max_chars: int
    max_seconds: int
    max_memory_mib: int


class RenderRequest(msgspec.Struct, kw_only=True):
    """A chat for the template of this name.

    Attributes:
        is_turn: only the end of the prompt is wanted, after all messages that are over.
    """

    template: str
    variables: dict[str, Any]
    continue_final_message: bool = False
    is_turn: bool = False


class RenderReply(msgspec.Struct, kw_only=True):
    """The prompt, or why there is none."""

    text: str | None = None
    error: str | None = None
