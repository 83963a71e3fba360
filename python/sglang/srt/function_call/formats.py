"""The formats in which models write calls of functions. A new format is an entry of
CALL_FORMATS."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# May stand between a name and its object, the first with an id after it.
CALL_ID_MARK = "[CALL_ID]"
ARGUMENTS_MARK = "[ARGS]"


@dataclass(frozen=True)
class CallFormat:
    """Calls as JSON objects with a name and arguments, after a marker.

    Grammars hold calls to the form that templates write. Outputs are read more liberally: calls
    after a marker may have any separator or none, and be in a list or a fence.

    Attributes:
        marker: begins calls.
        is_special: the marker is a special token, which texts do not show unless they are told to.
        closing: may follow a call.
        separator: stands between calls after one marker.
        in_list: the calls after a marker are a JSON list.
        named: a name may stand before the object, which then holds the arguments alone.
        is_bare: a call may stand alone, without the marker, if its name is known.
        ends: special tokens that end outputs: after a call, or at the very end, no content.
        arguments: the key of the arguments, as templates tell the model to write it.
        id_chars: length of an id, where templates ask for one.
    """

    marker: str
    is_special: bool = False
    closing: str = ""
    separator: str = ""
    in_list: bool = False
    named: bool = False
    is_bare: bool = False
    ends: tuple[str, ...] = ()
    arguments: str = "arguments"
    id_chars: int = 0


_HERMES = CallFormat(marker="<tool_call>", closing="</tool_call>")
CALL_FORMATS: Mapping[str, CallFormat] = {
    "hermes": _HERMES,
    "qwen": _HERMES,
    "qwen25": _HERMES,
    "llama3": CallFormat(
        marker="<|python_tag|>",
        is_special=True,
        separator=";",
        is_bare=True,
        ends=("<|eom_id|>", "<|eot_id|>"),
        arguments="parameters",
    ),
    "mistral": CallFormat(
        marker="[TOOL_CALLS]",
        is_special=True,
        in_list=True,
        named=True,
        ends=("</s>",),
        id_chars=9,
    ),
}
