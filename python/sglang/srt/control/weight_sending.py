"""Sends the weights of a trainer to a server on the same machine; it runs in the trainer."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from sglang.srt.control.bodies import UpdateWeightsFromTensorReqInput
from sglang.srt.utils.tensor_serializer import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import LocalSerializedTensor


async def update_weights(
    engine: Any,
    params_batch: Sequence[tuple[str, torch.Tensor]],
    device_mesh_key: str,
    device_mesh: DeviceMesh,
    load_format: str | None = None,
    **options: Any,
) -> Any:
    """Sends tensors to a server on this machine, by naming their memory. Every process of the
    mesh's dimension calls this with the same names, and the first of them sends.

    Args:
        engine: has `update_weights_from_tensor`, which takes one `UpdateWeightsFromTensorReqInput`;
            only that of the first process is used.
        device_mesh_key: the dimension, one process for each rank of the server.
        options: other fields of the request, such as flush_cache.

    Returns:
        The engine's answer; None in the other processes.
    """
    mesh = device_mesh[device_mesh_key]
    own = [
        (name, MultiprocessingSerializer.serialize(_preprocess_tensor_for_update_weights(tensor)))
        for name, tensor in params_batch
    ]
    is_first = mesh.get_local_rank() == 0
    by_rank: list[Any] | None = [None] * mesh.size() if is_first else None
    first = int(mesh.mesh.flatten()[0])
    distributed.gather_object(own, by_rank, dst=first, group=mesh.get_group())
    if by_rank is None:
        return None
    named = [
        (parts[0][0], LocalSerializedTensor([data for _, data in parts]))
        for parts in zip(*by_rank, strict=True)
    ]
    serialized: list[Any] = [MultiprocessingSerializer.serialize(named)] * mesh.size()
    answer = engine.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=serialized, load_format=load_format, **options
        )
    )
    return await answer if inspect.isawaitable(answer) else answer


def _preprocess_tensor_for_update_weights(tensor: torch.Tensor) -> Any:
    """Gathers a tensor that is spread over processes; all of them must call this."""
    from torch.distributed.tensor import DTensor

    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
