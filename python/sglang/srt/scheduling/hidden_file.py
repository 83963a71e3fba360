"""Hidden states of one request in a safetensors file, written while the request runs."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
from collections.abc import Callable
from typing import BinaryIO

import torch

from sglang.srt.messages.requests import FinishReason, HiddenFileOptions

logger = logging.getLogger(__name__)

TENSOR = "hidden_states"
HEADER_BYTES = 4096  # of the file's beginning, whose text is written last: it has the counts
FLUSH_BYTES = 1 << 20  # so much is collected before it is written
TYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
REMEDY = "see --hidden-states-folder: does it have room?"


class HiddenFile:
    """Takes rows of hidden states in their order. The file has one tensor `hidden_states`,
    [rows, layers, hidden_size] in the model's type, and `layers` among its metadata. Whoever named
    the file has made it, empty, and removes it if the request ends early, for good: it is not made
    again here. Nothing here stays open.

    Attributes:
        problem: why the file cannot be written; None: it can be.
    """

    def __init__(self, options: HiddenFileOptions) -> None:
        self._options = options
        self._waiting = bytearray()
        self._num_written = 0  # bytes
        self._shape: tuple[int, ...] = ()  # of a row
        self._dtype = torch.float32
        self.problem: str | None = None

    @classmethod
    def of(cls, options: HiddenFileOptions | None) -> HiddenFile | None:
        """Makes the file of a request that has one."""
        return None if options is None else cls(options)

    def add(self, states: torch.Tensor) -> None:
        """Adds rows [n, layers, hidden_size], which may be overwritten afterwards."""
        if len(states) == 0 or self.problem is not None:
            return
        self._shape, self._dtype = tuple(states.shape[1:]), states.dtype
        part = states.contiguous().view(torch.uint8).flatten().numpy().data
        if len(part) < FLUSH_BYTES:
            self._waiting += part
        if len(self._waiting) >= FLUSH_BYTES or len(part) >= FLUSH_BYTES:
            self._write(self._waiting)
            self._waiting = bytearray()
        if len(part) >= FLUSH_BYTES:  # of a prompt: not worth a copy
            self._write(part)

    def finish(self, num_rows: int) -> FinishReason | None:
        """Completes the file with its first `num_rows` rows; returns why the request ends with an
        error instead, if it does."""
        self._write(self._waiting)
        self._try(lambda: self._complete(num_rows))
        if self.problem is None:
            return None
        return FinishReason(
            type="abort", message=self.problem, status_code=500, err_type="InternalServerError"
        )

    def _write(self, rows: bytearray | memoryview) -> None:
        if rows:
            self._try(lambda: self._append(rows))

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
        """Writes, unless that has failed before."""
        if self.problem is not None:
            return
        try:
            write()
        except OSError as error:
            self.problem = f"Its hidden states cannot be stored: {error.strerror}; {REMEDY}"
            logger.warning("%s: %s", self._options.path, self.problem)
