"""What a worker is made of, by what its drafter needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from sglang.srt.processes import worker_factory
from speculation_flags_cases import resolved

GPU, CPU = torch.device("cuda"), torch.device("cpu")


class Clock:
    """In place of `GpuStepClock`, which needs a GPU."""


def test_steps_are_timed_only_where_somebody_takes_the_times(
    target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would pile up, two events of each step."""
    monkeypatch.setattr(worker_factory, "GpuStepClock", Clock)
    drafts = resolved(target, algorithm="NGRAM").needs
    assert drafts.needs_prices
    assert isinstance(worker_factory.step_clock(drafts, GPU), Clock)
    assert worker_factory.step_clock(drafts, CPU) is None
    fixed = resolved(target, algorithm="NGRAM", load_aware="off").needs
    assert worker_factory.step_clock(fixed, GPU) is None
    masks = resolved(target, mtp_mask_token_id=5).needs
    assert masks.needs_prices
    assert worker_factory.step_clock(masks, GPU) is None
