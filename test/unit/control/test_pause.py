"""Pause, continue, abort and flush at every phase of a request, in every kind of decoding."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

from fake_worker import VOCAB_SIZE, FakeWorker, oracle
from sglang.srt.messages.control import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    EngineStatus,
    FlushCacheReqInput,
    PauseGenerationReq,
)
from sglang.srt.step.worker import GenerationBatchResult, ScheduleBatch
from utils import SchedulerHarness, Setup

KINDS = ("plain", "verify", "mtp")
MODES = ("abort", "retract", "in_place", "drain")
K = 4
PROMPT = [i * 5 % VOCAB_SIZE for i in range(20)]
NUM_NEW = 30
CHUNK = 8  # so the prompt takes three steps

# How far a request has come, seen when nothing else happens in the turn.
PHASES: dict[str, Callable[[Any, int], bool]] = {
    "first chunk": lambda req, _: 0 < req.committed_bound < len(PROMPT) - CHUNK,
    "last chunk": lambda req, _: len(PROMPT) - CHUNK <= req.committed_bound < len(PROMPT),
    "just prefilled": lambda req, num: req.committed_bound >= len(PROMPT) and num <= K,
    "first token": lambda req, num: num >= 1,
    "mid decode": lambda req, num: num >= NUM_NEW // 2,
    "last decode": lambda req, num: num >= NUM_NEW - K,
}


def make(kind: str = "plain", overlap: bool = True, **changes: Any) -> SchedulerHarness:
    setup = Setup(enable_overlap=overlap, chunked_prefill_size=CHUNK, **changes)
    return SchedulerHarness(setup, FakeWorker(kind, K, setup.max_running_requests, seed=0))


def submit(harness: SchedulerHarness, prompt: list[int] = PROMPT, **params: Any) -> int:
    return harness.submit(prompt, **{"max_new_tokens": NUM_NEW, "temperature": 0.0, **params})


_call_ids = itertools.count(1000)


def pause(mode: str, **fields: Any) -> PauseGenerationReq:
    return PauseGenerationReq(call_id=next(_call_ids), mode=mode, **fields)


def resume() -> ContinueGenerationReq:
    return ContinueGenerationReq(call_id=next(_call_ids))


def flush(timeout_s: float = 0.0) -> FlushCacheReqInput:
    return FlushCacheReqInput(call_id=next(_call_ids), timeout_s=timeout_s)


def step_to(harness: SchedulerHarness, req_id: int, phase: str) -> None:
    """Steps until the request has come so far."""
    while phase != "arriving":
        reqs = [*harness.scheduler.lifecycle.waiting, *harness.scheduler.lifecycle.running]
        req = next((req for req in reqs if req.req_id == req_id), None)
        if req is not None and PHASES[phase](req, len(req.output_ids)):
            return
        assert not (req is None and harness.outputs[req_id].num_ends), f"{phase} never seen."
        harness.step()


def last_status(harness: SchedulerHarness) -> EngineStatus:
    statuses = [r for r in harness.replies if isinstance(r, EngineStatus)]
    return statuses[-1] if statuses else EngineStatus()


@pytest.mark.long_matrix
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", ["arriving", *PHASES])
@pytest.mark.parametrize("mode", MODES)
def test_every_mode_at_every_phase(mode: str, phase: str, kind: str, overlap: bool) -> None:
    """A request, a bystander before it and a newcomer during the pause: nothing is lost, moved or
    answered twice, and every token is right."""
    harness = make(kind, overlap)
    bystander = submit(harness, PROMPT[:3])
    req_id = submit(harness)
    step_to(harness, req_id, phase)
    num_ended_before = sum(harness.outputs[i].num_ends for i in (bystander, req_id))
    reply = harness.call(pause(mode))
    assert reply.success
    lifecycle = harness.scheduler.lifecycle
    assert harness.ongoing is None
    assert reply.fields["running"] == len(lifecycle.running)
    assert reply.fields["queued"] == len(lifecycle.waiting)
    num_ended = sum(harness.outputs[i].num_ends for i in (bystander, req_id)) - num_ended_before
    assert num_ended == reply.fields["aborted"] + reply.fields["finished"]
    if mode != "in_place":
        assert not lifecycle.running
        assert harness.ledger.num_free_tokens + harness.ledger.num_tree_tokens == 512
    newcomer = submit(harness, PROMPT[:5])
    before = {i: list(harness.outputs[i].token_ids) for i in (bystander, req_id, newcomer)}
    for _ in range(5):
        harness.step()
    after = {i: harness.outputs[i].token_ids for i in (bystander, req_id, newcomer)}
    assert after == before, "Something was generated during the pause."
    assert harness.call(resume()).success
    harness.run()
    for i, prompt in ((bystander, PROMPT[:3]), (req_id, PROMPT), (newcomer, PROMPT[:5])):
        outcome, right = harness.outputs[i], oracle(prompt, NUM_NEW)
        assert outcome.num_ends == 1
        assert outcome.finish_reason is not None
        if outcome.finish_reason.type == "abort":
            assert mode == "abort"
            assert i != newcomer
            assert outcome.token_ids == right[: len(outcome.token_ids)]
        else:
            assert outcome.token_ids == right


@pytest.mark.parametrize("kind", KINDS)
def test_retract_gives_all_private_slots_back_and_inserts_nothing(kind: str) -> None:
    harness = make(kind)
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    cached = harness.ledger.num_tree_tokens
    reply = harness.call(pause("retract"))
    assert (reply.fields["retracted"], reply.fields["running"]) == (1, 0)
    assert harness.ledger.num_tree_tokens == cached
    assert harness.ledger.num_free_tokens == 512 - cached
    assert harness.ledger.num_used_rows == 0


def test_in_place_keeps_every_slot() -> None:
    harness = make()
    req_ids = [submit(harness, PROMPT[i:]) for i in range(4)]
    step_to(harness, req_ids[-1], "mid decode")
    harness.call(pause("in_place"))
    state = harness.scheduler.control.internal_state()
    harness.step()
    again = harness.scheduler.control.internal_state()
    assert again == state
    assert state["engine_paused"]
    assert state["running_batch_size"] == 4
    assert state["available_kv_tokens"] < 512 - state["tree_cache_size"]


def test_retracted_requests_stay_ahead_of_newcomers_and_in_order() -> None:
    harness = make(max_running_requests=3)
    req_ids = [submit(harness, [i, i + 1]) for i in range(6)]
    step_to(harness, req_ids[2], "first token")
    harness.call(pause("retract"))
    submit(harness, [9, 9])
    harness.step()
    assert [req.req_id for req in harness.scheduler.lifecycle.waiting][:6] == req_ids


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("second", MODES)
def test_every_pair_of_modes_answers_both_and_ends_with_right_tokens(
    mode: str, second: str
) -> None:
    """One after the other was answered, and both at once."""
    for together in (False, True):
        harness = make("verify")
        req_id = submit(harness)
        step_to(harness, req_id, "mid decode")
        first, other = pause(mode), pause(second)
        if together:
            harness.inbox.messages.append(first)
        else:
            assert harness.call(first).success
        assert harness.call(other).success
        answer = harness.reply_to(first.call_id)
        superseded = together and (mode, second) == ("drain", "in_place")
        assert answer.success != superseded
        assert harness.scheduler.control.internal_state()["engine_paused"]
        assert harness.call(resume()).success
        harness.run()
        outcome = harness.outputs[req_id]
        assert outcome.num_ends == 1
        was_aborted = outcome.finish_reason is not None and outcome.finish_reason.type == "abort"
        if was_aborted:
            assert "abort" in (mode, second)
        assert outcome.token_ids == oracle(PROMPT, NUM_NEW)[: len(outcome.token_ids)]


def test_the_epoch_counts_pauses() -> None:
    harness = make()
    assert harness.call(pause("retract")).fields["epoch"] == 1
    assert harness.call(pause("in_place")).fields["epoch"] == 1
    assert harness.call(resume()).fields == {
        "epoch": 1,
        "was_paused": True,
        "running": 0,
        "queued": 0,
    }
    assert harness.call(pause("abort")).fields["epoch"] == 2


def test_continue_without_a_pause_changes_nothing() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "first token")
    reply = harness.call(resume())
    assert reply.success
    assert reply.fields["was_paused"] is False
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, NUM_NEW)


def test_continue_before_the_stop_answers_the_pause_with_a_conflict() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    stop = pause("retract")
    harness.inbox.messages.append(stop)
    harness.call(resume())
    harness.run()
    answer = harness.reply_to(stop.call_id)
    assert (answer.success, answer.status_code) == (False, 409)
    assert harness.outputs[req_id].num_retractions == 0
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, NUM_NEW)


def test_a_pause_that_was_continued_and_asked_for_again_is_another_pause() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    first, second = pause("retract"), pause("in_place")
    harness.inbox.messages.extend([first, resume(), second])
    harness.step()
    assert not harness.reply_to(first.call_id).success
    assert harness.reply_to(second.call_id).fields["epoch"] == 2
    assert harness.reply_to(second.call_id).fields["running"] == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("where", ["running", "waiting"])
def test_abort_during_any_pause_answers_at_once_with_the_partial_output(
    mode: str, where: str
) -> None:
    harness = make(max_running_requests=1)
    running = submit(harness)
    step_to(harness, running, "mid decode")
    harness.call(pause(mode))
    waiting = submit(harness, PROMPT[:4])
    harness.step()
    victim = running if where == "running" else waiting
    if mode in ("abort", "drain") and where == "running":
        assert harness.outputs[running].num_ends == 1  # by the pause itself
        return
    harness.inbox.messages.append(AbortReq(req_ids=[victim]))
    harness.step()
    outcome = harness.outputs[victim]
    assert outcome.finish_reason is not None
    assert outcome.finish_reason.type == "abort"
    right = oracle(PROMPT, NUM_NEW)
    assert outcome.token_ids == (right[: len(outcome.token_ids)] if victim == running else [])
    assert bool(outcome.token_ids) == (victim == running)
    harness.call(resume())
    harness.run()
    assert harness.ledger.num_used_rows == 0


def test_requests_during_a_pause_are_refused_when_asked() -> None:
    harness = make(refuses_while_stopped=True)
    running = submit(harness)
    step_to(harness, running, "first token")
    harness.call(pause("retract"))
    refused = submit(harness, PROMPT[:4])
    harness.step()
    reason = harness.outputs[refused].finish_reason
    assert reason is not None
    assert (reason.type, reason.status_code) == ("abort", 503)
    harness.call(resume())
    harness.run()
    assert harness.outputs[running].token_ids == oracle(PROMPT, NUM_NEW)


def test_the_front_end_hears_of_a_pause_before_its_answer() -> None:
    harness = make()
    harness.call(pause("in_place"))
    assert isinstance(harness.replies[-2], EngineStatus)
    assert "in_place" in harness.replies[-2].stopped
    assert harness.replies[-2].is_frozen
    harness.call(resume())
    assert last_status(harness).stopped == ""


# ---------------------------------------------------------------- drain


def test_drain_lets_running_requests_finish_and_starts_no_other() -> None:
    harness = make("mtp", max_running_requests=2)
    running = [submit(harness, PROMPT[i:]) for i in range(2)]
    step_to(harness, running[1], "first token")
    waiting = submit(harness, PROMPT[:4])
    stop = pause("drain")
    reply = harness.call(stop, max_steps=200)
    assert reply.fields["finished"] == 2
    assert reply.fields["queued"] == 1
    assert harness.outputs[waiting].token_ids == []
    for req_id in running:
        assert len(harness.outputs[req_id].token_ids) == NUM_NEW
    harness.call(resume())
    harness.run()
    assert harness.outputs[waiting].token_ids == oracle(PROMPT[:4], NUM_NEW)


def test_drain_past_its_time_retracts() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "first token")
    stop = pause("drain", drain_timeout_s=5.0)
    harness.inbox.messages.append(stop)
    harness.step()
    harness.step()
    assert harness.reply_to(stop.call_id) is None
    assert not harness.scheduler.control.internal_state()["engine_paused"]
    harness.now = 6.0
    for _ in range(3):
        harness.step()
    reply = harness.reply_to(stop.call_id)
    assert reply.success
    assert reply.fields["retracted"] == 1
    harness.call(resume())
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, NUM_NEW)


def test_another_drain_gives_one_that_is_out_of_time_more() -> None:
    """The deadline is seen with a step in flight; the second call comes before it is read."""
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "first token")
    harness.inbox.messages.append(pause("drain", drain_timeout_s=5.0))
    harness.step()
    harness.now = 6.0
    harness.scheduler.receive()
    reply = harness.call(pause("drain"), max_steps=100)
    assert (reply.fields["finished"], reply.fields["retracted"]) == (1, 0)
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, NUM_NEW)


def test_drain_after_in_place_lets_the_frozen_finish() -> None:
    harness = make("verify")
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    harness.call(pause("in_place"))
    reply = harness.call(pause("drain"))
    assert reply.fields["finished"] == 1
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, NUM_NEW)


def test_drain_lets_those_finish_that_lose_their_place_meanwhile() -> None:
    harness = make("mtp", retract_interval=2)
    running = [submit(harness, PROMPT[i:]) for i in range(3)]
    step_to(harness, running[2], "first token")
    waiting = submit(harness, PROMPT[:4])
    reply = harness.call(pause("drain"), max_steps=500)
    assert reply.fields["finished"] == 3
    assert harness.outputs[waiting].token_ids == []
    for i, req_id in enumerate(running):
        assert harness.outputs[req_id].num_retractions > 0
        assert harness.outputs[req_id].token_ids == oracle(PROMPT[i:], NUM_NEW)


def test_drain_after_retract_starts_nobody() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    harness.call(pause("retract"))
    reply = harness.call(pause("drain"))
    assert (reply.fields["finished"], reply.fields["queued"]) == (0, 1)


@pytest.mark.parametrize("overlap", [True, False])
def test_what_a_pause_makes_possible_is_done_in_the_same_turn(overlap: bool) -> None:
    """The loop may sleep after it."""
    harness = make(overlap=overlap)
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    empty, stop, drain = flush(timeout_s=60.0), pause("retract"), pause("drain")
    harness.inbox.messages.append(empty)
    harness.step()
    harness.inbox.messages.extend([stop, drain])
    harness.step()
    assert not harness.scheduler.control.has_work
    for call in (empty, stop, drain):
        assert harness.reply_to(call.call_id).success


# ---------------------------------------------------------------- lease


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_lease_that_runs_out_continues(mode: str, caplog: pytest.LogCaptureFixture) -> None:
    harness = make()
    running = submit(harness)
    step_to(harness, running, "mid decode")
    harness.call(pause(mode, lease_s=10.0))
    waiting = submit(harness, PROMPT[:4])
    harness.now = 9.0
    harness.step()
    assert harness.scheduler.control.wait_s == 1.0
    assert harness.outputs[waiting].token_ids == []
    harness.now = 10.0
    harness.run()
    assert harness.outputs[waiting].token_ids == oracle(PROMPT[:4], NUM_NEW)
    assert last_status(harness).stopped == ""
    assert harness.scheduler.control.internal_state()["num_lease_expiries"] == 1
    assert "has run out" in caplog.text


def test_a_lease_can_abort() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    harness.call(pause("in_place", lease_s=10.0, lease_end="abort"))
    harness.now = 11.0
    harness.step()
    reason = harness.outputs[req_id].finish_reason
    assert reason is not None
    assert reason.type == "abort"
    assert "lease" in str(reason.message)
    assert harness.generate([PROMPT], max_new_tokens=3, temperature=0.0) == [oracle(PROMPT, 3)]


def test_a_lease_begins_with_the_answer() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "first token")
    stop = pause("drain", lease_s=1.0, drain_timeout_s=5.0)
    harness.inbox.messages.append(stop)
    for _ in range(3):
        harness.now += 1.5
        harness.step()
    harness.now = 6.0
    while harness.reply_to(stop.call_id) is None:
        harness.step()
    assert harness.reply_to(stop.call_id).success
    harness.step()
    assert harness.scheduler.control.internal_state()["engine_paused"]
    harness.now = 7.5
    harness.step()
    assert not harness.scheduler.control.internal_state()["engine_paused"]


def test_a_repeated_pause_renews_the_lease_and_one_without_ends_it() -> None:
    harness = make()
    harness.call(pause("retract", lease_s=10.0))
    harness.now = 8.0
    harness.call(pause("retract", lease_s=10.0))
    harness.now = 17.0
    harness.step()
    assert harness.scheduler.control.internal_state()["engine_paused"]
    harness.call(pause("retract"))
    harness.now = 1000.0
    harness.step()
    assert harness.scheduler.control.internal_state()["engine_paused"]
    assert harness.scheduler.control.wait_s is None


# ---------------------------------------------------------------- flush


@pytest.mark.parametrize("mode", ["abort", "retract"])
def test_flush_works_under_a_pause_that_leaves_no_kv(mode: str) -> None:
    harness = make()
    req_ids = [submit(harness, PROMPT[i:]) for i in range(3)]
    step_to(harness, req_ids[-1], "mid decode")
    cached = harness.ledger.num_tree_tokens
    assert cached > 0
    stop, empty = pause(mode), flush()
    harness.inbox.messages.append(stop)  # both at once: flush must wait for the stop
    reply = harness.call(empty)
    assert (reply.success, reply.flushed_items) == (True, cached)
    state = harness.scheduler.control.internal_state()
    assert state["available_kv_tokens"] == 512
    assert state["tree_cache_size"] == state["req_to_token_pool_used"] == 0
    assert state["forward_ct_decode"] == 0
    assert state["new_token_ratio"] == state["init_new_token_ratio"]
    assert state["cur_batch_is_none"]
    assert state["last_batch_is_none"]
    harness.call(resume())
    harness.run()
    for i, req_id in enumerate(req_ids):
        outcome = harness.outputs[req_id]
        right = oracle(PROMPT[i:], NUM_NEW)
        assert outcome.token_ids == right[: len(outcome.token_ids)]
        assert (len(outcome.token_ids) == NUM_NEW) == (mode == "retract")


def test_flush_is_refused_under_in_place_with_the_reason_and_the_lengths() -> None:
    harness = make(max_running_requests=2)
    req_ids = [submit(harness, PROMPT[i:]) for i in range(3)]
    step_to(harness, req_ids[1], "mid decode")
    harness.call(pause("in_place"))
    cached = harness.ledger.num_tree_tokens
    reply = harness.call(flush())
    assert not reply.success
    assert "2 requests are running and 1 waiting" in reply.error_msg
    assert "in place" in reply.error_msg
    assert harness.ledger.num_tree_tokens == cached
    harness.call(resume())
    harness.run()


def test_flush_is_refused_while_requests_are_about_to_start() -> None:
    harness = make()
    submit(harness)
    reply = harness.call(flush())
    assert not reply.success
    assert "0 requests are running and 1 waiting" in reply.error_msg


def test_a_flush_with_a_timeout_waits_for_idle_or_gives_up() -> None:
    harness = make()
    req_id = submit(harness)
    step_to(harness, req_id, "mid decode")
    patient, hasty = flush(timeout_s=100.0), flush(timeout_s=1.0)
    harness.inbox.messages.extend([patient, hasty])
    harness.step()
    harness.step()
    assert harness.reply_to(patient.call_id) is harness.reply_to(hasty.call_id) is None
    harness.now = 2.0
    harness.step()
    assert not harness.reply_to(hasty.call_id).success
    harness.run()
    harness.step()
    assert harness.reply_to(patient.call_id).success
    assert harness.ledger.num_free_tokens == 512


# ---------------------------------------------------------------- promptness


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
def test_a_pause_is_answered_within_one_turn(
    mode: str, overlap: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step in flight is read, none is launched."""
    launched, launch = [], FakeWorker.forward_batch_generation

    def noted(worker: FakeWorker, batch: ScheduleBatch) -> GenerationBatchResult:
        launched.append(batch)
        return launch(worker, batch)

    monkeypatch.setattr(FakeWorker, "forward_batch_generation", noted)
    harness = make("mtp", overlap, max_running_requests=64, num_pages=8192)
    req_ids = [submit(harness, [i % 50, 1, 2]) for i in range(64)]
    step_to(harness, req_ids[-1], "mid decode")
    assert launched
    assert (harness.ongoing is not None) == overlap
    launched.clear()
    stop = pause(mode)
    harness.inbox.messages.append(stop)
    harness.step()
    assert isinstance(harness.reply_to(stop.call_id), ControlReply)
    assert not launched
    assert harness.ongoing is None


def test_after_in_place_the_first_turn_decodes_everyone() -> None:
    harness = make(overlap=False)
    req_ids = [submit(harness, PROMPT[i:]) for i in range(4)]
    step_to(harness, req_ids[-1], "mid decode")
    harness.call(pause("in_place"))
    before = [len(harness.outputs[i].token_ids) for i in req_ids]
    harness.inbox.messages.append(resume())
    harness.step()
    assert [len(harness.outputs[i].token_ids) for i in req_ids] == [n + 1 for n in before]
