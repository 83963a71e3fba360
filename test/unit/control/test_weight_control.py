"""Weight updates and memory at the scheduler: all or nothing, no stale KV, labels per token."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any, get_args

import pytest

from fake_weights import FakeWeights
from fake_worker import VOCAB_SIZE, FakeWorker, oracle
from sglang.srt.control import pause_bodies
from sglang.srt.control.control import ModelResources
from sglang.srt.control.memory_control import GRAPH_TAG, KV_TAG, WEIGHTS_TAG, MemoryPart
from sglang.srt.messages.control import (
    DEFAULT_GROUP,
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    EngineStatus,
    FromBytes,
    FromDirectory,
    FromFile,
    FromGroup,
    GroupAddress,
    MemoryOccupationReq,
    PauseGenerationReq,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
)
from sglang.srt.weight_sync.weight_group import WeightGroup
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from utils import SchedulerHarness, Setup

K = 4
PROMPT = [i * 5 % VOCAB_SIZE for i in range(20)]
_call_ids = itertools.count(1000)


class Part:
    """Memory that only notes what happens to it."""

    def __init__(self, tag: str, events: list[tuple[str, str]]) -> None:
        self._tag, self._all_events = tag, events
        self.error: Exception | None = None

    @property
    def events(self) -> list[str]:
        return [action for action, tag in self._all_events if tag == self._tag]

    def release(self) -> None:
        self._all_events.append(("release", self._tag))

    def restore(self) -> None:
        if self.error is not None:
            raise self.error
        self._all_events.append(("restore", self._tag))


class Harness(SchedulerHarness):
    """A harness with weights and two parts of memory, or three with graphs."""

    def __init__(self, kind: str = "plain", has_graphs: bool = False, **changes: Any) -> None:
        setup = Setup(**changes)
        worker = FakeWorker(kind, K, setup.max_running_requests, seed=0)
        self.weights = FakeWeights(worker)
        tags = ("kv_cache", "weights", "cuda_graph")[: 2 + has_graphs]
        self.events: list[tuple[str, str]] = []  # what happened to which part
        self.parts = {tag: Part(tag, self.events) for tag in tags}
        memory = {tag: MemoryPart(part.release, part.restore) for tag, part in self.parts.items()}
        super().__init__(
            setup, worker, resources=ModelResources(weights=self.weights, memory=memory)
        )

    def send(self, kind: type, max_steps: int = 100_000, **fields: Any) -> ControlReply:
        return self.call(kind(call_id=next(_call_ids), **fields), max_steps)

    def update(self, name: str = "w", **fields: Any) -> ControlReply:
        return self.send(UpdateWeightsReq, source=FromFile(path=name), **fields)

    def begin_update(self, name: str = "w", **fields: Any) -> int:
        """Sends an update and waits, without a step, until it has been read; its call id."""
        return self.send_without_steps(UpdateWeightsReq, source=FromFile(path=name), **fields)

    def send_without_steps(self, kind: type, **fields: Any) -> int:
        """A call id; the call has got as far as it can without a step of running requests."""
        call_id = next(_call_ids)
        self.inbox.messages.append(kind(call_id=call_id, **fields))
        control = self.scheduler.control
        while control.may_launch:  # what was read waits for the step
            self.scheduler.receive()
            time.sleep(0.001)
        while not control.may_launch and control.state.admits:
            self.step()
        return call_id

    def session(self, action: str, **fields: Any) -> ControlReply:
        return self.send(WeightSessionReq, action=action, **fields)

    def pause(self, mode: str) -> ControlReply:
        return self.send(PauseGenerationReq, mode=mode)

    def resume(self) -> ControlReply:
        return self.send(ContinueGenerationReq)

    def start(self, num_tokens: int, prompt: list[int] = PROMPT, num_new: int = 30) -> int:
        req_id = self.submit(prompt, max_new_tokens=num_new, temperature=0.0)
        while len(self.outputs[req_id].token_ids) < num_tokens:
            self.step()
        return req_id

    @property
    def state(self) -> dict[str, Any]:
        return self.scheduler.control.internal_state()

    @property
    def status(self) -> EngineStatus:
        return [r for r in self.replies if isinstance(r, EngineStatus)][-1]


# ---------------------------------------------------------------- KV of other weights


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
@pytest.mark.parametrize("is_flushed", [True, False])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_no_prefix_of_old_weights_is_ever_used_again(
    kind: str, is_flushed: bool, mode: str
) -> None:
    """The fake worker fails when it meets KV of other weights in a cached prefix."""
    harness = Harness(kind)
    harness.generate([PROMPT], max_new_tokens=5, temperature=0.0)
    live = harness.start(9)
    assert harness.outputs[live].cached_tokens > 0
    harness.pause(mode)
    assert harness.update(flush_cache=is_flushed).success
    again = harness.submit(PROMPT, max_new_tokens=5, temperature=0.0)
    harness.resume()
    harness.run()
    assert harness.outputs[again].cached_tokens == 0
    assert harness.outputs[live].token_ids == oracle(PROMPT, 30)
    # What the new weights have computed is shared again.
    third = harness.submit(PROMPT, max_new_tokens=5, temperature=0.0)
    harness.run()
    assert harness.outputs[third].cached_tokens > 0


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
@pytest.mark.parametrize("num_tokens", [0, 1, 15])
def test_a_request_whose_kv_spans_two_epochs_inserts_nothing(kind: str, num_tokens: int) -> None:
    """Neither when its prompt is done nor at its end; mid-prompt and while it decodes."""
    harness = Harness(kind, chunked_prefill_size=4)
    req_id = harness.start(num_tokens)
    if num_tokens == 0:
        harness.step()
        harness.step()
        assert harness.scheduler.lifecycle.running
    harness.pause("in_place")
    before = harness.state["tree_cache_size"]
    harness.update(flush_cache=False)
    harness.resume()
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)
    assert harness.state["tree_cache_size"] == before


@pytest.mark.parametrize("action", ["begin", "commit", "rollback"])
def test_every_action_of_a_session_begins_an_epoch(action: str) -> None:
    harness = Harness()
    if action != "begin":
        harness.session("begin")
        harness.update()
    harness.generate([PROMPT], max_new_tokens=5, temperature=0.0)
    epoch = harness.state["weight_epoch"]
    harness.session(action)
    assert harness.state["weight_epoch"] == epoch + 1
    req_id = harness.submit(PROMPT, max_new_tokens=5, temperature=0.0)
    harness.run()
    assert harness.outputs[req_id].cached_tokens == 0


# ---------------------------------------------------------------- all or nothing


def test_a_session_changes_the_weights_once_at_its_commit() -> None:
    harness = Harness()
    assert harness.session("begin").success
    assert harness.status.in_weight_session
    for name in ("a", "b", "a"):
        reply = harness.update(name)
        assert reply.success
        assert "staged" in reply.message
    assert harness.weights.num_applied == 0
    req_id = harness.start(3)
    reply = harness.session("commit", weight_version="v2", flush_cache=False)
    assert reply.fields["num_tensors"] == 2
    assert reply.fields["weight_version"] == "v2"
    assert harness.weights.num_applied == 1
    assert not harness.status.in_weight_session
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)


def test_a_rolled_back_session_changes_nothing() -> None:
    harness = Harness()
    harness.session("begin")
    harness.update("a", weight_version="v2")
    assert harness.session("rollback").success
    assert harness.weights.num_applied == 0
    assert harness.state["weight_version"] == "default"


def test_a_failed_part_leaves_the_session_and_the_weights_as_they_were() -> None:
    harness = Harness()
    harness.session("begin")
    harness.update("a")
    reply = harness.update("bad")
    assert not reply.success
    assert reply.status_code == 400
    assert harness.session("commit").fields["num_tensors"] == 1


def test_sessions_out_of_order_are_refused() -> None:
    harness = Harness()
    for action in ("commit", "rollback"):
        reply = harness.session(action)
        assert not reply.success
        assert "begin_weight_update" in reply.message
    harness.session("begin")
    assert "already" in harness.session("begin").message
    assert "Nothing has been staged" in harness.session("commit").message


def test_a_failed_update_leaves_the_old_weights_serving() -> None:
    harness = Harness()
    req_id = harness.start(3)
    epoch = harness.state["weight_epoch"]
    reply = harness.update("bad", weight_version="v2")
    assert not reply.success
    assert "no such weight" in reply.message
    assert (harness.state["weight_epoch"], harness.state["weight_version"]) == (epoch, "default")
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)


def test_weights_that_broke_half_way_never_serve_until_a_complete_update() -> None:
    harness = Harness()
    req_id = harness.start(3)
    harness.pause("retract")
    harness.weights.error = RuntimeError("out of memory")
    reply = harness.update()
    assert (reply.success, reply.status_code) == (False, 500)
    reply = harness.resume()
    assert not reply.success
    assert "update_weights_from_disk" in reply.message
    assert not harness.update().success  # a part is not enough
    harness.step()
    assert len(harness.outputs[req_id].token_ids) < 30
    assert harness.send(UpdateWeightsReq, source=FromDirectory(path="all")).success
    assert harness.resume().success
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)


def test_the_file_of_an_update_is_deleted_whatever_becomes_of_it(tmp_path: Any) -> None:
    harness = Harness()
    for name in ("good", "bad"):
        path = tmp_path / name
        path.touch()
        source = FromFile(path=str(path), delete=True)
        harness.send(UpdateWeightsReq, source=source)
        assert not path.exists()
    kept = tmp_path / "kept"
    kept.touch()
    harness.send(UpdateWeightsReq, source=FromFile(path=str(kept)))
    assert kept.exists()


def test_the_engine_generates_while_weights_are_read() -> None:
    harness = Harness()
    req_id = harness.start(1)
    message = UpdateWeightsReq(call_id=next(_call_ids), source=FromBytes(data=b"w"))
    harness.inbox.messages.append(message)
    harness.run()
    while harness.reply_to(message.call_id) is None:
        assert harness.scheduler.control.wait_s is not None
        harness.step()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)
    assert harness.weights.num_applied == 1


# ---------------------------------------------------------------- updates of a running engine


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
def test_running_requests_finish_with_the_old_weights_and_later_ones_have_the_new(
    kind: str,
) -> None:
    harness = Harness(kind, max_running_requests=2)
    running = [harness.start(2, PROMPT[i:]) for i in range(2)]
    waiting = harness.submit(PROMPT[:4], max_new_tokens=9, temperature=0.0)
    call_id = harness.begin_update(weight_version="v1")
    late = harness.submit(PROMPT[:5], max_new_tokens=9, temperature=0.0)
    while harness.reply_to(call_id) is None:
        assert harness.weights.num_applied == 0
        assert harness.outputs[waiting].token_ids == harness.outputs[late].token_ids == []
        harness.step()
    assert harness.reply_to(call_id).success
    harness.run()
    for i, req_id in enumerate(running):
        assert harness.outputs[req_id].token_ids == oracle(PROMPT[i:], 30)
        assert spans(harness, req_id) == [("default", 0)]
    assert spans(harness, waiting) == spans(harness, late) == [("v1", 0)]
    assert harness.outputs[late].token_ids == oracle(PROMPT[:5], 9)
    assert harness.status.stopped == ""


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place", "drain"])
def test_a_pause_lets_a_waiting_update_take_over_at_once(mode: str) -> None:
    harness = Harness()
    req_id = harness.start(2, num_new=200)
    call_id = harness.begin_update()
    assert harness.reply_to(call_id) is None
    assert harness.pause(mode).success
    harness.step()
    assert harness.reply_to(call_id).success
    assert harness.status.stopped
    harness.resume()
    harness.run()
    tokens = harness.outputs[req_id].token_ids
    assert tokens == oracle(PROMPT, 200)[: len(tokens)]
    assert len(tokens) == 200 or mode == "abort"


def test_updates_take_effect_in_their_order() -> None:
    harness = Harness()
    harness.start(2, num_new=200)
    first, second = (
        UpdateWeightsReq(call_id=next(_call_ids), source=FromFile(path=v), weight_version=v)
        for v in ("v1", "v2")
    )
    harness.inbox.messages.extend([first, second])
    harness.step()
    harness.submit(PROMPT[:5], max_new_tokens=9, temperature=0.0)
    harness.run()
    while harness.reply_to(second.call_id) is None:
        harness.step()
    harness.run()
    replies = [r.call_id for r in harness.replies if isinstance(r, ControlReply)]
    assert replies == [first.call_id, second.call_id]
    assert harness.weights.num_applied == 2
    assert harness.state["weight_version"] == "v2"


def test_calls_take_effect_in_their_order_without_waiting_for_answers() -> None:
    harness = Harness()
    names = ("a", "b", "c")
    parts = [
        UpdateWeightsReq(call_id=next(_call_ids), source=FromFile(path=name)) for name in names
    ]
    begin, commit = (
        WeightSessionReq(call_id=next(_call_ids), action=action) for action in ("begin", "commit")
    )
    label = UpdateWeightVersionReq(call_id=next(_call_ids), new_version="v1")
    harness.inbox.messages.extend([begin, *parts[:2], commit, label, parts[2]])
    while (reply := harness.reply_to(parts[2].call_id)) is None:
        harness.step()
    assert [harness.reply_to(part.call_id).fields["staged"] for part in parts] == [
        True,
        True,
        False,
    ]
    assert harness.reply_to(commit.call_id).fields["num_tensors"] == 2
    assert harness.reply_to(commit.call_id).fields["weight_version"] == "default"
    assert reply.fields["weight_version"] == "v1"
    assert harness.weights.num_applied == 2


def test_a_label_waits_behind_an_update_that_waits() -> None:
    harness = Harness()
    running = harness.start(2)
    update = harness.begin_update(weight_version="v1")
    label = UpdateWeightVersionReq(call_id=next(_call_ids), new_version="v2")
    harness.inbox.messages.append(label)
    harness.run()
    while harness.reply_to(label.call_id) is None:
        harness.step()
    assert harness.reply_to(update).fields["weight_version"] == "v1"
    assert harness.state["weight_version"] == "v2"
    assert spans(harness, running) == [("default", 0)]


@pytest.mark.parametrize("kind", ["plain", "verify", "mtp"])
def test_requests_that_lose_their_place_while_an_update_waits_finish_before_it(kind: str) -> None:
    """Retracted ones (here: at every fifth step) have begun; new ones have not."""
    harness = Harness(kind, retract_interval=5)
    running = [harness.start(2, PROMPT[i:]) for i in range(3)]
    call_id = harness.begin_update(weight_version="v1")
    late = harness.submit(PROMPT[:5], max_new_tokens=9, temperature=0.0)
    while harness.reply_to(call_id) is None:
        assert harness.outputs[late].token_ids == []
        harness.step()
    harness.run()
    for i, req_id in enumerate(running):
        assert harness.outputs[req_id].num_retractions > 0
        assert harness.outputs[req_id].token_ids == oracle(PROMPT[i:], 30)
        assert spans(harness, req_id) == [("default", 0)]
    assert spans(harness, late) == [("v1", 0)]


def test_an_update_that_aborts_waits_for_nobody_and_spares_all_if_it_fails() -> None:
    harness = Harness()
    first = harness.start(2, num_new=200)
    refused = harness.begin_update("bad", abort_all_requests=True)
    assert not harness.reply_to(refused).success
    assert harness.outputs[first].num_ends == 0
    waiting = harness.submit(PROMPT, max_new_tokens=200, temperature=0.0)
    done = harness.begin_update(abort_all_requests=True)
    assert harness.reply_to(done).success
    for req_id in (first, waiting):
        reason = harness.outputs[req_id].finish_reason
        assert reason is not None
        assert reason.type == "abort"
        assert len(harness.outputs[req_id].token_ids) < 200


def test_an_update_that_does_not_fit_what_serves_ends_no_request_and_leaves_its_session() -> None:
    """Found between steps: what all calls of a session staged does not fit together."""
    harness = Harness()
    req_id = harness.start(2)
    harness.session("begin")
    harness.update("a", abort_all_requests=True)
    harness.weights.error = WeightUpdateError("The update has two values for one weight.")
    reply = harness.session("commit", abort_all_requests=True)
    assert (reply.success, reply.status_code) == (False, 400)
    assert "two values" in reply.message
    assert harness.status.in_weight_session
    assert harness.session("rollback").success
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)


def test_a_session_with_an_aborting_part_aborts_at_its_commit() -> None:
    harness = Harness()
    harness.session("begin")
    req_id = harness.start(2, num_new=200)
    harness.begin_update("a", abort_all_requests=True)
    assert harness.outputs[req_id].num_ends == 0
    commit = harness.send_without_steps(WeightSessionReq, action="commit")
    assert harness.reply_to(commit).success
    assert harness.outputs[req_id].num_ends == 1


def test_a_commit_that_changes_nothing_can_be_tried_again() -> None:
    harness = Harness()
    harness.session("begin")
    harness.update("a")
    memory(harness, "release", "weights")
    refused = harness.session("commit")
    assert not refused.success
    assert "resume_memory_occupation" in refused.message
    memory(harness, "resume", "weights")
    assert harness.session("commit").fields["num_tensors"] == 1


def test_groups_that_do_not_exist_are_refused() -> None:
    harness = Harness()
    reply = harness.send(WeightGroupReq, group_name="g")
    assert not reply.success
    assert "'g'" in reply.message


def test_by_the_default_name_the_only_group_is_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightGroup, "join", lambda **_: SilentGroup())
    harness = Harness()
    for name in ("a", "b"):
        assert harness.send(WeightGroupReq, group_name=name, join=ADDRESS).success
    assert not harness.send(WeightGroupReq, group_name=DEFAULT_GROUP).success
    assert harness.send(WeightGroupReq, group_name="a").success
    assert harness.send(WeightGroupReq, group_name=DEFAULT_GROUP).success
    assert not harness.send(WeightGroupReq, group_name="b").success


ADDRESS = GroupAddress(
    master_address="localhost",
    master_port=1,
    rank=1,
    world_size=2,
    backend="gloo",
    timeout_s=60.0,
)


class SilentGroup:
    """A group whose trainer sends nothing; leaving it ends the waiting."""

    def __init__(self) -> None:
        self.left = threading.Event()

    def receive(self, specs: Any) -> Any:
        assert self.left.wait(20)
        raise WeightUpdateError("The group was left.")

    def close(self) -> None:
        self.left.set()


def test_leaving_a_group_ends_what_is_awaited_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(WeightGroup, "join", lambda **_: SilentGroup())
    harness = Harness()
    assert harness.send(WeightGroupReq, group_name="g", join=ADDRESS).success
    source = FromGroup(group_name="g", names=["a"], dtypes=["float32"], shapes=[[1]])
    update = UpdateWeightsReq(call_id=next(_call_ids), source=source)
    harness.inbox.messages.append(update)
    for _ in range(20):
        harness.step()
    assert harness.reply_to(update.call_id) is None
    assert harness.send(WeightGroupReq, group_name="g").success
    assert "was left" in harness.reply_to(update.call_id).message
    assert not harness.send(WeightGroupReq, group_name="g").success


# ---------------------------------------------------------------- labels


def spans(harness: Harness, req_id: int) -> list[tuple[str, int]]:
    return harness.outputs[req_id].weight_spans["target"]


@pytest.mark.parametrize("kind", ["plain", "mtp"])
@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_labels_split_exactly_where_the_weights_changed(kind: str, mode: str) -> None:
    harness = Harness(kind)
    req_id = harness.start(5)
    cuts = [0]
    for version in ("v1", "v2"):
        harness.pause(mode)
        harness.update(weight_version=version)
        cuts.append(len(harness.outputs[req_id].token_ids))
        harness.resume()
        for _ in range(2):
            harness.step()
    harness.run()
    assert spans(harness, req_id) == list(zip(("default", "v1", "v2"), cuts, strict=True))
    assert len(set(cuts)) == 3


def test_the_first_label_is_that_of_the_flag() -> None:
    harness = Harness(weight_version="step-7")
    req_id = harness.start(2)
    assert harness.state["weight_version"] == "step-7"
    harness.pause("in_place")
    assert harness.status.weight_version == "step-7"
    harness.resume()
    harness.run()
    assert spans(harness, req_id) == [("step-7", 0)]


def test_a_waiting_request_gets_the_label_of_its_first_token() -> None:
    harness = Harness(max_running_requests=1)
    harness.start(2)
    waiting = harness.submit(PROMPT, max_new_tokens=3, temperature=0.0)
    harness.step()
    reply = harness.send(UpdateWeightVersionReq, new_version="v1")
    assert reply.fields["new_version"] == "v1"
    harness.run()
    assert spans(harness, waiting) == [("v1", 0)]


def test_the_same_label_again_begins_no_span() -> None:
    harness = Harness()
    req_id = harness.start(4)
    harness.send(UpdateWeightVersionReq, new_version="default")
    harness.run()
    assert spans(harness, req_id) == [("default", 0)]


def test_partial_outputs_have_labels_too() -> None:
    harness = Harness(max_running_requests=1)
    running = harness.start(4)
    waiting = harness.submit(PROMPT, max_new_tokens=3, temperature=0.0)
    harness.step()
    harness.send(UpdateWeightVersionReq, new_version="v1")
    cut = len(harness.outputs[running].token_ids)
    harness.inbox.messages.append(AbortReq(abort_all=True))
    harness.step()
    assert spans(harness, running)[0] == ("default", 0)
    assert spans(harness, running)[1:] in ([], [("v1", cut)])
    assert spans(harness, waiting) == [("v1", 0)]


# ---------------------------------------------------------------- memory


def memory(harness: Harness, action: str, *tags: str) -> ControlReply:
    return harness.send(MemoryOccupationReq, action=action, tags=list(tags) or None)


def test_the_bodies_of_calls_have_the_same_tags() -> None:
    assert get_args(pause_bodies.MemoryTag) == (KV_TAG, WEIGHTS_TAG, GRAPH_TAG)


def test_released_memory_stops_the_engine_until_it_is_back() -> None:
    harness = Harness()
    harness.generate([PROMPT], max_new_tokens=3, temperature=0.0)
    assert memory(harness, "release").success
    assert "released" in harness.status.stopped
    assert harness.state["available_kv_tokens"] == 512
    req_id = harness.submit(PROMPT, max_new_tokens=3, temperature=0.0)
    for _ in range(3):
        harness.step()
    assert harness.outputs[req_id].token_ids == []
    reply = harness.resume()
    assert not reply.success
    assert "resume_memory_occupation" in reply.message
    assert memory(harness, "resume", "weights").success
    harness.step()
    assert harness.outputs[req_id].token_ids == []
    assert memory(harness, "resume").success
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 3)
    assert harness.outputs[req_id].cached_tokens == 0
    assert harness.parts["kv_cache"].events == ["release", "restore"]


@pytest.mark.parametrize(
    ("before", "action", "tags", "reason"),
    [
        ("", "release", ["engine"], "not held"),
        ("", "release", ["weights", "nonsense"], "not held"),
        ("", "resume", [], "Nothing is released"),
        ("", "resume", ["weights"], "not released"),
        ("release", "release", ["weights"], "already"),
        ("release", "release", [], "already"),
    ],
)
def test_memory_calls_out_of_order_are_refused_and_change_nothing(
    before: str, action: str, tags: list[str], reason: str
) -> None:
    harness = Harness()
    if before:
        memory(harness, before)
    events = {tag: list(part.events) for tag, part in harness.parts.items()}
    reply = memory(harness, action, *tags)
    assert not reply.success
    assert reason in reply.message
    assert {tag: part.events for tag, part in harness.parts.items()} == events


def test_graphs_are_no_matter_where_there_are_none() -> None:
    harness = Harness()
    for action in ("release", "resume"):
        assert memory(harness, action, "cuda_graph").success
        assert memory(harness, action, "kv_cache", "cuda_graph").fields["tags"] == ["kv_cache"]
    assert harness.parts["kv_cache"].events == ["release", "restore"]


CALLS: list[list[tuple[str, list[str]]]] = [  # that end with all memory there
    [("release", []), ("resume", [])],
    # As verl and slime call it.
    [("release", ["kv_cache", "weights"]), ("resume", ["weights"]), ("resume", ["kv_cache"])],
    [("release", []), ("resume", ["weights"]), ("resume", ["kv_cache", "cuda_graph"])],
    [("release", []), ("resume", ["weights"]), ("resume", ["kv_cache"])],
    [("release", ["kv_cache", "weights"]), ("resume", ["kv_cache", "weights", "cuda_graph"])],
    [("release", ["kv_cache"]), ("resume", ["cuda_graph"]), ("resume", ["kv_cache"])],
    [("release", ["cuda_graph"]), ("resume", ["cuda_graph"])],
    [("release", ["cuda_graph"]), ("release", ["cuda_graph"]), ("resume", ["cuda_graph"])],
    [("release", ["cuda_graph"]), ("release", ["weights"]), ("resume", ["weights"])],
    [("release", ["weights", "cuda_graph"]), ("resume", ["cuda_graph", "weights"])],
    [("release", ["kv_cache"]), ("release", ["weights", "cuda_graph"]), ("resume", [])],
    [("resume", ["cuda_graph"])],
]


@pytest.mark.parametrize("calls", CALLS)
@pytest.mark.parametrize("has_graphs", [False, True])
def test_graphs_are_held_exactly_while_all_other_memory_is(
    has_graphs: bool, calls: list[tuple[str, list[str]]]
) -> None:
    """They go before it does and come back behind it; a call may name them where there are none."""
    harness = Harness(has_graphs=has_graphs)
    for action, tags in calls:
        reply = memory(harness, action, *tags)
        assert reply.success, reply.message
        held = {tag for tag, part in harness.parts.items() if part.events[-1:] != ["release"]}
        assert {*reply.fields["released"]} == harness.parts.keys() - held
        if has_graphs and held != harness.parts.keys():
            assert "cuda_graph" not in held
    assert held == harness.parts.keys()
    actions = [action for action, _ in harness.events]
    graphs = [number for number, (_, tag) in enumerate(harness.events) if tag == "cuda_graph"]
    assert not graphs or graphs == [0, len(actions) - 1]
    assert harness.generate([PROMPT], max_new_tokens=3, temperature=0.0) == [oracle(PROMPT, 3)]


def test_nothing_runs_without_the_graphs_that_were_released() -> None:
    harness = Harness(has_graphs=True)
    req_id = harness.start(2)
    assert "pause generation first" in memory(harness, "release", "cuda_graph").message
    harness.pause("in_place")
    assert memory(harness, "release", "cuda_graph").fields["released"] == ["cuda_graph"]
    assert "cuda_graph" in harness.resume().message
    harness.parts["cuda_graph"].error = RuntimeError("out of memory")
    reply = memory(harness, "resume")
    assert not reply.success
    assert reply.fields["released"] == ["cuda_graph"]
    harness.parts["cuda_graph"].error = None
    assert memory(harness, "resume").success
    harness.resume()
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)


def test_requests_are_refused_while_memory_is_released_when_asked() -> None:
    harness = Harness(refuses_while_stopped=True)
    memory(harness, "release")
    req_id = harness.submit(PROMPT, max_new_tokens=3, temperature=0.0)
    harness.step()
    reason = harness.outputs[req_id].finish_reason
    assert reason is not None
    assert reason.status_code == 503
    assert "resume_memory_occupation" in str(reason.message)


def test_memory_that_cannot_be_had_leaves_the_engine_stopped_and_alive() -> None:
    harness = Harness()
    memory(harness, "release")
    harness.parts["weights"].error = RuntimeError("out of memory")
    reply = memory(harness, "resume")
    assert not reply.success
    assert "out of memory" in reply.message
    assert reply.fields["released"] == harness.state["released_memory"] == ["weights"]
    harness.parts["weights"].error = None
    assert memory(harness, "resume").success
    assert harness.generate([PROMPT], max_new_tokens=3, temperature=0.0) == [oracle(PROMPT, 3)]


def test_memory_that_requests_use_is_not_released() -> None:
    harness = Harness()
    req_id = harness.start(3)
    assert "pause generation first" in memory(harness, "release", "weights").message
    harness.pause("in_place")
    assert "retract" in memory(harness, "release", "kv_cache").message
    assert "retract" in memory(harness, "release").message
    assert memory(harness, "release", "weights").success
    assert memory(harness, "resume", "weights").success
    harness.pause("retract")
    assert memory(harness, "release").success
    assert memory(harness, "resume").success
    harness.resume()
    harness.run()
    assert harness.outputs[req_id].token_ids == oracle(PROMPT, 30)
