"""Pause and continue over the Engine and HTTP, with plain requests and both kinds of multi-token
prediction in one batch."""

from __future__ import annotations

from pause_target import Requests, Target

NUM_REQUESTS, NUM_NEW = 8, 60


def test_1_pause_generation_retract_mode(target: Target) -> None:
    target.flush(timeout_s=10)
    free = target.state()["available_kv_tokens"]
    requests = Requests(target, "mixed", NUM_REQUESTS, NUM_NEW)
    before = requests.wait_until_running()
    assert before["available_kv_tokens"] < free
    reply = target.pause(mode="retract")
    after = target.state()
    assert reply["status"] == "ok"
    assert after["engine_paused"]
    assert after["running_batch_size"] == reply["running"] == 0
    num_left = NUM_REQUESTS - reply["finished"]
    assert after["waiting_queue_size"] == reply["queued"] == reply["retracted"] == num_left > 0
    assert after["available_kv_tokens"] > before["available_kv_tokens"]
    assert after["req_to_token_pool_used"] == 0
    assert after["available_kv_tokens"] + after["tree_cache_size"] == free
    assert target.resume()["status"] == "ok"
    for result in requests.results():
        assert result["meta_info"]["finish_reason"]["type"] == "length"
        assert len(result["output_ids"]) == NUM_NEW
    assert not target.state()["engine_paused"]


def test_2_pause_generation_in_place_mode(target: Target) -> None:
    requests = Requests(target, "mixed", NUM_REQUESTS, NUM_NEW)
    requests.wait_until_running()
    target.pause(mode="in_place")
    before, num_done = target.state(), requests.num_done
    assert before["engine_paused"]
    assert before["running_batch_size"] > 0
    after = [target.state() for _ in range(20)][-1]
    for name in (
        "running_batch_rids",
        "waiting_queue_rids",
        "available_kv_tokens",
        "forward_ct_decode",
    ):
        assert after[name] == before[name]
    assert requests.num_done == num_done
    target.resume()
    assert all(len(result["output_ids"]) == NUM_NEW for result in requests.results())


def test_3_pause_continue_multiple_cycles(target: Target) -> None:
    requests = Requests(target, "mixed", 4, NUM_NEW)
    requests.wait_until_running()
    epochs = []
    for mode in ("retract", "in_place", "retract"):
        epochs.append(target.pause(mode=mode)["epoch"])
        assert target.state()["engine_paused"]
        target.resume()
        assert not target.state()["engine_paused"]
    assert epochs == list(range(epochs[0], epochs[0] + 3))
    assert all(len(result["output_ids"]) == NUM_NEW for result in requests.results())


def test_4_pause_generation_abort_mode(target: Target) -> None:
    requests = Requests(target, "mixed", NUM_REQUESTS, 10 * NUM_NEW)
    requests.wait_until_running()
    reply = target.pause(mode="abort")
    state = target.state()
    assert state["running_batch_size"] == state["waiting_queue_size"] == 0
    assert reply["aborted"] == NUM_REQUESTS
    for result in requests.results():
        assert result["meta_info"]["finish_reason"]["type"] == "abort"
        assert 0 < len(result["output_ids"]) == result["meta_info"]["completion_tokens"]
        assert result["text"]
    target.resume()
