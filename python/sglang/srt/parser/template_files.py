"""Finds the chat templates of a model: in its folder, or in the file of `--chat-template`."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from sglang.srt.model_files import TEMPLATE_FOLDERS
from sglang.srt.plain_files import UnreadableFileError, read_text
from sglang.srt.tokenizer_config import read_tokenizer_config, special_tokens

FLAG, NAME_FLAG = "--chat-template", "--hf-chat-template-name"
MAX_TEMPLATE_BYTES = 1024 * 1024
MAX_TEMPLATES = 32
DEFAULT, TOOL_USE = "default", "tool_use"


class TemplateFileError(ValueError):
    """A file that cannot be used; the message names it."""


@dataclass(frozen=True)
class TemplateFiles:
    """The templates of a model by name; there may be none.

    Attributes:
        tokens: special tokens under the names that templates know, such as `bos_token`.
        problem: why there is no template, and the remedy.
        only: the template of all chats.
    """

    templates: dict[str, str] = field(default_factory=dict)
    tokens: dict[str, str] = field(default_factory=dict)
    problem: str = ""
    only: str | None = None

    def with_only(self, name: str) -> TemplateFiles:
        """These, with one for all chats.

        Raises:
            TemplateFileError: if there is none of that name.
        """
        if name not in self.templates:
            names = ", ".join(sorted(self.templates)) or self.problem
            raise TemplateFileError(f"the model has no chat template {name!r}; there are: {names}")
        return replace(self, only=name)

    def choose(self, has_tools: bool) -> str | None:
        """The name of the template for a chat; None if there is none for it."""
        if self.only is not None:
            return self.only
        names = (TOOL_USE, DEFAULT) if has_tools else (DEFAULT,)
        return next((name for name in names if name in self.templates), None)


def find_templates(folder: Path, flag: str | None) -> TemplateFiles:
    """The templates of a model's folder, or the one in the file that the flag names.

    As in transformers, files of their own (`chat_template.jinja`, and named ones in
    TEMPLATE_FOLDERS) go before the entry `chat_template` of tokenizer_config.json.

    Raises:
        TemplateFileError: if the flag names no file that can be read. A model's own files never
            do: their problem is told to who sends a chat.
    """
    try:
        config = read_tokenizer_config(folder)
        tokens = special_tokens(config)
    except UnreadableFileError as error:
        config, tokens, broken = {}, {}, str(error)
    else:
        broken = ""
    if flag is not None:
        return TemplateFiles({DEFAULT: _read(Path(flag).expanduser())}, tokens)
    try:
        templates = _files(folder) or _entries(config.get("chat_template"))
    except TemplateFileError as error:
        return TemplateFiles({}, tokens, f"{error}; give another with {FLAG} FILE")
    if templates:
        names = ", ".join(sorted(templates))
        return TemplateFiles(
            templates,
            tokens,
            f"of the model's chat templates ({names}) none is the default; choose one"
            f" with {NAME_FLAG} NAME, or give one with {FLAG} FILE",
        )
    reason = broken or "the model has no chat template"
    return TemplateFiles({}, tokens, f"{reason}; start the server with {FLAG} FILE")


def _files(folder: Path) -> dict[str, str]:
    """The templates that are files of their own."""
    found = {}
    if (folder / "chat_template.jinja").is_file():
        found[DEFAULT] = folder / "chat_template.jinja"
    others = (path for name in TEMPLATE_FOLDERS for path in sorted((folder / name).glob("*.jinja")))
    for path in itertools.islice(others, MAX_TEMPLATES):
        found[path.stem] = path
    return {name: _read(path) for name, path in found.items()}


def _entries(entry: Any) -> dict[str, str]:
    """The templates of an entry of tokenizer_config.json: a text, or a list of named ones."""
    if entry is None:
        return {}
    if isinstance(entry, str):
        return {DEFAULT: _checked(entry)}
    rule = "chat_template of tokenizer_config.json is no text and no list of names and templates"
    if not isinstance(entry, list) or len(entry) > MAX_TEMPLATES:
        raise TemplateFileError(rule)
    found = {}
    for item in entry:
        match item:
            case {"name": str(name), "template": str(template)}:
                found[name] = _checked(template)
            case _:
                raise TemplateFileError(rule)
    return found


def _checked(template: str) -> str:
    if len(template) > MAX_TEMPLATE_BYTES:
        raise TemplateFileError(f"the chat template has more than {MAX_TEMPLATE_BYTES} characters")
    return template


def _read(path: Path) -> str:
    try:
        return read_text(path, MAX_TEMPLATE_BYTES)
    except UnreadableFileError as error:
        raise TemplateFileError(str(error)) from None
