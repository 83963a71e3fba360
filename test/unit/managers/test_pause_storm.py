"""A thousand random programs of pauses, updates, aborts and flushes against live traffic."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
from test_scheduler_properties import KINDS, Storm, expected_output

from sglang.srt.managers.control_messages import (
    AbortReq,
    ContinueGenerationReq,
    ControlReply,
    FlushCacheReqInput,
    FromBytes,
    MemoryOccupationReq,
    PauseGenerationReq,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightSessionReq,
)

NUM_SEEDS = 334  # per kind
MAX_STEPS = 3000  # what one program may take to come to its end
MODES = ("abort", "retract", "in_place", "drain")


class ControlStorm(Storm):
    """A storm with control calls in it; their answers are counted."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__(kind, seed)
        self.calls: list[int] = []
        self._call_ids = itertools.count(10_000)

    def run(self) -> None:
        for _ in range(self.random.randint(10, 40)):
            self._act()
            for _ in range(self.random.choice([1, 1, 1, 2, 3])):
                self._control()
            self.harness.now += self.random.choice([0.0, 0.1, 1.0])
            self.harness.step()
        self._send(MemoryOccupationReq, action="resume")
        self._send(ContinueGenerationReq)
        self._finish()

    def _finish(self) -> None:
        """Steps only when the scheduler's own loop would, which may sleep for ever."""
        harness, control = self.harness, self.harness.scheduler.control
        for _ in range(MAX_STEPS):
            if not (harness.inbox.messages or harness.ongoing or control.has_work):
                if control.wait_s is None:
                    break
                harness.now += control.wait_s
                time.sleep(0.001 if control.wait_s else 0)  # for what a thread reads
            harness.step()
        assert harness.is_idle
        assert all(harness.reply_to(call_id) is not None for call_id in self.calls)

    def _control(self) -> None:
        draw, choose = self.random.random(), self.random.choice
        if draw < 0.12:
            mode = choose(MODES)
            fields: dict[str, Any] = {"lease_s": choose([None, None, 2.0])}
            if fields["lease_s"]:
                fields["lease_end"] = choose(["continue", "abort"])
            if mode == "drain":
                fields["drain_timeout_s"] = choose([None, 0.5, 5.0])
            self._send(PauseGenerationReq, mode=mode, **fields)
        elif draw < 0.30:
            self._send(ContinueGenerationReq)
        elif draw < 0.34:
            self._send(FlushCacheReqInput, timeout_s=choose([0.0, 0.0, 1.0]))
        elif draw < 0.38:
            data = choose([b"a", b"b", b"bad"])
            self._send(
                UpdateWeightsReq,
                source=FromBytes(data=data),
                weight_version=choose([None, "v1", "v2"]),
                flush_cache=choose([True, False]),
            )
        elif draw < 0.42:
            self._send(WeightSessionReq, action=choose(["begin", "commit", "rollback"]))
        elif draw < 0.44:
            self._send(UpdateWeightVersionReq, new_version=choose(["v1", "v3"]))
        elif draw < 0.46:
            self._send(MemoryOccupationReq, action=choose(["release", "resume"]))
        elif draw < 0.48 and self.submitted:
            self.harness.inbox.messages.append(
                AbortReq(req_ids=[self.random.choice(list(self.submitted))])
            )

    def _send(self, kind: type, **fields: Any) -> None:
        call_id = next(self._call_ids)
        self.calls.append(call_id)
        self.harness.inbox.messages.append(kind(call_id=call_id, **fields))


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_moved_or_answered_twice_in_a_thousand_storms(kind: str) -> None:
    """The harness checks the ledger after every step, the fake worker the KV of cached prefixes."""
    num_aborted = num_whole = num_updates = num_refused = num_expired = 0
    for seed in range(NUM_SEEDS):
        storm = ControlStorm(kind, seed)
        storm.run()
        harness = storm.harness
        for req_id, request in storm.submitted.items():
            outcome = harness.outputs[req_id]
            where = f"{kind}, seed {seed}, request {req_id}, {storm.setup}"
            assert outcome.num_ends == 1, where
            assert outcome.finish_reason is not None
            tokens, kind_of_end = expected_output(request, storm.setup.eos_token_ids)
            if outcome.finish_reason.type == "abort":
                assert outcome.token_ids == tokens[: len(outcome.token_ids)], where
                num_aborted += 1
            else:
                assert outcome.token_ids == tokens, where
                assert outcome.finish_reason.type == kind_of_end, where
                num_whole += 1
            starts = [start for _, start in outcome.weight_spans]
            assert starts[0] == 0, where
            assert starts == sorted(set(starts)), where
            assert starts[-1] <= len(outcome.token_ids), where
        replies = [harness.reply_to(call_id) for call_id in storm.calls]
        num_refused += sum(isinstance(r, ControlReply) and not r.success for r in replies)
        state = harness.scheduler.control.internal_state()
        num_expired += state["num_lease_expiries"]
        num_updates += state["weight_epoch"]
        assert state["available_kv_tokens"] + state["tree_cache_size"] == (
            harness.ledger.num_pool_tokens
        )
        assert not state["stopped"]
    # The storms must really do what they are meant to.
    assert num_aborted > 500
    assert num_whole > 500
    assert num_updates > 200
    assert num_refused > 200
    assert num_expired > 20
