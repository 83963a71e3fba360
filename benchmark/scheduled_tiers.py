"""Tiers that a benchmark chooses, and a worker whose launches it times."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import ClassVar

import torch

from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import LengthPolicy, PolicyParts
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.speculative.drafter_configs import EagleConfig
from sglang.srt.step.step_sizes import StepWidth
from sglang.srt.step.worker import GenerationBatchResult, HostResult, ScheduleBatch, Worker

TIERS = (0, 1, 3, 7)


class ScheduledTier:
    """A tier policy for measuring: some tiers in turn, whatever is confirmed.

    Attributes:
        turns: the tiers of the steps to come, again and again; set from outside.
    """

    needs_prices = reads_matches = may_rest = False
    turns: ClassVar[Sequence[int]] = (TIERS[-1],)

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return TIERS

    def __init__(self, parts: PolicyParts) -> None:
        self.settled = TIERS[-1]
        self._number = 0

    def choose(self, upcoming: UpcomingStep) -> Budget:
        self._number += 1
        self.settled = self.turns[self._number % len(self.turns)]
        return Budget(1 + self.settled, settled=self.settled)

    def observe(self, outcome: StepOutcome) -> None:
        """Learns nothing."""


@dataclass(frozen=True, slots=True)
class ScheduledRounds(RoundOptions):
    """With `ScheduledTier`, whatever `tier_policy` names."""

    @property
    def policy(self) -> type[LengthPolicy]:
        return ScheduledTier

    @classmethod
    def of(cls, config: EagleConfig) -> EagleConfig:
        """The drafter's configuration with these."""
        known = {entry.name: getattr(config.rounds, entry.name) for entry in fields(config.rounds)}
        return replace(config, rounds=cls(**known))


@dataclass
class TimedWorker:
    """Another worker, whose launches are timed. Each waits first until the device is idle: else a
    launch may wait for room in the device's queue.

    Attributes:
        launch_ns: of each step.
    """

    worker: Worker
    launch_ns: list[int] = field(default_factory=list)

    def step_width(self, params: SamplingParams) -> StepWidth:
        return self.worker.step_width(params)

    def observe(self, result: HostResult) -> None:
        self.worker.observe(result)

    def forward_batch_generation(self, batch: ScheduleBatch) -> GenerationBatchResult:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        start = time.perf_counter_ns()
        result = self.worker.forward_batch_generation(batch)
        self.launch_ns.append(time.perf_counter_ns() - start)
        return result
