"""The contract of what proposes drafts. A worker is a target model and one drafter, or none.

A step of a worker with a drafter (`workers/tp_worker.py`), the one rule of docs/architecture.md:

1. `plan`: the drafter says what each request may feed and read, from what the host knows.
2. The rows are laid out on the device, the target runs, and its own token after each row read is
   chosen. The drafts of a request are its pending tokens but the first, which is certain.
3. Drafts that equal the target's tokens are confirmed, along a chain or a path of a tree, and the
   watermark moves over them. `speculative/confirm.py` has other rules.
4. `extend`: the drafter's own models run over the rows that the target was fed.
5. `propose`: the drafter writes drafts after the new certain token, for the next step.

Nothing of this waits for the device; `observe` hears each result one step later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.forward_inputs import NO_TOKEN
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_clock import StepClock
from sglang.srt.step.step_ops import AcceptedTokens, RowLayout, StepCounts
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import HostResult, NewRow, ScheduleBatch


@dataclass(frozen=True, slots=True)
class RowPlan:
    """The rows that a step of R requests feeds and reads, as far as the host knows.

    Attributes:
        counts: rows, of each request the most.
        max_pending: pending rows of any request that the target may confirm, the certain token's
            counted, at most.
        max_accepted: tokens that any request may be given, at most.
        lookahead_token: what rows after the pending tokens feed.
        wants_probs: the drafter looks at `ComputedStep.probs`.
        wants_paths: of trees, results carry the confirmed paths (`GenerationBatchResult.paths`).
        accepts_unconfirmed: for unverified requests (see `StepCounts`): tokens accepted, [R] int64,
            at least 1, from the step's choice; ignored for others. None: no such requests.
        tier: what a length policy chose; results carry it.
        next_drafts: R counts of drafts that `propose` gives, where the host knows them; empty: it
            does not.
        rests: the drafter's models are left out of the step, which no drafts follow.
    """

    counts: StepCounts
    max_pending: int = 1
    max_accepted: int = 1
    lookahead_token: int = NO_TOKEN
    wants_probs: bool = False
    wants_paths: bool = False
    accepts_unconfirmed: Callable[[ChosenTokens], torch.Tensor] | None = None
    tier: int = 0
    next_drafts: Sequence[int] = ()
    rests: bool = False

    @property
    def is_plain(self) -> bool:
        """Tells whether no request looks ahead."""
        return self.counts.is_plain


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens that the target chose after the S rows read of a step.

    Attributes:
        layout: the step's rows; `layout.reads` says which row each token follows.
        targets: [S] int64; once drafts are confirmed, the token to emit after each row kept.
        probs: [S] float32; probability of each row's best token; None unless
            `RowPlan.wants_probs`.
    """

    layout: RowLayout
    targets: torch.Tensor
    probs: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A step whose tokens are accepted and whose watermarks have moved: all that a drafter may look
    at, on the device.

    Attributes:
        state: the device rows, as the step leaves them.
        inputs: what the target was given, rows of padding included.
        forward: hidden states, and the taps of `DrafterNeeds.capture`.
    """

    batch: ScheduleBatch
    plan: RowPlan
    state: RequestRows
    inputs: ForwardBatch
    forward: ForwardResult
    chosen: ChosenTokens
    accepted: AcceptedTokens


@dataclass(frozen=True, slots=True)
class ExtendedStep:
    """A step after `Drafter.extend`: all that `Drafter.propose` may look at. Nothing on the device
    has a shape that depends on how many drafts the step verified, so that proposals after all
    steps can be one CUDA graph.

    Attributes:
        state: the device rows, as the step leaves them.
        rows: [R] int64; row of the request-to-token table.
        output: [R, width]; what `extend` gave, if anything.
    """

    batch: ScheduleBatch
    plan: RowPlan
    state: RequestRows
    rows: torch.Tensor
    output: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DrafterParts:
    """The parts that a drafter is made of.

    Attributes:
        options: what `DrafterConfig.options` holds.
        runners: of the target and, after it, of `DrafterType.models`.
        state: the device rows, with the token table.
        prices: of steps; None where none are measured.
        clock: times the worker's steps where `DrafterNeeds.times_steps` asks for it and the device
            can tell; times pile up until they are taken (`StepClock.ended`).
    """

    options: Any
    runners: RunnerGroup
    state: RequestRows
    prices: PriceTable | None = None
    clock: StepClock | None = None


class DrafterType(Protocol):
    """A class of drafters, before there is one; `DRAFTERS` names such classes."""

    def needs(self, options: Any) -> DrafterNeeds:
        """
        Raises:
            ValueError: for options that cannot be had; the text names the remedy.
        """

    def models(self, options: Any, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        """Further models, each with a KV pool of its own behind the target's page table."""

    def make(self, parts: DrafterParts) -> Drafter:
        """Makes the drafter once the models are there."""


class Drafter(Protocol):
    """Proposes drafts. It owns no KV pages: what it writes to a pool of its own lies after the
    slots of the same requests."""

    def step_width(self, params: SamplingParams) -> StepWidth:
        """Rows that a request with these parameters needs per step."""

    def admit(self, new_rows: list[NewRow]) -> None:
        """Requests that have just got a row, before the first step with them is planned."""

    def plan(self, batch: ScheduleBatch) -> RowPlan:
        """Plans what the next step feeds and reads. The step before has not been read yet."""

    def extend(self, step: ComputedStep) -> torch.Tensor | None:
        """Takes what it needs of a step: models of its own run over the same rows. Called for every
        step, but for those that replay a graph of it (`DrafterNeeds.rounds`).

        Returns:
            [R, width]; what `propose` needs of each request, of the same width and dtype in all
            steps. None: nothing.
        """

    def propose(self, step: ExtendedStep) -> None:
        """Writes drafts after the certain token of requests that emitted
        (`StepOps.write_drafts`). Called for every step, also for those without drafts, but for
        those that replay a graph of it (`DrafterNeeds.rounds`)."""

    def observe(self, result: HostResult) -> None:
        """Hears the result of the oldest step that it has not heard of."""


def plan_of_drafts(
    batch: ScheduleBatch, num_drafts: Sequence[int], max_confirmed: int | None = None
) -> RowPlan:
    """The plan of a step in which prompts are fed, and every other request feeds its certain token
    and its drafts, of which the host knows how many there are. It is plain where there are none.

    Args:
        num_drafts: R counts, 0 where a prompt is fed.
        max_confirmed: see `DrafterNeeds`.
    """
    most = max(num_drafts)
    if most == 0:
        return RowPlan(StepCounts.plain(batch))
    accepted = most if max_confirmed is None else min(most, max_confirmed)
    return RowPlan(_counts(batch, num_drafts), max_pending=1 + most, max_accepted=1 + accepted)


def _counts(batch: ScheduleBatch, num_drafts: Sequence[int]) -> StepCounts:
    emits, prompts = [int(flag) for flag in batch.emits], batch.num_prompt_tokens
    q_lens = [
        num_prompt or 1 + count for num_prompt, count in zip(prompts, num_drafts, strict=True)
    ]
    fed = zip(prompts, q_lens, emits, strict=True)
    num_read = [flag if num_prompt else q_len for num_prompt, q_len, flag in fed]
    return StepCounts(q_lens, num_read, emits, [True] * len(emits))
