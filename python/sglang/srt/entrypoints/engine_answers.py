"""Turns what callers of the Engine give into fields of `/generate`, and its chunks into answers."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any

import msgspec

from sglang.srt.managers.tokenizer_manager import Answer
from sglang.srt.sampling.sampling_params import SamplingParams

OneSampling = dict[str, Any] | SamplingParams
SamplingInput = OneSampling | Sequence[OneSampling] | None


def sampling_fields(params: Any) -> Any:
    """Sampling parameters as `/generate` takes them; what is no such thing is refused there."""
    if isinstance(params, list | tuple):
        return [sampling_fields(item) for item in params]
    return msgspec.to_builtins(params) if isinstance(params, SamplingParams) else params


async def next_chunk(outputs: AsyncGenerator[Answer, None]) -> Answer | None:
    """The next chunk, or None at the end."""
    return await anext(outputs, None)


async def only_answer(outputs: AsyncGenerator[Answer, None]) -> Answer:
    """The one answer of a request that does not stream."""
    try:
        return await anext(outputs)
    finally:
        await outputs.aclose()


async def close(outputs: AsyncGenerator[Answer, None]) -> None:
    await outputs.aclose()
