"""Renders a chat template as transformers does. It runs in the process of `render_process.py`: a
template is foreign code, and what it may take is limited there.

The environment is Jinja's ImmutableSandboxedEnvironment with what Hugging Face's templates expect
beside Jinja's own: `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `break` and
`continue`, and `{% generation %}`, which changes nothing.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Stand after texts of messages while they are rendered, to be found again: of the one that is
# continued, and of those that are over.
END_MARK = f"{secrets.token_hex(8).upper()} "
TURN_MARK = secrets.token_hex(8).upper()
PROBE_TEXT = "3f1c probe"


class RenderingError(ValueError):
    """A chat that the template does not render; the message says why."""


class Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what trainers learn from; here its content is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - Jinja's own attribute

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        """The block as a call, since what it assigns stays inside, as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render")
        return jinja2.nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render(self, caller: Any) -> Any:
        return caller()


class TemplateDict:
    """`dict` of templates: the calls, and nothing of the class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """`dict.fromkeys`."""
        return dict.fromkeys(*args)


def make_environment() -> jinja2.sandbox.ImmutableSandboxedEnvironment:
    """The sandbox that templates are compiled for."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, jinja2.ext.loopcontrols],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = TemplateDict()
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(layout: str) -> str:
    return datetime.now().strftime(layout)


class ChatTemplate:
    """A compiled template.

    Args:
        max_chars: of an output.

    Raises:
        RenderingError: if it cannot be compiled.
    """

    def __init__(self, source: str, max_chars: int) -> None:
        self._max_chars = max_chars
        try:
            self._template = make_environment().from_string(source)
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            raise RenderingError(f"it cannot be compiled: {describe(error)}") from None
        self._takes_parts: bool | None = None

    def render(self, variables: dict[str, Any], continue_final_message: bool = False) -> str:
        """The prompt of a chat.

        Args:
            variables: `messages`, `tools`, `add_generation_prompt` and whatever else it may read.
            continue_final_message: end where the last message's text ends.

        Raises:
            RenderingError: if the template fails, or its output is too long.
        """
        messages = self._in_its_form(variables)
        if not continue_final_message:
            return self._output({**variables, "messages": messages})
        marked = [*messages[:-1], _marked(messages[-1], END_MARK)]
        return _cut(self._output({**variables, "messages": marked}))

    def render_turn(self, variables: dict[str, Any], continue_final_message: bool = False) -> str:
        """The end of the prompt, after all messages that are over: what begins the assistant's
        message, or that message as far as it goes. Takes and raises what `render` does.
        """
        messages = self._in_its_form(variables)
        num_over = len(messages)
        is_answered = bool(messages) and messages[-1]["role"] == "assistant"
        if is_answered and not variables.get("add_generation_prompt"):
            num_over -= 1
        over = [_marked(message, TURN_MARK) for message in messages[:num_over]]
        marked = {**variables, "messages": [*over, *messages[num_over:]]}
        return self.render(marked, continue_final_message).rpartition(TURN_MARK)[2]

    def _output(self, variables: dict[str, Any]) -> str:
        pieces, room = [], self._max_chars
        try:
            for piece in self._template.generate(**variables):
                room -= len(piece)
                if room < 0:
                    raise RenderingError(f"its output has more than {self._max_chars} characters")
                pieces.append(piece)
        except (RenderingError, MemoryError):
            raise
        except Exception as error:  # noqa: BLE001 - foreign code may raise anything
            raise RenderingError(describe(error)) from None
        return "".join(pieces)

    def _in_its_form(self, variables: dict[str, Any]) -> list[dict[str, Any]]:
        """Messages whose contents are lists of text parts as texts, unless it reads such lists."""
        messages = [_with_reasoning(message) for message in variables["messages"]]
        if not any(isinstance(message.get("content"), list) for message in messages):
            return messages
        if self._takes_parts is None:
            self._takes_parts = self._renders_parts_as_texts(variables)
        if self._takes_parts:
            return messages
        return [_with_text(message) for message in messages]

    def _renders_parts_as_texts(self, variables: dict[str, Any]) -> bool:
        """Tells whether a list of one text part gives what its text gives."""
        outputs = []
        for content in (PROBE_TEXT, [{"type": "text", "text": PROBE_TEXT}]):
            probe = [{"role": "user", "content": content}]
            try:
                outputs.append(self._output({**variables, "messages": probe, "tools": None}))
            except RenderingError:
                return False
        return outputs[0] == outputs[1]


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """The reasoning of a message under both names that templates read."""
    reasoning = message.get("reasoning_content")
    return message if reasoning is None else {"thinking": reasoning, **message}


def _with_text(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": " ".join(_texts(content))}


def _texts(parts: Iterable[dict[str, Any]]) -> list[str]:
    return [part["text"] for part in parts]


def _marked(message: dict[str, Any], mark: str) -> dict[str, Any]:
    """The message with a mark after its text, if it has one."""
    content = message.get("content")
    if isinstance(content, list):
        *others, last = content
        return {**message, "content": [*others, {**last, "text": last["text"] + mark}]}
    return message if content is None else {**message, "content": f"{content}{mark}"}


def _cut(output: str) -> str:
    """The output up to END_MARK; its last space tells whether the template strips texts."""
    place = output.rfind(END_MARK.strip())
    if place < 0:
        raise RenderingError("it leaves out the last message, which can then not be continued")
    is_whole = output.startswith(END_MARK, place)
    return output[:place] if is_whole else output[:place].rstrip()


def describe(error: Exception) -> str:
    """One line about an error of a template."""
    text = " ".join(str(error).split())
    if isinstance(error, jinja2.TemplateSyntaxError):
        return f"line {error.lineno}: {text}"
    if isinstance(error, jinja2.TemplateError):
        return text or type(error).__name__
    return f"{type(error).__name__}: {text}"
