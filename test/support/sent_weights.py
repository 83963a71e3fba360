"""Weights as trainers send them, and the pickles of those that have SGLang's own package."""

from __future__ import annotations

import io
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool)


def pickle_of(value: Any) -> bytes:
    """A pickle, in which a tensor is described by its memory."""
    stream = io.BytesIO()
    ForkingPickler(stream).dump(value)
    return stream.getvalue()


def weights() -> dict[str, torch.Tensor]:
    """Makes tensors of several types, misaligned in a bucket, and in no order in memory."""
    generator = torch.Generator().manual_seed(3)
    tensors = {
        f"w{index}": (torch.randn(3, index + 1, generator=generator) * 9).to(dtype)
        for index, dtype in enumerate(DTYPES)
    }
    whole = torch.randn(8, 6, generator=generator)
    tensors["transposed"], tensors["rows"] = whole.t(), whole[2:5]
    tensors["column"], tensors["scalar"] = whole[:, 3], torch.tensor(2.5)
    tensors["expanded"] = whole[0].expand(4, 6)
    tensors["parameter"] = torch.nn.Parameter(torch.randn(5, generator=generator))
    return tensors


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].shape == tensor.shape
        assert torch.equal(found[name], tensor), name
