"""CUDA graphs of steps, captured by shape and replayed by steps that fit."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Generic, TypeVar

import torch
from tqdm import tqdm

from sglang.srt.garbage import no_collections
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.model_executor.graph_keys import GraphKeys, kind_of, split_rows
from sglang.srt.platform import free_bytes
from sglang.srt.step.step_ops import StaticInputs, StepOps

logger = logging.getLogger(__name__)

Results = TypeVar("Results", bound=tuple[torch.Tensor | None, ...])
Found = TypeVar("Found")


@dataclass(frozen=True, slots=True)
class Replay(Generic[Results]):
    """The results of a replay; the next replay overwrites them.

    Attributes:
        results: those of the captured callable, padding included.
        places: [T] int64, the place of each row of the step in the graph; None: they are its first
            rows.
    """

    results: Results
    places: torch.Tensor | None

    def rows(self, values: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Returns the T rows of the step out of a result that has a row for each row of the
        graph."""
        return values[:num_tokens] if self.places is None else values[self.places]


@dataclass(frozen=True, slots=True)
class _Captured(Generic[Results]):
    """A graph and its results."""

    graph: torch.cuda.CUDAGraph
    results: Results


@dataclass(slots=True)
class _Cost:
    """The time and memory that the graphs of a kind took at capture."""

    num_graphs: int = 0
    seconds: float = 0.0
    num_bytes: int = 0


class GraphMemory:
    """The inputs of graphs, as large as the largest graph needs, and the memory of their results.
    `CudaGraphRunner`s may share it: then a replay of one overwrites the inputs, and maybe the
    results, of the others.

    Args:
        keys: keys of all graphs.
        hidden_dtype: of `ForwardBatch.hidden`.
        alone: `ModelRunner.alone`.
    """

    def __init__(
        self,
        keys: Sequence[GraphKey],
        device: str,
        hidden_dtype: torch.dtype = torch.float32,
        alone: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self.alone = alone
        most_tokens = max(key.num_tokens for key in keys)
        most_reqs = max(key.num_reqs for key in keys)
        num_hidden = max(key.num_tokens * key.hidden_width for key in keys)
        have_trees = any(key.has_tree for key in keys)
        tokens = torch.zeros((3, most_tokens), dtype=torch.int64, device=device)
        requests = torch.zeros((3, most_reqs), dtype=torch.int64, device=device)
        hidden = torch.zeros(num_hidden, dtype=hidden_dtype, device=device)
        self.static = StaticInputs(
            tokens,
            requests,
            requests.new_zeros(most_reqs + 1),
            ancestors=tokens.new_zeros(most_tokens) if have_trees else None,
            tree_starts=requests.new_zeros(most_reqs) if have_trees else None,
            hidden=hidden if num_hidden else None,
        )
        self.pool = torch.cuda.graph_pool_handle()

    @cached_property
    def side(self) -> torch.cuda.Stream:
        """Returns the stream on which a graph's callable runs before it is captured: one for all
        graphs, since cuBLAS takes memory for each stream."""
        return torch.cuda.Stream()


def capture_graph(
    memory: GraphMemory,
    run: Callable[[], Found],
    prepare: Callable[[], None] = lambda: None,
    runs_first: bool = True,
) -> tuple[torch.cuda.CUDAGraph, Found]:
    """Calls `run` once on a side stream, so that its kernels are compiled and memory is taken, then
    captures it. The call waits for no other rank, which may lack that memory; the graph does.

    Args:
        prepare: called before each of the two, and no part of the graph.
        runs_first: False: captures at once, since `run` keeps nothing from one call to the next.
            Kernels that are not compiled yet are compiled during the capture.

    Returns:
        The graph, and the result of `run` in it.
    """
    if runs_first:
        side = memory.side
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), memory.alone():
            prepare()
            run()
        torch.cuda.current_stream().wait_stream(side)
    prepare()
    graph = torch.cuda.CUDAGraph()
    # Relaxed: this thread may load kernels meanwhile, and others too.
    with torch.cuda.graph(graph, pool=memory.pool, capture_error_mode="relaxed"):
        found = run()
    return graph, found


