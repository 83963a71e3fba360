"""Typed ZeroMQ channels between the processes of one server: msgspec over `ipc://`, no pickle."""

from __future__ import annotations

import logging
import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

import msgspec
import zmq
import zmq.asyncio

logger = logging.getLogger(__name__)

M = TypeVar("M")
FALLBACK_DIRECTORY = "/tmp"
SOCKET_NAMES = ("scheduler", "detokenizer", "frontend", "launcher")


class IpcAddresses(msgspec.Struct, frozen=True):
    """Socket addresses of one server, all in a directory that only its user can enter.

    The receiving side of a channel binds, the senders connect. `launcher` carries the readiness
    handshake.
    """

    scheduler: str
    detokenizer: str
    frontend: str
    launcher: str

    def of_rank(self, rank: int) -> str:
        """The address of a rank beside the first one, for the steps that it shall run."""
        return f"ipc://{self._directory / f'rank{rank}'}"

    @property
    def meeting_point(self) -> Path:
        """A file beside the sockets, by which the ranks of a model find each other."""
        return self._directory / "ranks"

    @property
    def _directory(self) -> Path:
        return Path(self.launcher.removeprefix("ipc://")).parent

    def remove(self) -> None:
        """Removes the sockets and their directory; another process may do so too."""
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def private_cache(self) -> Path:
        """A folder beside the sockets, not made yet, for what ends with the server."""
        return self._directory / "cache"

    @classmethod
    def create(cls) -> tuple[IpcAddresses, str]:
        """Makes a directory with mode 0700; returns the addresses and the directory's path.

        Raises:
            OSError: if no directory with a path short enough for sockets can be made.
        """
        directory = tempfile.mkdtemp(prefix="sglang-")
        if not _fits_sockets(directory):
            os.rmdir(directory)
            directory = tempfile.mkdtemp(prefix="sglang-", dir=FALLBACK_DIRECTORY)
        os.chmod(directory, 0o700)
        return cls(*(f"ipc://{directory}/{name}" for name in SOCKET_NAMES)), directory


def _fits_sockets(directory: str) -> bool:
    paths = [os.path.join(directory, name) for name in SOCKET_NAMES]
    return max(len(os.fsencode(path)) for path in paths) <= zmq.IPC_PATH_MAX_LEN


class ChildConfig(msgspec.Struct, frozen=True):
    """The settings that a child process reads from its standard input: one line of JSON.

    Standard input stays open for the parent's life; end of file tells the child to exit.

    Attributes:
        beats: the writing end of the pipe that takes its beats; None: no listener.
        rank: of those that hold the model together; 0 is the scheduler's.
    """

    server_args: dict[str, Any]
    addresses: IpcAddresses
    beats: int | None = None
    rank: int = 0


class Sender(Generic[M]):
    """Connects to a receiver's address and pushes messages of the type M."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PUSH)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)  # ms to deliver what was sent before a close
        self._socket.connect(address)
        self._encoder = msgspec.msgpack.Encoder()

    def send(self, message: M) -> None:
        self._socket.send(self._encoder.encode(message))

    def close(self) -> None:
        self._socket.close()


class Receiver(Generic[M]):
    """Binds an address and pulls messages of the union `message_type`. A frame that is none of them
    is dropped, with a line in the log.

    Attributes:
        num_turns: how often messages were asked for; a process that asks no more is stuck,
        is_waiting: unless it waits for one now.
    """

    def __init__(self, address: str, message_type: Any) -> None:
        self.num_turns = 0
        self.is_waiting = False
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_type)

    def poll(self, timeout_ms: int | None) -> bool:
        """Tells whether a message is there, waiting for one up to `timeout_ms` (None: no limit)."""
        self.is_waiting = True
        is_there = bool(self._socket.poll(timeout_ms))
        self.is_waiting = False
        self.num_turns += 1
        return is_there

    def wait(self, timeout_s: float | None) -> bool:
        """Tells whether a message is there, waiting for it up to the time (None: no limit)."""
        return self.poll(None if timeout_s is None else math.ceil(timeout_s * 1000))

    def receive(self) -> M:
        """Waits for the next message."""
        message = None
        while message is None:
            self.is_waiting = True
            frame = self._socket.recv()
            self.is_waiting = False
            self.num_turns += 1
            message = _read(self._decoder, frame)
        return message

    def drain(self) -> Iterator[M]:
        """The messages that are there now, without waiting."""
        self.num_turns += 1
        while True:
            try:
                frame = self._socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            message = _read(self._decoder, frame)
            if message is not None:
                yield message

    def close(self) -> None:
        self._socket.close(linger=0)


class AsyncReceiver(Generic[M]):
    """`Receiver` for an asyncio loop; create it in the loop's thread."""

    def __init__(self, address: str, message_type: Any) -> None:
        self._socket = zmq.asyncio.Context.instance().socket(zmq.PULL)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(address)
        self._decoder = msgspec.msgpack.Decoder(message_type)

    async def receive(self) -> M:
        """Waits for the next message."""
        while (message := _read(self._decoder, await self._socket.recv())) is None:
            pass
        return message

    def close(self) -> None:
        self._socket.close(linger=0)


def _read(decoder: msgspec.msgpack.Decoder[M], frame: bytes) -> M | None:
    """The message of a frame; None, with a line in the log, if it holds none."""
    try:
        return decoder.decode(frame)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        logger.error("A message that cannot be read was dropped: %s", error)
        return None
