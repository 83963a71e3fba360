"""Flushing the cache over the Engine and HTTP, with plain requests and both kinds of multi-token
prediction in one batch."""

from __future__ import annotations

from typing import Any

from pause_target import Target, baseline, interrupt

NUM_NEW = 24


def assert_flushed(target: Target) -> dict[str, Any]:
    """Everything is as at the start."""
    state = target.state()
    assert state["tree_cache_size"] == state["req_to_token_pool_used"] == 0
    assert state["forward_ct_decode"] == 0
    assert state["new_token_ratio"] == state["init_new_token_ratio"]
    assert state["running_batch_size"] == state["waiting_queue_size"] == 0
    assert state["cur_batch_is_none"]
    assert state["last_batch_is_none"]
    assert state["chunked_req_rids"] == []
    assert state["cur_batch"] is state["last_batch"] is state["chunked_req"] is None
    return state


def test_1_flush_cache_after_generation(target: Target) -> None:
    assert target.flush(timeout_s=10) == ""
    initial = assert_flushed(target)["available_kv_tokens"]
    baseline(target, "mixed", 8, NUM_NEW)
    used = target.state()
    assert used["tree_cache_size"] > 0
    assert used["forward_ct_decode"] > 0
    assert target.flush(timeout_s=10) == ""
    assert assert_flushed(target)["available_kv_tokens"] == initial


def test_2_flush_cache_clears_scheduling_state(target: Target) -> None:
    """Also of requests that a pause has put back: they lose KV, not their place."""
    paused = interrupt(target, "mixed", 4, NUM_NEW * 4, "in_place")
    reason = target.flush()
    assert "are running" in reason
    assert "in place" in reason
    assert target.pause(mode="retract")["queued"] == 4
    assert target.flush() == ""
    state = target.state()
    assert state["tree_cache_size"] == state["req_to_token_pool_used"] == 0
    assert state["waiting_queue_size"] == 4
    target.resume()
    results = paused.requests.results()
    assert all(len(result["output_ids"]) == paused.num_new for result in results)
    assert target.flush(timeout_s=10) == ""
    assert_flushed(target)


def test_3_generation_works_after_flush(target: Target) -> None:
    before = baseline(target, "mixed", 1, NUM_NEW)
    assert target.flush(timeout_s=10) == ""
    after = baseline(target, "mixed", 1, NUM_NEW)
    assert [r["output_ids"] for r in after] == [r["output_ids"] for r in before]
    assert all(r["meta_info"]["cached_tokens"] == 0 for r in after)


def test_4_multiple_flush_cycles(target: Target) -> None:
    free = set()
    for _ in range(3):
        baseline(target, "mixed", 2, NUM_NEW)
        assert target.flush(timeout_s=10) == ""
        free.add(assert_flushed(target)["available_kv_tokens"])
    assert len(free) == 1
