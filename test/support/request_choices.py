"""Requests that choose what is drafted for them, in turn; and checks of what steps do for each."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from drafted_serving import Drafted
from sglang.srt.sampling.sampling_params import SamplingParams, Speculative
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.step_parts import part_of
from sglang.srt.step.step_ops import NUM_READ, Q_LEN, Q_START, READ_START
from sglang.srt.step.worker import NewRow

OFF, NGRAMS = Speculative(enabled=False), Speculative(drafter="ngram")
CHOICES = (Speculative(), OFF, Speculative(max_drafts=1), Speculative(max_drafts=0))


def choose_in_turn(harness: Drafted, choices: tuple[Speculative, ...] = CHOICES) -> None:
    """From now on each request makes another choice."""
    submit, turns = harness.submit, itertools.cycle(choices)

    def chosen(prompt: list[int], **params: Any) -> int:
        return submit(prompt, **{"speculative": next(turns), **params})

    vars(harness)["submit"] = chosen


class ChoiceChecks:
    """Looks whether each step does for each request what that chose; for `on_step` of a worker.

    Attributes:
        seen: drafts confirmed and steps, by the most drafts that a request takes.
    """

    def __init__(self, harness: Drafted, most_drafts: int) -> None:
        self.seen = Counter[str]()
        self._most_drafts = most_drafts
        self._params: dict[int, SamplingParams] = {}
        self._random = random.Random(7)
        self._admit = harness.planner.admit
        vars(harness.planner)["admit"] = self._admitted

    def _admitted(self, new_rows: list[NewRow]) -> None:
        self._params.update((new.row, new.params) for new in new_rows)
        self._admit(new_rows)

    def most(self, row: int) -> int:
        """Drafts that the request of a row takes."""
        choice = self._params[row].speculative
        if choice.is_off:
            return 0
        return self._most_drafts if choice.max_drafts is None else choice.max_drafts

    def watch_model(self, checks: list[Any]) -> None:
        """Checks of a drafter's model that no request that takes no drafts is fed."""

        checks.append(lambda batch: self._check_rows(batch.rows))

    def watch_search(self, ops: Any) -> None:
        """Checks that n-grams are searched for no request that takes no drafts."""
        find = ops.find

        def watched(rows: torch.Tensor, *others: Any) -> Any:
            self._check_rows(rows)
            return find(rows, *others)

        vars(ops)["find"] = watched

    def _check_rows(self, rows: torch.Tensor) -> None:
        known = [row for row in rows.tolist() if row in self._params]
        assert all(self.most(row) for row in known), known
        self.seen["looked at"] += len(known)

    def __call__(self, step: ComputedStep) -> None:
        batch, plan = step.batch, step.plan
        mosts = [self.most(row) for row in batch.rows]
        fed = step.chosen.layout.per_request[Q_LEN].tolist()
        lens = step.accepted.accept_lens.tolist()
        for place, most in enumerate(mosts):
            num_prompt = batch.num_prompt_tokens[place]
            assert plan.next_drafts[place] <= most
            if not num_prompt:
                assert fed[place] <= plan.counts.q_lens[place] <= 1 + most
                self.seen[f"steps of {most}"] += 1
                self.seen[f"confirmed of {most}"] += lens[place] - 1
            if most == 0:
                assert batch.max_q_lens[place] == (num_prompt or 1)
        if not plan.rests:
            assert list(plan.left_out) == [i for i, most in enumerate(mosts) if most == 0]
        self.seen["mixed"] += 0 < len(plan.left_out) < len(mosts)
        self.seen["packed"] += plan.counts.packed is not None
        count = self._random.randint(1, len(mosts))
        check_part(step, sorted(self._random.sample(range(len(mosts)), count)))


NO_LAUNCH = (torch.ops.aten.new_empty.default, torch.ops.aten.flatten.using_ints)


class Launches(TorchDispatchMode):
    """Counts the operations of torch, but for those that only make a view or take memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = Counter[str]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.seen[str(func)] += not (func.is_view or func in NO_LAUNCH)
        return func(*args, **kwargs or {})


def launches_of_decodes(harness: Drafted) -> list[Counter[str]]:
    """From now on, the operations of each step that feeds no prompt and keeps no text."""
    found, worker = list[Counter[str]](), harness.scheduler._worker
    launch = worker.forward_batch_generation

    def counted(batch: Any) -> Any:
        with Launches() as launches:
            result = launch(batch)
        if not (any(batch.num_prompt_tokens) or batch.ended_texts):
            found.append(launches.seen)
        return result

    vars(worker)["forward_batch_generation"] = counted
    return found


def check_part(step: ComputedStep, places: list[int]) -> None:
    """Each request's rows and results are those that it has in the whole step, side by side."""
    part = part_of(step, places)
    whole_numbers = step.chosen.layout.per_request.T.tolist()
    numbers = part.chosen.layout.per_request.T.tolist()
    assert part.batch.rows == [step.batch.rows[place] for place in places]
    next_row = next_read = 0
    for new, old in enumerate(places):
        had, has = whole_numbers[old], numbers[new]
        assert (has[Q_START], has[READ_START]) == (next_row, next_read)
        next_row, next_read = next_row + has[Q_LEN], next_read + has[NUM_READ]
        rows, new_rows = _span(had, Q_START, Q_LEN), _span(has, Q_START, Q_LEN)
        reads, new_reads = _span(had, READ_START, NUM_READ), _span(has, READ_START, NUM_READ)
        for name in ("input_ids", "positions", "slots", "ancestors"):
            _same(getattr(step.inputs, name), getattr(part.inputs, name), rows, new_rows)
        _same(step.forward.taps, part.forward.taps, rows, new_rows)
        _same(step.chosen.targets, part.chosen.targets, reads, new_reads)
        for name in ("offset", "positions", "rows"):
            whole, cut = step.chosen.layout.reads, part.chosen.layout.reads
            _same(getattr(whole, name), getattr(cut, name), reads, new_reads)
        index = part.chosen.layout.reads.index[new_reads] - has[Q_START] + had[Q_START]
        assert torch.equal(index, step.chosen.layout.reads.index[reads])
        for name in ("accept_lens", "kept_lens", "next_token_ids", "path", "num_drafts"):
            one, other = slice(old, old + 1), slice(new, new + 1)
            _same(getattr(step.accepted, name), getattr(part.accepted, name), one, other)
        assert part.inputs.rows[new] == step.batch.rows[old]
        assert part.inputs.kv_lens[new] == step.inputs.kv_lens[old]
        assert part.inputs.q_lens[new] == step.inputs.q_lens[old]
    assert len(part.inputs.slots) == part.plan.counts.num_rows >= next_row
    assert not part.inputs.slots[next_row:].any()
    assert len(part.chosen.targets) == part.plan.counts.num_reads >= next_read
    is_packed = step.plan.counts.packed is not None
    assert is_packed or len(part.inputs.slots) == next_row
    if part.inputs.q_starts is not None:
        assert part.inputs.q_starts.tolist() == [*(each[Q_START] for each in numbers), next_row]


def _span(numbers: list[int], start: int, length: int) -> slice:
    return slice(numbers[start], numbers[start] + numbers[length])


def _same(
    whole: torch.Tensor | None, cut: torch.Tensor | None, rows: slice, new_rows: slice
) -> None:
    assert (whole is None) == (cut is None)
    if whole is not None and cut is not None:
        assert torch.equal(whole[rows], cut[new_rows])
