"""A drafter that runs a model of its own over a pool of its own, as chains or trees. For tests: it
waits for the device wherever that is simple."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import Planner, StepPlan, StepRecord
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.step_ops import StepCounts
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import HostResult, ScheduleBatch

PLACE = f"{__name__}:OwnModelDrafter"  # for a registry
NUM_DRAFTS = 4
# The second best token and one behind it, then the best one and one behind that: what is confirmed
# lies behind what is not.
TREE_PARENTS, TREE_DEPTHS, TREE_ANCESTORS = [0, 0, 1, 2], [1, 1, 2, 2], [0b1, 0b10, 0b101, 0b1010]


@dataclass(frozen=True)
class OwnModelOptions:
    """Says how the drafter with a model of its own drafts.

    Attributes:
        model: the drafter's own.
        has_trees: drafts are a tree of two branches, else a chain.
        token_shift: see `DrafterNeeds`.
    """

    model: ExecutionConfig
    has_trees: bool = False
    token_shift: int = 0

    @property
    def keeps_drafts(self) -> bool:
        """Returns whether the pool is not filled anew where confirmed drafts were, since the worker
        has moved their KV: all nodes of a tree are fed."""
        return self.has_trees and self.token_shift == 0


class OwnModelDrafter(Planner, Drafter):
    """Feeds its model what the target kept and the certain token, then drafts of the round."""

    def __init__(self, parts: DrafterParts) -> None:
        self._options: OwnModelOptions = parts.options
        self._state, self.runner = parts.state, parts.runners.runners[1]
        self._table = self.runner.req_to_token_pool.req_to_token
        self.num_confirmed = 0

    @staticmethod
    def needs(options: OwnModelOptions) -> DrafterNeeds:
        return DrafterNeeds(
            max_drafts=NUM_DRAFTS,
            max_rows=2 * (1 + NUM_DRAFTS),
            has_trees=options.has_trees,
            token_shift=options.token_shift,
        )

    @staticmethod
    def models(options: OwnModelOptions, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        return (options.model,)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        made = cls(parts)
        return PlannedDrafter(made, made)

    def step_width(self, params: SamplingParams) -> StepWidth:
        """Slots for the step's rows, and for drafts behind all that it may keep."""
        return StepWidth(2 * (1 + NUM_DRAFTS), 1 + NUM_DRAFTS, 1 + NUM_DRAFTS)

    def observe(self, record: StepRecord, result: HostResult) -> None:
        self.num_confirmed += sum(max(0, int(count) - 1) for count in result.accept_lens)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        emits, width = [int(flag) for flag in batch.emits], 1 + NUM_DRAFTS
        prompts = list(zip(emits, batch.num_prompt_tokens, strict=True))
        counts = StepCounts(
            q_lens=[num_prompt or width for _, num_prompt in prompts],
            num_read=[flag if num_prompt else width for flag, num_prompt in prompts],
            num_predicted=emits,
            emits_only_confirmed=[True] * len(emits),
            is_plain=all(batch.num_prompt_tokens),
        )
        return StepPlan(counts=counts, max_pending=width, max_accepted=width)

    def extend(self, step: ComputedStep) -> torch.Tensor:
        """[R, 2] int64; the second best and the best token behind each certain one."""
        inputs, state, emits = step.inputs, self._state, torch.tensor(step.batch.emits)
        first = inputs.kv_lens - torch.tensor(inputs.q_lens)
        if self._options.keeps_drafts:
            is_prompt = torch.tensor(step.batch.num_prompt_tokens) > 0
            first = torch.where(is_prompt, first, state.committed[inputs.rows])
        return self.catch_up(inputs.rows, first, emits)

    def propose(self, step: ExtendedStep) -> None:
        state, best, emits = self._state, step.output, torch.tensor(step.batch.emits)
        emitting = step.rows[emits]
        if not len(emitting):
            return
        assert best is not None, "It is told what `extend` gives."
        draft = self._draft_tree if self._options.has_trees else self._draft_chain
        tokens = draft(emitting, best[emits])
        num_drafts = torch.full_like(emitting, NUM_DRAFTS)
        parents = None
        if self._options.has_trees:
            parents = torch.tensor(TREE_PARENTS, dtype=torch.int32).repeat(len(emitting), 1)
        state.write_drafts(emitting, tokens, num_drafts, parents)

    def catch_up(
        self, rows: torch.Tensor, first: torch.Tensor, emits: torch.Tensor
    ) -> torch.Tensor:
        """Fills the pool from column `first` [R] on up to the watermark, and where the request
        emits up to the certain token.

        Returns:
            [R, 2] int64; the second best and the best token behind that.
        """
        shift, state = self._options.token_shift, self._state
        ends = state.committed[rows] + torch.where(emits, 1 - shift, 0)
        spans = [torch.arange(int(start), int(end)) for start, end in zip(first, ends, strict=True)]
        tokens = [state.tokens[row, span + shift] for row, span in zip(rows, spans, strict=True)]
        return self.feed(rows, spans, tokens, spans)[1]

    def _draft_chain(self, rows: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """[R, NUM_DRAFTS]; one step for each but the first; best [R, 2], in ascending order."""
        drafts = [best[:, 1]]
        first = self._state.committed[rows] + 1 - self._options.token_shift
        for number in range(NUM_DRAFTS - 1):
            columns = list((first + number)[:, None])
            drafts.append(self.feed(rows, columns, list(drafts[-1][:, None]), columns)[1][:, 1])
        return torch.stack(drafts, dim=1)

    def _draft_tree(self, rows: torch.Tensor, best: torch.Tensor) -> torch.Tensor:
        """[R, NUM_DRAFTS]; best [R, 2], the second best token first."""
        first = self._state.committed[rows] + 1 - self._options.token_shift
        nodes, num_reqs = best, len(rows)
        for width in (2, 4):  # the deeper rows see the others again, which are fed once more
            columns = list(first[:, None] + torch.arange(width))
            depths = torch.tensor(TREE_DEPTHS[:width])
            positions = list((first - 1)[:, None] + depths)
            ancestors = torch.tensor(TREE_ANCESTORS[:width]).repeat(num_reqs)
            all_best = self.feed(rows, columns, list(nodes), positions, ancestors)[0]
            if width == 2:
                nodes = torch.cat((nodes, all_best[:, 1].view(num_reqs, 2)), dim=1)
        return nodes

    def feed(
        self,
        rows: torch.Tensor,
        columns: list[torch.Tensor],
        tokens: list[torch.Tensor],
        positions: list[torch.Tensor],
        ancestors: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the model; of each request the same number of columns, tokens and positions.

        Returns:
            [T, 2], [R, 2] int64; the second best and the best token behind each row, and behind
            the last row of each request.
        """
        q_lens = [len(span) for span in columns]
        slots = [self._table[row, span] for row, span in zip(rows, columns, strict=True)]
        kv_lens = torch.stack([span[-1] for span in columns]) + 1
        batch = ForwardBatch(
            input_ids=torch.cat(tokens).to(torch.int64),
            positions=torch.cat(positions),
            slots=torch.cat(slots).to(torch.int64),
            rows=rows,
            q_lens=q_lens,
            kv_lens=kv_lens,
            kv_len_upper_bounds=kv_lens.tolist(),
            bounds_are_exact=True,
            ancestors=ancestors,
        )
        logits = self.runner.compute_logits(self.runner.forward(batch).hidden)
        best = logits.topk(2).indices.flip(1)
        return best, best[torch.tensor(q_lens).cumsum(0) - 1]
