"""Measures prices of steps and of drafting, once at start-up, before any request has rows and
slots.

Steps feed random tokens, and heads random hidden states: a GPU multiplies equal rows, and zeros,
faster than others, since that takes less power.

Ranks of a model measure together: they launch the same steps in the same order, since all go by
what the first one's clock says.
"""

from __future__ import annotations

import itertools
import logging
import math
import statistics
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial

import torch

from sglang.srt.device_copies import to_device
from sglang.srt.layers.forward_batch import MIXED, ForwardBatch, GraphKey, dummy_step
from sglang.srt.model_executor.graph_keys import LEAST_SAVING, split_rows
from sglang.srt.model_executor.measured_times import SLOW_ROWS, CpuTimer, GpuTimer, Launch, shown
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.price_table import (
    FREE,
    Curve,
    DraftPrices,
    FindGraph,
    PassPrices,
    PriceTable,
    PromptChunk,
    no_graphs,
)

logger = logging.getLogger(__name__)

# Rows of steps that replay no graph, and rows whose logits are read.
EAGER_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)
# Products are cut into tiles, and a GPU computes several at a time. So prices are no straight line,
# and more rows may cost less.
MANY_ROWS = (*range(SLOW_ROWS, 2049, 128), 2560, 4096, 8192)
READ_STATES = 64  # number of different hidden states whose logits are computed
READ_ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)
PROMPT_ROWS = 512  # rows of a request in a step of many rows
GRAPH_REPEATS = 3  # the shortest counts
PLAIN_REPEATS = 7  # enough to show how much times vary
CHUNK_REPEATS, KV_REPEATS = 2, 3
DRAFT_REQUESTS = (1, 2, 4, *range(8, 129, 8), 256, 512, 1024)  # of passes that draft
QUICK_RUNS = 30  # of one request: attention is measured if the budget has time for so many


