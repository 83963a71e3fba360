"""Faults at every stage of a server's processes; `python test/faults.py` runs them all."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from faults import FAULTS, nothing_left, run_fault
from injected_faults import Injected
from serving_utils import in_background, running_server, wait_until

UPDATE = "sglang.srt.weight_sync.weight_reader:WeightReader.from_directory"
STEP = "sglang.srt.managers.scheduler:Scheduler.receive"


@pytest.mark.long_matrix
@pytest.mark.parametrize("stage", {fault.stage: None for fault in FAULTS.values()})
def test_a_fault_is_survived_or_ends_the_server(stage: str) -> None:
    """One fault of each stage, another one in each turn."""
    faults = [fault for fault in FAULTS.values() if fault.stage == stage]
    fault = random.Random(f"{os.environ.get('TEST_TURN')} {stage}").choice(faults)
    print(fault.name)
    run_fault(fault)


@pytest.mark.long_matrix
def test_a_scheduler_that_fails_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    hang = Injected(tmp_path, "scheduler_process", UPDATE, "hang", "hang")
    error = Injected(tmp_path, "scheduler_process", STEP, "error", "error")
    paths = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")]))
    with (
        nothing_left(tmp_path),
        running_server("demo", PYTHONPATH=paths, TMPDIR=str(tmp_path)) as server,
    ):
        hang.arm()
        body = {"model_path": "demo"}
        update = in_background(lambda: server.post("/update_weights_from_disk", body))
        wait_until(lambda: hang.has_struck, update)
        error.arm()
        answer = server.generate()
        assert answer.status_code == 503
        assert "The scheduler process ended with exit code 1" in answer.json()["message"]
        assert update.result().status_code == 503
        assert server.exit_code(10) == 1
