"""Decides which CUDA graphs there are, and which one a step replays.

There are five kinds of graphs (tags of `GraphKey`). A step replays the smallest one that has room
for its requests and its rows, or a larger one that is cheaper (`prefer_cheaper`):

- DECODE, if each request feeds one row.
- RAGGED, if requests feed a few rows each (look-ahead, drafts to verify), in any mix.
- UNIFORM instead, if the attention backend can only plan the same number of rows for each request:
  each gets the graph's width, and padding fills the rows that it does not feed.
- MIXED, if some feed prompts. Steps so large that the device computes longer than the host launches
  have none; every smaller step finds one.

- DRAFT_STEPS, for several steps of one row per request at once (`draft_passes.py`).

Graphs of a head also differ by the width of their hidden inputs. Those of several rows per request
compute one row of each request, so they serve only steps that read no more.

Decodes whose requests share prefixes (`ForwardBatch.shared_prefixes`) replay graphs of their own,
if there are any. So do steps whose sums go in fixed orders (`ForwardBatch.fixed_orders`).

Steps whose rows are trees (`ForwardBatch.ancestors`) replay graphs of their own, if there are any.
RAGGED and MIXED graphs for look-ahead read `ForwardBatch.q_starts`, and so serve packed batches,
of which the device alone knows how many rows each request feeds.

Padding rows and requests write K and V to the dummy slot, and their results are not read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from sglang.srt.layers.attention.base_attn_backend import GraphSupport
from sglang.srt.layers.forward_batch import (
    DECODE,
    DRAFT_STEPS,
    MIXED,
    RAGGED,
    UNIFORM,
    ForwardBatch,
    GraphKey,
)

LEAST_SAVING = 0.05  # share by which a larger graph must be cheaper, since times vary
MAX_WIDE_TOKENS = 1024  # rows of a step of several rows per request, in graphs of their own
UNIFORM_WIDTHS = (3, 7, 15, 31)
# Rows in all. Up to 128 they cost nearly the same, and beyond a GPU computes in tiles.
ROWS = (16, 32, 64, 96, *range(128, 320, 32), *range(320, 1025, 64))
# More rows: in graphs for more requests than FEW_REQUESTS, unless there never are as many.
LARGE_ROWS = tuple(range(1152, 2049, 128))
ONE_ROW = (DECODE, DRAFT_STEPS)
# Number of shapes whose graph is cached. A step looks up tens of them, and steps with prompts
# hardly ever the same ones.
MAX_KNOWN = 4096
FEW_REQUESTS = 8  # with as few, KV is split among more programs


class GraphKeys:
    """Knows the graphs that exist, and finds the one for a step.

    Args:
        support: batches that the attention backend can replay.
        max_requests: of a step.
        max_width: rows of a request in a step without prompts that replays a graph.
        max_mixed_rows: most rows in all of a step with prompts that replays a graph; 0: none does.
        computes_all_rows: no graph skips rows (`HiddenCapture.all_rows`).
        with_trees: each graph of several rows per request also exists for steps with `ancestors`.
        hidden_width: width of the hidden input of each row; 0: the model reads tokens alone.
        reads_one_row: no step reads more than one row of a request.
        draft_hidden_width: the same for draft steps, if each replays a graph of its own; 0: none
            does.
        shares_kv: there are graphs for decodes whose requests share prefixes.
        has_both_orders: each other graph also exists for sums in fixed orders.
    """

    def __init__(
        self,
        support: GraphSupport,
        max_requests: int,
        max_width: int,
        max_mixed_rows: int = 0,
        *,
        computes_all_rows: bool = False,
        with_trees: bool = False,
        hidden_width: int = 0,
        reads_one_row: bool = False,
        draft_hidden_width: int = 0,
        shares_kv: bool = False,
        has_both_orders: bool = False,
    ) -> None:
        self.all: list[GraphKey] = []
        self._has_both_orders = has_both_orders
        self._known_smallest = lru_cache(maxsize=MAX_KNOWN)(self._smallest)
        self._graphs_ms: Mapping[GraphKey, float] = {}
        if support is GraphSupport.NEVER:
            return
        self.all = [
            replace(
                key,
                computes_all_rows=computes_all_rows,
                hidden_width=hidden_width,
                reads_one_row=reads_one_row and key.tag != DECODE,
            )
            for key in _plain_keys(support, max_requests, max_width, max_mixed_rows)
        ]
        if with_trees:
            self.all += [replace(key, has_tree=True) for key in self.all if key.width > 1]
        if has_both_orders:
            self.all += [replace(key, fixed_orders=True) for key in self.all]
        if shares_kv:
            sizes = {16, *range(32, max_requests, 32), max_requests}
            self.all += [
                replace(key, shares_kv=True)
                for key in self.all
                if key.tag == DECODE and key.num_reqs in sizes and not key.fixed_orders
            ]
        if draft_hidden_width not in (0, hidden_width):
            self.all += [
                replace(key, hidden_width=draft_hidden_width)
                for key in self.all
                if key.tag == DECODE
            ]

    @classmethod
    def of_draft_steps(
        cls, max_requests: int, hidden_width: int, num_steps: int, batch_sizes: Sequence[range]
    ) -> GraphKeys:
        """Returns the keys of graphs of `num_steps` draft steps at once, for batches of these
        sizes."""
        keys = cls(GraphSupport.NEVER, max_requests, 1)
        keys.all = [
            GraphKey(DRAFT_STEPS, n, 1, n, hidden_width=hidden_width, num_steps=num_steps)
            for n in decode_sizes(max_requests)
            if any(n in sizes for sizes in batch_sizes)
        ]
        return keys

    def prefer_cheaper(self, graphs_ms: Mapping[GraphKey, float]) -> None:
        """Makes steps replay a larger graph where that takes less time: products are cut into
        tiles, which fit some numbers of rows badly.

        Args:
            graphs_ms: milliseconds of graphs; the choice of other graphs does not change.
        """
        self._graphs_ms = graphs_ms
        self._known_smallest.cache_clear()

    def is_undercut(self, num_tokens: int, larger: Sequence[int]) -> bool:
        """Tells whether steps of `num_tokens` rows, several of each request, take longer than steps
        of one of these larger numbers of rows, if both have prices."""
        costs: dict[int, float] = {}
        for key, cost_ms in self._graphs_ms.items():
            if key.tag not in ONE_ROW:
                costs[key.num_tokens] = min(cost_ms, costs.get(key.num_tokens, cost_ms))
        others = [costs[rows] for rows in larger if rows in costs]
        own_ms = costs.get(num_tokens)
        return own_ms is not None and min(others, default=own_ms) < own_ms * (1 - LEAST_SAVING)

    def decode_size(self, num_reqs: int) -> int:
        """Returns the requests of the graph for `num_reqs` decodes; without a graph that number
        itself."""
        key = self.find_shape(num_reqs, 1, num_reqs)
        return num_reqs if key is None else key.num_reqs

    def find(self, q_lens: Sequence[int], has_tree: bool = False) -> GraphKey | None:
        """Returns the smallest graph with room for the requests, then for their rows."""
        return self.find_shape(len(q_lens), max(q_lens), sum(q_lens), has_tree)

    def find_shape(
        self,
        num_reqs: int,
        widest: int,
        num_tokens: int,
        has_tree: bool = False,
        is_packed: bool = False,
        hidden_width: int = 0,
        shares_kv: bool = False,
        fixed_orders: bool = False,
    ) -> GraphKey | None:
        """Does the same, by the number of requests, the most rows that any of them feeds and the
        rows in all. A packed step may have fewer rows than requests."""
        kinds = has_tree, is_packed, hidden_width, shares_kv, fixed_orders and self._has_both_orders
        return self._known_smallest(num_reqs, widest, num_tokens, *kinds)

    def _smallest(
        self,
        num_reqs: int,
        widest: int,
        num_tokens: int,
        has_tree: bool,
        is_packed: bool,
        hidden_width: int,
        shares_kv: bool,
        fixed_orders: bool,
    ) -> GraphKey | None:
        fitting = [
            key
            for key in self.all
            if key.has_tree == has_tree
            and key.hidden_width == hidden_width
            and key.shares_kv == shares_kv
            and key.fixed_orders == fixed_orders
            and key.num_reqs >= num_reqs
            and key.num_tokens >= num_tokens
            and (key.tag == MIXED or key.width >= widest)
            and (key.is_packed if is_packed else key.tag in ONE_ROW or widest > 1)
        ]
        narrow = [key for key in fitting if key.tag != MIXED]
        usable, costs = narrow or fitting, self._graphs_ms
        smallest = min(usable, key=lambda key: (key.num_reqs, key.num_tokens), default=None)
        if smallest is None or smallest not in costs:
            return smallest
        cheapest = min((key for key in usable if key in costs), key=costs.__getitem__)
        return cheapest if costs[cheapest] < costs[smallest] * (1 - LEAST_SAVING) else smallest


def uniform_key(batch: ForwardBatch) -> GraphKey:
    """Returns the key of a step whose requests all feed the same number of rows, as a part of a
    larger graph."""
    count, width = len(batch.q_lens), batch.q_lens[0]
    assert batch.q_lens == [width] * count, "Requests feed different numbers of rows."
    hidden_width = 0 if batch.hidden is None else batch.hidden.shape[1]
    tag = DECODE if width == 1 else UNIFORM
    has_tree = batch.ancestors is not None
    return GraphKey(
        tag,
        count,
        width,
        count * width,
        has_tree,
        hidden_width=hidden_width,
        fixed_orders=batch.fixed_orders,
    )


def split_rows(num_rows: int, num_reqs: int) -> list[int]:
    """Returns the rows of requests that feed nearly the same number."""
    share, rest = divmod(num_rows, num_reqs)
    return [share + (index < rest) for index in range(num_reqs)]


def kind_of(key: GraphKey) -> str:
    """Returns the kind of a graph, for the log."""
    steps = f"{key.num_steps} {key.tag}" if key.num_steps > 1 else key.tag
    hidden = f", hidden states of {key.hidden_width}" if key.hidden_width else ""
    kind = steps + hidden + ", trees" * key.has_tree + ", shared prefixes" * key.shares_kv
    return kind + ", fixed orders" * key.fixed_orders


def _plain_keys(
    support: GraphSupport, max_requests: int, max_width: int, max_mixed_rows: int
) -> list[GraphKey]:
    keys = [GraphKey(DECODE, n, 1, n) for n in decode_sizes(max_requests)]
    if support is GraphSupport.RAGGED_Q:
        most_requests = min(max_requests, max_mixed_rows)  # each feeds a row at least
        many = {min(most_requests, ROWS[-1]), most_requests}
        keys += [
            GraphKey(MIXED, num_reqs, max_width, rows)
            for num_reqs in sorted({min(FEW_REQUESTS, most_requests), *many})
            for rows in (ROWS + LARGE_ROWS if num_reqs in many else ROWS)
            if num_reqs <= rows <= max_mixed_rows
        ]
    if max_width == 1:
        return keys
    sizes = sorted({*_powers_of_two(max_requests), max_requests})
    if support is GraphSupport.UNIFORM_Q:
        widths = sorted({*(w for w in UNIFORM_WIDTHS if w < max_width), max_width})
        wide = [GraphKey(UNIFORM, n, w, n * w) for n in sizes for w in widths]
    else:
        wide = [
            GraphKey(RAGGED, n, max_width, tokens)
            for n in sizes
            for tokens in _row_counts(n, n * max_width)
        ]
    return keys + [key for key in wide if key.num_tokens <= MAX_WIDE_TOKENS]


def decode_sizes(max_requests: int) -> list[int]:
    """Returns 1, 2, 4, then every eighth up to 128, every 16th up to 256, every 32nd beyond, and
    `max_requests` itself."""
    sizes = {1, 2, 4, *range(8, 129, 8), *range(144, 257, 16), *range(288, max_requests, 32)}
    return sorted({size for size in sizes if size < max_requests} | {max_requests})


def _powers_of_two(limit: int) -> list[int]:
    return [1 << power for power in range(limit.bit_length()) if 1 << power <= limit]


def _row_counts(least: int, most: int) -> list[int]:
    """Returns numbers of rows for steps of `least` to `most` rows."""
    return [rows for rows in ROWS if least < rows < most] + [most]
