"""The contract of policies, which choose how far requests look ahead: how many masks they feed, or
how many drafts they get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Protocol

from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.round_options import RoundOptions
from sglang.srt.lookahead.round_prices import RoundPrices, StepCase
from sglang.srt.lookahead.upcoming_step import StepOutcome, UpcomingStep
from sglang.srt.step.price_table import PriceTable


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyParts:
    """The parts that a policy is made of."""

    options: RoundOptions
    max_prompt_rows: int = 1  # of a step
    steps: PriceTable | None = None  # None where none were measured
    rounds: RoundPrices | None = None  # of a drafter of drafts; None likewise
    graph_size: Callable[[int], int] = int  # to how many requests a step of so many is padded
    # Milliseconds by which a plain step takes longer than its price if the drafter's model is not
    # left out of it; None: it never is.
    feed_ms: Callable[[StepCase], float] | None = None


class LengthPolicy(Protocol):
    """Chooses lengths on the host, while the last two steps may not have been read. Reads no clock.

    Masks are fed in the step that is chosen for. Drafts are proposed in it, since that costs too,
    and verified in the next one.
    """

    needs_prices: ClassVar[bool] = False  # goes by prices, which are then measured at start-up
    reads_matches: ClassVar[bool] = False  # kinds of requests name matches (`Kind.match`)
    may_rest: ClassVar[bool] = False  # `Budget.rests` may ever be so
    # Drafts of steps as they come, before the first one too, though single steps try others.
    settled: int = 0

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        """The numbers of drafts that it may choose, ascending, up to `max_drafts`."""

    def __init__(self, parts: PolicyParts) -> None: ...

    def choose(self, upcoming: UpcomingStep) -> Budget:
        """Returns how far adjustable requests may look ahead. Called where one does."""

    def observe(self, outcome: StepOutcome) -> None:
        """Learns from a step that has been read. Called for each step, in the order of launches."""


class FixedLength(LengthPolicy):
    """Every request looks ahead as far as it wishes."""

    @staticmethod
    def tiers(options: RoundOptions) -> tuple[int, ...]:
        return (options.num_steps,)

    def __init__(self, parts: PolicyParts) -> None:
        self.settled = parts.options.num_steps

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(upcoming.longest)
