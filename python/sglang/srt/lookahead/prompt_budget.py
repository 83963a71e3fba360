"""Decides how many prompt tokens a step feeds: all that fit or, where its decodes must not wait
long, as many as keep the step within a bound. Reads no clock: steps have measured prices, and the
caller reports how long they took."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import NamedTuple, Protocol

from sglang.srt.step.price_table import PriceTable, PromptChunk

# A step feeds at least this many prompt tokens, however long it gets, so that every prompt is read
# some time. Up to this many rows a GPU's matrix products are bound by reading the weights, so they
# cost next to nothing beside the decodes.
MIN_PROMPT_TOKENS = 128
# The estimate of time / price follows each step by these shares of the difference: quickly upwards,
# slowly downwards. Ratios are bounded: a step that took far longer was disturbed, and the next ones
# will not be.
EXCESS_RISE, EXCESS_FALL = 0.5, 0.1
MIN_EXCESS, MAX_EXCESS = 0.8, 2.0
PRICE_MARGIN = 1.05  # steps of the same price differ in time
# Share of the time left by the decodes within the bound that further prompts of a step may use. So
# prompts begin to decode one after the other and end one after the other, and in a closed loop a
# step admits as many as end in it. If all began at once, all would end at once.
SHARE_OF_OTHERS = 1 / 3
# A GPU computes products of many rows in tiles of this size; part of a tile costs as much as all.
ROW_TILE = 128


class DecodeLoad(NamedTuple):
    """The requests of a step that feed no prompt. Numbers that depend on unread results are upper
    bounds.

    Attributes:
        num_reqs: requests.
        num_rows: their rows, look-ahead included.
        num_read: rows whose logits are read.
        kv_tokens: their tokens with KV.
        row_kv: sum over the rows of the tokens that each sees.
    """

    num_reqs: int = 0
    num_rows: int = 0
    num_read: int = 0
    kv_tokens: int = 0
    row_kv: int = 0


class PromptAllowance:
    """The prompt tokens that one step may feed. The planner asks `room_for` and then tells `take`,
    prompt by prompt.

    Args:
        max_tokens: prompt tokens, at most.
        step: limits their cost; None: no limit.

    Attributes:
        num_taken: prompt tokens that the step feeds.
    """

    def __init__(self, max_tokens: int, step: BoundedStep | None = None) -> None:
        self._max_tokens = max_tokens
        self._step = step
        self.num_taken = 0

    def room_for(
        self, position: int, num_left: int, num_lookahead: int = 0, comes_along: bool = False
    ) -> int:
        """Returns how many tokens of a prompt the step can feed now.

        Args:
            position: of its next token.
            num_left: tokens from there to its end.
            num_lookahead: rows that follow its last token.
            comes_along: another prompt is the step's first one.
        """
        most = min(num_left, self._max_tokens - self.num_taken)
        if self._step is None or most <= 0:
            return most
        least = min(most, MIN_PROMPT_TOKENS - self.num_taken)
        return max(least, self._step.room_for(position, most, num_lookahead, comes_along))

    @property
    def price_ms(self) -> float | None:
        """Returns the expected time of the step, in ms; None without a limit or prompts."""
        return None if self._step is None or self.num_taken == 0 else self._step.price_ms

    def take(self, position: int, count: int, num_lookahead: int = 0) -> None:
        """Notes that the step feeds `count` tokens of a prompt from `position` on."""
        self.num_taken += count
        if self._step is not None:
            self._step.add(position, count, num_lookahead)


class PromptBudget(Protocol):
    """Decides how many prompt tokens each step feeds."""

    def open(self, decodes: DecodeLoad, someone_streams: bool) -> PromptAllowance:
        """Returns the allowance of a step with these decodes; at least one token.

        Args:
            someone_streams: whether a running or waiting request streams.
        """

    def observe(self, price_ms: float, took_ms: float) -> None:
        """Learns the time of a step whose allowance had a price."""


@dataclass(frozen=True, slots=True)
class FixedBudget:
    """Allows the same number in every step."""

    max_tokens: int

    def open(self, decodes: DecodeLoad, someone_streams: bool) -> PromptAllowance:
        return PromptAllowance(self.max_tokens)

    def observe(self, price_ms: float, took_ms: float) -> None:
        """Does nothing: a fixed number needs no prices."""


class BoundedBudget:
    """Gives `max_tokens` where no client would see a gap between tokens. Otherwise the first prompt
    gets as many as keep the step within `max_step_ms`, further ones share SHARE_OF_OTHERS of the
    time, and all together at least MIN_PROMPT_TOKENS. Where no request decodes, the first prompt
    has no bound.

    Prices are those of a GPU that has just started to work. Under a long load its clock falls, so
    the bound is corrected by the ratio of measured times to prices.

    Args:
        for_streams_alone: the bound holds only while a request streams. If not, always.
        share_of_others: see SHARE_OF_OTHERS.
    """

    def __init__(
        self,
        max_tokens: int,
        prices: PriceTable,
        max_step_ms: float,
        for_streams_alone: bool = False,
        share_of_others: float = SHARE_OF_OTHERS,
    ) -> None:
        self._max_tokens = max_tokens
        self._ladders = Ladders(prices)
        self._max_step_ms = max_step_ms
        self._for_streams_alone = for_streams_alone
        self._share_of_others = share_of_others
        self._excess = 1.0

    def open(self, decodes: DecodeLoad, someone_streams: bool) -> PromptAllowance:
        if self._for_streams_alone and not someone_streams:
            return PromptAllowance(self._max_tokens)
        bound_ms = self._max_step_ms / (PRICE_MARGIN * self._excess)
        decodes_ms = BoundedStep(self._ladders, decodes).price_ms if decodes.num_reqs else 0.0
        others_ms = decodes_ms + self._share_of_others * max(bound_ms - decodes_ms, 0.0)
        max_ms = bound_ms if decodes.num_reqs else math.inf
        step = BoundedStep(self._ladders, decodes, max_ms, others_ms)
        return PromptAllowance(self._max_tokens, step)

    def observe(self, price_ms: float, took_ms: float) -> None:
        difference = min(max(took_ms / price_ms, MIN_EXCESS), MAX_EXCESS) - self._excess
        self._excess += difference * (EXCESS_RISE if difference > 0 else EXCESS_FALL)


def make_budget(
    max_tokens: int, max_step_ms: float, prices: PriceTable | None, for_streams_alone: bool = False
) -> PromptBudget:
    """Makes the budget within a bound; without a bound (0) or prices, always `max_tokens`."""
    if max_step_ms > 0 and prices is not None:
        return BoundedBudget(max_tokens, prices, max_step_ms, for_streams_alone)
    return FixedBudget(max_tokens)


class Rung(NamedTuple):
    """Steps of more than `below` rows and up to `num_rows`: their price, without KV and logits,
    rises from `first_ms` to `last_ms` in a straight line."""

    below: int
    num_rows: int
    first_ms: float
    last_ms: float


class Ladders:
    """Prices by rows of steps that feed a prompt, for each number of requests."""

    def __init__(self, prices: PriceTable) -> None:
        self.prices = prices
        sizes = prices.sizes
        # Prices go on in a straight line beyond the last size.
        self.sizes = [*sizes, 1000 * sizes[-1]]
        self._by_requests: dict[int, list[Rung]] = {}

    def of(self, num_reqs: int) -> list[Rung]:
        """Returns the rungs, ascending, one for each of `sizes`. A prompt's chunk is priced as
        wider than any decode: a chunk of a few rows may replay a graph of decodes, which costs no
        more."""
        if num_reqs not in self._by_requests:
            row_ms = partial(self.prices.rows_ms, num_reqs, self.sizes[-1])
            self._by_requests[num_reqs] = [
                Rung(below, size, row_ms(below + 1), row_ms(size))
                for below, size in pairwise([0, *self.sizes])
            ]
        return self._by_requests[num_reqs]


class BoundedStep:
    """The cost of a step while prompts are added to it.

    Args:
        max_ms: limit of its cost.
        others_ms: limit of its cost when further prompts come along with the first one.
    """

    def __init__(
        self,
        ladders: Ladders,
        decodes: DecodeLoad,
        max_ms: float = math.inf,
        others_ms: float = math.inf,
    ) -> None:
        self._ladders = ladders
        self._max_ms, self._others_ms = max_ms, others_ms
        prices = ladders.prices
        self._attention_ms = prices.kv_ms * decodes.kv_tokens + prices.row_kv_ms * decodes.row_kv
        self._num_reqs, self._num_rows = decodes.num_reqs, decodes.num_rows
        self._num_read = decodes.num_read

    def add(self, position: int, count: int, num_lookahead: int) -> None:
        """Adds a prompt's next tokens and the look-ahead rows after them."""
        num_rows = count + num_lookahead
        self._num_reqs += 1
        self._num_rows += num_rows
        self._num_read += 1 + num_lookahead
        self._attention_ms += self._ladders.prices.prompt_ms(PromptChunk(position, num_rows))

    @property
    def price_ms(self) -> float:
        """Returns the price of the step so far, in ms."""
        prices, widest = self._ladders.prices, self._ladders.sizes[-1]
        rows_ms = prices.rows_ms(self._num_reqs, widest, self._num_rows)
        return rows_ms + prices.head.at(self._num_read) + self._attention_ms

    def room_for(self, position: int, most: int, num_lookahead: int, comes_along: bool) -> int:
        """Returns the most tokens, up to `most`, with which the step costs no more than it may. If
        not all fit, the end of a tile, or of a smaller graph, may be the better place to stop."""
        max_ms = self._others_ms if comes_along else self._max_ms
        rungs = self._ladders.of(self._num_reqs + 1)
        others = self._num_rows + num_lookahead
        prices = self._ladders.prices
        other_ms = self._attention_ms + prices.head.at(self._num_read + 1 + num_lookahead)
        offer = _Offer(position, num_lookahead, others, max_ms - other_ms, other_ms, prices)
        top = bisect.bisect_left(self._ladders.sizes, others + most)
        for index in range(top, -1, -1):
            rung = rungs[index]
            if rung.num_rows <= others:
                break
            count = offer.most_on(rung, most)
            if count == most:
                return count
            if count and rung.first_ms < rung.last_ms:
                return offer.whole_tiles(rung, count)
            if count:
                before = rung.below - others
                is_better = offer.is_better(before, rungs[index - 1], count, rung)
                return before if is_better else count
        return 0


