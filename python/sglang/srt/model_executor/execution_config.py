"""The settings of a model runner and its KV memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from sglang.srt.layers.attention.base_attn_backend import AttentionCapabilities
from sglang.srt.layers.forward_options import NO_CAPTURE, HiddenCapture
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.draft_shapes import DraftShape
from sglang.srt.registry import ATTENTION_BACKENDS


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """The settings of a model runner and its KV memory. Runners over one memory have the same
    `device`, `page_size`, `row_width` and `max_running_requests`.

    Attributes:
        dtype: one of `DTYPES`, the type of weights and KV.
        row_width: tokens that a row of the request-to-token table holds, in whole pages.
        kv_budget_bytes: memory for the KV pool; None for what the weights leave of
            `static_memory_share` of the device's memory.
        ops: name of the set in `OPERATIONS` (registry.py).
        max_graph_width: rows of a request in steps without prompts that replay a captured graph,
            where the attention backend can; 0 for no graphs, 1 for plain decoding alone.
        max_graph_rows: rows in all of steps with prompts that do; 0 for none.
        max_prompt_rows: prompt tokens that a step may feed, as wished; 0 reserves no memory for
            them.
        max_decode_rows: rows that a request without a prompt feeds at most.
        poisons_graphs: for tests, see `CudaGraphRunner`; kernels also tell of columns outside of
            their row of the request-to-token table.
        num_threads: torch threads of a CPU.
        capture: which hidden states a forward pass gives beside those of the rows read.
        draft_steps: of a model that drafts: how many draft steps may follow a step of the target
            (`draft`), or which trees may be drafted (`draft_trees`), and in batches of which sizes.
        reads_one_row: no step reads more than one row of a request, as of models that draft: graphs
            compute no more.
        may_rest: the model may be left out of steps, and then has no KV of what they feed
            (`MHATokenToKVPool.kv_starts`).
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

    @cached_property
    def capabilities(self) -> AttentionCapabilities:
        """The abilities of `attention_backend`."""
        capabilities: AttentionCapabilities = ATTENTION_BACKENDS.load(
            self.attention_backend
        ).capabilities()
        return capabilities
