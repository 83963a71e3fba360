"""What a round costs: a step of the target that verifies drafts, and the drafting of as many for
the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from sglang.srt.step.price_table import DraftPrices, PriceTable, StepShape


class UpcomingRound(NamedTuple):
    """Requests that will verify drafts in the next step, as far as the host knows.

    Attributes:
        kv_tokens: tokens with KV of all of them, at most.
    """

    num_reqs: int
    kv_tokens: int = 0


class RoundPrices(Protocol):
    """Prices of rounds.

    Attributes:
        spread: typical deviation of one measurement from another, as a share.
    """

    @property
    def spread(self) -> float: ...

    def round_ms(self, upcoming: UpcomingRound, num_drafts: int) -> float:
        """Milliseconds of a round in which every request has so many drafts; 0: a plain step."""


@dataclass(frozen=True, slots=True)
class RoundCost:
    """Milliseconds of a round without KV, and of each token of KV."""

    rows_ms: float
    kv_ms: float

    def at(self, kv_tokens: int) -> float:
        """Milliseconds with so many tokens of KV."""
        return self.rows_ms + self.kv_ms * kv_tokens


class MeasuredRounds:
    """Rounds over a target whose head runs in each step and drafts one token at a time.

    Args:
        target, head: what was measured at start-up.
    """

    def __init__(self, target: PriceTable, head: DraftPrices) -> None:
        self.target = target
        self.head = head
        self._costs: dict[tuple[int, int], RoundCost] = {}

    @property
    def spread(self) -> float:
        return self.target.spread

    def round_ms(self, upcoming: UpcomingRound, num_drafts: int) -> float:
        key = upcoming.num_reqs, num_drafts
        if key not in self._costs:
            self._costs[key] = self.cost(*key, upcoming.num_reqs * (1 + num_drafts))
        return self._costs[key].at(upcoming.kv_tokens)

    def cost(self, num_reqs: int, num_drafts: int, num_rows: int) -> RoundCost:
        """Of a round in which so many rows are verified, `num_drafts` of a request at most, and
        each request is given as many drafts for the next one."""
        target, head = self.target, self.head
        rows = num_reqs, 1 + num_drafts, num_rows
        shape = StepShape(*rows, num_read=num_rows, kv_tokens=1.0, row_kv=num_rows / num_reqs)
        rows_ms = target.rows_ms(*rows) + target.head.at(shape.num_read)
        rows_ms += head.extend.rows_ms(*rows)
        kv_ms = target.attention_ms(shape) + head.extend.attention_ms(shape)
        if num_drafts:
            rows_ms += head.extend.head.at(num_reqs)  # the first draft
        if num_drafts > 1:
            rows_ms += head.passes[num_drafts - 1].at(num_reqs)
            kv_ms += (num_drafts - 1) * (head.extend.kv_ms + head.extend.row_kv_ms)
        return RoundCost(rows_ms, kv_ms)
