"""NGRAM: drafts are what followed the last tokens of a request where they stood before.

They stood in its own text, prompt and output, in text of requests that have ended, or in a corpus
(`NgramMemory`). All are searched on the device behind each step of the target, so no model runs
and the host does nothing that depends on tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import MAX_TREE_ROWS
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.registry import ATTENTION_BACKENDS, load
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import ComputedStep, DrafterNeeds, DrafterParts, RowPlan
from sglang.srt.speculative.ngram_confidence import MatchConfidence
from sglang.srt.speculative.ngram_memory import NgramMemory
from sglang.srt.speculative.ngram_ops import Continuation, NgramLimits, NgramOps
from sglang.srt.speculative.ngram_tier import MatchedTier
from sglang.srt.speculative.ngram_watch import MatchWatch
from sglang.srt.speculative.round_planner import RoundOptions, RoundPlanner
from sglang.srt.speculative.round_prices import MeasuredRounds
from sglang.srt.step.price_table import FREE, DraftPrices, PriceTable, no_graphs
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import EMITS, ROW
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch, StepWidth

# 1.5 MB on a GPU, so that its cache holds them; a CPU searches fewer in as much time.
DEFAULT_CAPACITY = {"cpu": 2048, "cuda": 131_072}


@dataclass(frozen=True, slots=True)
class NgramConfig:
    """What the drafter needs to know.

    Attributes:
        rounds: how many tokens are drafted, all without a draft step (`num_free`).
        limits: how long matches are.
        capacity: tokens of ended requests that are searched, at least 2; None: DEFAULT_CAPACITY.
        breadth: different tokens that may follow the certain one behind the shortest matches: 1
            drafts chains, more drafts trees of as many nodes. Then `rounds` must always draft all
            of them.
        suppressed_token_ids: ids that the target never emits.
        min_breadth: likewise, behind the longest matches; `breadth` at most.
        corpus_budget: drafts of a request in a step that may come from the corpus; None: all.
        corpus: see `NgramMemory`.
    """

    rounds: RoundOptions
    limits: NgramLimits
    capacity: int | None = None
    breadth: int = 1
    suppressed_token_ids: tuple[int, ...] = ()
    min_breadth: int = 1
    corpus_budget: int | None = None
    corpus: np.ndarray | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        assert not self.rounds.draft_steps, "Drafts of n-grams need no draft steps."


def branch_lengths(num_drafts: int, breadth: int) -> tuple[int, ...]:
    """Nodes of each branch of a tree; branches part at its root. The first one, of the longest
    match, has at least half of all, the others have fewer and fewer, and as many of them as wished
    are there if that leaves each a node."""
    lengths, left = list[int](), num_drafts // 2
    for branch in range(1, breadth):
        length = min(left, max(1, num_drafts >> (branch + 1)))
        if length == 0:
            break
        lengths.append(length)
        left -= length
    return (num_drafts - sum(lengths), *lengths)


def tree_parents(branches: Sequence[int]) -> list[int]:
    """The node that each node but the root follows, in a tree of branches of these lengths."""
    parents = list[int]()
    for length in branches:
        parents += [0, *range(len(parents) + 1, len(parents) + length)]
    return parents


def num_branches(
    match_lens: torch.Tensor, least: int, most: int, limits: NgramLimits
) -> torch.Tensor:
    """[R] int64; branches of trees behind matches [R] int64 of these lengths: `most` behind the
    shortest ones, `least` behind those of `limits.longest`, linear between and rounded. Where all
    matches are as long, `most`."""
    span = max(1, limits.longest - limits.shortest)
    beyond = (match_lens - limits.shortest).clamp(0, span)
    return most - (2 * (most - least) * beyond + span) // (2 * span)


class TreeLayouts:
    """Trees of 1 to B branches, each of D nodes: with fewer branches the first one is longer.

    Attributes:
        lengths: of B branches, each in the tree where it is longest. Their tokens lie one behind
            the other, T of them.
        columns: [B, D] int64; which of the T tokens each node has, of trees of 1 to B branches.
        branches: [B, D] int64; which branch each node is in.
        parents: [B, D] int32; see `RequestRows.write_drafts`.

    Args:
        num_drafts: D.
        breadth: B, unless D is too small for so many.
    """

    def __init__(self, num_drafts: int, breadth: int, device: torch.device) -> None:
        widest = branch_lengths(num_drafts, breadth)
        self.lengths = (num_drafts, *widest[1:])
        trees = [branch_lengths(num_drafts, 1 + number) for number in range(len(widest))]
        nodes = [
            [(branch, place) for branch, length in enumerate(tree) for place in range(length)]
            for tree in trees
        ]
        columns = [[sum(self.lengths[:branch]) + place for branch, place in tree] for tree in nodes]
        self.columns = to_device(columns, device, torch.int64)
        branches = [[branch for branch, _ in tree] for tree in nodes]
        self.branches = to_device(branches, device, torch.int64)
        self.parents = to_device([tree_parents(tree) for tree in trees], device, torch.int32)


class NgramDrafter:
    """Every request that drafts gives as many drafts as the step's tier says. One whose last tokens
    stood nowhere before repeats its last one: its rows are fed anyway."""

    def __init__(self, parts: DrafterParts) -> None:
        options: NgramConfig = parts.options
        if options.breadth > 1:
            _check_trees(parts.runners.target.config.attention_backend)
        self._state = parts.state
        self._step_width = options.rounds.step_width
        capacity = options.capacity or DEFAULT_CAPACITY[parts.state.tokens.device.type]
        self.memory = NgramMemory(parts.state, capacity, options.corpus)
        kind = load(parts.runners.target.operations.ngrams)
        self._ops: NgramOps = kind(parts.state, self.memory, options.limits)
        most = options.rounds.num_steps
        self._options = options
        self._layouts = TreeLayouts(most, options.breadth, parts.state.tokens.device)
        self._confidence = _confidence(parts.state, most)
        prices = None
        if options.rounds.needs_prices and parts.prices is not None:
            num_rows = parts.runners.memory.table.num_rows
            prices = MeasuredRounds(parts.prices, _free_drafts(most), max_requests=num_rows)
        self.planner = RoundPlanner(options.rounds, parts, prices)
        self._watch: MatchWatch | None = None
        if isinstance(self.planner.policy, MatchedTier):
            self._watch = MatchWatch(self.planner.policy, parts.state)

    @staticmethod
    def needs(options: NgramConfig) -> DrafterNeeds:
        needs = replace(options.rounds.needs, suppressed_token_ids=options.suppressed_token_ids)
        if options.breadth == 1:
            return needs
        if needs.max_rows > MAX_TREE_ROWS:
            raise ValueError(
                f"--speculative-num-draft-tokens {needs.max_rows}: a tree has {MAX_TREE_ROWS}"
                " tokens at most; ask for fewer, or use --speculative-ngram-max-bfs-breadth 1."
            )
        # Whole rounds are captured of chains alone.
        return replace(needs, has_trees=True, rounds={})

    @staticmethod
    def models(options: NgramConfig, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return ()

    @classmethod
    def make(cls, parts: DrafterParts) -> NgramDrafter:
        return cls(parts)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self._step_width

    def admit(self, new_rows: list[NewRow]) -> None:
        self.memory.admit(new_rows)
        self.planner.admit(new_rows)

    def observe(self, result: HostResult) -> None:
        if self._watch is not None:
            self._watch.observe(result)
        self.planner.observe(result)

    def plan(self, batch: ScheduleBatch) -> RowPlan:
        if self._watch is not None:
            self._watch.plan(batch)
        return self.planner.plan(batch)

    def propose(self, step: ComputedStep) -> None:
        rows, accepted = step.chosen.layout.per_request[ROW], step.accepted
        if self._confidence is not None and accepted.num_drafts is not None:
            self._confidence.learn(rows, accepted.num_drafts, accepted.accept_lens - 1)
        num_drafts = max(step.plan.next_drafts)
        if num_drafts == 0:
            if self._watch is not None:
                self._watch.note(rows, self._ops.find(rows, 1).match_lens)
        elif len(self._layouts.lengths) == 1:
            self._propose_chains(rows, num_drafts, _counts(step, num_drafts))
        else:
            self._propose_trees(rows, _counts(step, num_drafts))

    def _propose_chains(self, rows: torch.Tensor, num_drafts: int, counts: torch.Tensor) -> None:
        """For those of rows [R] whose counts [R] are not 0."""
        found, confidence = self._ops.find(rows, num_drafts), None
        if self._watch is not None:
            self._watch.note(rows, found.match_lens)
        if self._confidence is not None:
            confidence = self._confidence.proposed(rows, found.match_lens)[:, :num_drafts]
        counts = self._within_budget(counts, found.in_corpus[:, None].expand(found.tokens.shape))
        self._state.write_drafts(rows, found.tokens, counts, confidence=confidence)

    def _propose_trees(self, rows: torch.Tensor, counts: torch.Tensor) -> None:
        """Of each branch the first token is another one. A request has as many branches as its
        longest match asks for, and as places were found, one at least."""
        found, layouts, options = list[Continuation](), self._layouts, self._options
        for length in layouts.lengths:
            taken = torch.stack([each.tokens[:, 0] for each in found], 1) if found else None
            found.append(self._ops.find(rows, length, taken))
        match_lens = torch.stack([each.match_lens for each in found], 1)
        num_found = (match_lens > 0).sum(1).clamp(min=1)
        breadths = options.min_breadth, options.breadth
        tree = num_branches(match_lens[:, 0], *breadths, options.limits).minimum(num_found) - 1
        drafts = torch.cat([each.tokens for each in found], 1).gather(1, layouts.columns[tree])
        in_corpus = torch.stack([each.in_corpus for each in found], 1)
        counts = self._within_budget(counts, in_corpus.gather(1, layouts.branches[tree]))
        self._state.write_drafts(rows, drafts, counts, layouts.parents[tree])

    def _within_budget(self, counts: torch.Tensor, in_corpus: torch.Tensor) -> torch.Tensor:
        """Of counts [R] drafts as many as come before the first that would be one too many of the
        corpus; in_corpus [R, D] int64."""
        budget = self._options.corpus_budget
        if budget is None:
            return counts
        return torch.minimum(counts, (in_corpus.cumsum(1) <= budget).sum(1))


def _check_trees(backend: str) -> None:
    """
    Raises:
        ValueError: if the attention backend knows no trees.
    """
    if not ATTENTION_BACKENDS.load(backend).capabilities().tree_masks:
        raise ValueError(
            f"--speculative-ngram-max-bfs-breadth: --attention-backend {backend} knows no trees of"
            " drafts; use 1, or another backend."
        )


def _counts(step: ComputedStep, num_drafts: int) -> torch.Tensor:
    """[R] int64; drafts that each request is given: `RowPlan.next_drafts`, on the device. Where all
    that emit get as many, as in whole rounds, nothing is copied there."""
    planned, emits = step.plan.next_drafts, step.batch.emits
    per_request = step.chosen.layout.per_request
    if all(count == num_drafts for count, flag in zip(planned, emits, strict=True) if flag):
        return per_request[EMITS] * num_drafts
    return to_device(list(planned), per_request.device, torch.int64)


def _free_drafts(max_drafts: int) -> DraftPrices:
    """In place of a head's prices: with drafts or without, each step searches."""
    extend = PriceTable(find=no_graphs, graphs_ms={}, eager=FREE, head=FREE)
    return DraftPrices(extend, dict.fromkeys(range(1, max_drafts), FREE))


def _confidence(state: RequestRows, max_drafts: int) -> MatchConfidence | None:
    """None where nobody looks at it."""
    if state.confidence is None:
        return None
    device = state.tokens.device
    return MatchConfidence(len(state.tokens), max_drafts, state.padding_row, device)
