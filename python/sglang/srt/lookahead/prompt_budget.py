"""Decides how many prompt tokens a step feeds: all that fit or, where its decodes must not wait
long, as many as keep the step within a bound. Reads no clock: steps have measured prices, and the
caller reports how long they took."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

from sglang.srt.step.price_table import PriceTable, PromptChunk, StepShape

# A step feeds at least this many prompt tokens, however long it gets, so that every prompt is read
# some time. Up to this many rows a GPU's matrix products are bound by reading the weights, so they
# cost next to nothing beside the decodes.
MIN_PROMPT_TOKENS = 128
# The estimate of time / price follows each step by these shares of the difference, quickly upwards.
# Ratios are bounded: a step that took far longer was disturbed, and the next ones will not be.
EXCESS_RISE, EXCESS_FALL = 0.5, 0.1
MIN_EXCESS, MAX_EXCESS = 0.8, 2.0
PRICE_MARGIN = 1.05  # steps of the same price differ in time
# Share of the time left by the decodes within the bound that further prompts of a step may use. So
# prompts begin to decode one after the other and end one after the other, and in a closed loop a
# step admits as many as end in it. If all began at once, all would end at once.
SHARE_OF_OTHERS = 1 / 3
# A GPU computes products of many rows in tiles of this size; part of a tile costs as much as all.
ROW_TILE = 128
# Rows of a request. A prompt's chunk is priced as wider than any decode: a chunk of a few rows may
# replay a graph of decodes, which costs no more.
WIDEST = 1 << 30
NO_DECODES = StepShape(0, WIDEST, 0, 0)


@dataclass(eq=False)
class PromptAllowance:
    """The prompt tokens that one step may feed. The planner asks `room_for` and then tells `take`,
    prompt by prompt."""

    max_tokens: int
    prices: PriceTable | None = None  # None: the step's cost has no limit
    step: StepShape = NO_DECODES  # with the prompts that were taken
    max_ms: float = math.inf  # the most that the step may cost
    others_ms: float = math.inf  # the same when further prompts come along
    num_taken: int = 0  # prompt tokens that the step feeds

    def room_for(
        self, position: int, num_left: int, num_lookahead: int = 0, comes_along: bool = False
    ) -> int:
        """Returns how many of a prompt's `num_left` tokens from a position on the step feeds, and
        after its last one rows of look-ahead; `comes_along`: the first prompt is another one."""
        most, prices = min(num_left, self.max_tokens - self.num_taken), self.prices
        if prices is None or most <= 0:
            return most
        max_ms = self.others_ms if comes_along else self.max_ms
        most_within = self._most_within(prices, max_ms, position, most, num_lookahead)
        return max(min(most, MIN_PROMPT_TOKENS - self.num_taken), most_within)

    def _most_within(
        self, prices: PriceTable, max_ms: float, position: int, most: int, num_lookahead: int
    ) -> int:
        """Returns the most tokens with which the step costs no more than it may. If not all fit,
        the end of a tile, or of a smaller graph, may be the better place to stop."""
        step, others = self.step, self.step.num_rows + num_lookahead
        beside_ms = prices.head.at(step.num_read + 1 + num_lookahead) + prices.attention_ms(step)
        rows_ms = partial(prices.rows_ms, step.num_reqs + 1, WIDEST)

        def cost_ms(count: int) -> float:
            chunk = PromptChunk(position, count + num_lookahead)
            return rows_ms(others + count) + beside_ms + chunk.ms(prices.prompt_kv_ms)

        sizes = [size - others for size in prices.by_rows if size > others]
        sizes.append(max([most, *sizes]) + 1)  # prices go on in a straight line beyond the last one
        for least, size in reversed([*pairwise([0, *sizes])]):
            count = min(size, most)
            if least >= most or min(cost_ms(least + 1), cost_ms(count)) > max_ms:
                continue  # nothing between costs less
            if cost_ms(count) > max_ms:
                count = least + bisect.bisect_right(range(least + 1, count), max_ms, key=cost_ms)
            if count == most:
                return count
            if rows_ms(others + least + 1) < rows_ms(others + size):  # not padded
                fewer = count - (others + count) % ROW_TILE
                return fewer if fewer > least else count
            # Attention keeps `count` tokens from filling their graph; `least` fill the one before.
            least_ms = cost_ms(least) if least else math.inf
            is_better = least_ms <= max_ms and least * cost_ms(count) > count * least_ms
            return least if is_better else count
        return 0

    @property
    def price_ms(self) -> float | None:
        """Returns the expected time of the step, in ms; None without a limit or prompts."""
        return self.prices.price_ms(self.step) if self.prices and self.num_taken else None

    def take(self, position: int, count: int, num_lookahead: int = 0) -> None:
        """Notes that the step feeds `count` tokens of a prompt from `position` on."""
        self.num_taken += count
        step, num_rows = self.step, count + num_lookahead
        self.step = step._replace(
            num_reqs=step.num_reqs + 1,
            num_rows=step.num_rows + num_rows,
            num_read=step.num_read + 1 + num_lookahead,
            prompts=(*step.prompts, PromptChunk(position, num_rows)),
        )


@dataclass(eq=False)
class PromptBudget:
    """Gives `max_tokens` where no client would see a gap between tokens, or without a bound or
    prices. Otherwise the first prompt gets as many as keep the step within `max_step_ms`, further
    ones share SHARE_OF_OTHERS of the time, and all together at least MIN_PROMPT_TOKENS. Where no
    request decodes, the first prompt has no bound.

    Prices are those of a GPU that has just started to work. Under a long load its clock falls, so
    the bound is corrected by the ratio of measured times to prices.
    """

    max_tokens: int
    prices: PriceTable | None = None
    max_step_ms: float = 0.0  # 0: no bound
    for_streams_alone: bool = False  # the bound holds only while a request streams; else always
    share_of_others: float = SHARE_OF_OTHERS
    excess: float = 1.0  # estimate of time / price

    def open(self, decodes: StepShape, someone_streams: bool) -> PromptAllowance:
        """Returns the allowance of a step; at least one token. `decodes`: upper bounds of what
        requests without a prompt feed; `someone_streams`: a running or waiting request does."""
        prices, is_free = self.prices, self.for_streams_alone and not someone_streams
        if prices is None or self.max_step_ms <= 0 or is_free:
            return PromptAllowance(self.max_tokens)
        step = decodes._replace(widest=WIDEST)
        bound_ms = self.max_step_ms / (PRICE_MARGIN * self.excess)
        decodes_ms = prices.price_ms(step) if step.num_reqs else 0.0
        others_ms = decodes_ms + self.share_of_others * max(bound_ms - decodes_ms, 0.0)
        max_ms = bound_ms if step.num_reqs else math.inf
        return PromptAllowance(self.max_tokens, prices, step, max_ms, others_ms)

    def observe(self, price_ms: float, took_ms: float) -> None:
        """Learns the time of a step whose allowance had a price."""
        difference = min(max(took_ms / price_ms, MIN_EXCESS), MAX_EXCESS) - self.excess
        self.excess += difference * (EXCESS_RISE if difference > 0 else EXCESS_FALL)
