"""The storm can fail: each of these defects, put into the runtime, is found within a few rounds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from sglang.srt.control.pause import PauseController
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.logit_adjustments import LogitAdjustments, RowAdjustments
from sglang.srt.lookahead.mask_planner import MaskPlanner
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.messages.requests import FinishReason
from sglang.srt.scheduling import batch_result_processor, step_builder
from sglang.srt.scheduling.batch_result_processor import BatchResultProcessor
from sglang.srt.scheduling.grammar_constraint import GrammarConstraint
from sglang.srt.scheduling.logprobs_and_hidden import LogprobsAndHiddenReader
from sglang.srt.scheduling.request import Req
from sglang.srt.scheduling.request_lifecycle import RequestLifecycle
from sglang.srt.step.step_ops import ReadRows
from sglang.srt.step.worker import NewRow
from sglang.srt.workers import tp_worker
from storm import run_rounds
from storm_checks import StormFailure
from storm_parts import TinyModels

MAX_ROUNDS = 20
Patch = pytest.MonkeyPatch


def forgets_a_page(patch: Patch) -> None:
    free = PageAllocator.free
    patch.setattr(PageAllocator, "free", lambda self, pages: free(self, list(pages)[:7]))


def drops_a_token(patch: Patch) -> None:
    accept = batch_result_processor.accept_tokens

    def accept_tokens(req: Req, tokens: list[int]) -> FinishReason | None:
        return accept(req, tokens[1:] if len(tokens) == 3 else tokens)

    patch.setattr(batch_result_processor, "accept_tokens", accept_tokens)


def sends_a_token_twice(patch: Patch) -> None:
    queue = BatchResultProcessor._queue_output

    def queue_output(self: BatchResultProcessor, req: Req) -> None:
        queue(self, req)
        if req.num_retractions and req.num_sent:
            req.num_sent -= 1

    patch.setattr(BatchResultProcessor, "_queue_output", queue_output)


def looks_for_stops_at_the_end_of_a_run_only(patch: Patch) -> None:
    accept = batch_result_processor.accept_tokens

    def accept_tokens(req: Req, tokens: list[int]) -> FinishReason | None:
        head = tokens[: max(0, min(len(tokens), req.num_remaining) - 1)]
        req.output_ids += head
        return accept(req, tokens[len(head) :])

    patch.setattr(batch_result_processor, "accept_tokens", accept_tokens)


def reads_a_wrong_row(patch: Patch) -> None:
    right = tp_worker.hidden_of_reads

    def hidden_of_reads(
        hidden: torch.Tensor, inputs: ForwardBatch, reads: ReadRows
    ) -> torch.Tensor:
        return right(hidden, inputs, reads).roll(1, 0)

    patch.setattr(tp_worker, "hidden_of_reads", hidden_of_reads)


def caches_tokens_without_kv(patch: Patch) -> None:
    release = RequestLifecycle._release

    def uncommitted(self: RequestLifecycle, req: Req, insert: bool) -> None:
        if insert and req.kv is not None:
            room = len(req.kv.pages) * self.ledger.page_size
            req.committed = min(len(req.known_ids), room)
        release(self, req, insert)

    patch.setattr(RequestLifecycle, "_release", uncommitted)


def keeps_kv_of_old_weights(patch: Patch) -> None:
    patch.setattr(KVLedger, "begin_weight_epoch", lambda self: None)


def loses_entries_of_the_page_table(patch: Patch) -> None:
    write = KVLedger._write_table

    def write_table(self: KVLedger, row: int, first_page: int, pages: Sequence[int]) -> None:
        write(self, row, first_page, pages if len(pages) < 5 else pages[:-1])

    patch.setattr(KVLedger, "_write_table", write_table)


def forgets_penalties_with_a_retraction(patch: Patch) -> None:
    def adjustments(*args: Any) -> RowAdjustments:
        params, _, num_prompt_tokens, stop_token_ids = args
        return RowAdjustments(params, [], num_prompt_tokens, stop_token_ids)

    patch.setattr(step_builder, "RowAdjustments", adjustments)


def leaves_biases_in_a_row(patch: Patch) -> None:
    initialize = LogitAdjustments.initialize

    def only_if_wanted(self: LogitAdjustments, row: int, wanted: RowAdjustments | None) -> None:
        if wanted is not None:
            initialize(self, row, wanted)

    patch.setattr(LogitAdjustments, "initialize", only_if_wanted)


def leaves_thresholds_in_a_row(patch: Patch) -> None:
    admit = MaskPlanner.admit

    def without_thresholds(self: MaskPlanner, new_rows: list[NewRow]) -> None:
        kept = [request.tau for request in self._requests]
        admit(self, new_rows)
        for request, tau in zip(self._requests, kept, strict=True):
            request.tau = tau

    patch.setattr(MaskPlanner, "admit", without_thresholds)


def draws_another_seed_after_a_retraction(patch: Patch) -> None:
    right = step_builder._new_row

    def new_row(req: Req) -> NewRow:
        return dataclasses.replace(right(req), seed=req.seed ^ (req.num_retractions > 0))

    patch.setattr(step_builder, "_new_row", new_row)


def hands_logprobs_to_the_next_request(patch: Patch) -> None:
    take = LogprobsAndHiddenReader.take_output_logprobs

    def take_output_logprobs(self: LogprobsAndHiddenReader, req: Req, tokens: list[int]) -> Any:
        before = self._next_emitted
        taken = take(self, req, tokens)
        if req.finish_reason is not None:
            self._next_emitted = before
        return taken

    patch.setattr(LogprobsAndHiddenReader, "take_output_logprobs", take_output_logprobs)


def answers_no_abort_of_a_waiting_request(patch: Patch) -> None:
    end = BatchResultProcessor.end

    def only_running(self: BatchResultProcessor, req: Req, reason: FinishReason) -> None:
        if req.kv is None and req.was_admitted:
            self._lifecycle.finish(req, reason)
        else:
            end(self, req, reason)

    patch.setattr(BatchResultProcessor, "end", only_running)


def answers_no_drain(patch: Patch) -> None:
    patch.setattr(PauseController, "_answer_drains", lambda self: self._drains.clear())


def labels_only_what_runs(patch: Patch) -> None:
    relabel = RequestLifecycle.set_weight_version

    def set_weight_version(self: RequestLifecycle, weight_version: str, *model: str) -> None:
        waiting, self.waiting = self.waiting, []
        relabel(self, weight_version, *model)
        self.waiting = waiting

    patch.setattr(RequestLifecycle, "set_weight_version", set_weight_version)


def forgets_retracted_requests(patch: Patch) -> None:
    retract_all = RequestLifecycle.retract_all

    def lose_one(self: RequestLifecycle) -> None:
        retract_all(self)
        if len(self.waiting) > 2:
            self.waiting.pop()

    patch.setattr(RequestLifecycle, "retract_all", lose_one)


def makes_masks_before_the_step_in_flight_is_read(patch: Patch) -> None:
    patch.setattr(GrammarConstraint, "_unread_tokens", lambda self: {})


# With a seed whose round finds it, in a few steps. Where the draws of rounds change, later rounds
# do, and take longer: give it the seed that the failure names.
DEFECTS: dict[Callable[[Patch], None], int] = {
    forgets_a_page: 1,
    drops_a_token: 0,
    sends_a_token_twice: 1,
    looks_for_stops_at_the_end_of_a_run_only: 12,
    reads_a_wrong_row: 3,
    caches_tokens_without_kv: 2024,
    keeps_kv_of_old_weights: 13,
    loses_entries_of_the_page_table: 2,
    forgets_penalties_with_a_retraction: 2006,
    leaves_biases_in_a_row: 13,
    leaves_thresholds_in_a_row: 2011,
    draws_another_seed_after_a_retraction: 1,
    hands_logprobs_to_the_next_request: 2013,
    answers_no_abort_of_a_waiting_request: 29,
    answers_no_drain: 3000,
    labels_only_what_runs: 3000,
    forgets_retracted_requests: 13,
    makes_masks_before_the_step_in_flight_is_read: 2015,
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> TinyModels:
    return TinyModels(tmp_path_factory.mktemp("models"))


@pytest.mark.long_matrix
@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.__name__)
def test_a_defect_is_found(
    models: TinyModels, monkeypatch: Patch, defect: Callable[[Patch], None]
) -> None:
    defect(monkeypatch)
    with pytest.raises(StormFailure, match="--seed") as found:
        run_rounds(models, DEFECTS[defect], 0.0, MAX_ROUNDS, MAX_ROUNDS)
    is_misfit = isinstance(found.value.__cause__, TypeError | AttributeError)
    assert not is_misfit, "The storm has found that the defect does not fit the code."
