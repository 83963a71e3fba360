"""A model, its KV memory and its attention: loads them, then turns forward batches into logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, GraphSupport
from sglang.srt.layers.forward_batch import ForwardBatch, dummy_step
from sglang.srt.layers.layer_runtime import LayerRuntime
from sglang.srt.mem_cache.kv_sizing import KVSizing
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, GraphKeys
from sglang.srt.model_loader.loader import load_model
from sglang.srt.platform import memory_for, static_bytes_left
from sglang.srt.registry import ATTENTION_BACKENDS, OPERATIONS, load
from sglang.srt.step.step_ops import StepOps
from sglang.srt.weight_sync.weight_store import WeightStore

WARM_UP_Q_LENS = (128, 8, 1)
LESS_STATIC_MEMORY = "Lower --mem-fraction-static, --max-total-tokens"


@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """What the model runner needs to know.

    Attributes:
        dtype: one of `DTYPES`, the type of weights and KV.
        row_width: tokens that a row of the request-to-token table holds, in whole pages.
        kv_budget_bytes: memory for the KV pool; None for what the weights leave of
            `static_memory_share` of the device's memory.
        ops: name of the set in `OPERATIONS` (registry.py).
        max_graph_width: rows of a request in steps without prompts that replay a captured graph,
            where the attention backend can; 0 for no graphs, 1 for plain decoding alone.
        max_graph_rows: rows in all of steps with prompts that do; 0 for none.
        poisons_graphs: for tests, see `CudaGraphRunner`; kernels also tell of columns outside of
            their row of the request-to-token table.
        num_threads: torch threads of a CPU.
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
    poisons_graphs: bool = False


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """What a forward pass gives.

    Attributes:
        hidden: hidden states after the last norm: of the rows `ForwardBatch.read_index`
            [S, hidden_size], or of all [T, hidden_size].
        used_graph: whether a captured graph was replayed.
    """

    hidden: torch.Tensor
    used_graph: bool


