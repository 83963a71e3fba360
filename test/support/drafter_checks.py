"""Serves requests with a drafter and without one, and compares all that clients are told. The
ledger and the token table are checked after every step, and before it the KV that it reads.

A drafter of a test is named in the registry first:

    monkeypatch.setitem(DRAFTERS.entries, "toy", "module_of_the_test:ToyDrafter")
    plain = serve(path, setup, None, requests)
    served = serve(path, setup, DrafterConfig("toy", options), requests)
    assert_same(served.outcomes, plain.outcomes)
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang.srt.messages.requests import LogprobOptions, PositionLogprobs
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models, make_worker
from sglang.srt.scheduling.request import HiddenStates
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.step_ops import EMITS
from thread_ranks import NUM_RANKS, EqualSteps, RunnersOfRanks, put_to_work, runners_of
from token_table_check import checked_harness
from utils import Collected, SchedulerHarness, Setup, make_execution

TOLERANCE = 1e-4  # of log-probabilities and hidden states: other batches, other roundings


@dataclass(frozen=True)
class Request:
    """Describes what a client asks for.

    Attributes:
        params: sampling parameters.
    """

    prompt: list[int]
    params: dict[str, Any]
    logprobs: LogprobOptions | None = None
    hidden_states: HiddenStates = "none"

    def submit(self, harness: SchedulerHarness) -> int:
        return harness.submit(
            self.prompt, logprobs=self.logprobs, hidden_states=self.hidden_states, **self.params
        )


ASKED: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 3, "min_p": 0.05},
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.4},
    {"logit_bias": {"1": 2.5, "2": -4.0}},
    {"min_new_tokens": 9, "stop_token_ids": [0, 1, 2]},
    {"min_new_tokens": 5, "stop_token_ids": [3], "logit_bias": {"3": 3}},
    {"stop_token_ids": [2]},
    {"stop_token_ids": [4], "min_new_tokens": 3},
]


def asking_requests(vocab_size: int) -> list[Request]:
    """Greedy and seeded ones that ask for each of ASKED, for log-probabilities and hidden
    states."""
    chooser = random.Random(5)
    requests = []
    for number, asked in enumerate([*ASKED, *ASKED]):
        prompt = [chooser.randrange(vocab_size) for _ in range(chooser.choice([3, 9, 20]))]
        params = {"max_new_tokens": chooser.choice([18, 24]), "temperature": 0.0, **asked}
        if number >= len(ASKED):
            params |= {"temperature": 0.7, "sampling_seed": number}
        scores = LogprobOptions(start_len=1, top_num=2, token_ids=[4, 0], kept=number % 2 == 0)
        states = chooser.choice(["none", "all"])
        requests.append(Request(prompt, params, chooser.choice([None, scores]), states))
    return requests


@dataclass(frozen=True)
class Served:
    """Holds what became of requests.

    Attributes:
        outcomes: in the order of the requests.
        seen: how many drafts were fed and confirmed, and in how many steps of a request the
            accepted path was not the first rows; what the token table was checked for.
    """

    outcomes: list[Collected]
    seen: Counter[str] = field(default_factory=Counter)


class DraftCounter:
    """Counts what becomes of drafts; for `on_step` of a worker."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()

    def __call__(self, step: ComputedStep) -> None:
        accepted, emits = step.accepted, step.chosen.layout.per_request[EMITS]
        if accepted.num_drafts is None:
            self.seen["steps without look-ahead"] += 1
            return
        num_confirmed = (accepted.accept_lens - 1).clamp(min=0)
        self.seen["fed"] += int(accepted.num_drafts.sum())
        self.seen["confirmed"] += int(num_confirmed.sum())
        self.seen["draftless"] += int(((accepted.num_drafts == 0) & (emits > 0)).sum())
        if accepted.path is not None:
            places = torch.arange(accepted.path.shape[1], device=accepted.path.device)
            is_kept = (places > 0) & (places <= num_confirmed[:, None])
            is_moved = (accepted.path != places) & is_kept
            self.seen["moved"] += int(is_moved.any(1).sum())


