"""SGLang's path of what trainers call before they pickle tensors of a GPU for a server."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import reduction
from typing import Any

import torch
from torch.multiprocessing import reductions

DEVICE = 6  # which argument of torch's function names the GPU


def monkey_patch_torch_reductions() -> None:
    """From here on this process's pickles name a GPU by its UUID: another process may number the
    GPUs otherwise (CUDA_VISIBLE_DEVICES). Later calls change nothing."""
    for kind in (torch.Tensor, torch.nn.Parameter):
        reduction.register(kind, _reduce_tensor_modified)


def _reduce_tensor_modified(tensor: torch.Tensor) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """What to call with which arguments for a tensor on the other side; its kinds of other devices
    are torch's own."""
    function, arguments = reductions.reduce_tensor(tensor)
    if function is not reductions.rebuild_cuda_tensor:
        return function, arguments
    uuid = str(torch.cuda.get_device_properties(arguments[DEVICE]).uuid)
    return _rebuild_cuda_tensor_modified, _with_device(arguments, uuid)


def _rebuild_cuda_tensor_modified(*arguments: Any) -> torch.Tensor:
    """The tensor, in another process of the trainer's.

    Raises:
        ValueError: if this process does not see its GPU.
    """
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == arguments[DEVICE]:
            tensor: torch.Tensor = reductions.rebuild_cuda_tensor(*_with_device(arguments, index))
            return tensor
    raise ValueError(f"This process does not see the GPU {arguments[DEVICE]}.")


def _with_device(arguments: tuple[Any, ...], device: int | str) -> tuple[Any, ...]:
    return (*arguments[:DEVICE], device, *arguments[DEVICE + 1 :])
