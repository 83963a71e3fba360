"""stream_interval and cache keys, through the scheduler."""

from __future__ import annotations

import pytest

from fake_worker import FakeWorker, oracle
from sglang.srt.messages.requests import TokenizedGenerateReqInput
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


STOPPING = oracle([1, 2], 30)


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
def test_ends_by_token_and_what_ignores_them(kind: str) -> None:
    """End-of-text ids end an output unless ignored, stop_token_ids always do; the stop token is the
    last one, wherever it stood in an accepted run."""
    first_seen = [i for i, token in enumerate(STOPPING) if token not in STOPPING[:i]]
    eos_at, stop_at = first_seen[4], first_seen[8]
    eos, stop = STOPPING[eos_at], STOPPING[stop_at]
    setup = Setup(eos_token_ids=frozenset({eos}))

    def run(**params: object) -> Collected:
        harness = SchedulerHarness(setup, FakeWorker(kind, 4, 8, seed=1))
        req_id = harness.submit([1, 2], max_new_tokens=30, temperature=0.0, **params)
        harness.run()
        return harness.outputs[req_id]

    ended = run()
    assert ended.token_ids == STOPPING[: eos_at + 1]
    assert ended.finish_reason is not None
    assert ended.finish_reason.matched == eos
    assert run(ignore_eos=True).token_ids == STOPPING
    stopped = run(ignore_eos=True, stop_token_ids=[stop])
    assert stopped.token_ids == STOPPING[: stop_at + 1]
    assert stopped.finish_reason is not None
    assert stopped.finish_reason.matched == stop


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
def test_a_stop_at_the_last_allowed_token_counts_as_a_stop(kind: str) -> None:
    harness = SchedulerHarness(Setup(), FakeWorker(kind, 4, 8, seed=1))
    last = max(i for i, token in enumerate(STOPPING) if token not in STOPPING[:i])
    params = {"max_new_tokens": last + 1, "temperature": 0.0, "stop_token_ids": [STOPPING[last]]}
    req_id = harness.submit([1, 2], **params)
    harness.run()
    reason = harness.outputs[req_id].finish_reason
    assert reason is not None
    assert reason.type == "stop"
