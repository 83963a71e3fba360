"""SGLang's path of the scheduler's requests; they are in `srt/scheduling/`."""

from __future__ import annotations

from sglang.srt.scheduling.request import (
    Req as Req,
)