class ModelRunner:
    """Owns everything that lives on the device for the target model.

    Raises:
        ModelPathError: if the weights cannot be loaded.
        ValueError: if the attention backend or the KV pool cannot be had; the text says why.
    """

    def __init__(self, config: ExecutionConfig) -> None:
        model, dtype = config.model, getattr(torch, config.dtype)
        backend = ATTENTION_BACKENDS.load(config.attention_backend)
        problems = backend.capabilities().problems(config.device, dtype, config.page_size)
        if problems:
            raise ValueError(
                f"--attention-backend {config.attention_backend} cannot be used:"
                f" {'; '.join(problems)}."
            )
        self.vocab_size = model.vocab_size
        with memory_for("the weights", "Use a GPU with more memory, or a smaller model."):
            self.model = load_model(
                model, config.load_format, config.row_width, dtype, config.device
            )
        self.weights = WeightStore(self.model, model)
        num_values = 2 * model.num_layers * model.num_kv_heads * model.head_dim
        self.kv_bytes_per_token = num_values * dtype.itemsize
        budget = config.kv_budget_bytes
        if budget is None:
            budget = static_bytes_left(config.device, config.static_memory_share)
        sizing = KVSizing(
            available_bytes=budget,
            bytes_per_token=self.kv_bytes_per_token,
            page_size=config.page_size,
            wished_tokens=config.max_total_tokens,
            max_useful_tokens=config.max_running_requests * config.row_width,
        )
        self.num_pages, self.kv_size_reason = sizing.num_pages(), sizing.reason
        self.req_to_token_pool = ReqToTokenPool(
            config.max_running_requests, config.row_width, config.device, config.poisons_graphs
        )
        with memory_for("the KV pool", f"{LESS_STATIC_MEMORY} or --max-running-requests."):
            self.kv_pool = MHATokenToKVPool(
                self.num_pages * config.page_size,
                config.page_size,
                model.num_layers,
                model.num_kv_heads,
                model.head_dim,
                dtype,
                config.device,
            )
        attention: AttentionBackend = backend(
            self.req_to_token_pool, self.kv_pool, model.num_heads, self.model.windows
        )
        place = self.kv_pool.kv[0].device
        self.operations = OPERATIONS[config.ops]
        self._layers = LayerRuntime(load(self.operations.layers)(place), attention, self.kv_pool)
        self.step_ops: StepOps = load(self.operations.step)(place)
        self._threads = HostThreads(config.num_threads) if config.device == "cpu" else None
        self._graph_support: GraphSupport = backend.capabilities().graph
        self._config = config
        self._graphs: CudaGraphRunner | None = None
        self.capture_graphs()
        if config.device != "cpu":
            self.warm_up()

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures graphs anew, if there are to be any and all memory is there: they hold its
        addresses."""
        self._graphs = None
        config = self._config
        if self.weights.is_released or self.kv_pool.is_released or config.max_graph_width == 0:
            return
        keys = GraphKeys(
            self._graph_support,
            config.max_running_requests,
            config.max_graph_width,
            config.max_graph_rows,
        )
        if not keys.all:
            return
        graphs = CudaGraphRunner(
            self._layers.plan,
            lambda batch: self.model(batch, self._layers),
            self.step_ops,
            keys,
            config.row_width,
            config.device,
            config.poisons_graphs,
        )
        with memory_for(
            "CUDA graphs",
            f"{LESS_STATIC_MEMORY} or --max-running-requests, or --disable-cuda-graph.",
        ):
            graphs.capture()
        self._graphs = graphs

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Runs a step that replays no graph, over the dummy slot: a long prompt, a short one and a
        decode. So what such steps need is compiled before a request waits for it."""
        q_lens = [min(size, self._config.row_width) for size in WARM_UP_Q_LENS]
        batch = dummy_step(q_lens, self.req_to_token_pool.req_to_token.device)
        with memory_for("a step", f"{LESS_STATIC_MEMORY}."):
            self._layers.plan(batch)
            self.compute_logits(self.model(batch, self._layers))

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    @property
    def graph_keys(self) -> GraphKeys | None:
        """Which graphs were captured, and which one a step replays; None without graphs."""
        return None if self._graphs is None else self._graphs.keys

    def restore_kv(self) -> None:
        """Takes the KV pool's memory again."""
        self.kv_pool.restore()
        self.capture_graphs()

    def restore_weights(self) -> None:
        """Takes the weights' memory again."""
        self.weights.restore()
        self.capture_graphs()

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Runs the model; the next call may overwrite the result."""
        assert not self.weights.is_released, "A step without weights."
        assert not self.kv_pool.is_released, "A step without a KV pool."
        self.req_to_token_pool.raise_if_outside()
        if self._threads is not None:
            self._threads.use_for(batch.input_ids.shape[0])
        key = None if self._graphs is None else self._graphs.key_of(batch)
        if self._graphs is not None and key is not None:
            return ForwardResult(self._graphs.run(key, batch), used_graph=True)
        with memory_for("a step", f"{LESS_STATIC_MEMORY} or --chunked-prefill-size."):
            self._layers.plan(batch)
            return ForwardResult(self.model(batch, self._layers), used_graph=False)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab_size], in the model's type, of hidden states [S, hidden_size]."""
        return self.model.compute_logits(hidden, self._layers)


class HostThreads:
    """Torch threads by the size of a step: waking a second thread for each small operation costs
    more than it computes."""

    MIN_ROWS_PER_THREAD = 4

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        self._current = max_threads
        torch.set_num_threads(max_threads)

    def use_for(self, num_rows: int) -> None:
        wanted = max(1, min(self._max_threads, num_rows // self.MIN_ROWS_PER_THREAD))
        if wanted != self._current:
            torch.set_num_threads(wanted)
            self._current = wanted
