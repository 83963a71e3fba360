"""The front end's side of chat templates: renders chats in processes of their own.

A process starts with the first chat that needs it, and ends with this one: it reads end of file.
"""

from __future__ import annotations

import time
from typing import Any

import msgspec

from sglang.srt.framed_process import FramedProcess, ProcessPool
from sglang.srt.parser.render_messages import RenderReply, RenderRequest, RenderSetup
from sglang.srt.parser.template_files import FLAG, TemplateFiles

MODULE = "sglang.srt.parser.render_process"
MAX_CHARS = 16 * 1024 * 1024
MAX_SECONDS = 5  # of a processor, for one chat
MAX_WALL_SECONDS = 30.0  # for a machine that is busy with something else
MAX_MEMORY_MIB = 1024
MAX_PROCESSES = 2
START_SECONDS = 60.0


class TemplateError(ValueError):
    """A chat that cannot be rendered; the message has the reason and, where there is one, the
    remedy."""


class RenderProcess:
    """One process that renders. A failed or abandoned call leaves it ended."""

    def __init__(self, setup: RenderSetup) -> None:
        self._process = FramedProcess(MODULE)
        self._is_new = True
        self._setup = setup

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive

    @property
    def is_stopped(self) -> bool:
        return self._process.is_stopped

    def render(self, request: RenderRequest) -> str:
        """The prompt of a chat; takes as long as it takes, so call it in a thread.

        Raises:
            TemplateError: if the template fails, or takes too much.
        """
        seconds = MAX_WALL_SECONDS
        try:
            messages = [msgspec.msgpack.encode(request)]
        except (OverflowError, RecursionError, ValueError):
            raise TemplateError(
                "the chat is nested too deeply, or holds a number of more than 64 bits"
            ) from None
        if self._is_new:
            messages.insert(0, msgspec.msgpack.encode(self._setup))
            seconds += START_SECONDS
            self._is_new = False
        answer = self._ask(messages, time.monotonic() + seconds)
        if answer is None:
            self.end()
            raise TemplateError(
                "the chat template takes too much time or memory for this chat; give another with"
                f" {FLAG} FILE"
            )
        reply = msgspec.msgpack.decode(answer, type=RenderReply)
        if reply.text is None:
            raise TemplateError(f"the chat template does not take this chat: {reply.error}")
        return reply.text

    def _ask(self, messages: list[bytes], deadline: float) -> bytes | None:
        """The answer; None if there is none by then, or the process ends."""
        try:
            for message in messages:
                self._process.send(message)
            return self._process.receive(deadline)
        except (OSError, EOFError):
            return None

    def end(self) -> None:
        """Ends the process at once; a call that waits for it fails."""
        self._process.end()

    def close(self) -> None:
        """Ends it and frees its pipes, once no call uses them."""
        self._process.close()


class ChatTemplates:
    """Renders chats with a model's templates.

    Args:
        max_processes: that render at a time; other chats wait.
    """

    def __init__(
        self,
        files: TemplateFiles,
        max_processes: int = MAX_PROCESSES,
        max_seconds: int = MAX_SECONDS,
        max_chars: int = MAX_CHARS,
    ) -> None:
        self._files = files
        self._setup = RenderSetup(
            templates=files.templates,
            max_chars=max_chars,
            max_seconds=max_seconds,
            max_memory_mib=MAX_MEMORY_MIB,
        )
        self._processes = ProcessPool(lambda: RenderProcess(self._setup), max_processes)

    @property
    def default(self) -> str | None:
        """The text of the template for chats without tools, if there is one."""
        return self._files.templates.get(self._files.choose(has_tools=False) or "")

    def reads(self, name: str, has_tools: bool) -> bool:
        """Tells whether the template for a chat mentions a variable."""
        template = self._files.choose(has_tools)
        return template is not None and name in self._files.templates[template]

    def check(self, has_tools: bool) -> None:
        """Raises TemplateError if there is no template."""
        if self._files.choose(has_tools) is None:
            raise TemplateError(self._files.problem)

    async def render(
        self,
        variables: dict[str, Any],
        continue_final_message: bool = False,
        is_turn: bool = False,
    ) -> str:
        """The prompt of a chat. A caller that is cancelled ends the process that works on it.

        Args:
            variables: `messages`, `tools` (None without any) and what else the template reads.
            is_turn: give only the prompt's end, after all messages that are over.

        Raises:
            TemplateError: if there is no template, it fails, or takes too much.
        """
        name = self._files.choose(variables.get("tools") is not None)
        if name is None:
            raise TemplateError(self._files.problem)
        request = RenderRequest(
            template=name,
            variables={**self._files.tokens, **variables},
            continue_final_message=continue_final_message,
            is_turn=is_turn,
        )
        return await self._processes.call(lambda process: process.render(request))

    def close(self) -> None:
        """Ends the processes that wait for a chat."""
        self._processes.close()
