"""NGRAM: drafts are what followed the last tokens of a request where they stood before.

They stood in its own text, prompt and output, in text of requests that have ended, or in a corpus
(`NgramMemory`). All are searched on the device after each step of the target, so no model runs
and the host does nothing that depends on tokens.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_options import MAX_TREE_ROWS
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.round_prices import MeasuredRoundPrices
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.registry import load
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_configs import NgramConfig, NgramLimits
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.ngram_confidence import MatchConfidence, likeliest_nodes
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_ops import Continuation, NgramOps
from sglang.srt.speculative.rounds import needs_of_rounds, planner_of_rounds
from sglang.srt.step.price_table import FREE, DraftPrices, PassPrices, PriceTable, no_graphs
from sglang.srt.step.request_rows import confidence_of_scores
from sglang.srt.step.worker import ScheduleBatch

# 1.5 MB on a GPU, so that its cache holds them; a CPU searches fewer in as much time.
DEFAULT_CAPACITY = {"cpu": 2048, "cuda": 131_072}


def num_branches(
    match_lens: torch.Tensor, least: int, most: int, limits: NgramLimits
) -> torch.Tensor:
    """Int64; branches of trees after matches of these lengths, match_lens int64 of the same shape:
    `most` after the shortest ones, `least` after those of `limits.longest`, linear between and
    rounded. Where all matches are as long, `most`."""
    span = max(1, limits.longest - limits.shortest)
    beyond = (match_lens - limits.shortest).clamp(0, span)
    return most - (2 * (most - least) * beyond + span) // (2 * span)


class NgramDrafter(Drafter):
    """Every request that drafts gives as many drafts as the step's tier says, unless a budget of
    the corpus leaves it fewer. One whose last tokens stood nowhere before repeats its last one: its
    rows are fed anyway."""

    def __init__(self, parts: DrafterParts) -> None:
        options: NgramConfig = parts.options
        self._state = parts.state
        self._step_ops = parts.runners.target.step_ops
        capacity = options.capacity or DEFAULT_CAPACITY[parts.state.tokens.device.type]
        self.memory = NgramMemory(parts.state, capacity, options.corpus)
        kind = load(parts.runners.target.operations.ngrams)
        self._ops: NgramOps = kind(parts.state, self.memory, options.limits)
        most = options.rounds.num_steps
        self._options = options
        # A tree of D nodes has no more branches than that.
        self._most_branches = min(most, options.breadth)
        self._chains: MatchConfidence | None = None  # None too where confidences are not read
        state = parts.state
        num_rows, padding, device = len(state.tokens), state.padding_row, state.tokens.device
        if state.confidence is not None and not options.rounds.has_trees:
            self._chains = MatchConfidence(num_rows, most, padding, device)
        self._match_lens: torch.Tensor | None = None  # [N] int64, by row; None: no one asks
        if options.rounds.policy.reads_matches:
            self._match_lens = torch.zeros(len(state.tokens), dtype=torch.int64, device=device)

    @staticmethod
    def needs(options: NgramConfig) -> DrafterNeeds:
        needs = replace(
            needs_of_rounds(options.rounds),
            suppressed_token_ids=options.suppressed_token_ids,
            proposes_without_output=True,
        )
        if needs.has_trees and needs.max_rows > MAX_TREE_ROWS:
            raise ValueError(
                f"--speculative-num-draft-tokens {needs.max_rows}: a tree has {MAX_TREE_ROWS}"
                " tokens at most; ask for fewer, or use --speculative-ngram-max-bfs-breadth 1."
            )
        return needs

    @staticmethod
    def models(options: NgramConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return ()

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        rounds, prices = parts.options.rounds, None
        if rounds.needs_prices and parts.prices is not None:
            free, num_rows = _free_drafts(rounds.num_steps), parts.runners.memory.table.num_rows
            prices = MeasuredRoundPrices(parts.prices, free, max_requests=num_rows)
        return PlannedDrafter(planner_of_rounds(rounds, parts, prices), cls(parts))

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        self.memory.admit(batch.new_rows)

    def lens(self) -> torch.Tensor | None:
        """Lengths of the matches that the pending drafts follow."""
        return self._match_lens

    def _note(self, rows: torch.Tensor, match_lens: torch.Tensor) -> None:
        """The matches of rows [R] are so long, [R] int64."""
        if self._match_lens is not None:
            self._match_lens[rows] = match_lens

    def extend(self, step: ComputedStep) -> None:
        """There is no model; what became of the drafts is learnt."""
        accepted = step.accepted
        if self._chains is not None and accepted.num_drafts is not None:
            num_right = accepted.accept_lens - 1
            self._chains.learn(step.inputs.rows, accepted.num_drafts, num_right)

    def propose(self, step: ExtendedStep) -> None:
        rows = step.rows
        num_drafts = max(step.plan.next_drafts)
        if num_drafts == 0:
            if self._match_lens is not None:
                self._note(rows, self._ops.find(rows, 1).match_lens)
        elif self._options.rounds.has_trees:
            self._propose_trees(rows, num_drafts, planned_counts(step, num_drafts))
        else:
            self._propose_chains(rows, num_drafts, planned_counts(step, num_drafts))

    def _propose_chains(self, rows: torch.Tensor, num_drafts: int, counts: torch.Tensor) -> None:
        """For those of rows [R] whose counts [R] are not 0."""
        found, confidence = self._ops.find(rows, num_drafts), None
        self._note(rows, found.match_lens)
        counts = within_budget(counts, found, self._options.corpus_budget)
        if self._chains is not None:
            confidence = self._chains.proposed(rows, found.match_lens)[:, :num_drafts]
        drafts = EagleVerifyInput(found.tokens, confidence, per_request_draft_token_num=counts)
        drafts.write(self._step_ops, self._state, rows)

    def _propose_trees(self, rows: torch.Tensor, num_drafts: int, counts: torch.Tensor) -> None:
        """The likeliest nodes of each of rows [R], counts [R] at most. Of each branch the first
        token is another one. A request has as many branches as its longest match asks for, and as
        places were found, one at least."""
        found, options = list[Continuation](), self._options
        for _ in range(self._most_branches):
            taken = torch.stack([each.tokens[:, 0] for each in found], 1) if found else None
            found.append(self._ops.find(rows, options.rounds.num_steps, taken))
        self._note(rows, found[0].match_lens)
        match_lens = torch.stack([each.match_lens for each in found], 1)
        breadths = options.min_breadth, options.breadth
        wanted = num_branches(match_lens[:, :1], *breadths, options.limits)
        branches = torch.arange(len(found), device=rows.device)
        match_lens = torch.where(branches < wanted, match_lens, 0)
        in_corpus = torch.stack([each.in_corpus for each in found], 1)
        most, budget = options.rounds.num_steps, options.corpus_budget
        nodes = likeliest_nodes(match_lens, in_corpus, most, budget)
        tokens = torch.cat([each.tokens for each in found], 1).gather(1, nodes.order)
        drafts = EagleVerifyInput(
            tokens[:, :num_drafts],
            confidence_of_scores(nodes.scores)[:, :num_drafts],
            nodes.parents[:, :num_drafts],
            per_request_draft_token_num=torch.minimum(nodes.counts, counts),
        )
        drafts.write(self._step_ops, self._state, rows)


# SGLang's name of it. The target's pass and verification are no part: see `TpModelWorker`.
NGRAMWorker = NgramDrafter


def planned_counts(step: ExtendedStep, num_drafts: int) -> torch.Tensor:
    """[R] int64; drafts that each request is given: `StepPlan.next_drafts`, on the device. Where
    all get as many, nothing is copied there."""
    planned = step.plan.next_drafts
    if all(count == num_drafts for count in planned):
        return torch.full_like(step.rows, num_drafts)
    return to_device(list(planned), step.rows.device, torch.int64)


def within_budget(counts: torch.Tensor, found: Continuation, budget: int | None) -> torch.Tensor:
    """[R]; of counts [R] drafts of chains as many as the corpus may give; None: all."""
    if budget is None:
        return counts
    return torch.where(found.in_corpus > 0, counts.clamp(max=budget), counts)


def _free_drafts(max_drafts: int) -> DraftPrices:
    """In place of a head's prices: with drafts or without, each step searches."""
    extend = PriceTable(find=no_graphs, graphs_ms={}, eager=FREE, head=FREE)
    return DraftPrices(extend, dict.fromkeys(range(1, max_drafts), PassPrices(FREE)))
