"""The sampling operations of a device: the kernels of `sgl_kernel`, or its torch references."""

from __future__ import annotations

import functools
import logging
from types import ModuleType

import torch

import sgl_kernel
import sgl_kernel.reference

logger = logging.getLogger(__name__)


@functools.cache
def sampling_ops(device: torch.device) -> ModuleType:
    """`sgl_kernel`, compiled and loaded; or `sgl_kernel.reference`, which computes the same more
    slowly, where no kernels can be had for a GPU. On a CPU the two are the same."""
    if device.type == "cpu":
        return sgl_kernel
    try:
        sgl_kernel.warm_up(device)
    except sgl_kernel.KernelUnavailableError as error:
        logger.warning("Tokens are sampled by torch, which is slower: %s", error)
        return sgl_kernel.reference
    return sgl_kernel
