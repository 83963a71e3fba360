"""The lengths that a plan goes by do not depend on how fast the host is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from sglang.srt.device_copies import HostCopy
from sglang.srt.lookahead.contract import Planner, StepPlan
from sglang.srt.model_config import resolve_model_path
from sglang.srt.speculative.drafter import NoDrafts, PlannedDrafter
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch
from sglang.srt.workers import tp_worker
from utils import SchedulerHarness, Setup, make_runner

SETUP = Setup(num_pages=100, max_running_requests=2)


class GivesLens(NoDrafts):
    """Gives the watermarks of all rows as lengths."""

    def __init__(self, state: RequestRows) -> None:
        self._state = state
        self.given: list[list[int]] = []

    def lens(self) -> torch.Tensor:
        self.given.append(self._state.committed.tolist())
        return self._state.committed


class NotesLens(Planner):
    def __init__(self) -> None:
        self.seen: list[Sequence[int] | None] = []

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        self.seen.append(lens)
        return super().plan(batch, lens)


class DeviceCopy(HostCopy):
    """A copy as from a GPU, which may be there at once or late."""

    is_complete: ClassVar[bool] = False  # type: ignore[misc]


@pytest.mark.parametrize("is_gpu", [False, True])
def test_lens_are_of_the_step_before_on_a_gpu_and_of_this_one_on_a_cpu(
    is_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_gpu:
        monkeypatch.setattr(tp_worker, "HostCopy", DeviceCopy)
    runner = make_runner(resolve_model_path("demo"), SETUP, 64, 1)
    state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
    planner, drafter = NotesLens(), GivesLens(state)
    worker = tp_worker.TpModelWorker(runner, state, (), PlannedDrafter(planner, drafter))
    harness = SchedulerHarness(SETUP, worker)
    harness.submit([5, 6, 7], max_new_tokens=6, temperature=0.0)
    harness.run()
    expected = [None, *drafter.given[:-1]] if is_gpu else drafter.given
    assert len(drafter.given) > 5
    assert planner.seen == expected
