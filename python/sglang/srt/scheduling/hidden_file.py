"""Hidden states of one request in a safetensors file, which a thread writes meanwhile."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from typing import BinaryIO

import torch

from sglang.srt.messages.requests import FinishReason, HiddenFileOptions

logger = logging.getLogger(__name__)

TENSOR = "hidden_states"
HEADER_BYTES = 4096  # of the file's beginning, whose text is written last: it has the counts
FLUSH_BYTES = 1 << 18  # so much is collected before it is written
MOST_WAITING_BYTES = 1 << 30  # of all files, until steps wait for the disk
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
REMEDY = "see --hidden-states-folder: does it have room?"


class FileWriter:
    """Writes in a thread, in the order of the calls, so that steps go on meanwhile."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "files of hidden states")
        self._waiting: deque[tuple[Future[None], int]] = deque()
        self._num_bytes = 0  # of `_waiting`

    def write(self, write: Callable[[], None], num_bytes: int) -> Future[None]:
        """Calls `write`, which raises nothing, as soon as all earlier calls are done. Waits for
        earlier ones while there are more than MOST_WAITING_BYTES.

        Args:
            num_bytes: that are kept in memory until then.
        """
        future = self._thread.submit(write)
        self._waiting.append((future, num_bytes))
        self._num_bytes += num_bytes
        waiting = self._waiting
        while waiting and (waiting[0][0].done() or self._num_bytes > MOST_WAITING_BYTES):
            oldest, size = waiting.popleft()
            oldest.result()
            self._num_bytes -= size
        return future


class HiddenFile:
    """Takes rows of hidden states in their order. The file has one tensor `hidden_states`,
    [rows, layers, hidden_size] in the model's type, and `layers` among its metadata. Whoever named
    the file has made it, empty, and removes it if the request ends early, for good: it is not made
    again here. Nothing here stays open.

    Attributes:
        problem: why the file cannot be written; None: it can be.
    """

    def __init__(self, options: HiddenFileOptions, writer: FileWriter) -> None:
        self._options = options
        self._writer = writer
        self._last: Future[None] | None = None  # what is still to be written
        self._is_dropped = False
        self._waiting = bytearray()
        self._num_written = 0  # bytes
        self._shape: tuple[int, ...] = ()  # of a row
        self._dtype = torch.float32
        self.problem: str | None = None

    @classmethod
    def of(cls, options: HiddenFileOptions | None, writer: FileWriter) -> HiddenFile | None:
        """Makes the file of a request that has one."""
        return None if options is None else cls(options, writer)

    def add(self, states: torch.Tensor) -> None:
        """Adds rows [n, layers, hidden_size], which may be overwritten afterwards."""
        if len(states) == 0 or self.problem is not None:
            return
        self._shape, self._dtype = tuple(states.shape[1:]), states.dtype
        if states.nbytes >= FLUSH_BYTES:  # of a prompt: torch copies in several threads
            self._write(self._waiting)
            self._waiting = bytearray()
            self._write(_bytes_of(states.clone()))
            return
        self._waiting += _bytes_of(states)
        if len(self._waiting) >= FLUSH_BYTES:
            self._write(self._waiting)
            self._waiting = bytearray()

    def finish(self, num_rows: int) -> None:
        """Begins to complete the file with its first `num_rows` rows; nothing is added later."""
        self._write(self._waiting)
        complete = partial(self._complete, num_rows)
        self._last = self._writer.write(partial(self._try, complete), 0)

    def is_done(self, timeout_s: float = 0.0) -> bool:
        """Tells whether all is written or given up, after waiting for that up to the time."""
        return self._last is None or not wait([self._last], timeout_s).not_done

    def error(self) -> FinishReason | None:
        """Returns why the request ends with an error, if it does; once all is done."""
        if self._last is not None:
            self._last.result()  # raises what the thread did not expect
        if self.problem is None:
            return None
        return FinishReason(
            type="abort", message=self.problem, status_code=500, err_type="InternalServerError"
        )

    def drop(self) -> None:
        """Writes nothing more: the request ends early."""
        self._is_dropped = True

    def _write(self, rows: bytearray | memoryview) -> None:
        if rows:
            append = partial(self._append, rows)
            self._last = self._writer.write(partial(self._try, append), len(rows))

    def _append(self, rows: bytearray | memoryview) -> None:
        is_first = self._num_written == 0
        with self._open(os.O_WRONLY | os.O_APPEND) as file:
            if is_first:
                if os.fstat(file.fileno()).st_size:
                    raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
                file.write(bytes(HEADER_BYTES))
            file.write(rows)
        self._num_written += len(rows)

    def _complete(self, num_rows: int) -> None:
        size = num_rows * math.prod(self._shape) * self._dtype.itemsize
        layers = ",".join(map(str, self._options.layers))
        header = {
            "__metadata__": {"layers": layers},
            TENSOR: {
                "dtype": TYPES[self._dtype],
                "shape": [num_rows, *self._shape],
                "data_offsets": [0, size],
            },
        }
        text_bytes = HEADER_BYTES - 8
        text = json.dumps(header).encode().ljust(text_bytes)
        assert len(text) == text_bytes
        assert size <= self._num_written
        with self._open(os.O_WRONLY) as file:
            file.write(text_bytes.to_bytes(8, "little") + text)
            file.truncate(HEADER_BYTES + size)

    def _open(self, flags: int) -> BinaryIO:
        """Opens the file, and follows no link."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self._options.path, flags), "wb")

    def _try(self, write: Callable[[], None]) -> None:
        """Writes, unless that has failed before or nobody wants the file."""
        if self.problem is not None or self._is_dropped:
            return
        try:
            write()
        except OSError as error:
            if self._is_dropped:  # and removed meanwhile
                return
            self.problem = f"Its hidden states cannot be stored: {error.strerror}; {REMEDY}"
            logger.warning("%s: %s", self._options.path, self.problem)


def _bytes_of(states: torch.Tensor) -> memoryview:
    return states.contiguous().view(torch.uint8).flatten().numpy().data
