"""Prices steps from measurements at start-up."""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, NamedTuple

import msgspec

from sglang.srt.layers.forward_batch import GraphKey

# As files may hold it, of JSON, which has neither NaN nor infinity.
Price = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
# Finds the graph that a step replays from its requests, rows of the widest one, and rows in all.
FindGraph = Callable[[int, int, int], GraphKey | None]


class PromptChunk(NamedTuple):
    """Rows of a prompt that a step feeds."""

    position: int  # of the first one; as many tokens are before it
    num_rows: int

    def ms(self, kv_ms: Curve) -> float:
        """Returns the time of its attention; kv_ms: see `PriceTable.prompt_kv_ms`."""
        mean_seen = self.position + (self.num_rows + 1) / 2  # tokens, of a row, itself included
        return kv_ms.at(self.num_rows) * mean_seen


class StepShape(NamedTuple):
    """The properties of a step that decide its price."""

    num_reqs: int
    widest: int  # rows of the request that feeds most
    num_rows: int  # in all
    num_read: int  # rows whose logits are read
    kv_tokens: float = 0.0  # tokens with KV of all requests that emit; each is read once
    row_kv: float = 0.0  # sum over their rows, without prompts, of the tokens that each row sees
    prompts: tuple[PromptChunk, ...] = ()


@dataclass(frozen=True, slots=True)
class Curve:
    """Milliseconds by size, where sizes are not padded: linear between measured sizes, never
    falling beyond the largest."""

    sizes: tuple[int, ...]  # ascending, at least one
    costs_ms: tuple[float, ...]  # measured; they may fall in places

    def __post_init__(self) -> None:
        is_ascending = list(self.sizes) == sorted({0, *self.sizes})[1:]
        has_times = len(self.sizes) == len(self.costs_ms) and min(self.costs_ms, default=-1) >= 0
        if not is_ascending or not has_times:
            raise ValueError("A curve has ascending sizes of at least 1, each with a time.")

    def at(self, size: int) -> float:
        """Continues the mean slope of the second half beyond the last size, since the last piece
        alone may be flat; with one size, cost grows in proportion."""
        sizes, costs = self.sizes, self.costs_ms
        if size <= sizes[0]:
            return costs[0]
        last = sizes[-1]
        if size > last:
            if len(sizes) == 1:
                return costs[0] * size / last
            middle = last // 2
            slope = (costs[-1] - self.at(middle)) / (last - middle)
            return costs[-1] + max(slope, 0.0) * (size - last)
        right = bisect.bisect_left(sizes, size)
        share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
        return costs[right - 1] + share * (costs[right] - costs[right - 1])


FREE = Curve((1,), (0.0,))


def no_graphs(num_reqs: int, widest: int, num_rows: int) -> None:
    """`FindGraph` where every step is launched kernel by kernel."""


@dataclass(frozen=True)
class PriceTable:
    """Prices of steps in milliseconds. A step that replays a graph costs the time of that graph,
    however many of its rows are padding."""

    find: FindGraph
    graphs_ms: Mapping[GraphKey, float]  # with next to no KV
    eager: Curve  # of steps that replay no graph, by rows, with next to no KV
    head: Curve  # of logits and of drawing tokens from them, by rows read
    kv_ms: float = 0.0  # of each token of KV that is read
    row_kv_ms: float = 0.0  # of each pair of a row and a token of KV that it sees
    # Of a token that a prompt's chunk sees, by the chunk's rows; not falling. Rows share the KV
    # that they read, and small chunks underuse a GPU.
    prompt_kv_ms: Curve = FREE
    spread: float = 0.0  # typical deviation of one measurement from another, as a share

    @cached_property
    def by_rows(self) -> dict[int, float]:
        """Ascending numbers of rows, between which steps are padded or prices are linear, and of
        each the ms of the cheapest step."""
        graphs = ((key.num_tokens, cost_ms) for key, cost_ms in self.graphs_ms.items())
        eager = zip(self.eager.sizes, self.eager.costs_ms, strict=True)
        dearest_first = sorted([*graphs, *eager], reverse=True)
        return dict(sorted(dict(dearest_first).items()))

    def rows_ms(self, num_reqs: int, widest: int, num_rows: int) -> float:
        """Returns the time of a step without its attention over KV and its logits, in ms."""
        key = self.find(num_reqs, widest, num_rows)
        measured = None if key is None else self.graphs_ms.get(key)
        return self.eager.at(num_rows) if measured is None else measured

    def attention_ms(self, step: StepShape) -> float:
        """Returns the time of the attention over a step's KV, in ms."""
        return (
            self.kv_ms * step.kv_tokens
            + self.row_kv_ms * step.row_kv
            + sum(chunk.ms(self.prompt_kv_ms) for chunk in step.prompts)
        )

    def price_ms(self, step: StepShape) -> float:
        """Returns the time of a step, in ms."""
        rows_ms = self.rows_ms(step.num_reqs, step.widest, step.num_rows)
        return rows_ms + self.head.at(step.num_read) + self.attention_ms(step)


class PassPrices(NamedTuple):
    """Prices of a pass that drafts, in milliseconds: with next to no KV, and of each token of KV
    before its first step, however many of its steps and rows read that."""

    by_requests: Curve
    kv_ms: Price = 0.0


@dataclass(frozen=True, slots=True)
class DraftPrices:
    """Prices of a head over a target."""

    extend: PriceTable  # its pass over the rows that the target was fed, and its logits
    passes: Mapping[Any, PassPrices]  # for each number of draft steps, or shape of trees
