"""The contract of what proposes drafts. A worker is a target model and one drafter, or none. A
drafter has a planner (`lookahead/contract.py`), which decides on the host; it does what plans say.

A step of a worker with a drafter (`workers/tp_worker.py`), the one rule of docs/architecture.md:

1. The planner says what each request may feed and read, from what the host knows. `prepare`: the
   drafter writes to the device what the plan needs there.
2. The rows are laid out on the device, the target runs, and its own token after each row read is
   chosen. The drafts of a request are its pending tokens but the first, which is certain.
3. Drafts that equal the target's tokens are confirmed, along a chain or a path of a tree, and the
   watermark moves over them. `speculative/confirm.py` has other rules.
4. `extend`: the drafter's own models run over the rows that the target was fed.
5. `propose`: the drafter writes drafts after the new certain token, for the next step.

Nothing of this waits for the device; the planner observes each result one step later.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import Planner, StepPlan
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.model_runner import ForwardResult
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.speculative.drafter_options import DrafterNeeds
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.step_ops import AcceptedTokens, RowLayout
from sglang.srt.step.worker import DraftMakers, ScheduleBatch


@dataclass(frozen=True, slots=True)
class ChosenTokens:
    """The tokens that the target chose after the S rows read of a step.

    Attributes:
        layout: the step's rows; `layout.reads` says which row each token follows.
        targets: [S] int64; once drafts are confirmed, the token to emit after each row kept.
        probs: [S] float32; probability of each row's best token; None unless
            `StepPlan.wants_probs`.
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
    plan: StepPlan
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
        output: [R, width]; what `extend` gave, if anything, of those that its models were fed
            (`StepPlan.without_model`).
    """

    batch: ScheduleBatch
    plan: StepPlan
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
        modelless: the name of a drafter beside it that needs no model; None: there is none.
    """

    options: Any
    runners: RunnerGroup
    state: RequestRows
    prices: PriceTable | None = None
    modelless: str | None = None


class Drafter(Protocol):
    """Proposes drafts on the device, as plans say. It owns no KV pages: what it writes to a pool of
    its own lies after the slots of the same requests."""

    def lens(self) -> torch.Tensor | None:
        """Returns the lengths that the planner wants of each row of the page table, [N] int64, as
        the last step leaves them: pending tokens, or lengths of matches. None: it wants none."""
        return None

    def makers(self, rows: torch.Tensor) -> DraftMakers | None:
        """Says which of several drafters made the drafts that rows [R] int64 hold, in new tensors;
        None: one makes all."""
        return None

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        """Writes what new requests and the plan need, before the step is launched."""
        return

    def num_unconfirmed(self, chosen: ChosenTokens) -> torch.Tensor:
        """Tokens that unverified requests (`StepCounts.emits_only_confirmed`) are given of a step:
        [R] int64, at least 1; ignored for others."""
        raise AssertionError("No request of this drafter is unverified.")

    def extend(self, step: ComputedStep) -> torch.Tensor | None:
        """Takes what it needs of a step: models of its own run over the same rows. Called for every
        step, but for those that replay a graph of it (`DrafterNeeds.rounds`).

        Returns:
            [R, width]; what `propose` needs of each request, of the same width and dtype in all
            steps. None: nothing.
        """
        return None

    def propose(self, step: ExtendedStep) -> None:
        """Writes drafts after the certain token of requests that emitted
        (`StepOps.write_drafts`). Called for every step, also for those without drafts, but for
        those that replay a graph of it (`DrafterNeeds.rounds`)."""
        return


class NoDrafts(Drafter):
    """Proposes nothing: steps are the target's alone."""


class PlannedDrafter(NamedTuple):
    """Two halves of one kind: one decides on the host, the other does it on the device. By default
    nothing is drafted."""

    planner: Planner = Planner()
    drafter: Drafter = NoDrafts()


class DrafterType(Protocol):
    """A class of drafters, before there is one; `DRAFTERS` names such classes."""

    def needs(self, options: Any) -> DrafterNeeds:
        """
        Raises:
            ValueError: for options that cannot be had; the text names the remedy.
        """

    def models(self, options: Any, target: ExecutionConfig) -> tuple[ExecutionConfig, ...]:
        """Further models, each with a KV pool of its own behind the target's page table."""

    def make(self, parts: DrafterParts) -> PlannedDrafter:
        """Makes both halves once the models are there."""
