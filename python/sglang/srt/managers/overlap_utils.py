"""Gives, under SGLang's path, what a step reads of the step before while that one is in flight:
each request's tokens and lengths on the device. It is in `srt/step/`."""

from __future__ import annotations

from sglang.srt.step.request_rows import (
    RequestRows as RequestRows,
)
