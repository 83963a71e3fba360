"""stream_interval and cache keys, through the scheduler."""

from __future__ import annotations

import pytest

from fake_worker import FakeWorker, oracle
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.sampling.sampling_params import SamplingParams
from utils import Collected, SchedulerHarness, Setup


@pytest.mark.parametrize("interval", [1, 3, 100])
def test_stream_chunks_keep_the_interval_and_lose_nothing(interval: int) -> None:
    """The first token goes out at once, then a chunk per interval, then the rest."""
    harness = SchedulerHarness(Setup(), FakeWorker("plain", 4, 8, seed=0))
    req_id = harness.submit([1, 2], max_new_tokens=11, temperature=0.0, stream_interval=interval)
    lengths = []
    while not harness.is_idle:
        before = len(harness.outputs[req_id].token_ids)
        harness.step()
        added = len(harness.outputs[req_id].token_ids) - before
        lengths += [added] if added else []
    assert harness.outputs[req_id].token_ids == oracle([1, 2], 11)
    expected = [1] + [interval] * (10 // interval) + ([10 % interval] if 10 % interval else [])
    assert lengths == expected


def submit_with_key(harness: SchedulerHarness, req_id: int, key: tuple[str, str]) -> Collected:
    harness.outputs[req_id] = Collected()
    harness.inbox.messages.append(
        TokenizedGenerateReqInput(
            req_id=req_id,
            rid=str(req_id),
            input_ids=list(range(30)),
            sampling_params=SamplingParams(max_new_tokens=4, temperature=0.0),
            cache_key=key,
        )
    )
    harness.run()
    return harness.outputs[req_id]


def test_kv_is_shared_only_within_a_cache_key() -> None:
    harness = SchedulerHarness(Setup(), FakeWorker("plain", 4, 8, seed=0))
    keys = [("", ""), ("", "salt"), ("adapter", ""), ("", "salt"), ("", "")]
    cached = [submit_with_key(harness, i, key).cached_tokens for i, key in enumerate(keys)]
    assert cached == [0, 0, 0, 29, 29]
    assert all(out.token_ids == oracle(list(range(30)), 4) for out in harness.outputs.values())
