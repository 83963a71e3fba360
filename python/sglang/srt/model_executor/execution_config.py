"""The settings of a model runner and its KV memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sglang.srt.layers.attention.base_attn_backend import AttentionCapabilities
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.model_config import ModelConfig
from sglang.srt.registry import ATTENTION_BACKENDS, ROW_INDEPENDENT
from sglang.srt.step.draft_shapes import DraftShape


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """The settings of a model runner and its KV memory. Runners over one memory have the same
    `device`, `page_size`, `row_width` and `max_running_requests`.

    Attributes:
        dtype: one of `DTYPES`, the type of weights and KV.
        row_width: tokens that a row of the request-to-token table holds, in whole pages.
        kv_budget_bytes: memory for the KV pool; None: the part of `static_memory_share` of the
            device's memory that the weights leave.
        ops: name of the set in `OPERATIONS` (registry.py).
        max_graph_width: the most rows of a request in a step without prompts that replays a
            captured graph, where the attention backend can; 0: no graphs, 1: plain decoding alone.
        max_graph_rows: the most rows in all of a step with prompts that replays one; 0: none does.
        max_prompt_rows: wished prompt tokens of a step, at most; 0 reserves no memory for them.
        max_decode_rows: rows that a request without a prompt feeds at most.
        poisons_graphs: for tests, see `CudaGraphRunner`; kernels also report columns outside of
            their row of the request-to-token table.
        num_threads: torch threads of a CPU.
        capture: hidden states that a forward pass returns beside those of the rows read.
        draft_steps: for a model that drafts, the numbers of draft steps (`draft`) or the shapes of
            trees (`draft_trees`) that have graphs, with their batch sizes.
        reads_one_row: no step reads more than one row of a request, as with models that draft, so
            graphs compute no more.
        may_rest: the model may be left out of steps, or of some requests of theirs, and then has no
            KV of their tokens (`MHATokenToKVPool.kv_starts`).
        has_both_orders: steps may ask for sums in fixed orders (`ForwardBatch.fixed_orders`), with
            the attention and the operations ROW_INDEPENDENT beside those named here.
        captures_trees: steps whose rows are trees also replay graphs, if the attention backend has
            masks for them.
    """

    model: ModelConfig
    load_format: str
    device: str
    dtype: str
    attention_backend: str
    page_size: int
    max_total_tokens: int | None
    max_running_requests: int
    context_len: int
    row_width: int
    kv_budget_bytes: int | None
    num_threads: int
    static_memory_share: float = 0.0
    ops: str = "torch"
    max_graph_width: int = 0
    max_graph_rows: int = 0
    max_prompt_rows: int = 0
    max_decode_rows: int = 1
    poisons_graphs: bool = False
    capture: HiddenCapture = NO_CAPTURE
    captures_trees: bool = False
    draft_steps: Mapping[DraftShape, tuple[range, ...]] = field(default_factory=dict)
    reads_one_row: bool = False
    may_rest: bool = False
    has_both_orders: bool = False

    @property
    def orders(self) -> tuple[bool, ...]:
        """The values of `ForwardBatch.fixed_orders` that steps have."""
        if self.has_both_orders:
            return (False, True)
        return (self.attention_backend == ROW_INDEPENDENT,)

    @cached_property
    def capabilities(self) -> AttentionCapabilities:
        """The abilities of `attention_backend`."""
        capabilities: AttentionCapabilities = ATTENTION_BACKENDS.load(
            self.attention_backend
        ).capabilities()
        return capabilities
