"""Gives, under SGLang's path, what turns results of steps into tokens and ends of requests. The
scheduler holds one instead of inheriting it; it is in `srt/scheduling/`."""

from __future__ import annotations

from sglang.srt.scheduling.batch_result_processor import (
    BatchResultProcessor as BatchResultProcessor,
)
