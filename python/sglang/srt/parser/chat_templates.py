"""The front end's side of chat templates: renders chats in processes of their own.

A process starts with the first chat that needs it, and ends with this one: it reads end of file.
"""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from sglang.srt.parser.render_messages import (
    NUM_LENGTH_BYTES,
    RenderReply,
    RenderRequest,
    RenderSetup,
)
from sglang.srt.parser.template_files import FLAG, TemplateFiles

MODULE = "sglang.srt.parser.render_process"
MAX_CHARS = 16 * 1024 * 1024
MAX_SECONDS = 5  # of a processor, for one chat
MAX_WALL_SECONDS = 30.0  # for a machine that is busy with something else
MAX_MEMORY_MIB = 1024
MAX_PROCESSES = 2
START_SECONDS = 60.0
PIPE_BYTES = 65_536
ENVIRONMENT = ("PATH", "LD_LIBRARY_PATH", "TZ", "LANG")


class TemplateError(ValueError):
    """A chat that cannot be rendered; the message has the reason and, where there is one, the
    remedy."""


class RenderProcess:
    """One process that renders. A failed or abandoned call leaves it ended."""

    def __init__(self, setup: RenderSetup) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=_environ(),
            start_new_session=True,  # a Ctrl-C in the terminal is the server's alone
        )
        self._is_new = True
        self._setup = setup

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

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
        deadline = time.monotonic() + seconds
        try:
            for message in messages:
                head = len(message).to_bytes(NUM_LENGTH_BYTES, "little")
                self._send(head + message, deadline)
            length = int.from_bytes(self._receive(NUM_LENGTH_BYTES, deadline), "little")
            reply = msgspec.msgpack.decode(self._receive(length, deadline), type=RenderReply)
        except (OSError, EOFError, TimeoutError):
            self.end()
            raise TemplateError(
                "the chat template takes too much time or memory for this chat; give another with"
                f" {FLAG} FILE"
            ) from None
        if reply.text is None:
            raise TemplateError(f"the chat template does not take this chat: {reply.error}")
        return reply.text

    def end(self) -> None:
        """Ends the process at once; a call that waits for it fails."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Ends it and frees its pipes, once no call uses them."""
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    def _send(self, data: bytes, deadline: float) -> None:
        assert self._process.stdin is not None
        descriptor, view = self._process.stdin.fileno(), memoryview(data)
        os.set_blocking(descriptor, False)
        while view:
            _wait(descriptor, select.POLLOUT, deadline)
            view = view[os.write(descriptor, view[:PIPE_BYTES]) :]

    def _receive(self, size: int, deadline: float) -> bytes:
        assert self._process.stdout is not None
        descriptor, parts, missing = self._process.stdout.fileno(), [], size
        while missing:
            _wait(descriptor, select.POLLIN, deadline)
            part = os.read(descriptor, min(missing, PIPE_BYTES))
            if not part:
                raise EOFError
            parts.append(part)
            missing -= len(part)
        return b"".join(parts)


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
        self._idle: list[RenderProcess] = []
        self._turns = asyncio.Semaphore(max_processes)

    @property
    def default(self) -> str | None:
        """The text of the template for chats without tools, if there is one."""
        return self._files.templates.get(self._files.choose(has_tools=False) or "")

    def reads(self, name: str, has_tools: bool) -> bool:
        """Whether the template for a chat mentions a variable."""
        template = self._files.choose(has_tools)
        return template is not None and name in self._files.templates[template]

    def check(self, has_tools: bool) -> None:
        """Raises TemplateError if there is no template."""
        if self._files.choose(has_tools) is None:
            raise TemplateError(self._files.problem)

    async def render(self, variables: dict[str, Any], continue_final_message: bool = False) -> str:
        """The prompt of a chat. A caller that is cancelled ends the process that works on it.

        Args:
            variables: `messages`, `tools` (None without any) and what else the template reads.

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
        )
        async with self._turns:
            return await self._render(request)

    async def _render(self, request: RenderRequest) -> str:
        process = self._idle.pop() if self._idle else None
        if process is None or not process.is_alive:
            process = RenderProcess(self._setup)
        working = asyncio.create_task(asyncio.to_thread(process.render, request))
        try:
            return await asyncio.shield(working)
        except asyncio.CancelledError:
            process.end()  # so the thread ends too
            await asyncio.gather(working, return_exceptions=True)
            raise
        finally:
            if process.is_alive:
                self._idle.append(process)
            else:
                process.close()

    def close(self) -> None:
        """Ends the processes that wait for a chat."""
        while self._idle:
            self._idle.pop().close()


def _environ() -> dict[str, str]:
    """The environment of a process that finds this package as this one did, and nothing more."""
    root = str(Path(__file__).resolve().parents[3])
    paths = [root, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    kept = {name: os.environ[name] for name in ENVIRONMENT if name in os.environ}
    return {**kept, "PYTHONPATH": os.pathsep.join(paths)}


def _wait(descriptor: int, event: int, deadline: float) -> None:
    poll = select.poll()  # `select` knows the first 1024 descriptors only
    poll.register(descriptor, event)
    if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
        raise TimeoutError
