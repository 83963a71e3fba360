"""CUDA graphs of the model's forward pass, for steps in which every request feeds one row.

A graph is captured per number of requests; a step replays the smallest that has room. Rows that pad
it write their K and V to the dummy slot and read one token of row 0; nobody looks at their result.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from sglang.srt.model_executor.forward_batch_info import ForwardBatch

logger = logging.getLogger(__name__)

WARM_UPS = 2


@dataclass(frozen=True, slots=True)
class GraphKey:
    """What a captured graph is good for: `num_reqs` requests of `width` rows each."""

    tag: str
    num_reqs: int
    width: int


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph, the static batch that it reads, and its result [num_reqs, hidden_size]."""

    graph: torch.cuda.CUDAGraph
    batch: ForwardBatch
    hidden: torch.Tensor


class CudaGraphRunner:
    """Replays captured forward passes.

    Args:
        plan: the attention backend's, called before each replay with the static batch.
        forward: the model over a planned batch.
        sizes: numbers of requests to capture.
        longest: KV tokens of a request at most; work is cut for it, lengths are read on the device.
    """

    def __init__(
        self,
        plan: Callable[[ForwardBatch], None],
        forward: Callable[[ForwardBatch], torch.Tensor],
        sizes: Sequence[int],
        longest: int,
        device: str,
    ) -> None:
        self._plan = plan
        self._forward = forward
        self._sizes = sorted(sizes)
        self._longest = longest
        most = self._sizes[-1]
        # input ids, positions, slots, rows
        self._inputs = torch.zeros((4, most), dtype=torch.int64, device=device)
        self._kv_lens = torch.ones(most, dtype=torch.int64, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._captured: dict[GraphKey, _Captured] = {}

    def capture(self) -> None:
        """Captures all graphs, the largest first, so that the others fit into its memory."""
        start = time.perf_counter()
        for size in reversed(self._sizes):
            self._captured[GraphKey("decode", size, 1)] = self._capture(size)
        logger.info(
            "Captured %d CUDA graphs for up to %d requests in %.1f s.",
            len(self._sizes),
            self._sizes[-1],
            time.perf_counter() - start,
        )

    def key_of(self, batch: ForwardBatch) -> GraphKey | None:
        """The graph that a step can replay, if there is one."""
        num_reqs = len(batch.q_lens)
        if batch.input_ids.shape[0] != num_reqs or num_reqs > self._sizes[-1]:
            return None
        return GraphKey("decode", self._sizes[bisect.bisect_left(self._sizes, num_reqs)], 1)

    def run(self, key: GraphKey, batch: ForwardBatch) -> torch.Tensor:
        """Hidden states [T, hidden_size]; the next replay overwrites them."""
        captured, count = self._captured[key], len(batch.q_lens)
        self._inputs[:, count : key.num_reqs] = 0
        self._kv_lens[count : key.num_reqs] = 1
        sources = (batch.input_ids, batch.positions, batch.slots, batch.rows)
        for buffer, source in zip(self._inputs, sources, strict=True):
            buffer[:count].copy_(source)
        self._kv_lens[:count].copy_(batch.kv_lens)
        self._plan(captured.batch)
        captured.graph.replay()
        return captured.hidden[:count]

    def _capture(self, size: int) -> _Captured:
        input_ids, positions, slots, rows = (buffer[:size] for buffer in self._inputs)
        batch = ForwardBatch(
            input_ids=input_ids,
            positions=positions,
            slots=slots,
            rows=rows,
            q_lens=[1] * size,
            kv_lens=self._kv_lens[:size],
            kv_len_upper_bounds=[self._longest] * size,
        )
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self._plan(batch)
                self._forward(batch)
        torch.cuda.current_stream().wait_stream(side)
        self._plan(batch)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            hidden = self._forward(batch)
        return _Captured(graph, batch, hidden)


def capture_sizes(max_requests: int) -> list[int]:
    """1, 2, 4, then every eighth up to `max_requests`."""
    return sorted(
        {size for size in (1, 2, 4, max_requests) if size <= max_requests}
        | set(range(8, max_requests + 1, 8))
    )
