"""Prices rounds: a step of the target that verifies drafts, and the drafting of as many for the
next one."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, Protocol

from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import FREE, DraftPrices, PassPrices, PriceTable

MAX_COSTS = 4096  # that are remembered


class StepCase(NamedTuple):
    """Requests that verify drafts in a step, as far as the host knows."""

    num_reqs: int
    kv_tokens: int = 0  # tokens with KV of all of them, at most
    prompts: tuple[tuple[float, int], ...] = ((1.0, 0),)  # chances of rows of prompts beside them
    num_plain: int = 0  # those of the requests that take no drafts


class RoundPrices(Protocol):
    """Prices of rounds. What prompts that share a round would cost elsewhere is not part of it:
    they must be read anyway."""

    @property
    def spread(self) -> float:
        """Typical deviation of one measurement from another, as a share."""

    def round_ms(self, upcoming: StepCase, num_drafts: int) -> float:
        """Milliseconds of a round in which every request that takes drafts has `num_drafts`; 0: a
        plain step."""


class LatencyByKV(NamedTuple):
    """Milliseconds without KV, and of each token of KV."""

    rows_ms: float
    kv_ms: float = 0.0


@dataclass(eq=False)
class MeasuredRoundPrices:
    """Rounds over a target whose head runs in each step, and then drafts chains or trees."""

    target: PriceTable  # measured at start-up, as the head's
    head: DraftPrices
    tree: TreeShape | None = None  # that drafting gives each request; None: chains
    max_requests: int = sys.maxsize  # of a step
    can_rest: bool = False  # steps that neither verify nor draft are priced without the head
    num_free: int = 1  # drafts of a chain from the head's pass over the rows of the target

    def __post_init__(self) -> None:
        self.spread = self.target.spread
        by_rows = self.target.by_rows.items()
        self.prompt_row_ms = min(ms / rows for rows, ms in by_rows)  # of a prompt elsewhere
        self.passes = {0: PassPrices(FREE), **self.head.passes}
        self.cost = lru_cache(maxsize=MAX_COSTS)(self._cost)

    def round_ms(self, upcoming: StepCase, num_drafts: int) -> float:
        cases = upcoming.prompts
        return sum(chance * self.beside_ms(upcoming, num_drafts, rows) for chance, rows in cases)

    def beside_ms(self, upcoming: StepCase, num_drafts: int, prompt_rows: int) -> float:
        """Milliseconds beside so many rows of prompts, whatever those of the case are."""
        num_reqs, kv_tokens, _, num_plain = upcoming
        num_rows = num_reqs + (num_reqs - num_plain) * num_drafts
        cost = self.cost(num_reqs, num_drafts, num_rows, prompt_rows, num_plain)
        return self.own_ms(cost, kv_tokens, num_rows, prompt_rows)

    def own_ms(self, cost: LatencyByKV, kv_tokens: int, num_rows: int, prompt_rows: int) -> float:
        """Milliseconds of a round without those of the prompts beside its rows: to these belongs
        what their rows would cost elsewhere, and no more than their share of all rows."""
        ms, share = cost.rows_ms + cost.kv_ms * kv_tokens, prompt_rows / (prompt_rows + num_rows)
        return ms - min(self.prompt_row_ms * prompt_rows, share * ms)

    def feed_ms(self, upcoming: StepCase) -> float:
        """Milliseconds by which a plain step takes longer if the head does not rest."""
        num_fed, ms = upcoming.num_reqs - upcoming.num_plain, 0.0
        for chance, prompt_rows in upcoming.prompts:
            cost = self._of_rows(self.head.extend, num_fed, 1, num_fed, prompt_rows)
            ms += chance * (cost.rows_ms + cost.kv_ms * upcoming.kv_tokens)
        return ms

    def _cost(
        self, num_reqs: int, num_drafts: int, num_rows: int, prompt_rows: int, num_plain: int
    ) -> LatencyByKV:
        """Returns the measured cost of a round that verifies `num_rows` rows, at most `num_drafts`
        drafts of a request, and gives each as many for the next one, but for `num_plain` that take
        none; beside rows of prompts, without their attention."""
        width, target = 1 + num_drafts, self.target
        logits = LatencyByKV(target.head.at(num_rows + (prompt_rows > 0)))
        parts = [logits, self._of_rows(target, num_reqs, width, num_rows, prompt_rows)]
        if num_drafts or not self.can_rest:
            num_fed, num_rows = num_reqs - num_plain, num_rows - num_plain
            if self.tree is not None:  # the head is fed paths, whatever was cut
                width = 1 + min(num_drafts, self.tree.max_confirmed)
                num_rows = num_fed * width
            extending = self._of_rows(self.head.extend, num_fed, width, num_rows, prompt_rows)
            parts += [extending, self._drafting(num_fed, num_drafts)]
        return LatencyByKV(*map(sum, zip(*parts, strict=True)))

    def _of_rows(
        self, prices: PriceTable, num_reqs: int, width: int, num_rows: int, prompt_rows: int
    ) -> LatencyByKV:
        """A pass over rows, of a request `width` at most, beside those of prompts; no logits."""
        rows_ms = prices.rows_ms(*self.fed(num_reqs, width, num_rows, prompt_rows))
        return LatencyByKV(rows_ms, prices.kv_ms + prices.row_kv_ms * (num_rows / num_reqs))

    def fed(
        self, num_reqs: int, width: int, num_rows: int, prompt_rows: int
    ) -> tuple[int, int, int]:
        """Returns requests, rows of the widest one, and rows in all, of a pass beside rows of
        prompts. These are one more request or, where there is no room, come when one has ended."""
        is_one_more = prompt_rows > 0 and num_reqs < self.max_requests
        return num_reqs + is_one_more, max(width, prompt_rows), num_rows + prompt_rows

    def _drafting(self, num_reqs: int, num_drafts: int) -> LatencyByKV:
        """Drafts after the head's pass over the target's rows; of trees, with the first beam."""
        shape, first_ms = self.tree, 0.0
        if num_drafts == 0:
            return LatencyByKV(0.0)
        if shape is None:
            first_ms = self.head.extend.head.at(num_reqs) if self.num_free else 0.0
            # Requests may take fewer drafts than any tier has, whose pass is not measured.
            shape = min(each for each in self.passes if each >= num_drafts - self.num_free)
        by_requests, kv_ms = self.passes[shape]
        return LatencyByKV(first_ms + by_requests.at(num_reqs), kv_ms)
