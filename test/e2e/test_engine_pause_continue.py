"""Pause and continue over the Engine and HTTP, with plain requests and both kinds of multi-token
prediction in one batch."""

from __future__ import annotations

from pause_target import Target, interrupt

NUM_REQUESTS, NUM_NEW = 8, 60


def test_1_pause_generation_retract_mode(target: Target) -> None:
    target.flush(timeout_s=10)
    free = target.state()["available_kv_tokens"]
    paused = interrupt(target, "mixed", NUM_REQUESTS, NUM_NEW, "retract")
    before, reply = paused.before, paused.reply
    assert before["available_kv_tokens"] < free
    after = target.state()
    assert reply["status"] == "ok"
    assert after["engine_paused"]
    assert after["running_batch_size"] == reply["running"] == 0
    assert after["waiting_queue_size"] == reply["queued"] == reply["retracted"] == NUM_REQUESTS
    assert after["available_kv_tokens"] > before["available_kv_tokens"]
    assert after["req_to_token_pool_used"] == 0
    assert after["available_kv_tokens"] + after["tree_cache_size"] == free
    assert target.resume()["status"] == "ok"
    for result in paused.requests.results():
        assert result["meta_info"]["finish_reason"]["type"] == "length"
        assert len(result["output_ids"]) == paused.num_new
    assert not target.state()["engine_paused"]


def test_2_pause_generation_in_place_mode(target: Target) -> None:
    paused = interrupt(target, "mixed", NUM_REQUESTS, NUM_NEW, "in_place")
    before = target.state()
    assert before["engine_paused"]
    assert before["running_batch_size"] == NUM_REQUESTS
    after = [target.state() for _ in range(20)][-1]
    for name in (
        "running_batch_rids",
        "waiting_queue_rids",
        "available_kv_tokens",
        "forward_ct_decode",
    ):
        assert after[name] == before[name]
    assert not paused.requests.ended
    target.resume()
    results = paused.requests.results()
    assert all(len(result["output_ids"]) == paused.num_new for result in results)


def test_3_pause_continue_multiple_cycles(target: Target) -> None:
    paused = interrupt(target, "mixed", 4, NUM_NEW, "retract")
    epochs = [paused.reply["epoch"]]
    for mode in ("in_place", "retract"):
        target.resume()
        assert not target.state()["engine_paused"]
        epochs.append(target.pause(mode=mode)["epoch"])
        assert target.state()["engine_paused"]
    target.resume()
    assert not target.state()["engine_paused"]
    assert epochs == list(range(epochs[0], epochs[0] + 3))
    results = paused.requests.results()
    assert all(len(result["output_ids"]) == paused.num_new for result in results)


def test_4_pause_generation_abort_mode(target: Target) -> None:
    paused = interrupt(target, "mixed", NUM_REQUESTS, 10 * NUM_NEW, "abort")
    state = target.state()
    assert state["running_batch_size"] == state["waiting_queue_size"] == 0
    assert paused.reply["aborted"] == NUM_REQUESTS
    for result in paused.requests.results():
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(result["output_ids"]) == result["meta_info"]["completion_tokens"]
        assert result["text"]
    target.resume()
