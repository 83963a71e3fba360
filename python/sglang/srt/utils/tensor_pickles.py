"""Pickles that a trainer makes of its tensors for a server on the same machine.

They are written here and never read: that is `srt/control/pickle_records.py`, in a process of its
own.
"""

from __future__ import annotations

import base64
import io
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal, NoReturn, overload

UNREAD = (
    "Pickles are not read here, since whoever reads one runs its code. A server that is started"
    " with --allow-pickled-weights takes those of weights at /update_weights_from_tensor and runs"
    " nothing of them; Engine.update_weights_from_tensor takes tensors as they are."
)


class MultiprocessingSerializer:
    """Describes tensors for another process, by the memory that they are in; see docs/pause.md."""

    @overload
    @staticmethod
    def serialize(obj: Any, output_str: Literal[False] = False) -> bytes: ...

    @overload
    @staticmethod
    def serialize(obj: Any, output_str: Literal[True]) -> str: ...

    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes | str:
        """A pickle of an object, whose tensors must live until it has been read.

        Args:
            output_str: whether to give it in base64.
        """
        stream = io.BytesIO()
        ForkingPickler(stream).dump(obj)
        pickled = stream.getvalue()
        return base64.b64encode(pickled).decode() if output_str else pickled

    @staticmethod
    def deserialize(data: Any) -> NoReturn:
        """
        Raises:
            NotImplementedError: always, with what to do instead.
        """
        raise NotImplementedError(UNREAD)
