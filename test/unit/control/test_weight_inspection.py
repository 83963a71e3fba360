"""Weights by name, and the checker: snapshot, compare, reset."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from fake_weights import FakeWeights
from fake_worker import FakeWorker
from sglang.srt.control import weight_inspection
from sglang.srt.control.control import ModelResources
from sglang.srt.control.memory_control import MemoryPart
from sglang.srt.control.weight_inspection import checksum
from sglang.srt.messages.control import (
    CheckWeightsReq,
    ControlReply,
    GetWeightsByNameReq,
    MemoryOccupationReq,
)
from utils import SchedulerHarness, Setup

_call_ids = itertools.count(1000)


class Harness(SchedulerHarness):
    def __init__(self) -> None:
        worker = FakeWorker("plain", 1, Setup().max_running_requests, seed=0)
        self.weights = FakeWeights(worker)
        memory = {"weights": MemoryPart(lambda: None, lambda: None)}
        super().__init__(
            Setup(), worker, resources=ModelResources(weights=self.weights, memory=memory)
        )

    def send(self, kind: type, **fields: Any) -> ControlReply:
        return self.call(kind(call_id=next(_call_ids), **fields))

    def check(self, action: str) -> ControlReply:
        return self.send(CheckWeightsReq, action=action)


def test_values_are_cut_in_their_first_dimension() -> None:
    harness = Harness()
    reply = harness.send(GetWeightsByNameReq, name="w", truncate_size=2)
    assert reply.fields["parameter"] == [[0.0, 1.0], [2.0, 3.0]]
    reply = harness.send(GetWeightsByNameReq, name="b", truncate_size=100)
    assert reply.fields["parameter"] == [1.0, 1.0]


def test_a_name_that_is_none_and_too_many_values_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    harness = Harness()
    reply = harness.send(GetWeightsByNameReq, name="x", truncate_size=2)
    assert (reply.success, reply.status_code) == (False, 400)
    assert reply.message.startswith("name: there is no weight 'x'")
    monkeypatch.setattr(weight_inspection, "MAX_VALUES", 3)
    reply = harness.send(GetWeightsByNameReq, name="w", truncate_size=2)
    assert reply.message.startswith("truncate_size: that is 4 values, more than 3")


def test_weights_are_compared_with_the_snapshot() -> None:
    harness = Harness()
    assert "There is no snapshot" in harness.check("compare").message
    assert harness.check("snapshot").success
    assert harness.check("compare").success
    harness.weights.values["w"][2, 1] += 2.0**-20
    reply = harness.check("compare")
    assert (reply.success, reply.message) == (
        False,
        "1 of 2 weights are not those of the snapshot: w.",
    )


def test_a_reset_makes_all_weights_zero_and_old_prefixes_match_no_more() -> None:
    harness = Harness()
    harness.generate([[1, 2, 3]], max_new_tokens=2)
    assert harness.check("snapshot").success
    epoch = harness.ledger.weight_epoch
    assert harness.check("reset").success
    assert not any(value.any() for value in harness.weights.values.values())
    assert harness.ledger.weight_epoch > epoch
    assert harness.ledger.num_tree_tokens == 0
    assert not harness.check("compare").success
    harness.weights.values = {"w": torch.arange(6.0).reshape(3, 2), "b": torch.ones(2)}
    assert harness.check("compare").success


def test_a_reset_takes_no_weights_from_under_a_request() -> None:
    harness = Harness()
    harness.submit([1, 2, 3], max_new_tokens=50, ignore_eos=True)
    harness.step()
    reply = harness.check("reset")
    assert "1 requests run or wait" in reply.message
    assert harness.weights.num_applied == 0
    harness.run()


def test_released_weights_are_not_looked_at() -> None:
    harness = Harness()
    assert harness.check("snapshot").success
    assert harness.send(MemoryOccupationReq, action="release").success
    replies = [harness.check(action) for action in ("snapshot", "compare", "reset")]
    replies.append(harness.send(GetWeightsByNameReq, name="w", truncate_size=2))
    for reply in replies:
        assert (reply.success, "resume_memory_occupation" in reply.message) == (False, True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_a_checksum_is_of_values_and_places(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.arange(24).reshape(4, 6).to(dtype)
    whole = checksum(value)
    monkeypatch.setattr(weight_inspection, "CHECKSUM_BYTES", 7)
    assert checksum(value) == whole, "however it is cut"
    assert checksum(value.t().contiguous().t()) == whole, "however it lies in memory"
    others = {whole, checksum(value.flip(0)), checksum(value.reshape(-1).roll(1))}
    for index in range(24):
        changed = value.clone()
        changed.view(-1)[index] += 1
        others.add(checksum(changed))
    assert len(others) == 27
    assert checksum(torch.zeros(())) != checksum(torch.zeros(2))
