"""A drafter with a second model and a KV pool of its own: chains, as in STANDALONE speculation.

The second model runs over every row that the target runs over, so its pool always holds KV of the
same tokens: of prompts, chunks, cached prefixes, and drafts that were confirmed. Then it drafts,
one row of each request at a time. With the target's weights it is right wherever its KV is."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from sglang.srt.layers.forward_options import NO_CAPTURE
from sglang.srt.lookahead.contract import Planner, StepPlan
from sglang.srt.lookahead.draft_planner import drafts_of_requests
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.registry import DRAFTERS
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.draft_steps import plan_draft_steps
from sglang.srt.speculative.drafter import (
    ComputedStep,
    Drafter,
    DrafterParts,
    ExtendedStep,
    PlannedDrafter,
)
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import ScheduleBatch
from verifying_plan import verifying_plan

NAME = "second_model"


@dataclass(frozen=True)
class SecondModel:
    """Holds what the drafter takes: a folder of a model, and how many drafts it proposes."""

    path: Path
    num_drafts: int = 3


@contextmanager
def registered(kind: type[SecondModelDrafter] | None = None) -> Iterator[None]:
    """The drafter, or a class made from it, is called `NAME` while this lasts."""
    kind = kind or SecondModelDrafter
    place = f"{kind.__module__}:{kind.__name__}"
    with mock.patch.dict(DRAFTERS.entries, {NAME: place}):
        yield


class SecondModelDrafter(Planner, Drafter):
    """Each request always proposes `num_drafts` tokens."""

    def __init__(self, options: SecondModel, parts: DrafterParts) -> None:
        self._num_drafts = options.num_drafts
        self._runner = parts.runners.runners[1]
        self._table = parts.runners.memory.table
        self._state = parts.state

    @staticmethod
    def needs(options: SecondModel) -> DrafterNeeds:
        count = options.num_drafts
        return DrafterNeeds(max_drafts=count, max_rows=1 + count, extra_slots=count)

    @staticmethod
    def models(options: SecondModel, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        model = load_model_config(str(options.path))
        if model.vocab_size != target.model.vocab_size:
            raise ValueError(
                f"The draft model {options.path} has {model.vocab_size} tokens, the target"
                f" {target.model.vocab_size}; use one with the same vocabulary."
            )
        return (replace(target, model=model, capture=NO_CAPTURE),)

    @classmethod
    def make(cls, parts: DrafterParts) -> PlannedDrafter:
        made = cls(parts.options, parts)
        return PlannedDrafter(made, made)

    def step_width(self, params: SamplingParams) -> StepWidth:
        count = self._num_drafts
        return StepWidth(decode_rows=1 + 2 * count, lookahead_rows=count, max_kept=1 + count)

    def plan(self, batch: ScheduleBatch, lens: Sequence[int] | None = None) -> StepPlan:
        count = self._num_drafts
        plan = verifying_plan(batch, count, 1 + count)
        next_drafts = drafts_of_requests(batch, plan.max_accepted, count, count)
        return replace(plan, next_drafts=next_drafts)

    def extend(self, step: ComputedStep) -> None:
        self._runner.forward(step.inputs)

    def propose(self, step: ExtendedStep) -> None:
        if not any(step.plan.next_drafts):
            return
        steps = plan_draft_steps(step, self._table, self._num_drafts)
        drafts = [steps.certain_tokens]
        for index in range(self._num_drafts):
            hidden = self._runner.forward(steps.batch(index, drafts[-1])).hidden
            drafts.append(self._runner.compute_logits(hidden).argmax(dim=-1))
        tokens = torch.stack(drafts[1:], dim=1)
        self._state.write_drafts(steps.rows, tokens, torch.full_like(steps.rows, self._num_drafts))
