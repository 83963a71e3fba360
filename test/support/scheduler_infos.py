"""Makes up what a scheduler tells the front end."""

from __future__ import annotations

from typing import Any

from sglang.srt.messages.requests import SchedulerInfo


def scheduler_info(**changes: Any) -> SchedulerInfo:
    """Returns what the scheduler of a small server without look-ahead tells."""
    values = {
        "vocab_size": 100,
        "context_len": 64,
        "max_total_num_tokens": 640,
        "max_req_len": 64,
        "max_req_len_reason": "the model's context length",
        "max_running_requests": 4,
        "eos_token_ids": [1],
        "resolved": {},
    }
    return SchedulerInfo(**{**values, **changes})
