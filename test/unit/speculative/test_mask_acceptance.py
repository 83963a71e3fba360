"""Tests what is accepted of a step's predictions and what is left for the next step, against a
plain loop over each request."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from sgl_kernel import reference
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.speculative.drafter import ChosenTokens
from sglang.srt.speculative.mask_ops import TorchMaskOps
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import READ_START, AcceptedTokens, StepCounts
from sglang.srt.step.torch_step_ops import TorchStepOps
from sglang.srt.step.worker import BatchRequest, ScheduleBatch

VOCAB_SIZE = 3  # small, so that drafts are often right
MAX_PENDING = 4
MASK = 7
WIDTH = 32
TAU = 0.5


@dataclass(frozen=True)
class Case:
    """One request: what it feeds and what its rows say."""

    committed: int
    pending: list[int]
    bound: int
    num_predicted: int
    emits_only_confirmed: bool
    targets: list[int]
    confident: list[bool]

    @property
    def num_read(self) -> int:
        """Returns the number of rows read, for the most rows that the host expects."""
        return (self.bound if self.emits_only_confirmed else 1) + self.num_predicted - 1


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
    """Rows behind those that its pending tokens need say anything: nobody may look at them."""
    num_pending = chooser.randint(1, MAX_PENDING)
    case = Case(
        committed=chooser.randrange(1, WIDTH - 3 * MAX_PENDING),
        pending=[chooser.randrange(VOCAB_SIZE) for _ in range(num_pending)],
        bound=chooser.randint(num_pending, MAX_PENDING),
        num_predicted=chooser.randint(1, MAX_PENDING),
        emits_only_confirmed=chooser.random() < 0.6,
        targets=[],
        confident=[],
    )
    case.targets.extend(chooser.randrange(VOCAB_SIZE) for _ in range(case.num_read))
    case.confident.extend(chooser.random() < 0.7 for _ in range(case.num_read))
    return case


def accept(cases: list[Case], state: RequestRows, pool: ReqToTokenPool) -> AcceptedTokens:
    """The step of these requests, in rows 0, 1, ..., as the worker ends it."""
    for row, case in enumerate(cases):
        state.committed[row], state.pending_lens[row] = case.committed, len(case.pending)
        first = state.tokens[row, case.committed :]
        first[: len(case.pending)] = torch.tensor(case.pending, dtype=torch.int32)
    q_lens = [case.bound + case.num_predicted - 1 for case in cases]
    counts = StepCounts(
        q_lens,
        [case.num_read for case in cases],
        [case.num_predicted for case in cases],
        [case.emits_only_confirmed for case in cases],
    )
    requests = [
        BatchRequest(row, q_len, kv_len_before=WIDTH - q_len) for row, q_len in enumerate(q_lens)
    ]
    batch = ScheduleBatch(requests)
    ops = TorchStepOps(torch.device("cpu"))
    layout = ops.lay_out(batch, counts, state, pool, MASK)
    targets = torch.tensor([token for case in cases for token in case.targets])
    probs = torch.tensor([float(flag) for case in cases for flag in case.confident])
    chosen, lookahead = ChosenTokens(layout, targets, probs), layout.lookahead
    assert lookahead is not None
    masks = TorchMaskOps(state, torch.full((len(state.committed),), TAU))
    confirmed = reference.confirm_drafts(
        layout.input_ids,
        targets,
        None,
        lookahead.q_starts,
        lookahead.num_pending,
        MAX_PENDING,
        layout.per_request[READ_START],
    )
    accepted = ops.commit_run(
        layout, targets, confirmed, masks.num_confident(chosen), MAX_PENDING, state
    )
    masks.propose(chosen, accepted)
    return accepted


def test_acceptance_follows_the_rule_request_by_request() -> None:
    chooser = random.Random(0)
    seen_kept, seen_pending = set(), set()
    for _ in range(400):
        cases = [random_case(chooser) for _ in range(chooser.randint(1, 6))]
        pool = ReqToTokenPool(len(cases) + 1, WIDTH, "cpu")
        state = RequestRows(pool, MAX_PENDING, VOCAB_SIZE)
        state.tokens.fill_(MASK)
        accepted = accept(cases, state, pool)
        for row, case in enumerate(cases):
            right = expected(case)
            num_accepted, num_kept = int(accepted.accept_lens[row]), int(accepted.kept_lens[row])
            assert accepted.next_token_ids[row, :num_accepted].tolist() == right.emitted
            assert num_kept == right.num_kept
            num_pending = int(state.pending_lens[row])
            assert state.pending(torch.tensor([row]))[0, :num_pending].tolist() == right.pending
            assert int(state.committed[row]) == case.committed + num_kept
            assert int(state.num_tokens[row]) == case.committed + num_kept + num_pending
            known = [*case.pending[:1], *right.emitted]
            if not case.emits_only_confirmed:
                known = [*case.pending, *right.emitted]
            place = state.tokens[row, case.committed :]
            assert place[: len(known)].tolist() == known
            num_drafts = len(case.pending) - 1 if case.emits_only_confirmed else 0
            assert accepted.num_drafts is not None
            assert int(accepted.num_drafts[row]) == num_drafts
            seen_kept.add(right.num_kept)
            seen_pending.add(len(right.pending))
    assert seen_kept == seen_pending == set(range(1, MAX_PENDING + 1))
