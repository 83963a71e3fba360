"""Requests to a scheduler over a target and a drafter with a model of its own, left alone, paused
or aborted, and their answers compared with those without a drafter."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch

from sglang.srt.messages.control import AbortReq, ContinueGenerationReq, PauseGenerationReq
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.workers.tp_worker import TpModelWorker
from thread_ranks import EqualSteps, RunnersOfRanks, put_to_work
from utils import SchedulerHarness, Setup

VOCAB = 24
_call_ids = itertools.count(1)


def _made_worker(
    group: RunnerGroup, drafter: DrafterConfig | None, **options: Any
) -> TpModelWorker:
    """A worker over pools that hold no numbers yet."""
    for pool in group.memory.pools:
        for kv in pool.kv:
            kv[pool.page_size :] = float("nan")
    return make_worker(group, drafter, **options)


class Drafted(SchedulerHarness):
    """A scheduler over the target and a drafter, or none. What is in no pool yet is no number
    there, so whoever reads it shows. `scramblers` may change device rows after each step, of all
    ranks alike."""

    def __init__(
        self,
        group: RunnerGroup,
        drafter: DrafterConfig | None,
        setup: Setup,
        checks_kv: bool = False,
        **worker_options: Any,
    ) -> None:
        self.scramblers: list[Callable[[ComputedStep], None]] = []
        tell, has_ranks = worker_options.pop("on_step", None), isinstance(group, RunnersOfRanks)
        self._steps = EqualSteps(tell, has_ranks, self.scramblers)
        on_step = self._steps if tell or has_ranks else None
        options = {"checks_kv": checks_kv, "on_step": on_step, **worker_options}
        at_work = put_to_work(group, lambda group: _made_worker(group, drafter, **options))
        self._meet, self._steps.first = at_work.meet, at_work.first._state
        self.drafter: Any = at_work.first._drafter
        self.planner: Any = at_work.first._planner
        self.resources = at_work.resources
        super().__init__(setup, at_work.steps, resources=self.resources)

    def send(self, kind: type, **fields: Any) -> None:
        reply = self.call(kind(call_id=next(_call_ids), **fields), max_steps=10_000)
        assert reply.success, reply

    def pause(self, mode: str) -> None:
        self.send(PauseGenerationReq, mode=mode)

    def check(self) -> None:
        """The ledger is exact; it was after each step. The ranks are equal, and were."""
        self._meet()
        self._steps.check()
        checker, ledger = self.scheduler.checker, self.ledger
        assert checker.num_violations == checker.num_repairs == 0
        assert checker.report().is_exact
        assert ledger.num_used_rows == 0
        assert ledger.num_free_tokens + ledger.num_tree_tokens == ledger.num_pool_tokens


@contextmanager
def launches_never_wait(harness: Drafted) -> Iterator[None]:
    """On a GPU: in this block a launch raises at every operation that makes the host wait."""
    worker: Any = harness.scheduler._worker
    launch = worker.forward_batch_generation

    def watched(batch: object) -> object:
        torch.cuda.set_sync_debug_mode("error")
        try:
            return launch(batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    with mock.patch.object(worker, "forward_batch_generation", watched):
        yield


@functools.cache
def prompts() -> list[list[int]]:
    """Three begin with the same 34 tokens; lengths are around those of pages and chunks."""
    chooser = random.Random(0)
    shared = [chooser.randrange(VOCAB) for _ in range(34)]
    lengths = (1, 5, 16, 17, 40, 32)
    alone = [[chooser.randrange(VOCAB) for _ in range(length)] for length in lengths]
    return alone + [shared + [token] * count for token, count in ((1, 3), (2, 17), (3, 1))]


def params_of(index: int) -> dict[str, Any]:
    num_new = {"max_new_tokens": 8 + index}
    if index % 3 == 2:
        return {"temperature": 0.8, "sampling_seed": index, **num_new}
    return {"temperature": 0.0, **num_new}


Disturb = Callable[[Drafted, random.Random], None]


def nothing(harness: Drafted, chooser: random.Random) -> None:
    """Lets them run."""


def pause(harness: Drafted, chooser: random.Random) -> None:
    if chooser.random() < 0.15:
        harness.pause(chooser.choice(["retract", "in_place", "drain"]))
        harness.send(ContinueGenerationReq)


def abort(harness: Drafted, chooser: random.Random) -> None:
    if chooser.random() < 0.1:
        harness.inbox.messages.append(AbortReq(req_ids=[chooser.choice(list(harness.outputs))]))


def serve(
    harness: Drafted,
    right: list[list[int]],
    disturb: Disturb = nothing,
    seed: int = 0,
    num_turns: int = 2,
) -> list[int]:
    """All prompts in each turn, some arriving while others run; answers are compared. Gives the
    numbers of the requests."""
    chooser, ids = random.Random(seed), []
    for _ in range(num_turns):
        for index, prompt in enumerate(prompts()):
            ids.append(harness.submit(prompt, **params_of(index)))
            if chooser.random() < 0.4:
                harness.step()
                disturb(harness, chooser)
        while not harness.is_idle:
            harness.step()
            disturb(harness, chooser)
    harness.check()
    for req_id, tokens in zip(ids, right * num_turns, strict=True):
        outcome = harness.outputs[req_id]
        assert outcome.num_ends == 1
        assert outcome.finish_reason is not None
        if disturb is abort and outcome.finish_reason.type == "abort":
            tokens = tokens[: len(outcome.token_ids)]
        assert outcome.token_ids == tokens, (harness.setup, req_id)
    return ids