@dataclass(frozen=True, slots=True)
class _Offer:
    """A prompt whose tokens a step may feed.

    Attributes:
        others: rows of the step beside these tokens.
        left_ms: limit of the cost of rows and of the prompt's attention.
        other_ms: cost of the rest of the step.
    """

    position: int
    num_lookahead: int
    others: int
    left_ms: float
    other_ms: float
    prices: PriceTable

    def cost_ms(self, count: int, rung: Rung) -> float:
        """Returns the cost of the step's rows and of the prompt's attention, in ms."""
        share = 0.0
        if rung.last_ms != rung.first_ms:
            share = (self.others + count - rung.below - 1) / (rung.num_rows - rung.below - 1)
        rows_ms = rung.first_ms + share * (rung.last_ms - rung.first_ms)
        chunk = PromptChunk(self.position, count + self.num_lookahead)
        return rows_ms + self.prices.prompt_ms(chunk)

    def most_on(self, rung: Rung, most: int) -> int:
        """Returns the most tokens with which the step is on this rung and costs no more than it
        may; 0 if it would always cost more."""
        high = min(rung.num_rows - self.others, most)
        if self.cost_ms(high, rung) <= self.left_ms:
            return high
        counts = range(max(rung.below - self.others, 0) + 1, high)
        cost_ms = partial(self.cost_ms, rung=rung)
        num_fitting = bisect.bisect_right(counts, self.left_ms, key=cost_ms)
        return counts[num_fitting - 1] if num_fitting else 0

    def whole_tiles(self, rung: Rung, count: int) -> int:
        """Returns `count`, or fewer on the same rung so that the last tile of the step's rows is
        full."""
        fewer = count - (self.others + count) % ROW_TILE
        return fewer if fewer > max(rung.below - self.others, 0) else count

    def is_better(self, fewer: int, rung: Rung, count: int, padded: Rung) -> bool:
        """Tells whether `fewer` tokens, which fill their graph, have a higher throughput than
        `count` tokens in the next graph, which attention keeps them from filling."""
        if fewer <= 0:
            return False
        fewer_ms = self.cost_ms(fewer, rung)
        if fewer_ms > self.left_ms:
            return False
        count_ms = self.cost_ms(count, padded)
        return fewer * (self.other_ms + count_ms) > count * (self.other_ms + fewer_ms)