class CudaGraphRunner(Generic[Results]):
    """Captures a callable and replays it.

    Args:
        plan: the attention's, called before each capture and replay.
        compute: the captured callable over a planned batch; returns a tuple of tensors, with None
            for a missing one.
        ops: copies steps into the inputs of graphs.
        longest: the most KV tokens of a request.
        poisons: overwrites all inputs and results before each replay, so that values that a step
            does not fill anew show.
        memory: memory with room for all `keys`; None: the runner takes its own.
        runs_first: of `capture_graph`, for the graph of a key.
    """

    def __init__(
        self,
        plan: Callable[[ForwardBatch], None],
        compute: Callable[[ForwardBatch], Results],
        ops: StepOps,
        keys: GraphKeys,
        longest: int,
        device: str,
        poisons: bool = False,
        memory: GraphMemory | None = None,
        runs_first: Callable[[GraphKey], bool] = lambda _: True,
    ) -> None:
        memory = memory or GraphMemory(keys.all, device)
        self._plan = plan
        self._compute = compute
        self._ops = ops
        self._keys = keys
        self._longest = longest
        self._poisons = poisons
        self._memory, self._static = memory, memory.static
        self._tokens, self._requests = memory.static.tokens, memory.static.requests
        self._device = device
        self._runs_first = runs_first
        self._captured: dict[GraphKey, _Captured[Results]] = {}

    @property
    def keys(self) -> GraphKeys:
        """Returns the keys of all graphs."""
        return self._keys

    @property
    def num_graphs(self) -> int:
        return len(self._captured)

    def capture(self) -> None:
        """Captures all graphs, the largest first, so that the others fit into the memory of that
        one."""
        start = time.perf_counter()
        keys = sorted(self._keys.all, key=lambda key: -key.num_tokens)
        logger.info("Capturing %d CUDA graphs.", len(keys))
        costs: defaultdict[str, _Cost] = defaultdict(_Cost)
        with no_collections():  # freeing an object (an older graph) may call CUDA and end a capture
            now, free = start, free_bytes(self._device)
            for key in tqdm(keys, desc="Capturing CUDA graphs", unit="graph", disable=None):
                self._captured[key] = self._capture(key)
                cost, before, was_free = costs[kind_of(key)], now, free
                now, free = time.perf_counter(), free_bytes(self._device)
                cost.num_graphs += 1
                cost.seconds += now - before
                cost.num_bytes += was_free - free
        for kind, cost in costs.items():
            logger.info(
                "CUDA graphs of kind %s: %d, %.1f s, %d MiB.",
                kind,
                cost.num_graphs,
                cost.seconds,
                cost.num_bytes >> 20,
            )
        logger.info(
            "Captured %d CUDA graphs for up to %d requests and %d rows in %.1f s.",
            len(keys),
            max(key.num_reqs for key in keys),
            max(key.num_tokens for key in keys),
            time.perf_counter() - start,
        )

    def rehearse(self) -> None:
        """Computes a step of each shape and captures nothing."""
        for key in self._keys.all:
            batch = self._empty_step(key)
            self._plan(batch)
            self._compute(batch)

    def key_of(self, batch: ForwardBatch) -> GraphKey | None:
        """Returns the key of the graph that a step can replay, if there is one."""
        shape = len(batch.q_lens), max(batch.q_lens), batch.input_ids.shape[0]
        if batch.shared_prefixes and not batch.fixed_orders:
            shares_kv = self._keys.find_shape(*shape, shares_kv=True)
            if shares_kv is not None:
                return shares_kv
        key = self._keys.find_shape(
            *shape,
            has_tree=batch.ancestors is not None,
            is_packed=batch.q_starts is not None,
            hidden_width=0 if batch.hidden is None else batch.hidden.shape[1],
            fixed_orders=batch.fixed_orders,
        )
        if key is None:
            return None
        wanted = batch.read_index
        if key.skips_unread_rows and (wanted is None or len(wanted) > key.num_reqs):
            return None
        return key

    def run(self, key: GraphKey, batch: ForwardBatch) -> Replay[Results]:
        """Replays the graph of `key` for a step that fits it. The step's inputs may be results of
        the last replay."""
        captured = self._captured[key]
        if self._poisons:
            self._poison_inputs(key)
        places = self._ops.fill(self._static, key, batch)
        if self._poisons:
            poison(captured.results)
        self._plan(self._static_batch(key, batch))
        captured.graph.replay()
        return Replay(captured.results, places)

    def _poison_inputs(self, key: GraphKey) -> None:
        self._tokens.fill_(1)
        self._tokens[1].fill_(self._longest - 1)
        self._requests[:2].fill_(self._longest)
        self._requests[2].fill_(key.num_tokens - 1)
        self._static.q_starts.zero_()
        if self._static.ancestors is not None and self._static.tree_starts is not None:
            self._static.ancestors.zero_()
            self._static.tree_starts.zero_()
        if self._static.hidden is not None:
            self._static.hidden.fill_(float("nan"))

    def _static_batch(self, key: GraphKey, batch: ForwardBatch) -> ForwardBatch:
        """Returns the step in the form of the graph: static buffers with room for padding."""
        lacking = key.num_reqs - len(batch.q_lens)
        bounds = batch.kv_len_upper_bounds
        if key.is_uniform:
            pairs = zip(bounds, batch.q_lens, strict=True)
            bounds = [bound + key.width - q_len for bound, q_len in pairs] + [key.width] * lacking
        return ForwardBatch(
            input_ids=self._tokens[0, : key.num_tokens],
            positions=self._tokens[1, : key.num_tokens],
            slots=self._tokens[2, : key.num_tokens],
            rows=self._requests[0, : key.num_reqs],
            q_lens=[key.width] * key.num_reqs if key.is_uniform else batch.q_lens,
            kv_lens=self._requests[1, : key.num_reqs],
            kv_len_upper_bounds=bounds,
            bounds_are_exact=batch.bounds_are_exact,
            graph_key=key,
            read_index=self._requests[2, : key.num_reqs] if key.skips_unread_rows else None,
            ancestors=_first(self._static.ancestors, key.num_tokens if key.has_tree else None),
            tree_starts=_first(self._static.tree_starts, key.num_reqs if key.has_tree else None),
            q_starts=_first(self._static.q_starts, key.num_reqs + 1 if key.is_packed else None),
            hidden=self._static.hidden_of(key),
            shared_prefixes=batch.shared_prefixes,
            fixed_orders=key.fixed_orders,
        )

    def _capture(self, key: GraphKey) -> _Captured[Results]:
        """Captures a step of the key."""
        batch = self._empty_step(key)
        found = capture_graph(
            self._memory,
            lambda: self._compute(batch),
            lambda: self._plan(batch),
            self._runs_first(key),
        )
        return _Captured(*found)

    def _empty_step(self, key: GraphKey) -> ForwardBatch:
        """Returns a step of the key whose rows are all padding, in the form of the graph."""
        count = key.num_reqs
        empty = self._tokens[0, :0]
        shape = ForwardBatch(
            input_ids=empty,
            positions=empty,
            slots=empty,
            rows=empty,
            q_lens=split_rows(key.num_tokens, count),
            kv_lens=empty,
            kv_len_upper_bounds=[key.width] * count,
            bounds_are_exact=True,
        )
        self._ops.fill(self._static, key, replace(shape, q_lens=[]))
        return self._static_batch(key, shape)


def poison(results: tuple[torch.Tensor | None, ...]) -> None:
    """Overwrites results, so that values that a replay does not fill anew show."""
    for values in results:
        if values is not None:
            values.fill_(float("nan") if values.is_floating_point() else -1)


def _first(values: torch.Tensor | None, count: int | None) -> torch.Tensor | None:
    """The first `count` values, or None if there are none to be."""
    return None if count is None or values is None else values[:count]
