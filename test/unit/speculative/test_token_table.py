"""The token table on the device holds what the scheduler knows of every request, after every step,
whatever happens to the requests; and the check would find what could be wrong with it."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sgl_kernel import ConfirmedDrafts
from sglang.srt.messages.control import AbortReq
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.scheduling import step_builder
from sglang.srt.scheduling.request import Req
from sglang.srt.speculative import confirm as confirming
from sglang.srt.speculative.drafter import ChosenTokens
from sglang.srt.speculative.mask_ops import TorchMaskOps
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import EMITS, ROW, AcceptedTokens, RowLayout
from sglang.srt.step.torch_step_ops import TorchStepOps
from sglang.srt.step.worker import NewRow
from sglang.srt.workers.tp_worker import TpModelWorker
from target import TARGET
from token_table_check import checked_harness
from utils import MTP_MAX_ROWS, Setup, make_mtp_worker, make_runner

MASK = 5
CONTEXT = 64
NUM_REQUESTS = 14
SEEDS = range(8 if TARGET.device == "cpu" else 6)
KINDS = ("plain", "mtp")
MTP = {"mtp_enabled": True, "temperature": 0.0}
MODES: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "sampling_seed": 3, "frequency_penalty": 0.5},
    {**MTP, "mtp_k": 4},
    {**MTP, "mtp_k": 8, "mtp_strategy": ["conf_adapt", 0.6]},
    {**MTP, "mtp_k": 5, "mtp_verify": True},
    {**MTP, "mtp_k": 8, "mtp_verify": True, "temperature": 1.0, "sampling_seed": 4},
)
Patch = pytest.MonkeyPatch


@functools.cache
def runner_for(path: Path, page_size: int, kind: str) -> ModelRunner:
    setup = Setup(page_size=page_size, num_pages=320 // page_size, max_running_requests=4)
    return make_runner(path, setup, CONTEXT, 1 if kind == "plain" else MTP_MAX_ROWS)


def run(path: Path, kind: str, seed: int) -> Counter[str]:
    """Random requests, aborts and settings; returns what there was to check."""
    chooser = random.Random(seed)
    choose = chooser.choice
    page_size = choose([1, 16])
    runner = runner_for(path, page_size, kind)
    if kind == "plain":
        state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
        worker: Any = TpModelWorker(runner, state, (MASK,))
    else:
        worker = make_mtp_worker(runner, MASK, trims_rows=choose([True, False]))
    setup = Setup(
        page_size=page_size,
        num_pages=choose([128, 320]) // page_size,
        max_running_requests=4,
        use_radix_cache=choose([True, True, False]),
        chunked_prefill_size=choose([3, 7, 2048]),
        retract_interval=choose([0, 0, 1, 3]),
        enable_overlap=choose([True, True, False]),
        eos_token_ids=choose([frozenset(), frozenset({1})]),
        context_len=CONTEXT,
        max_decode_rows=1 if kind == "plain" else MTP_MAX_ROWS,
    )
    harness, check = checked_harness(setup, worker)
    modes = MODES[:2] if kind == "plain" else MODES
    shared = [chooser.randrange(MASK) for _ in range(20)]
    for number in range(1, NUM_REQUESTS + 1):
        prompt = shared[: choose([0, 5, 20])]
        prompt = prompt + [chooser.randrange(MASK) for _ in range(choose([1, 2, 16, 30]))]
        most = CONTEXT - len(prompt)
        harness.submit(prompt, max_new_tokens=choose([1, 9, most, most]), **choose(modes))
        for _ in range(choose([0, 0, 1, 5])):
            harness.step()
        if chooser.random() < 0.15:
            harness.inbox.messages.append(AbortReq(req_ids=[chooser.randint(1, number)]))
    harness.run()
    return check.seen


def run_all(path: Path, kind: str) -> Counter[str]:
    return sum((run(path, kind, seed) for seed in SEEDS), Counter[str]())


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", KINDS)
def test_the_table_holds_what_is_known_of_each_request(small_model: Path, kind: str) -> None:
    seen = run_all(small_model, kind)
    wanted = {"chunks", "retracted before", "length", "stop"}
    if kind == "mtp":
        wanted |= {"drafts", "rejected", "context's end"}
    assert all(seen[what] >= 10 for what in wanted), seen


# ---------------------------------------------------------------- what the check must find


def forgets_the_output_with_a_retraction(patch: Patch) -> None:
    right = step_builder._new_row

    def new_row(req: Req) -> NewRow:
        new = right(req)
        return dataclasses.replace(
            new, tokens=new.tokens[: max(len(req.input_ids), req.committed + 1)]
        )

    patch.setattr(step_builder, "_new_row", new_row)


def leaves_out_the_cached_prefix(patch: Patch) -> None:
    right = step_builder._new_row

    def new_row(req: Req) -> NewRow:
        new = right(req)
        tokens = np.where(np.arange(len(new.tokens)) < new.num_committed, MASK, new.tokens)
        return dataclasses.replace(new, tokens=tokens.astype(np.int32))

    patch.setattr(step_builder, "_new_row", new_row)


def mixes_up_sequences_that_come_together(patch: Patch) -> None:
    right = RequestRows._fill

    def fill(self: RequestRows, sequences: list[np.ndarray], rows: torch.Tensor) -> None:
        right(self, sequences[::-1] if len({*map(len, sequences)}) == 1 else sequences, rows)

    patch.setattr(RequestRows, "_fill", fill)


def keeps_the_known_end_of_plain_steps(patch: Patch) -> None:
    right = TorchStepOps.commit

    def commit(
        self: TorchStepOps, layout: RowLayout, tokens: torch.Tensor, state: RequestRows
    ) -> torch.Tensor:
        kept = state.num_tokens.clone()
        drawn = right(self, layout, tokens, state)
        state.num_tokens.copy_(kept)
        return drawn

    patch.setattr(TorchStepOps, "commit", commit)


def shows_rejected_drafts(patch: Patch) -> None:
    def after(state: RequestRows, rows: torch.Tensor, before: torch.Tensor) -> None:
        state.num_tokens[rows] = torch.maximum(state.num_tokens[rows], before)

    _after_acceptance(patch, after)


def confirms_other_drafts(patch: Patch) -> None:
    _take_for_pending(patch, 2)


def rejects_all_drafts(patch: Patch) -> None:
    _take_for_pending(patch, MASK)


def _take_for_pending(patch: Patch, token: int) -> None:
    right = confirming.sampling_ops

    class Kernels:
        """Confirms drafts of another token than those that were fed."""

        def __init__(self, device: torch.device) -> None:
            self._right = right(device)

        def confirm_drafts(self, tokens: torch.Tensor, *args: Any) -> ConfirmedDrafts:
            found: ConfirmedDrafts = self._right.confirm_drafts(
                torch.full_like(tokens, token), *args
            )
            return found

    patch.setattr(confirming, "sampling_ops", Kernels)


def writes_into_a_prompt_that_is_read(patch: Patch) -> None:
    right = TorchMaskOps.propose

    def propose(self: TorchMaskOps, chosen: ChosenTokens, accepted: AcceptedTokens) -> None:
        right(self, chosen, accepted)
        per_request = chosen.layout.per_request
        reading = per_request[ROW][per_request[EMITS] == 0]
        self._state.tokens[reading, self._state.committed[reading]] = MASK

    patch.setattr(TorchMaskOps, "propose", propose)


def writes_a_token_of_another_row(patch: Patch) -> None:
    def after(state: RequestRows, rows: torch.Tensor, before: torch.Tensor) -> None:
        state.tokens[(rows[0] + 1) % len(state.tokens), -1] += 1

    _after_acceptance(patch, after)


def _after_acceptance(
    patch: Patch, after: Callable[[RequestRows, torch.Tensor, torch.Tensor], None]
) -> None:
    """Does something to the rows after acceptance; it gets `num_tokens` as it was before."""
    confirm, right = TorchStepOps.commit_run, TorchMaskOps.propose
    before: list[torch.Tensor] = []

    def commit_run(self: TorchStepOps, layout: RowLayout, *args: Any) -> AcceptedTokens:
        before[:] = [args[-1].num_tokens[layout.per_request[ROW]]]
        return confirm(self, layout, *args)

    def propose(self: TorchMaskOps, chosen: ChosenTokens, accepted: AcceptedTokens) -> None:
        right(self, chosen, accepted)
        after(self._state, chosen.layout.per_request[ROW], before[0])

    patch.setattr(TorchStepOps, "commit_run", commit_run)
    patch.setattr(TorchMaskOps, "propose", propose)


@pytest.mark.skipif(TARGET.device != "cpu", reason="The bugs are put into the operations of a CPU.")
@pytest.mark.parametrize(
    ("bug", "kind", "found"),
    [
        (forgets_the_output_with_a_retraction, "plain", "admitted with"),
        (leaves_out_the_cached_prefix, "plain", "admitted with"),
        (mixes_up_sequences_that_come_together, "plain", "Another sequence"),
        (keeps_the_known_end_of_plain_steps, "plain", "tokens end where"),
        (shows_rejected_drafts, "mtp", "tokens end where"),
        (confirms_other_drafts, "mtp", "Other drafts were confirmed"),
        (rejects_all_drafts, "mtp", "right draft was rejected"),
        (writes_into_a_prompt_that_is_read, "mtp", "admitted with"),
        (writes_a_token_of_another_row, "mtp", "Tokens of another row"),
    ],
)
def test_the_check_finds(
    small_model: Path, monkeypatch: Patch, bug: Callable[[Patch], None], kind: str, found: str
) -> None:
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        run_all(small_model, kind)
