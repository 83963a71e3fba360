"""A drafter of chains with a model of its own (a head, a draft model), and n-grams beside it.

After each step both draft, and each request is given one of the two chains: that of the drafter
which it names (`Speculative.drafter`), else the chain of which more drafts are expected to be
right. What is expected is learnt on the device (`MatchConfidence`): of n-grams by the length of the
match, of the model's chains by what the model says of them.

Whichever chain a step verifies, the tokens that it gives show how far the other one was right. So
both are learnt from in every step, and nothing has to be tried out. Chains that are the same teach
nothing here: between them there is no choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.matched_drafts import LONGEST_OF_CLASS, PRIORS
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.registry import DRAFTERS, load
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    DrafterType,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_configs import NGRAM_NAME, PairConfig
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_confidence import MatchConfidence
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_ops import NgramOps
from sglang.srt.speculative.ngram_worker import DEFAULT_CAPACITY, planned_counts, within_budget
from sglang.srt.speculative.step_parts import extended_part_of, others, part_of
from sglang.srt.step.step_ops import AcceptedTokens
from sglang.srt.step.worker import DraftMakers, ScheduleBatch

# Classes of the model's chains: shares of their drafts that are right, by the model itself.
SHARES_OF_CLASS = (0.05, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9)
EITHER, MODEL, NGRAMS = 0, 1, 2  # what a request asks for
Step = TypeVar("Step", ComputedStep, ExtendedStep)


class _Judged(NamedTuple):
    """Chains of R requests.

    Attributes:
        chances: [R, D] float32; that each draft is right if those before it are.
        expected: [R] float32; drafts that are right, on average.
    """

    chances: torch.Tensor
    expected: torch.Tensor


class _Chains:
    """The last chains of one drafter, by row of the token table, and how often such are right.

    Attributes:
        tokens: [N, D] int64.
        counts: [N] int64; drafts of each chain, 0 where there is none.
    """

    def __init__(self, num_rows: int, max_drafts: int, confidence: MatchConfidence) -> None:
        device = confidence.tried.device
        self.tokens = torch.zeros((num_rows, max_drafts), dtype=torch.int64, device=device)
        self.counts = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._confidence = confidence
        self._places = torch.arange(max_drafts, device=device)

    def judge(
        self, rows: torch.Tensor, tokens: torch.Tensor, counts: torch.Tensor, scores: torch.Tensor
    ) -> _Judged:
        """Keeps new chains of rows [R], tokens [R, D] int64, of which each has its first counts [R]
        int64. Scores [R] say of which class they are."""
        width = tokens.shape[1]
        self.tokens[rows, :width] = tokens
        self.counts[rows] = counts
        chances = self._confidence.proposed(rows, scores)[:, :width]
        exists = self._places[:width] < counts[:, None]
        return _Judged(chances, torch.where(exists, chances.cumprod(1), 0.0).sum(1))

    def learn(self, rows: torch.Tensor, given: torch.Tensor, num_known: torch.Tensor) -> None:
        """Learns from the tokens that a step gave rows [R], given [R, M] int64, the first num_known
        [R] of each."""
        width = min(given.shape[1], len(self._places))
        num_known = torch.minimum(num_known, self.counts[rows])
        is_right = self.tokens[rows, :width] == given[:, :width]
        is_right &= self._places[:width] < num_known[:, None]
        self._confidence.learn(rows, num_known, is_right.int().cumprod(1).sum(1))


class PairDrafter(Drafter):
    """Lets the drafter with a model do all that it does alone, then writes the chains of n-grams
    over its own where these are given. Where its models may be left out, they are not fed requests
    that name n-grams (`StepPlan.without_model`)."""

    def __init__(self, parts: DrafterParts, model: Drafter) -> None:
        options: PairConfig = parts.options
        state, ngrams = parts.state, options.ngrams
        self._model = model
        self._state = state
        self._step_ops = parts.runners.target.step_ops
        device, num_rows = state.tokens.device, len(state.tokens)
        capacity = ngrams.capacity or DEFAULT_CAPACITY[device.type]
        self.memory = NgramMemory(state, capacity, ngrams.corpus)
        find: type[NgramOps] = load(parts.runners.target.operations.ngrams)
        self._ops = find(state, self.memory, ngrams.limits)
        self._corpus_budget = ngrams.corpus_budget
        most, padding = options.rounds.num_steps, state.padding_row
        by_share = [most * share for share in SHARES_OF_CLASS]
        of_model = MatchConfidence(num_rows, most, padding, device, by_share)
        of_match = MatchConfidence(num_rows, most, padding, device, LONGEST_OF_CLASS, PRIORS)
        self._of_model = _Chains(num_rows, most, of_model)
        self._of_match = _Chains(num_rows, most, of_match)
        self._wish_of_row = torch.zeros(num_rows, dtype=torch.int64, device=device)
        self._offsets = torch.arange(1, 1 + most, device=device)
        self._names = (*options.drafter.shown, NGRAM_NAME)
        self._maker_of_row = torch.zeros_like(self._wish_of_row)  # place in `_names`

    @staticmethod
    def needs(options: PairConfig) -> DrafterNeeds:
        needs = _kind(options).needs(options.drafter.options)
        assert not needs.has_trees, "Chains alone."
        return replace(needs, max_masks=needs.max_masks or 0)

    @staticmethod
    def models(options: PairConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return _kind(options).models(options.drafter.options, target)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        options: PairConfig = parts.options
        of_model = replace(parts, options=options.drafter.options, modelless=NGRAM_NAME)
        made = _kind(options).make(of_model)
        return PlannedDrafter(made.planner, cls(parts, made.drafter))

    def lens(self) -> torch.Tensor | None:
        return self._model.lens()

    def makers(self, rows: torch.Tensor) -> DraftMakers:
        return DraftMakers(self._names, self._maker_of_row[rows])

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        self.memory.admit(batch.new_rows)
        self._model.prepare(batch, plan)
        if not batch.new_rows:
            return
        pairs = [(new.row, _wish(new.params.speculative.drafter)) for new in batch.new_rows]
        rows, wishes = to_device(pairs, self._wish_of_row.device, torch.int64).T
        self._wish_of_row[rows] = wishes

    def extend(self, step: ComputedStep) -> torch.Tensor | None:
        if step.accepted.num_drafts is not None:
            self._learn(step.inputs.rows, step.accepted, step.accepted.num_drafts)
        fed = _fed(step, part_of)
        return None if fed is None else self._model.extend(fed)

    def _learn(
        self, rows: torch.Tensor, accepted: AcceptedTokens, num_drafts: torch.Tensor
    ) -> None:
        """Learns from a step that verified num_drafts [R] of rows [R]."""
        both = self._of_model, self._of_match
        is_other = both[0].tokens[rows] != both[1].tokens[rows]
        longest = torch.maximum(both[0].counts[rows], both[1].counts[rows])
        is_other &= self._offsets <= longest[:, None]
        teaches = is_other.any(1) & (num_drafts > 0)
        num_known = torch.where(teaches, accepted.accept_lens, 0)
        for chains in both:
            chains.learn(rows, accepted.next_token_ids, num_known)

    def propose(self, step: ExtendedStep) -> None:
        num_drafts = max(step.plan.next_drafts)
        if num_drafts == 0:
            return
        rows, wish = step.rows, self._wish_of_row[step.rows]
        found = self._ops.find(rows, num_drafts)  # before there are drafts in the token table
        counts = planned_counts(step, num_drafts)
        if (fed := _fed(step, extended_part_of)) is not None:
            self._model.propose(fed)
        of_model = self._judged_model(rows, torch.where(wish == NGRAMS, 0, counts), num_drafts)
        counts = within_budget(counts, found, self._corpus_budget)
        of_match = self._of_match.judge(rows, found.tokens, counts, found.match_lens)
        is_better = (wish == EITHER) & (of_match.expected > of_model.expected)
        takes_match = is_better | (wish == NGRAMS)
        self._maker_of_row[rows] = takes_match.to(torch.int64)
        counts = torch.where(takes_match, counts, 0)
        drafts = EagleVerifyInput(
            found.tokens, of_match.chances, per_request_draft_token_num=counts
        )
        drafts.write(self._step_ops, self._state, rows)  # over the model's

    def _judged_model(self, rows: torch.Tensor, counts: torch.Tensor, num_drafts: int) -> _Judged:
        """Judges the chains that the model has just written for rows [R], counts [R] drafts of
        each."""
        state = self._state
        assert state.confidence is not None, "`needs` asks for it."
        columns = state.committed[rows][:, None] + self._offsets[:num_drafts]
        columns = columns.clamp(max=state.tokens.shape[1] - 1)
        tokens = state.tokens[rows[:, None], columns].to(torch.int64)
        expected = state.confidence.drafts[rows, :num_drafts].cumprod(1).sum(1)
        return self._of_model.judge(rows, tokens, counts, expected)


def _kind(options: PairConfig) -> DrafterType:
    kind: DrafterType = DRAFTERS.load(options.drafter.name)
    return kind


def _fed(step: Step, cut: Callable[[Step, Sequence[int]], Step]) -> Step | None:
    """Returns the part of a step that the model is fed; None: nothing."""
    without = step.plan.without_model
    if not without:
        return step
    places = others(step.batch.rows, without)
    return cut(step, places) if places else None


def _wish(name: str | None) -> int:
    """Returns EITHER, MODEL or NGRAMS, by the name of a drafter."""
    if name is None:
        return EITHER
    return NGRAMS if name == NGRAM_NAME else MODEL
