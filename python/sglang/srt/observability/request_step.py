"""The record that an observer of the scheduler gets of each step whose result was read."""

from __future__ import annotations

from dataclasses import dataclass

from sglang.srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class RequestStep:
    """The effect of a step on one request.

    Attributes:
        index: place of the request in the step's batch.
        emits: the step accepts tokens (not so before the last prompt chunk).
        ends_prompt: the step fed the last prompt token.
        num_emitted: tokens that go to the client, after clipping at stops.
        num_kept: tokens by which the watermark moved.
        finish_reason: type of the reason with which the step ended the request, if it did.
    """

    index: int
    req_id: int
    rid: str
    params: SamplingParams
    emits: bool
    ends_prompt: bool
    num_emitted: int
    num_kept: int
    finish_reason: str | None
