"""What is accepted of a step's predictions, against a plain loop over each request."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from sglang.srt.mtp.acceptance import AcceptanceInputs, decide_acceptance

VOCAB_SIZE = 3  # small, so that drafts are often right
MAX_PENDING = 4


@dataclass(frozen=True)
class Case:
    """One request: what it fed and what its rows say."""

    pending: list[int]
    num_predicted: int
    emits_only_confirmed: bool
    targets: list[int]
    confident: list[bool]


@dataclass(frozen=True)
class Expected:
    emitted: list[int]
    num_kept: int
    pending: list[int]


def expected(case: Case) -> Expected:
    """The rule, spelled out."""
    if not case.emits_only_confirmed:
        count = 0
        while count < case.num_predicted and case.confident[count]:
            count += 1
        emitted = case.targets[: max(count, 1)]
        return Expected(emitted, len(case.pending), emitted)
    drafts = case.pending[1:]
    num_right = 0
    while num_right < len(drafts) and drafts[num_right] == case.targets[num_right]:
        num_right += 1
    emitted = case.targets[: num_right + 1]
    pending = [emitted[-1]]
    if num_right == len(drafts):
        for j in range(case.num_predicted - 1):
            if not case.confident[num_right + 1 + j]:
                break
            pending.append(case.targets[num_right + 1 + j])
    return Expected(emitted, num_right + 1, pending)


def random_case(chooser: random.Random) -> Case:
    emits_only_confirmed = chooser.random() < 0.6
    num_pending = chooser.randint(1, MAX_PENDING)
    num_predicted = chooser.randint(1, MAX_PENDING)
    num_read = (num_pending if emits_only_confirmed else 1) + num_predicted - 1
    return Case(
        pending=[chooser.randrange(VOCAB_SIZE) for _ in range(num_pending)],
        num_predicted=num_predicted,
        emits_only_confirmed=emits_only_confirmed,
        targets=[chooser.randrange(VOCAB_SIZE) for _ in range(num_read)],
        confident=[chooser.random() < 0.7 for _ in range(num_read)],
    )


def padded(values: list[int], width: int, filler: int) -> list[int]:
    return values + [filler] * (width - len(values))


def test_acceptance_follows_the_rule_request_by_request() -> None:
    """Padding to the width of the batch says "right and confident", so that reading it shows."""
    chooser = random.Random(0)
    seen_kept, seen_pending = set(), set()
    for _ in range(400):
        cases = [random_case(chooser) for _ in range(chooser.randint(1, 6))]
        width = max(len(case.targets) for case in cases) + chooser.randint(0, 2)
        filler = chooser.randrange(VOCAB_SIZE)
        outcome = decide_acceptance(
            AcceptanceInputs(
                targets=torch.tensor([padded(c.targets, width, filler) for c in cases]),
                confident=torch.tensor([padded(c.confident, width, True) for c in cases]).bool(),
                pending=torch.tensor([padded(c.pending, MAX_PENDING, filler) for c in cases]),
                pending_lens=torch.tensor([len(c.pending) for c in cases]),
                emits_only_confirmed=torch.tensor([c.emits_only_confirmed for c in cases]),
                num_predicted=torch.tensor([c.num_predicted for c in cases]),
            )
        )
        for i, case in enumerate(cases):
            right = expected(case)
            assert case.targets[: int(outcome.accept_lens[i])] == right.emitted
            assert int(outcome.kept_lens[i]) == right.num_kept
            num_pending = int(outcome.pending_lens[i])
            assert outcome.pending[i, :num_pending].tolist() == right.pending
            seen_kept.add(right.num_kept)
            seen_pending.add(len(right.pending))
    assert seen_kept == seen_pending == set(range(1, MAX_PENDING + 1))


def test_without_look_ahead_a_step_is_plain_decode() -> None:
    outcome = decide_acceptance(
        AcceptanceInputs(
            targets=torch.tensor([[7]]),
            confident=torch.tensor([[False]]),
            pending=torch.tensor([[3]]),
            pending_lens=torch.tensor([1]),
            emits_only_confirmed=torch.tensor([True]),
            num_predicted=torch.tensor([1]),
        )
    )
    assert outcome.accept_lens.tolist() == outcome.kept_lens.tolist() == [1]
    assert outcome.pending.tolist() == [[7]]
    assert outcome.pending_lens.tolist() == [1]
