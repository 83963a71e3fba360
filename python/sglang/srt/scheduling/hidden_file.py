"""Hidden states of one request in a safetensors file, written while the request runs."""

from __future__ import annotations

import json
import logging
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
    the file removes it if the request ends early; nothing here stays open.

    Attributes:
        problem: why the file cannot be written; None: it can be.
    """

    def __init__(self, options: HiddenFileOptions) -> None:
        self._options = options
        self._parts: list[bytes] = []
        self._num_waiting = self._num_written = 0  # bytes
        self._row: torch.Tensor | None = None  # the last one
        self.problem: str | None = None

    @classmethod
    def of(cls, options: HiddenFileOptions | None) -> HiddenFile | None:
        """Makes the file of a request that has one."""
        return None if options is None else cls(options)

    def add(self, states: torch.Tensor) -> None:
        """Adds rows [n, layers, hidden_size], which may be overwritten afterwards."""
        if len(states) == 0 or self.problem is not None:
            return
        self._row = states[-1]
        part = states.contiguous().view(torch.uint8).numpy().tobytes()
        self._parts.append(part)
        self._num_waiting += len(part)
        if self._num_waiting >= FLUSH_BYTES:
            self._write()

    def finish(self, num_rows: int) -> FinishReason | None:
        """Completes the file with its first `num_rows` rows; returns why the request ends with an
        error instead, if it does."""
        self._write()
        if self.problem is None and self._row is not None:
            self._try(lambda: self._complete(num_rows))
        if self.problem is None:
            return None
        return FinishReason(
            type="abort", message=self.problem, status_code=500, err_type="InternalServerError"
        )

    def _write(self) -> None:
        """Writes the rows that wait."""
        if self._parts and self.problem is None:
            self._try(self._append)
        self._parts, self._num_waiting = [], 0

    def _append(self) -> None:
        is_first = self._num_written == 0
        kind = os.O_CREAT | os.O_EXCL if is_first else 0
        with self._open(os.O_WRONLY | os.O_APPEND | kind) as file:
            if is_first:
                file.write(bytes(HEADER_BYTES))
            file.write(b"".join(self._parts))
        self._num_written += self._num_waiting

    def _complete(self, num_rows: int) -> None:
        assert self._row is not None, "There are rows."
        shape, size = [num_rows, *self._row.shape], num_rows * self._row.nbytes
        layers = ",".join(map(str, self._options.layers))
        header = {
            "__metadata__": {"layers": layers},
            TENSOR: {"dtype": TYPES[self._row.dtype], "shape": shape, "data_offsets": [0, size]},
        }
        text_bytes = HEADER_BYTES - 8
        text = json.dumps(header).encode().ljust(text_bytes)
        assert len(text) == text_bytes
        assert size <= self._num_written
        with self._open(os.O_WRONLY) as file:
            file.write(text_bytes.to_bytes(8, "little") + text)
            file.truncate(HEADER_BYTES + size)

    def _open(self, flags: int) -> BinaryIO:
        """Opens the file, only for this user, and follows no link."""
        flags |= os.O_NOFOLLOW | os.O_CLOEXEC
        return os.fdopen(os.open(self._options.path, flags, 0o600), "wb")

    def _try(self, write: Callable[[], None]) -> None:
        try:
            write()
        except OSError as error:
            self.problem = f"Its hidden states cannot be stored: {error.strerror}; {REMEDY}"
            logger.warning("%s: %s", self._options.path, self.problem)
