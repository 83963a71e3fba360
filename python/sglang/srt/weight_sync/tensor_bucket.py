"""SGLang's path of what trainers put tensors into before they serialize them for a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass
class FlattenedTensorMetadata:
    """The place of a tensor in a bucket.

    Attributes:
        start_idx, end_idx: its values are [start_idx, end_idx) of the flat tensor.
        numel: how many these are.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    start_idx: int
    end_idx: int
    numel: int


@dataclass
class LocalSerializedTensor:
    """A tensor for each rank of a server, each serialized by the trainer's process on that GPU."""

    values: list[bytes]


class FlattenedTensorBucket:
    """Several tensors of one device as the bytes of one, whose memory is shared by one handle.

    Args:
        named_tensors: what goes into it; or the two others, of a bucket that is there already.
        flattened_tensor: [num_bytes] uint8, or values of one type.

    Raises:
        ValueError: if there is nothing to put in.
    """

    supports_multi_dtypes = True  # trainers ask

    def __init__(
        self,
        named_tensors: Sequence[tuple[str, torch.Tensor]] | None = None,
        flattened_tensor: torch.Tensor | None = None,
        metadata: list[FlattenedTensorMetadata] | None = None,
    ) -> None:
        if flattened_tensor is not None and metadata is not None:
            self.flattened_tensor, self.metadata = flattened_tensor, metadata
            return
        if not named_tensors:
            raise ValueError("A bucket needs named_tensors, or flattened_tensor and metadata.")
        parts, self.metadata, start = [], [], 0
        for name, tensor in named_tensors:
            part = tensor.detach().reshape(-1).contiguous().view(torch.uint8)
            end = start + len(part)
            self.metadata.append(
                FlattenedTensorMetadata(name, tensor.shape, tensor.dtype, start, end, end - start)
            )
            parts.append(part)
            start = end
        self.flattened_tensor = torch.cat(parts)

    def get_flattened_tensor(self) -> torch.Tensor:
        """Gives [num_bytes] uint8, or what the bucket was made of."""
        return self.flattened_tensor

    def get_metadata(self) -> list[FlattenedTensorMetadata]:
        """Gives one entry for each tensor, in order."""
        return self.metadata

    def reconstruct_tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Gives names and tensors, over the bucket's memory where their alignment allows it."""
        tensors = []
        for entry in self.metadata:
            part = self.flattened_tensor[entry.start_idx : entry.end_idx].view(torch.uint8)
            if part.storage_offset() % entry.dtype.itemsize:
                part = part.clone()
            tensors.append((entry.name, part.view(entry.dtype).reshape(entry.shape)))
        return tensors
