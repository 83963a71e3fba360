"""Profiles of the steps: between steps, for so many, in the operator's folder alone."""

from __future__ import annotations

import gzip
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from fake_weights import FakeWeights
from fake_worker import FakeWorker
from sglang.srt.control.control import ModelResources
from sglang.srt.messages.control import ControlReply, StartProfileReq, StopProfileReq
from sglang.srt.step_profiler import StepProfiler
from utils import SchedulerHarness, Setup

_call_ids = itertools.count(1000)
START: dict[str, Any] = {
    "output_dir": "",
    "num_steps": 1000,
    "activities": ["CPU", "GPU"],
    "with_stack": False,
    "record_shapes": False,
}


class Harness(SchedulerHarness):
    def __init__(self, root: Path | None) -> None:
        worker = FakeWorker("plain", 1, Setup().max_running_requests, seed=0)
        self.profiler = StepProfiler(None if root is None else str(root), sees_gpu=False)
        resources = ModelResources(weights=FakeWeights(worker), memory={}, profiler=self.profiler)
        super().__init__(Setup(), worker, resources=resources)

    def send(self, kind: type, **fields: Any) -> ControlReply:
        return self.call(kind(call_id=next(_call_ids), **fields))

    def start(self, **fields: Any) -> ControlReply:
        return self.send(StartProfileReq, **{**START, **fields})


def test_a_profile_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert harness.start(output_dir="mine/first").success
    harness.generate([[1, 2, 3]], max_new_tokens=3)
    reply = harness.send(StopProfileReq)
    assert reply.success, reply.message
    path = Path(reply.fields["path"])
    assert path.parent == tmp_path.resolve() / "mine" / "first"
    assert json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]


def test_a_profile_of_so_many_steps_ends_by_itself(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert harness.start(num_steps=2).success
    assert harness.profiler.is_running
    harness.generate([[1, 2, 3]], max_new_tokens=6)
    assert not harness.profiler.is_running
    assert len(list(tmp_path.iterdir())) == 1
    assert "No profile runs" in harness.send(StopProfileReq).message


def test_one_profile_runs_at_a_time(tmp_path: Path) -> None:
    harness = Harness(tmp_path)
    assert harness.start().success
    assert "stop it first" in harness.start().message
    assert harness.send(StopProfileReq).success
    assert harness.start().success
    assert harness.send(StopProfileReq).success


@pytest.mark.parametrize("place", ["..", "../x", "/tmp", "a/../../b", "link"])
def test_no_folder_outside_is_written_to(tmp_path: Path, place: str) -> None:
    root, outside = tmp_path / "root", tmp_path / "outside"
    root.mkdir()
    outside.mkdir()
    (root / "link").symlink_to(outside)
    harness = Harness(root)
    reply = harness.start(output_dir=place)
    assert not reply.success
    assert reply.message.startswith("output_dir: must be inside SGLANG_TORCH_PROFILER_DIR")
    assert not harness.profiler.is_running


def test_without_a_folder_and_without_activities_there_is_no_profile(tmp_path: Path) -> None:
    reply = Harness(None).start()
    assert "with SGLANG_TORCH_PROFILER_DIR set to a folder" in reply.message
    assert "ask for CPU" in Harness(tmp_path).start(activities=["GPU"]).message
