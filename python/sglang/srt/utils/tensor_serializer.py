"""SGLang's name of what trainers make data of tensors with, for a server on the same machine.

It makes no pickles: what it makes is plain data, which a server takes from everyone who may change
its weights. Torch is imported when it is used.
"""

from __future__ import annotations

import base64
from typing import Any, Literal, overload

from sglang.srt.plain_tensors import MAGIC, TEXT_MAGIC
from sglang.srt.sent_tensors import TensorsRefused

UNREAD = (
    "This was not made by MultiprocessingSerializer of this package. Pickles are not read here,"
    " since whoever reads one runs its code. A server that is started with --allow-pickled-weights"
    " takes those of weights at /update_weights_from_tensor and runs nothing of them."
)


class MultiprocessingSerializer:
    """Describes tensors for another process; see docs/pause.md."""

    @overload
    @staticmethod
    def serialize(obj: Any, output_str: Literal[False] = False) -> bytes: ...

    @overload
    @staticmethod
    def serialize(obj: Any, output_str: Literal[True]) -> str: ...

    @staticmethod
    def serialize(obj: Any, output_str: bool = False) -> bytes | str:
        """Makes data of a tensor, of pairs of a name and a tensor, or of a flattened bucket. Values
        of a CPU are in it; memory of a GPU must live until the server has answered.

        Args:
            output_str: whether to give it in base64.

        Raises:
            ValueError: for anything else, with what to do instead.
        """
        from sglang.srt.weight_sync.plain_sending import serialize_tensors

        try:
            data = serialize_tensors(obj)
        except TensorsRefused as error:
            raise ValueError(f"This cannot be serialized: {error}.") from None
        return base64.b64encode(data).decode() if output_str else data

    @staticmethod
    def deserialize(data: bytes | str) -> Any:
        """Gives back what `serialize` was given; the flat tensor of a bucket is of bytes.

        Args:
            data: also in base64.

        Raises:
            NotImplementedError: if it is no data of `serialize`, with what to do instead.
            ValueError: if it is damaged.
        """
        from sglang.srt.weight_sync.plain_sending import deserialize_tensors

        if isinstance(data, str) and data.startswith(TEXT_MAGIC):
            data = base64.b64decode(data)
        if isinstance(data, str) or not data.startswith(MAGIC):
            raise NotImplementedError(UNREAD)
        return deserialize_tensors(data)