class PriceMeter:
    """Times steps of a runner, of up to `max_requests` requests, each of up to `max_width` rows."""

    def __init__(self, runner: ModelRunner, max_requests: int, max_width: int) -> None:
        self._runner, self._max_requests, self._max_width = runner, max_requests, max_width
        self._table = runner.req_to_token_pool.req_to_token
        self._device = self._table.device
        make_timer = CpuTimer if self._device.type == "cpu" else GpuTimer
        self.timer = make_timer(float if runner.ranks is None else runner.ranks.first_of)
        self._generator = torch.Generator(self._device).manual_seed(0)

    @torch.inference_mode()
    def measure(self) -> PriceTable:
        """Measures all prices and logs how long that took."""
        start = self.timer.now()
        logger.info("Measuring prices of steps.")
        prompt_kv_ms = self._prompt_attention()
        graphs_ms = self.graphs_ms(priced_graphs(self._runner, self._max_width))
        steps = self.eager_rows(), lambda num_rows: self._launch(self._q_lens(num_rows))
        eager = self.timer.curve_of(*steps, "steps")
        reads = [size for size in READ_ROWS if size <= self._max_requests * self._max_width]
        states = self._runner.forward(self._dummy_step([1] * min(READ_STATES, self._max_requests)))
        head = self.timer.curve_of(reads, partial(self._read, states.hidden.clone()), "logits")
        kv_ms, row_kv_ms = self._attention()
        times = self.timer.times_ms(self._launch([1]), PLAIN_REPEATS)
        middle = statistics.median(times)
        text = "Measured prices of %d graphs and %d other sizes of steps in %.1f s."
        num_others = len(eager.sizes) + len(head.sizes)
        logger.info(text, len(graphs_ms), num_others, self.timer.now() - start)
        return PriceTable(
            find=graph_finder(self._runner),
            graphs_ms=graphs_ms,
            eager=self._without_attention(eager, prompt_kv_ms),
            head=head,
            kv_ms=kv_ms,
            row_kv_ms=row_kv_ms,
            prompt_kv_ms=prompt_kv_ms,
            spread=statistics.median(abs(value - middle) for value in times) / middle,
        )

    @torch.inference_mode()
    def graph_ms(self, key: GraphKey, repeats: int) -> float:
        """Returns the milliseconds of a graph, the least of several runs after a first one."""
        batch = self._dummy_step(rows_of(key, self._table.shape[1]))
        if key.has_tree:
            batch = replace(batch, ancestors=torch.full_like(batch.positions, -1))
        return min(self.timer.times_ms(lambda: self._runner.forward(batch), repeats))

    def _is_quick(self, launch: Launch) -> bool:
        """Tells whether there is time to measure attention, by a launch of one request. On a CPU
        with a large model there is not, but weights outweigh KV."""
        most_ms = self.timer.budget_s * 1e3 / QUICK_RUNS
        return math.isinf(most_ms) or min(self.timer.times_ms(launch, 2)) <= most_ms

    def graphs_ms(self, keys: Sequence[GraphKey]) -> dict[GraphKey, float]:
        """Measures the milliseconds of each graph, again of those to which steps would prefer a
        larger one: they may have met a slow moment."""
        found = {key: self.graph_ms(key, GRAPH_REPEATS) for key in shown(keys, "Measuring graphs")}
        for key in sorted(found, key=lambda key: (-key.num_tokens, -key.num_reqs)):
            larger_ms = min(found[other] for other in found if _has_room(other, key))
            if larger_ms < found[key] * (1 - LEAST_SAVING):
                found[key] = min(found[key], self.graph_ms(key, GRAPH_REPEATS))
        return found

    def _attention(self) -> tuple[float, float]:
        """Measures `kv_ms` and `row_kv_ms`, from requests of one row and of the most rows."""
        width, per_row = self._max_width, 0.0
        narrow = self.kv_ms(lambda count, kv_len: self._launch([1] * count, kv_len))
        if width > 1:
            wide = self.kv_ms(lambda count, kv_len: self._launch([width] * count, kv_len))
            per_row = max(0.0, (wide - narrow) / (width - 1))
        return max(0.0, narrow - per_row), per_row

    def kv_ms(self, launch_of: Callable[[int, int], Launch]) -> float:
        """Measures the milliseconds per token of KV; `launch_of` takes a number of requests and the
        tokens before each."""
        count = min(self.timer.kv_requests, self._max_requests)
        num_slots = self._runner.memory.num_pages * self._runner.kv_pool.page_size
        # Half of a row leaves room for what is fed behind it.
        length = min(self.timer.kv_tokens, self._table.shape[1] // 2, num_slots // count)
        if length < 2 or not self._is_quick(launch_of(1, 0)):
            return 0.0
        return self._kv_slope(partial(launch_of, count), count, length, KV_REPEATS) / count

    def _kv_slope(
        self, launch_of: Callable[[int], Launch], count: int, length: int, repeats: int
    ) -> float:
        """Returns the milliseconds per token before each of `count` requests, of `length` of them,
        while the first rows of the table have as many slots each."""
        page_size, timer = self._runner.kv_pool.page_size, self.timer
        num_slots = self._runner.memory.num_pages * page_size
        slots = page_size + torch.arange(count * length, device=self._device) % num_slots
        self._table[:count, :length] = slots.view(count, length).to(self._table.dtype)
        times = [min(timer.times_ms(launch_of(kv_len), repeats)) for kv_len in (0, length)]
        self._table[:count, :length] = 0
        return max(0.0, (times[1] - times[0]) / length)

    def _prompt_attention(self) -> Curve:
        """Measures `prompt_kv_ms`, from chunks of a prompt with no KV before them and with much."""
        timer, width = self.timer, self._table.shape[1]
        most = min(timer.chunk_rows[-1], self._runner.max_prompt_rows, width // 2)
        if most < 1 or not self._is_quick(self._launch([1])):
            return FREE
        length = min(timer.chunk_kv_tokens, width - most)
        sizes = tuple(sorted({min(size, most) for size in timer.chunk_rows}))
        launches = [partial(self._launch, [size]) for size in sizes]
        costs = [self._kv_slope(each, 1, length, CHUNK_REPEATS) for each in launches]
        return Curve(sizes, tuple(itertools.accumulate(costs, max)))

    def _without_attention(self, eager: Curve, prompt_kv_ms: Curve) -> Curve:
        """Takes the attention of rows to each other out, priced apart; few rows hardly have any."""
        costs, least = [], prompt_kv_ms.sizes[0]
        for num_rows, cost_ms in zip(eager.sizes, eager.costs_ms, strict=True):
            chunks = [PromptChunk(0, q_len) for q_len in self._q_lens(num_rows) if q_len >= least]
            seen_ms = sum(chunk.ms(prompt_kv_ms) for chunk in chunks)
            costs.append(max(cost_ms - seen_ms, cost_ms / 2))
        return Curve(eager.sizes, tuple(costs))

    def _q_lens(self, num_rows: int) -> list[int]:
        """Returns the rows of each request of a step, in as few requests as it can have."""
        width = self._max_width
        if num_rows > self._max_requests * width or num_rows in MANY_ROWS:
            width = min(PROMPT_ROWS, self._table.shape[1])
        return split_rows(num_rows, -(-num_rows // width))

    def _read(self, states: torch.Tensor, num_rows: int) -> Launch:
        """Computes logits of states [n, D], repeated."""
        hidden = states.repeat(-(-num_rows // len(states)), 1)[:num_rows]
        logits_of = self._runner.compute_logits
        return lambda: torch.softmax(logits_of(hidden), dim=-1, dtype=torch.float32).max(dim=-1)

    def _launch(self, q_lens: list[int], kv_len: int = 0) -> Launch:
        batch = self._dummy_step(q_lens, kv_len)
        return lambda: self._runner.forward(batch)

    def _dummy_step(self, q_lens: list[int], kv_len: int = 0) -> ForwardBatch:
        batch = self.random_step(q_lens, self._runner.model.hidden_width, kv_len)
        if not self._runner.reads_one_row and self._max_width > 1:
            return batch  # a step may read all rows of requests that look ahead
        last = [end - 1 for end in itertools.accumulate(q_lens)]
        return replace(batch, read_index=to_device(last, self._device))

    def random_step(self, q_lens: list[int], hidden_width: int, kv_len: int = 0) -> ForwardBatch:
        """Makes a `dummy_step` of random tokens, and hidden states [T, hidden_width] unless that is
        0, after `kv_len` tokens of each request."""
        assert max(q_lens) + kv_len <= self._table.shape[1], "A request is longer than a row."
        count, device, hidden = sum(q_lens), self._device, None
        if hidden_width:
            dtype, shape = self._runner.kv_pool.kv[0].dtype, (count, hidden_width)
            hidden = torch.randn(shape, generator=self._generator, device=device, dtype=dtype)
        row = self._runner.req_to_token_pool.padding_row
        batch = dummy_step(q_lens, row, device, hidden=hidden)
        vocab_size, lens = self._runner.vocab_size, [q_len + kv_len for q_len in q_lens]
        ids = torch.randint(vocab_size, (count,), generator=self._generator, device=device)
        batch = replace(batch, input_ids=ids, positions=batch.positions + kv_len)
        rows = torch.arange(len(lens), device=device) if kv_len else batch.rows  # see `_kv_slope`
        return replace(batch, rows=rows, kv_lens=batch.kv_lens + kv_len, kv_len_upper_bounds=lens)

    def eager_rows(self) -> list[int]:
        """Returns sizes that no graph covers, and before them the largest that one does."""
        decode_rows = self._max_requests * self._max_width
        most = min(max(decode_rows, self._runner.max_prompt_rows), MANY_ROWS[-1])
        many = [*(size for size in MANY_ROWS if size < most), most]
        if mixed := [key.num_tokens for key in priced_graphs(self._runner, 1)]:
            return [size for size in many if size >= max(mixed)] or many[-1:]
        return [*(size for size in EAGER_ROWS if size < many[0]), *many]


def graph_finder(runner: ModelRunner) -> FindGraph:
    """Makes `PriceTable.find`. Where drafts are trees, several rows of a request verify one."""
    keys = runner.graph_keys
    if keys is None:
        return no_graphs
    # Where the backend cannot capture trees, no graph has room for them.
    has_trees = runner.config.captures_trees
    find = partial(keys.find_shape, hidden_width=runner.model.hidden_width)
    return lambda num_reqs, widest, rows: find(num_reqs, widest, rows, has_trees and widest > 1)


def priced_graphs(runner: ModelRunner, max_width: int) -> list[GraphKey]:
    """Returns the graphs with a price of their own, where a request feeds `max_width` rows at most:
    if none looks ahead, only steps with prompts need prices; draft steps never do, and steps in
    fixed orders go by those of others."""
    keys, looks_ahead, kind = runner.graph_keys, max_width > 1, (runner.model.hidden_width, False)
    return [
        key
        for key in ([] if keys is None else keys.all)
        if (key.tag == MIXED or looks_ahead) and (key.hidden_width, key.fixed_orders) == kind
    ]


def _has_room(graph: GraphKey, key: GraphKey) -> bool:
    """Tells whether steps of the key's graph may replay another graph of its kind, or the same."""
    has_room = graph.num_reqs >= key.num_reqs and graph.num_tokens >= key.num_tokens
    return has_room and (graph.tag, graph.has_tree) == (key.tag, key.has_tree)


def rows_of(key: GraphKey, row_width: int) -> list[int]:
    """Rows of the requests of a step that replays this graph and fills it, as far as requests of up
    to `row_width` rows can."""
    if key.tag != MIXED:
        return split_rows(key.num_tokens, key.num_reqs)
    # As few prompts as possible, too long for the other graphs, beside as many decodes as there is
    # room for.
    num_prompts = -(-(key.num_tokens - key.num_reqs) // max(row_width - 1, 1))
    num_prompts = min(max(num_prompts, 1), key.num_reqs)
    others = key.num_tokens - num_prompts * (key.width + 1)
    others = max(0, min(key.num_reqs - num_prompts, others))
    num_rows = min(key.num_tokens - others, num_prompts * row_width)
    return [*split_rows(num_rows, num_prompts), *[1] * others]


@torch.inference_mode()
def measure_draft_prices(
    runner: ModelRunner, max_requests: int, max_width: int, shapes: Collection[DraftShape]
) -> DraftPrices:
    """Measures a drafting model's runner as a target's, and passes that draft these shapes, with
    what they read of KV; other arguments as for `PriceMeter`."""
    meter = PriceMeter(runner, max_requests, max_width)
    start, fewer = meter.timer.now(), [size for size in DRAFT_REQUESTS if size < max_requests]

    def launch_of(shape: DraftShape, num_reqs: int, kv_len: int = 0) -> Launch:
        first = meter.random_step([1] * num_reqs, runner.model.draft_hidden_width, kv_len)
        if isinstance(shape, TreeShape):
            return lambda: runner.draft_trees(first, shape)
        return lambda: runner.draft(first, shape)

    extend, passes = meter.measure(), dict[DraftShape, PassPrices]()
    for shape in shapes:
        launch = partial(launch_of, shape)
        curve = meter.timer.curve_of([*fewer, max_requests], launch, f"drafting ({shape})")
        passes[shape] = PassPrices(curve, meter.kv_ms(launch))
    logger.info("Measured prices of a draft model in %.1f s.", meter.timer.now() - start)
    return DraftPrices(extend, passes)
