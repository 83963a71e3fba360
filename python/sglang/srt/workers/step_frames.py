"""Steps as frames that the first rank sends to the others. No pickle: msgspec, by types."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import torch

from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.step.token_constraint import AllowedTokens
from sglang.srt.step.worker import ScheduleBatch


class StepFrame(msgspec.Struct, frozen=True, tag="step"):
    """A step that all ranks run now.

    Attributes:
        batch: without its constraint.
        restricted: `TokenConstraint.requests`; an `AllowedFrame` follows. None: there is none.
    """

    batch: ScheduleBatch
    plan: StepPlan
    restricted: list[int] | None = None


class AllowedFrame(msgspec.Struct, frozen=True, tag="allowed"):
    """Tokens that the constraint of the step before allows."""

    allowed: AllowedTokens


class CallFrame(msgspec.Struct, frozen=True, tag="call"):
    """A call between steps, by the name that all ranks know it by."""

    name: str
    arguments: list[str]


Frame = StepFrame | AllowedFrame | CallFrame


def _plain(value: Any) -> Any:
    """An array as its type, shape and bytes, and a range as a list."""
    if isinstance(value, range):
        return list(value)
    if isinstance(value, torch.Tensor):
        value = value.numpy()
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    raise NotImplementedError(f"{type(value)} is no part of a frame.")


def _array(kind: type, plain: Any) -> Any:
    dtype, shape, data = plain
    values = np.frombuffer(bytearray(data), dtype).reshape(shape)
    return torch.from_numpy(values) if kind is torch.Tensor else values


_encoder = msgspec.msgpack.Encoder(enc_hook=_plain)
_decoder = msgspec.msgpack.Decoder(Frame, dec_hook=_array)


def encoded(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decoded(data: bytes) -> Frame:
    frame: Frame = _decoder.decode(data)
    return frame
