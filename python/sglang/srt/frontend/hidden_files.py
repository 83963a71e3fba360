"""Files of hidden states: the front end names them, counts their bytes and removes them; the
scheduler writes them."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path

from sglang.srt.frontend.errors import ServiceError, field_error
from sglang.srt.messages.requests import HiddenFileOptions, TokenizedGenerateReqInput

MAX_BYTES = "--max-hidden-states-bytes"
PREFIX = "sglang-hidden-states-"  # of a server's folder


class HiddenFiles:
    """Names files in a folder of its own, which only this user can enter and which ends with the
    server, or where that was killed, when the next one starts. Whoever reads a file removes it:
    until then its bytes count.

    Args:
        parent: where the folder is made.
        max_bytes: of all files at most.
        layers, row_bytes: see `SchedulerInfo`.

    Raises:
        OSError: if the folder cannot be made.
    """

    def __init__(self, parent: Path, max_bytes: int, layers: Sequence[int], row_bytes: int) -> None:
        made, self._lock = make_locked_folder(parent.resolve())
        self.folder = Path(made)
        self._remove_all = weakref.finalize(self, shutil.rmtree, made, ignore_errors=True)
        self._max_bytes = max_bytes
        self._layers = list(layers)
        self._row_bytes = row_bytes
        self._num_bytes: dict[int, int] = {}  # by request; of running ones at most
        self._are_complete: set[int] = set()

    def begin(self, messages: Sequence[TokenizedGenerateReqInput]) -> None:
        """Gives each request of a call its file; none if there is no room for all.

        Raises:
            RequestError: if they have more bytes than there may ever be.
            ServiceError: with status 503 if they have more than are left, or cannot be made.
        """
        sizes = [
            self._row_bytes * (len(each.input_ids) + each.sampling_params.max_new_tokens)
            for each in messages
        ]
        if sum(sizes) > self._max_bytes:
            reason = f"the files may have {sum(sizes)} bytes, more than {self._max_bytes}"
            remedy = "lower max_new_tokens, or send fewer prompts together"
            raise field_error("return_hidden_states", f"{reason} ({MAX_BYTES}); {remedy}")
        if sum(sizes) > self._max_bytes - sum(self._num_bytes.values()):
            self._forget_removed()
        if sum(sizes) > self._max_bytes - sum(self._num_bytes.values()):
            raise ServiceError(
                f"Files of hidden states fill {MAX_BYTES} {self._max_bytes}: remove those that you"
                " have read, then try again.",
                503,
            )
        try:
            for message in messages:
                self._path(message.req_id).touch(0o600, exist_ok=False)
        except OSError as error:
            for message in messages:
                self._path(message.req_id).unlink(missing_ok=True)
            raise ServiceError(
                f"Files of hidden states cannot be made: {error.strerror}; see"
                " --hidden-states-folder: does it have room?",
                503,
            ) from None
        for message, size in zip(messages, sizes, strict=True):
            self._num_bytes[message.req_id] = size
            path = str(self._path(message.req_id))
            message.hidden_file = HiddenFileOptions(path, self._layers)

    def end(self, req_id: int, is_wanted: bool) -> None:
        """Counts the file of a request that has ended, or removes it; nothing if it has none."""
        if req_id not in self._num_bytes:
            return
        path = self._path(req_id)
        if is_wanted and path.exists():
            self._num_bytes[req_id] = path.stat().st_size
            self._are_complete.add(req_id)
        else:
            path.unlink(missing_ok=True)
            self._forget(req_id)

    def close(self) -> None:
        """Removes the folder with all that is left in it, as the end of the process does."""
        if self._remove_all.alive:
            self._remove_all()
            os.close(self._lock)

    def _path(self, req_id: int) -> Path:
        return self.folder / f"{req_id}.safetensors"

    def _forget_removed(self) -> None:
        for req_id in [each for each in self._are_complete if not self._path(each).exists()]:
            self._forget(req_id)

    def _forget(self, req_id: int) -> None:
        self._num_bytes.pop(req_id)
        self._are_complete.discard(req_id)


def make_locked_folder(parent: Path) -> tuple[str, int]:
    """Makes a folder with mode 0700, and removes those of this user's servers that were killed:
    nobody holds their locks.

    Returns:
        The folder, and an open descriptor of it that holds its lock.
    """
    guard = os.open(parent, os.O_RDONLY)  # no folder is seen before it is locked
    try:
        fcntl.flock(guard, fcntl.LOCK_EX)
        for folder in parent.glob(f"{PREFIX}*"):
            _remove_if_left(folder)
        made = tempfile.mkdtemp(prefix=PREFIX, dir=parent)
        lock = os.open(made, os.O_RDONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        return made, lock
    finally:
        os.close(guard)


def _remove_if_left(folder: Path) -> None:
    try:
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder, ignore_errors=True)
    except BlockingIOError:  # its server runs
        return
    finally:
        os.close(lock)
