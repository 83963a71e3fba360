"""The sampling operations of a device: the kernels of `sgl_kernel`, or its torch references."""

from __future__ import annotations

import functools
import logging
import threading
from contextlib import suppress
from types import ModuleType

import torch

import sgl_kernel
import sgl_kernel.reference

logger = logging.getLogger(__name__)


def prepare_sampling_ops(device: torch.device) -> None:
    """Starts to compile or load the kernels; `sampling_ops` waits for them."""
    threading.Thread(target=_warm_up, args=(device,), name="sgl-kernel", daemon=True).start()


def _warm_up(device: torch.device) -> None:
    with suppress(sgl_kernel.KernelUnavailableError):  # `sampling_ops` reports it
        sgl_kernel.warm_up(device)


@functools.cache
def sampling_ops(device: torch.device) -> ModuleType:
    """Returns `sgl_kernel`, compiled and loaded, or `sgl_kernel.reference`, which computes the same
    more slowly, where a GPU has no kernels. On a CPU the two are the same."""
    if device.type == "cpu":
        return sgl_kernel
    try:
        sgl_kernel.warm_up(device)
    except sgl_kernel.KernelUnavailableError as error:
        logger.warning("Tokens are sampled by torch, which is slower: %s", error)
        return sgl_kernel.reference
    return sgl_kernel