def make_drafter_runners(
    path: Path,
    setup: Setup,
    drafter: DrafterConfig | None,
    num_ranks: int = NUM_RANKS,
    **changes: Any,
) -> tuple[RunnerGroup, Setup]:
    """Runners for a drafter, of ranks as `runners_of` has them, and the set-up with room for it;
    `changes` are fields of `ExecutionConfig`."""
    needs = drafter_needs(drafter)
    setup = replace(setup, max_decode_rows=needs.max_slots)
    execution = make_execution(
        path,
        setup,
        setup.context_len,
        needs.max_rows,
        row_width=setup.row_width,
        capture=needs.capture,
        captures_trees=needs.has_trees,
        **changes,
    )
    others = drafter_models(drafter, execution)
    return runners_of(execution, *others, num_ranks=num_ranks), setup


def drafter_harness(
    path: Path,
    setup: Setup,
    drafter: DrafterConfig | None,
    checks_kv: bool = True,
    **changes: Any,
) -> tuple[SchedulerHarness, Counter[str]]:
    """A scheduler over the model at `path` with a drafter or without one, and what is seen in its
    steps.

    Args:
        checks_kv: see `make_worker`.
        changes: fields of `ExecutionConfig`.
    """
    runners, setup = make_drafter_runners(path, setup, drafter, **changes)
    counter = DraftCounter()
    equal = EqualSteps(counter, isinstance(runners, RunnersOfRanks))
    options: dict[str, Any] = {"on_step": equal, "checks_kv": checks_kv}
    at_work = put_to_work(runners, lambda group: make_worker(group, drafter, **options))
    equal.first = at_work.first._state
    harness, check = checked_harness(
        setup, at_work.first, True, at_work.steps, resources=at_work.resources
    )
    check.seen = counter.seen
    return harness, counter.seen


def serve(
    path: Path,
    setup: Setup,
    drafter: DrafterConfig | None,
    requests: Sequence[Request],
    between: Callable[[SchedulerHarness, int], None] | None = None,
    **changes: Any,
) -> Served:
    """Serves requests that arrive in turn.

    Args:
        between: is called after each step with the number of steps so far.
        changes: as for `drafter_harness`.
    """
    harness, seen = drafter_harness(path, setup, drafter, **changes)
    ids = []
    for number, request in enumerate(requests):
        ids.append(request.submit(harness))
        if number % 3 == 2:
            harness.step()
    while not harness.is_idle:
        harness.step()
        if between is not None:
            between(harness, harness.num_steps)
    harness.run()
    return Served([harness.outputs[req_id] for req_id in ids], seen)


def assert_same(outcomes: Sequence[Collected], plain: Sequence[Collected]) -> None:
    """Clients are told the same: tokens and ends exactly, numbers within TOLERANCE."""
    for number, (outcome, right) in enumerate(zip(outcomes, plain, strict=True)):
        assert outcome.num_ends == right.num_ends == 1, number
        assert outcome.token_ids == right.token_ids, f"{number}: other tokens"
        assert outcome.finish_reason == right.finish_reason, f"{number}: another end"
        same = are_same_scores(outcome.output_logprobs, right.output_logprobs)
        same &= are_same_scores(outcome.input_logprobs, right.input_logprobs)
        assert same, f"{number}: other scores"
        states, wanted = outcome.hidden_states, right.hidden_states
        same = len(states) == len(wanted)
        same = same and all(map(are_close, states, wanted))
        assert same, f"{number}: other states"


def are_close(row: Sequence[float], other: Sequence[float]) -> bool:
    return torch.allclose(torch.tensor(row), torch.tensor(other), rtol=0, atol=TOLERANCE)


def are_same_scores(left: list[PositionLogprobs], right: list[PositionLogprobs]) -> bool:
    """Tells whether log-probabilities are of the same tokens, and close."""
    if [entry.token_id for entry in left] != [entry.token_id for entry in right]:
        return False
    return all(
        one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
        and one.chosen == pytest.approx(other.chosen, abs=TOLERANCE)
        and one.top_logprobs == pytest.approx(other.top_logprobs, abs=TOLERANCE)
        and {*array("i", one.kept or b"")} == {*array("i", other.kept or b"")}
        for one, other in zip(left, right, strict=True)
    )


def assert_many_of_each(seen: Counter[str], has_trees: bool, least: int = 20) -> None:
    """Drafts were often right and often wrong, were often lacking, and of trees the right branch
    was often not the first one: else equal tokens say little."""
    assert seen["confirmed"] >= least, seen
    assert seen["fed"] - seen["confirmed"] >= least, seen
    assert seen["draftless"] >= least // 4, seen
    if has_trees:
        assert seen["moved"] >= least // 4, seen
