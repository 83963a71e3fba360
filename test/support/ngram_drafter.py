"""A toy drafter: what followed earlier occurrences of a request's last tokens, as a chain or as
trees of many shapes. It reads the token table on the device and waits for nothing."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.lookahead.contract import Planner, StepPlan
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import (
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import PackedSize, StepCounts
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import NewRow, ScheduleBatch
from verifying_plan import verifying_plan

PLACE = f"{__name__}:NgramDrafter"  # for a registry
NUM_BRANCHES = 4
SHAPES = ("chain", "branches", "star", "random", "decoys", "single")


@dataclass(frozen=True)
class NgramOptions:
    """Says how the toy drafts.

    Attributes:
        max_drafts: drafts of a request in a step at most.
        max_depth: with trees, the longest path below the root; None for chains.
        max_rows: rows fed; more than the drafts need is padding.
        shapes: of trees, of SHAPES.
        is_fickle: some steps propose nothing, and one after those is plain if nobody has drafts;
            some feed fewer rows than drafts were proposed; and some drafts are chains though there
            may be trees.
        packs: the device divides fewer rows than all drafts would need among the requests.
        seed: of all that is drawn.
    """

    max_drafts: int
    max_depth: int | None = None
    max_rows: int = 0
    shapes: tuple[str, ...] = SHAPES
    is_fickle: bool = False
    packs: bool = False
    seed: int = 0

    @property
    def max_accepted(self) -> int:
        return 1 + (self.max_drafts if self.max_depth is None else self.max_depth)


@dataclass(frozen=True)
class TreeShape:
    """A tree, whatever its tokens are.

    Attributes:
        parents: of the nodes 1 to D.
        depths: of the same nodes.
        branches: which earlier occurrence each node's token is taken from, the last one being 0;
            NUM_BRANCHES for any token of the sequence.
    """

    parents: list[int]
    depths: list[int]
    branches: list[int]


def draw_shape(chooser: random.Random, options: NgramOptions) -> TreeShape:
    """A tree of `max_drafts` nodes, no deeper than `max_depth`."""
    assert options.max_depth is not None
    shape, depths = chooser.choice(options.shapes), [0]
    parents, branches = list[int](), list[int]()
    num_wide = max(1, options.max_drafts // NUM_BRANCHES)
    for node in range(1, options.max_drafts + 1):
        last = node - 1
        branch = chooser.randrange(NUM_BRANCHES)
        parent = 0
        if shape == "chain":
            parent, branch = last, 0
        elif shape == "branches":
            parent, branch = (0 if last % num_wide == 0 else last), last // num_wide
        elif shape == "random":
            parent = chooser.randrange(node)
        elif shape == "decoys":  # the first nodes are seldom right, what the chain behind says is
            is_decoy = node <= 2
            parent, branch = (0, NUM_BRANCHES) if is_decoy or node == 3 else (last, 0)
            branch = NUM_BRANCHES if is_decoy else 0
        if depths[parent] == options.max_depth:
            parent = 0
        parents.append(parent)
        depths.append(depths[parent] + 1)
        branches.append(min(branch, NUM_BRANCHES))
    count = 1 if shape == "single" else chooser.randint(1, options.max_drafts)
    if shape in ("branches", "decoys"):
        count = options.max_drafts
    return TreeShape(parents[:count], depths[1 : count + 1], branches[:count])


class NgramDrafter(Planner, Drafter):
    """Proposes for most requests in most steps, and for some nothing."""

    def __init__(self, options: NgramOptions, state: RequestRows) -> None:
        self._options, self._state = options, state
        self._random = random.Random(options.seed)
        self._may_have_drafts: set[int] = set()  # rows

    @staticmethod
    def needs(options: NgramOptions) -> DrafterNeeds:
        has_trees = options.max_depth is not None
        return DrafterNeeds(
            max_drafts=options.max_drafts,
            max_rows=max(1 + options.max_drafts, options.max_rows),
            has_trees=has_trees,
            keeps_confidence=options.packs,
        )

    @staticmethod
    def models(options: NgramOptions, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return ()

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        made = cls(parts.options, parts.state)
        return PlannedDrafter(made, made)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return StepWidth(self.needs(self._options).max_rows, 0, self._options.max_accepted)

    def admit(self, new_rows: list[NewRow]) -> None:
        self._may_have_drafts -= {new.row for new in new_rows}

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        options = self._options
        max_drafts = self.needs(options).max_rows - 1
        if options.is_fickle:
            if self._may_have_drafts.isdisjoint(batch.rows):
                return StepPlan(counts=StepCounts.plain(batch))
            max_drafts = self._random.choice([0, 1, 3, max_drafts])
        plan = verifying_plan(batch, max_drafts, options.max_accepted)
        return self._packed(batch, plan) if options.packs and not plan.counts.is_plain else plan

    def _packed(self, batch: ScheduleBatch, plan: StepPlan) -> StepPlan:
        """Any number of rows from one per request on is divided."""
        counts = plan.counts
        parts = list(zip(batch.num_prompt_tokens, counts.q_lens, counts.num_read, strict=True))
        most = [q_len for num_prompt, q_len, _ in parts if not num_prompt]
        given = self._random.randint(len(most), sum(most))
        num_reads = sum(num for num_prompt, _, num in parts if num_prompt) + given
        size = PackedSize(sum(batch.num_prompt_tokens) + given, num_reads)
        return replace(plan, counts=replace(counts, packed=size))

    def propose(self, step: ExtendedStep) -> None:
        if self._options.is_fickle and self._random.random() < 0.3:
            self._may_have_drafts.difference_update(step.batch.rows)
            return
        self._may_have_drafts.update(step.batch.rows)
        rows, state = step.rows, self._state
        emits = to_device(step.batch.emits, rows.device, torch.bool)
        num_tokens = state.num_tokens[rows]
        occurrences, exists = _occurrences(state.tokens[rows], num_tokens)
        is_silent = (num_tokens + rows) % 5 == 0
        proposes = emits & exists[:, 0] & ~is_silent
        max_depth, is_fickle = self._options.max_depth, self._options.is_fickle
        if max_depth is None or (is_fickle and self._random.random() < 0.5):
            self._propose_chains(rows, num_tokens, occurrences, proposes)
        else:
            self._propose_trees(rows, num_tokens, occurrences, exists, proposes)

    def _propose_chains(
        self,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        occurrences: torch.Tensor,
        proposes: torch.Tensor,
    ) -> None:
        max_drafts = self._options.max_accepted - 1
        first = occurrences[:, 0] + 1
        num_drafts = torch.where(proposes, (num_tokens - first).clamp(max=max_drafts), 0)
        columns = first[:, None] + torch.arange(max_drafts, device=rows.device)
        columns = torch.minimum(columns, num_tokens[:, None] - 1)
        self._state.write_drafts(rows, self._state.tokens[rows[:, None], columns], num_drafts)

    def _propose_trees(
        self,
        rows: torch.Tensor,
        num_tokens: torch.Tensor,
        occurrences: torch.Tensor,
        exists: torch.Tensor,
        proposes: torch.Tensor,
    ) -> None:
        """Proposes trees of shapes that the host draws; every third time the device leaves nodes
        out."""
        width = self._options.max_drafts
        shapes = [draw_shape(self._random, self._options) for _ in range(len(rows))]
        lacking = [[0] * (width - len(shape.parents)) for shape in shapes]
        kept = list(zip(shapes, lacking, strict=True))
        parents, depths, branches, anywhere = to_device(
            [
                [shape.parents + more for shape, more in kept],
                [shape.depths + more for shape, more in kept],
                [shape.branches + more for shape, more in kept],
                [[self._random.randrange(1 << 20) for _ in range(width)] for _ in shapes],
            ],
            rows.device,
            torch.int64,
        )
        known = branches.clamp(max=NUM_BRANCHES - 1)
        columns = occurrences.gather(1, known) + depths
        is_there = (branches < NUM_BRANCHES) & exists.gather(1, known)
        is_there &= columns < num_tokens[:, None]
        columns = torch.where(is_there, columns, anywhere % num_tokens[:, None])
        num_nodes = to_device([len(shape.parents) for shape in shapes], rows.device, torch.int64)
        fewer = torch.where(num_tokens % 3 == 0, 1 + num_tokens * 7 % width, width)
        num_drafts = torch.where(proposes, torch.minimum(num_nodes, fewer), 0)
        tokens = self._state.tokens[rows[:, None], columns]
        self._state.write_drafts(rows, tokens, num_drafts, parents.to(torch.int32))


def _occurrences(
    tokens: torch.Tensor, num_tokens: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds earlier places of each request's last token in `tokens` [R, width], of which num_tokens
    [R] are known: places after the same token first, then late ones before early ones.

    Returns:
        [R, NUM_BRANCHES] int64 and bool: places, and whether there is one.
    """
    width = tokens.shape[1]
    places = torch.arange(width, device=tokens.device)
    last = tokens.gather(1, num_tokens[:, None] - 1)
    before = tokens.gather(1, (num_tokens[:, None] - 2).clamp(min=0))
    is_found = (tokens == last) & (places < num_tokens[:, None] - 1)
    is_pair = (tokens.roll(1, 1) == before) & (places > 0)
    scores = torch.where(is_found, places + width * is_pair, -1)
    best = scores.topk(NUM_BRANCHES, dim=1).values
    return best.clamp(min=0) % width, best >= 0
