"""Gives, under SGLang's path, the scheduler's requests, which are in `srt/scheduling/`, and a step
as the scheduler asks for it, which is in `srt/step/`."""

from __future__ import annotations

from sglang.srt.scheduling.request import (
    Req as Req,
)
from sglang.srt.step.worker import (
    ScheduleBatch as ScheduleBatch,
)
