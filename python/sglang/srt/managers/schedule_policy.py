"""SGLang's path of the order of admission; it is in `srt/scheduling/`."""

from __future__ import annotations

from sglang.srt.scheduling.schedule_policy import (
    AdmissionPolicy as AdmissionPolicy,
)
