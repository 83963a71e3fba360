"""A model over its pool of the KV memory: turns forward batches into hidden states and logits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from sglang.srt.distributed.group import RankGroup
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey, ModelOutput, dummy_step
from sglang.srt.layers.layer_runtime import Computed, LayerRuntime
from sglang.srt.mem_cache.kv_memory import KVMemory
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner, GraphMemory
from sglang.srt.model_executor.draft_passes import DraftPass, Drafts, MaskPass
from sglang.srt.model_executor.draft_tree_passes import DraftedTrees, DraftTreePass
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.graph_keys import GraphKeys, uniform_key
from sglang.srt.model_executor.largest_step import MIN_PROMPT_ROWS, largest_step, most_that_fits
from sglang.srt.model_executor.loaded_model import LoadedModel
from sglang.srt.model_executor.runner_graphs import RunnerGraphs, keys_of_draft_steps, plan_nothing
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.platform import memory_for
from sglang.srt.registry import ATTENTION_BACKENDS, OPERATIONS, ROW_INDEPENDENT, load
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.step_ops import StepOps

logger = logging.getLogger(__name__)

WARM_UP_Q_LENS = (128, 8, 1)
MAX_FOLDED_HEADS = 64  # query heads of a KV head, of rows that attention is given as one
READ_ROWS = (1, 2, 16, 17, 32, 33, 64)  # whose logits take kernels of their own
LESS_STATIC_MEMORY = "Lower --mem-fraction-static, --max-total-tokens"


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """The results of a forward pass.

    Attributes:
        hidden, taps: see `ModelOutput`.
        used_graph: whether a captured graph was replayed.
    """

    hidden: torch.Tensor
    used_graph: bool
    taps: torch.Tensor | None = None


class _HostThreads:
    """Torch threads by the size of a step: waking a second thread for each small operation costs
    more than it computes."""

    MIN_ROWS_PER_THREAD = 4

    def __init__(self, max_threads: int) -> None:
        self._max_threads = max_threads
        torch.set_num_threads(max_threads)

    def use_for(self, num_rows: int) -> None:
        wanted = max(1, min(self._max_threads, num_rows // self.MIN_ROWS_PER_THREAD))
        if wanted != torch.get_num_threads():  # which a step of another runner may have changed
            torch.set_num_threads(wanted)


class ModelRunner:
    """A model's steps: attention, operations and graphs over one pool of a `KVMemory`. Several
    runners may work over one memory, each over its own pool; `make_runners` makes them.

    Args:
        pool_index: which of the memory's pools is the model's.
        ranks: that hold the model together; None: this one holds it all.

    Attributes:
        req_to_token_pool, kv_pool: the memory's page table, and the pool.
        ranks: see above.
        checks: for debugging; each sees every batch before it runs, and may raise.
        max_prompt_rows: prompt tokens that a step may feed: the configured number, or as many as
            the device's memory allows beside weights, KV pool and graphs (`warm_up`).

    Raises:
        ValueError: if the attention backend cannot serve the model; the text says why.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        memory: KVMemory,
        pool_index: int = 0,
        ranks: RankGroup | None = None,
    ) -> None:
        config = loaded.config
        self.ranks = ranks
        self.vocab_size = config.model.vocab_size
        self.model, self.weights = loaded.model, loaded.weights
        self.memory = memory
        self.req_to_token_pool, self.kv_pool = memory.table, memory.pools[pool_index]
        self.device = self.kv_pool.kv[0].device
        self.operations = OPERATIONS[config.ops]
        num_heads = config.model.shard.part(config.model.num_heads)
        group = 2 * num_heads // self.kv_pool.kv[0].shape[1]
        fixed = ROW_INDEPENDENT, ROW_INDEPENDENT
        self._layers = LayerRuntime(
            self._computed_by(config.attention_backend, config.ops, num_heads),
            self.kv_pool,
            ranks,
            max(1, MAX_FOLDED_HEADS // group) if config.capabilities.folds_rows else 1,
            self._computed_by(*fixed, num_heads) if config.has_both_orders else None,
        )
        self.step_ops: StepOps = load(self.operations.step)(self.device)
        self._threads = _HostThreads(config.num_threads) if config.device == "cpu" else None
        self.max_prompt_rows = config.max_prompt_rows
        self._config = config
        self._graphs: RunnerGraphs | None = None
        self._graphs_ms: dict[GraphKey, float] = {}
        self._is_part_of_graph = False
        self.checks: list[Callable[[ForwardBatch], None]] = []

    def _computed_by(self, backend: str, ops: str, num_heads: int) -> Computed:
        """Makes attention and operations of these names."""
        pools, model = (self.req_to_token_pool, self.kv_pool), self.model
        attention: AttentionBackend = ATTENTION_BACKENDS.load(backend)(
            *pools, num_heads, model.windows, model.scores
        )
        return Computed(load(OPERATIONS[ops].layers)(self.device), attention)

    @property
    def config(self) -> ExecutionConfig:
        """Returns the runner's settings."""
        return self._config

    @property
    def is_whole(self) -> bool:
        """Tells whether weights and KV pool have their memory."""
        return not (self.weights.is_released or self.kv_pool.is_released)

    @property
    def reads_one_row(self) -> bool:
        """Tells whether no step reads more than one row of a request."""
        return self.model.reads_one_row or self._config.reads_one_row

    def alone(self) -> AbstractContextManager[None]:
        """In this block steps wait for no other rank, and their results mean nothing."""
        return nullcontext() if self.ranks is None else self.ranks.alone()

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.model.parameters())

    def _compute(self, batch: ForwardBatch) -> ModelOutput:
        """The model over a planned batch."""
        output: ModelOutput = self.model(batch, self._layers, self._config.capture)
        return output

    def drop_graphs(self) -> None:
        """Gives the graphs' memory back; steps run without them until they are captured again."""
        self._graphs = None

    @torch.inference_mode()
    def capture_graphs(self) -> None:
        """Captures graphs anew, if the runner has graphs and all memory is there, since they hold
        its addresses."""
        self.drop_graphs()
        with memory_for(
            "CUDA graphs",
            f"{LESS_STATIC_MEMORY} or --max-running-requests, or --disable-cuda-graph.",
        ):
            graphs = self._make_graphs()
            if graphs is not None:
                graphs.capture()
        self._graphs = graphs

    @torch.inference_mode()
    def rehearse(self) -> None:
        """Runs steps of all shapes that graphs will have, and those of `warm_up`."""
        if (graphs := self._make_graphs()) is not None:
            graphs.rehearse()
        hidden = self.kv_pool.kv[0].new_zeros((READ_ROWS[-1], self._config.model.hidden_size))
        for fixed_orders in self._config.orders:
            self._run_small(fixed_orders)
            for num_rows in READ_ROWS:
                self.compute_logits(hidden[:num_rows])

    def _make_graphs(self) -> RunnerGraphs | None:
        """Makes the graph runners."""
        config = self._config
        if not self.is_whole or config.max_graph_width == 0 or not (keys := self._keys()).all:
            return None
        draft_keys = dict[DraftShape, GraphKeys]()
        is_foreseen = config.capabilities.captures_plans
        if is_foreseen:
            draft_keys = keys_of_draft_steps(config, self.model.draft_hidden_width)
        every = [key for each in (keys, *draft_keys.values()) for key in each.all]
        ops, plan = self.step_ops, self._layers.plan
        drafts: dict[DraftShape, CudaGraphRunner[Drafts | DraftedTrees]] = {}
        memory = GraphMemory(every, config.device, getattr(torch, config.dtype), self.alone)
        more = config.row_width, config.device, config.poisons_graphs, memory
        for shape, each in draft_keys.items():
            run = self._draft_pass(shape, lambda batch: self._forward_part(batch).hidden).run
            drafts[shape] = CudaGraphRunner(plan_nothing, run, ops, each, *more)
        always = self.operations.compares_first or not is_foreseen
        of_fixed = OPERATIONS[ROW_INDEPENDENT].compares_first
        steps = CudaGraphRunner(
            plan,
            self._compute,
            ops,
            keys,
            *more,
            runs_first=lambda key: always or (of_fixed and key.fixed_orders),
        )
        return RunnerGraphs(steps, drafts, config.capture.all_rows, memory)

    def _keys(self) -> GraphKeys:
        """Returns the keys of all graphs but those of several draft steps."""
        config, model, capabilities = self._config, self.model, self._config.capabilities
        steps_alone = bool(config.draft_steps) and not capabilities.captures_plans
        keys = GraphKeys(
            capabilities.graph,
            config.max_running_requests,
            config.max_graph_width,
            config.max_graph_rows,
            computes_all_rows=config.capture.all_rows,
            with_trees=config.captures_trees and capabilities.captures_trees,
            hidden_width=model.hidden_width,
            reads_one_row=self.reads_one_row,
            draft_hidden_width=model.draft_hidden_width if steps_alone else 0,
            shares_kv=capabilities.shares_kv and config.max_graph_width == 1,
            has_both_orders=config.has_both_orders,
        )
        keys.prefer_cheaper(self._graphs_ms)
        return keys

    @torch.inference_mode()
    def warm_up(
        self, least_rows: int = MIN_PROMPT_ROWS, drafting: Sequence[ModelRunner] = ()
    ) -> None:
        """Runs steps that replay no graph, over the dummy slot. First a long prompt, a short one
        and a decode, also packed and with masks of trees if there may be such steps, so that their
        kernels are compiled before a request waits for them. Then the largest possible step, whose
        memory stays reserved: if it does not fit, `max_prompt_rows` becomes less, but not less than
        `least_rows`. Graphs exist by then, since their memory is fixed and that of a step is not.

        Args:
            drafting: runners of a drafter's models, over the same memory. They run the same steps
                while the results of this one are held, as when drafts are proposed.

        Raises:
            MemoryError: if `least_rows` do not fit.
        """
        runners = (self, *drafting)
        with memory_for("a step", f"{LESS_STATIC_MEMORY}."), self.alone():
            for runner in runners:
                for fixed_orders in runner.config.orders:
                    runner._run_small(fixed_orders)
        wished = self.max_prompt_rows
        if wished == 0:
            return
        what, config = f"a step of {min(wished, least_rows)} prompt tokens", self._config
        limits = config.max_decode_rows, config.max_running_requests, config.row_width
        remedy = f"{LESS_STATIC_MEMORY} or --max-running-requests."
        with memory_for(what, remedy), self.alone():
            self.max_prompt_rows = most_that_fits(
                lambda rows: _run_together(runners, largest_step(rows, *limits)),
                wished,
                least_rows,
                self.device,
            )
        if self.max_prompt_rows < wished:
            logger.warning(
                "A step feeds up to %d prompt tokens, not %d (--chunked-prefill-size): the GPU has"
                " too little memory for more beside weights, KV pool and graphs."
                " A lower --mem-fraction-static or --max-total-tokens leaves more of it.",
                self.max_prompt_rows,
                wished,
            )

    def _run_small(self, fixed_orders: bool) -> None:
        config = self._config
        q_lens = [min(size, config.row_width) for size in WARM_UP_Q_LENS]
        self._run_dummy(q_lens, fixed_orders)
        if self._config.capabilities.reads_q_starts and config.max_decode_rows > 1:
            self._run_dummy(q_lens, fixed_orders, is_packed=True)
        if config.captures_trees:
            self._run_dummy(q_lens, fixed_orders, has_masks=True)

    def _run_dummy(
        self,
        q_lens: list[int],
        fixed_orders: bool = False,
        is_packed: bool = False,
        has_masks: bool = False,
    ) -> tuple[ModelOutput, torch.Tensor]:
        """Runs a step of prompts of these lengths, with all hidden states and as many logits as a
        step may read."""
        config, width = self._config, self.model.hidden_width
        hidden = self.kv_pool.kv[0].new_zeros((sum(q_lens), width)) if width else None
        row = self.req_to_token_pool.padding_row
        batch = dummy_step(q_lens, row, self.device, is_packed, has_masks, hidden, fixed_orders)
        self._layers.plan(batch)
        output = self._compute(batch)
        num_reads = config.max_running_requests * config.max_decode_rows
        return output, self.compute_logits(output.hidden[-num_reads:])

    def prefer_cheaper_graphs(self, graphs_ms: Mapping[GraphKey, float]) -> None:
        """Makes steps replay a larger graph where that is cheaper, also after graphs are captured
        anew."""
        self._graphs_ms = dict(graphs_ms)
        if self.graph_keys is not None:
            self.graph_keys.prefer_cheaper(graphs_ms)

    @property
    def num_graphs(self) -> int:
        """Captured graphs."""
        return 0 if self._graphs is None else self._graphs.num_graphs

    @property
    def graph_keys(self) -> GraphKeys | None:
        """Returns the keys of the captured graphs of steps, which say which one a step replays;
        None without graphs."""
        return None if self._graphs is None else self._graphs.keys

    @property
    def draft_graph_keys(self) -> dict[DraftShape, GraphKeys]:
        """The same for graphs of several draft steps."""
        return {} if self._graphs is None else self._graphs.draft_keys

    @property
    def graph_memory(self) -> GraphMemory | None:
        """Returns the memory of its graphs; None without any."""
        return None if self._graphs is None else self._graphs.memory

    @property
    def can_be_part_of_graph(self) -> bool:
        """Tells whether steps may run in `as_part_of_graph` now."""
        captures_plans = self._config.capabilities.captures_plans
        return self._graphs is not None and captures_plans and self.is_whole

    @contextmanager
    def as_part_of_graph(self) -> Iterator[None]:
        """In this block steps, with the same number of rows for each request, are part of a larger
        graph that is being captured: they replay no graph of their own and are not checked."""
        self._is_part_of_graph = True
        try:
            yield
        finally:
            self._is_part_of_graph = False

    def _forward_part(self, batch: ForwardBatch) -> ForwardResult:
        """A step as part of a larger graph."""
        self._layers.plan(replace(batch, graph_key=uniform_key(batch)))
        hidden, taps = self._compute(batch)
        return ForwardResult(hidden, True, taps)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch) -> ForwardResult:
        """Runs the model; the next call may overwrite the result."""
        if self._is_part_of_graph:
            return self._forward_part(batch)
        self.assert_ready()
        for check in self.checks:
            check(batch)
        if self._threads is not None:
            self._threads.use_for(batch.input_ids.shape[0])
        replayed = None if self._graphs is None else self._graphs.forward(batch)
        if replayed is not None:
            return ForwardResult(replayed.hidden, True, replayed.taps)
        with memory_for("a step", f"{LESS_STATIC_MEMORY} or --chunked-prefill-size."):
            self._layers.plan(batch)
            hidden, taps = self._compute(batch)
            return ForwardResult(hidden, False, taps)

    def assert_ready(self) -> None:
        """Asserts that a step may be launched.

        Raises:
            RuntimeError: if a kernel met a column outside of its row (`ReqToTokenPool.outside`).
        """
        assert not self.weights.is_released, "A step without weights."
        assert not self.kv_pool.is_released, "A step without a KV pool."
        self.req_to_token_pool.raise_if_outside()

    def draft(self, first: ForwardBatch, num_steps: int) -> Drafts:
        """Runs draft steps, `first` and those after it: see `DraftPass`. One graph holds all of
        them if their number is in `ExecutionConfig.draft_steps` and the attention backend
        `captures_plans`; otherwise each is a step of its own. The next call may overwrite the
        result."""
        drafts = self._draft(first, num_steps)
        assert isinstance(drafts, Drafts)
        return drafts

    def draft_trees(self, first: ForwardBatch, shape: TreeShape) -> DraftedTrees:
        """Drafts a tree for each request, see `DraftTreePass`; graphs are as for `draft`."""
        trees = self._draft(first, shape)
        assert isinstance(trees, DraftedTrees)
        return trees

    @torch.inference_mode()
    def _draft(self, first: ForwardBatch, shape: DraftShape) -> Drafts | DraftedTrees:
        drafts = None
        if not self._is_part_of_graph:
            self.assert_ready()
            drafts = None if self._graphs is None else self._graphs.draft(first, shape)
        if drafts is None:
            return self._draft_pass(shape, lambda batch: self.forward(batch).hidden).run(first)
        if self.checks:
            for batch in drafts.batches_fed(first):
                for check in self.checks:
                    check(batch)
        return drafts

    def _draft_pass(
        self, shape: DraftShape, forward: Callable[[ForwardBatch], torch.Tensor]
    ) -> DraftPass | MaskPass | DraftTreePass:
        model = self.model
        parts = self._layers, self.req_to_token_pool.req_to_token, forward
        if isinstance(shape, TreeShape):
            assert isinstance(model, DraftHead), "Heads alone draft trees."
            return DraftTreePass(model, *parts, shape, load(self.operations.trees))
        if isinstance(model, DraftHead) and model.mask_token_id is not None:
            return MaskPass(model, *parts, shape)
        return DraftPass(model, *parts, shape)

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [S, vocab_size], in the model's type, of hidden states [S, hidden_size]."""
        return self.model.compute_logits(hidden, self._layers)


def _run_together(runners: Sequence[ModelRunner], q_lens: list[int]) -> None:
    """Runs a step of prompts of these lengths, the results of each runner held while those after it
    run; in all orders of the first one's sums."""
    for fixed_orders in runners[0].config.orders:
        held = [runner._run_dummy(q_lens, fixed_orders) for runner in runners]
        del held
