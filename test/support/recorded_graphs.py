"""CUDA graphs on a CPU: `torch.cuda` of a test records the operations of a capture, and a replay
runs them again into the same tensors. What a capture reads on the host is a constant of the replay,
as in a real graph; so is every address."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten

from sglang.srt.layers.attention.base_attn_backend import (
    PLAIN,
    AttentionCapabilities,
    GraphSupport,
    ScoreForm,
)
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.registry import ATTENTION_BACKENDS

MIB_PER_LOOK = 1  # what the fake GPU has less of, each time that it is asked


class RecordedGraph:
    """Stands for `torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self.calls: list[RecordedCall] = []

    def record(
        self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], result: Any
    ) -> None:
        """Notes a call and what it gave. Results in the memory of an argument are views, or were
        written in place: a replay finds them there."""
        held = {tensor.untyped_storage().data_ptr() for tensor in _tensors((args, kwargs))}
        results = _tensors(result)
        own = [None if each.untyped_storage().data_ptr() in held else each for each in results]
        has_own = any(each is not None for each in own)
        self.calls.append(RecordedCall(function, args, kwargs, own if has_own else []))

    def replay(self) -> None:
        for function, args, kwargs, own in self.calls:
            found = function(*args, **kwargs)
            if own:
                for old, new in zip(own, _tensors(found), strict=True):
                    if old is not None:
                        old.copy_(new)


class RecordedCall(NamedTuple):
    """An operation with its arguments. `own`: the tensors that it gave, None for one without memory
    of its own; empty if none has."""

    function: Callable[..., Any]
    args: Any
    kwargs: dict[str, Any]
    own: list[torch.Tensor | None]


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    return [leaf for leaf in tree_flatten(tree)[0] if isinstance(leaf, torch.Tensor)]


class _Recording(TorchDispatchMode):
    def __init__(self, graph: RecordedGraph) -> None:
        super().__init__()
        self.graph = graph

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.graph.record(func, args, kwargs or {}, result)
        return result


def graph_being_recorded() -> RecordedGraph | None:
    """The graph that this thread records now, for work that torch does not see; None: none."""
    mode = _get_current_dispatch_mode()
    return mode.graph if isinstance(mode, _Recording) else None


@contextmanager
def recorded_graphs() -> Iterator[None]:
    """Graphs are recorded ones in this block."""
    free_mib = iter(range(100_000, 0, -MIB_PER_LOOK))
    fakes: dict[str, Any] = {
        "CUDAGraph": RecordedGraph,
        "Stream": mock.Mock,
        "current_stream": mock.Mock,
        "stream": lambda side: nullcontext(),
        "graph": lambda graph, pool, capture_error_mode: _Recording(graph),
        "graph_pool_handle": lambda: (0, 0),
        "mem_get_info": lambda device: (next(free_mib) << 20, 1 << 40),
    }
    with ExitStack() as stack:
        for name, fake in fakes.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, fake))
        yield


class ReplayableAttention:
    """An attention backend in plain torch whose plan is all that the host does. Each row sees the
    whole row of the page table, masked."""

    support = GraphSupport.RAGGED_Q
    captures_plans = True

    def __init__(
        self,
        req_to_token_pool: ReqToTokenPool,
        kv_pool: MHATokenToKVPool,
        num_heads: int,
        windows: Sequence[int | None],
        scores: ScoreForm = PLAIN,
    ) -> None:
        assert not any(windows)
        assert scores == PLAIN
        self._table, self._pool = req_to_token_pool.req_to_token, kv_pool
        self._spans: dict[GraphKey | None, torch.Tensor] = {}
        self._batch: ForwardBatch | None = None

    @classmethod
    def capabilities(cls) -> AttentionCapabilities:
        return AttentionCapabilities(
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32}),
            page_sizes=None,
            graph=cls.support,
            tree_masks=True,
            captures_trees=True,
            reads_q_starts=True,
            captures_plans=cls.captures_plans,
            reads_kv_starts=True,
        )

    def plan(self, batch: ForwardBatch) -> None:
        """`spans`: [3, T]; request, rows of the request, and place among them of each row; of
        packed batches `forward` finds them."""
        key = batch.graph_key
        spans = torch.zeros((3, len(batch.input_ids)), dtype=torch.int64)
        q_lens = batch.q_lens if batch.q_starts is None else []
        own = [(i, q_len, at) for i, q_len in enumerate(q_lens) for at in range(q_len)]
        spans[:, : len(own)] = torch.tensor(own, dtype=torch.int64).view(-1, 3).T
        if key is not None:
            spans = self._spans.setdefault(key, torch.empty_like(spans)).copy_(spans)
        self._spans[None], self._batch = spans, batch

    def forward(self, layer: int, q: torch.Tensor) -> torch.Tensor:
        batch, (request, q_len, at) = self._batch, self._spans[None]
        assert batch is not None
        if (q_starts := batch.q_starts) is not None:
            rows = torch.arange(len(q))
            request = torch.searchsorted(q_starts, rows, right=True) - 1
            request = request.clamp(max=len(batch.rows) - 1)  # of padding: anything
            q_len = q_starts.diff()[request]
            at = (rows - q_starts[request]).minimum(q_len)
        kv = self._pool.kv[layer][self._table[batch.rows[request]].long()]  # [T, width, ...]
        k, v = kv.repeat_interleave(q.shape[1] * 2 // kv.shape[2], dim=2).chunk(2, dim=2)
        columns = torch.arange(kv.shape[1])
        start = (batch.kv_lens[request] - q_len)[:, None]
        sees = columns <= start + at[:, None]
        if self._pool.kv_starts is not None:
            sees = sees & (columns >= self._pool.kv_starts[batch.rows[request]][:, None])
        if batch.ancestors is not None:
            if batch.tree_starts is not None:
                start = batch.tree_starts[request][:, None]
            bits = batch.ancestors[:, None] >> (columns - start).clamp(0, 63) & 1 == 1
            sees = sees & (bits | (columns < start))
        return self.attend(q, k, v, sees)

    def attend(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sees: torch.Tensor
    ) -> torch.Tensor:
        """q [T, H, D] over k and v [T, W, H, D], of which each row sees some [T, W]."""
        scores = torch.einsum("thd,twhd->thw", q, k) / q.shape[2] ** 0.5
        weights = scores.masked_fill(~sees[:, None], float("-inf")).softmax(-1)
        return torch.einsum("thw,twhd->thd", weights, v).flatten(1)


class UniformAttention(ReplayableAttention):
    """The same where all requests of a graph feed as many rows."""

    support = GraphSupport.UNIFORM_Q
    captures_plans = False


@contextmanager
def replayable_backends() -> Iterator[None]:
    """`--attention-backend ragged` and `uniform`."""
    names = {"ragged": "ReplayableAttention", "uniform": "UniformAttention"}
    places = {name: f"{__name__}:{attribute}" for name, attribute in names.items()}
    with mock.patch.dict(ATTENTION_BACKENDS.entries, places):
        yield
