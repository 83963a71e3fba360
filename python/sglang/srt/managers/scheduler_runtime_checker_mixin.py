"""Gives, under SGLang's path, the checks of KV memory after steps and while the scheduler is idle.
The scheduler holds them instead of inheriting them; they are in `srt/scheduling/`."""

from __future__ import annotations

from sglang.srt.scheduling.invariants import (
    InvariantChecker as InvariantChecker,
)
from sglang.srt.scheduling.invariants import (
    LedgerViolation as LedgerViolation,
)
