"""Reads `tool_choice`: which of the tools may be called, and whether one must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from sglang.srt.frontend.errors import field_error

FORMS = (
    'must be none, auto, required, {"type": "function", "function": {"name": NAME}}, or'
    ' {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
)


class ToolChoice(NamedTuple):
    """The functions that may be called, and how.

    Attributes:
        names: of those that may be.
        must_call: the answer has to be a call.
        is_single: there is one call at most.
        is_part: some tools may not be called.
    """

    names: frozenset[str]
    must_call: bool = False
    is_single: bool = False
    is_part: bool = False


def tool_choice_of(choice: Any, names: frozenset[str]) -> ToolChoice | None:
    """Reads a client's choice; None: no tool is to be used.

    Args:
        names: of the functions of `tools`.

    Raises:
        RequestError: naming what is wrong.
    """
    match choice:
        case "none":
            return None
        case None | "auto":
            return ToolChoice(names)
        case "required":
            return ToolChoice(_some(names), must_call=True)
        case {"type": "function", "function": {"name": str(name)}}:
            _check_known(name, "tool_choice.function.name", _some(names))
            only = frozenset((name,))
            return ToolChoice(only, must_call=True, is_single=True, is_part=only != names)
        case {"type": "allowed_tools", "allowed_tools": inner} if isinstance(inner, dict):
            return _allowed(inner, "tool_choice.allowed_tools", _some(names))
        case {"type": "allowed_tools"}:
            return _allowed(choice, "tool_choice", _some(names))
        case _:
            raise field_error("tool_choice", FORMS)


def _allowed(allowed: Mapping[str, Any], place: str, names: frozenset[str]) -> ToolChoice:
    mode, tools = allowed.get("mode"), allowed.get("tools")
    if mode not in ("auto", "required"):
        raise field_error(f"{place}.mode", "must be auto or required")
    if not isinstance(tools, list) or not tools:
        raise field_error(f"{place}.tools", "must be a list of functions, with one at least")
    only = frozenset(_name_of(tool, f"{place}.tools[{i}]", names) for i, tool in enumerate(tools))
    return ToolChoice(only, must_call=mode == "required", is_part=only != names)


def _name_of(tool: Any, place: str, names: frozenset[str]) -> str:
    match tool:
        case {"type": "function", "function": {"name": str(name)}}:
            _check_known(name, f"{place}.function.name", names)
        case {"type": "function", "name": str(name)}:
            _check_known(name, f"{place}.name", names)
        case _:
            raise field_error(place, 'must be {"type": "function", "function": {"name": NAME}}')
    return name


def _check_known(name: str, place: str, names: frozenset[str]) -> None:
    if name not in names:
        raise field_error(place, "is no function of tools")


def _some(names: frozenset[str]) -> frozenset[str]:
    if not names:
        raise field_error("tool_choice", "asks for a call, and there are no tools")
    return names
