"""Copies host memory of another process, which torch shares between processes on a CPU, to a
file."""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import AuthenticationError, reduction
from multiprocessing.connection import Client
from pathlib import Path
from typing import BinaryIO

from sglang.srt.control.pickled_tensors import HandedFile, HostSource, SharedFile
from sglang.srt.sent_tensors import SHARED_MEMORY, HostMemory, TensorsRefused

SHARED_HEAD_BYTES = 64  # of a shared file of torch's, before its values
COPY_BYTES = 1 << 22
ALIGNMENT = 64  # of memories in the file
OTHER_FAMILY = (
    "a tensor's file is handed over only to processes that the trainer has started; call"
    " torch.multiprocessing.set_sharing_strategy('file_system') in the trainer, or send tensors"
    " of a GPU or safetensors"
)


class HostCopies:
    """Copies host memory to a file.

    Args:
        file: written from its beginning.
        key: `multiprocessing`'s authkey, by which processes of one family know each other.
    """

    def __init__(self, file: BinaryIO, key: bytes) -> None:
        self._file, self._key = file, key

    def copy(self, source: HostSource) -> HostMemory:
        """Copies one memory; returns its place in the file.

        Raises:
            TensorsRefused: if there is no such memory, or it is smaller.
        """
        self._file.seek(-(-self._file.tell() // ALIGNMENT) * ALIGNMENT)
        first_byte = self._file.tell()
        try:
            if isinstance(source, SharedFile):
                self._copy_shared(source)
            else:
                self._copy_handed(source)
        except AuthenticationError:
            raise TensorsRefused(OTHER_FAMILY) from None
        except (OSError, EOFError, RuntimeError) as error:
            reason = error.strerror if isinstance(error, OSError) else type(error).__name__
            raise TensorsRefused(
                f"a tensor's memory cannot be had ({reason}); keep the tensors until the answer"
            ) from error
        return HostMemory(first_byte, source.num_bytes)

    def _copy_shared(self, source: SharedFile) -> None:
        path = SHARED_MEMORY / source.name
        with _opened(path) as descriptor:
            _check_file(descriptor, SHARED_HEAD_BYTES + source.num_bytes)
            self._copy(descriptor, SHARED_HEAD_BYTES, source.num_bytes)
            _leave(descriptor, path)

    def _copy_handed(self, source: HandedFile) -> None:
        place = os.stat(source.socket)
        if not stat.S_ISSOCK(place.st_mode) or place.st_uid != os.getuid():
            raise TensorsRefused("it names a socket that is none of this user's")
        with Client(source.socket, authkey=self._key) as connection:
            connection.send((source.ticket, os.getpid()))
            descriptor = reduction.recv_handle(connection)
        try:
            _check_file(descriptor, source.num_bytes)
            self._copy(descriptor, 0, source.num_bytes)
        finally:
            os.close(descriptor)

    def _copy(self, descriptor: int, start: int, num_bytes: int) -> None:
        position, end = start, start + num_bytes
        while position < end:
            part = os.pread(descriptor, min(COPY_BYTES, end - position), position)
            if not part:
                raise EOFError
            self._file.write(part)
            position += len(part)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _check_file(descriptor: int, num_bytes: int) -> None:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.getuid() or found.st_size < num_bytes:
        raise TensorsRefused("it names memory that is smaller, or none of this user's")


def _leave(descriptor: int, path: Path) -> None:
    """Leaves a shared file: its owner counts the processes that use it, in an int32 at its
    beginning.

    Other processes may count meanwhile, so this is one atomic step. The last process deletes the
    file.
    """
    with mmap.mmap(descriptor, ctypes.sizeof(ctypes.c_int32)) as memory:
        count = ctypes.c_int32.from_buffer(memory)
        is_last = _exchange_and_add(ctypes.byref(count), -1) == 1
        del count  # it holds the map
    if is_last:
        path.unlink(missing_ok=True)


def _exchange_and_add(number: object, more: int) -> int:
    """Adds to an int32 and returns its old value, atomically, by GCC's library, which torch
    needs."""
    function = ctypes.CDLL("libstdc++.so.6")["_ZN9__gnu_cxx18__exchange_and_addEPVii"]
    function.restype, function.argtypes = ctypes.c_int32, (ctypes.c_void_p, ctypes.c_int32)
    return int(function(number, more))
