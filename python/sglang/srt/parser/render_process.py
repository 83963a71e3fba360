"""The process that renders chat templates: `python -m sglang.srt.parser.render_process`.

A template comes with a model, so it is as little trusted as the model's other files, and works on
what clients send. Jinja's sandbox keeps it from Python's internals, but not from taking time and
memory (`{% for %}` over a `range` in another, `'a' * 10**10`), and no thread can be stopped. So
templates run here, under limits of the system: processor seconds for each chat, memory, no files to
be written. The parent (`chat_templates.py`) ends a process that does not answer.
"""

from __future__ import annotations

import signal
import sys
from typing import BinaryIO

import msgspec

from sglang.srt.framed_process import limit_memory, limit_time, read, write
from sglang.srt.parser.chat_rendering import ChatTemplate, RenderingError
from sglang.srt.parser.render_messages import RenderReply, RenderRequest, RenderSetup


def main(requests: BinaryIO, replies: BinaryIO) -> None:
    """Answers one request after the other until the parent closes the pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    setup = msgspec.msgpack.decode(read(requests) or b"", type=RenderSetup)
    limit_memory(setup.max_memory_mib)
    compiled: dict[str, ChatTemplate] = {}
    while (raw := read(requests)) is not None:
        limit_time(setup.max_seconds)
        write(replies, msgspec.msgpack.encode(_answer(raw, setup, compiled)))


def _answer(raw: bytes, setup: RenderSetup, compiled: dict[str, ChatTemplate]) -> RenderReply:
    try:
        request = msgspec.msgpack.decode(raw, type=RenderRequest)
        name = request.template
        if name not in compiled:
            compiled[name] = ChatTemplate(setup.templates[name], setup.max_chars)
        template = compiled[name]
        render = template.render_turn if request.is_turn else template.render
        text = render(request.variables, request.continue_final_message)
        text.encode()  # half a surrogate pair, which a template can make, is no text
        return RenderReply(text=text)
    except UnicodeEncodeError:
        return RenderReply(error="its output holds half a surrogate pair")
    except RenderingError as error:
        return RenderReply(error=str(error))
    except MemoryError:
        return RenderReply(error=f"it takes more than {setup.max_memory_mib} MiB of memory")
    except RecursionError:
        return RenderReply(error="it is nested too deeply")


if __name__ == "__main__":
    main(sys.stdin.buffer, sys.stdout.buffer)
