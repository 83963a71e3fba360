"""Builders for tests: a scheduler without processes, requests, random models."""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from fake_weights import FakeWeights
from policy_steps import mask_parts
from sglang.srt.constrained.grammar_sessions import GrammarSessions
from sglang.srt.control.control import ModelResources
from sglang.srt.lookahead.length_policy import FixedLength, LengthPolicy
from sglang.srt.lookahead.mask_planner import MaskPlanner, MTPConfig
from sglang.srt.lookahead.prompt_budget import PromptAllowance, PromptBudget
from sglang.srt.managers.scheduler import (
    NO_DEBUG,
    Scheduler,
    SchedulerConfig,
    SchedulerDebug,
)
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.mem_cache.kv_sizing import row_width
from sglang.srt.mem_cache.radix_cache import NullPrefixCache, RadixCache
from sglang.srt.messages.control import EngineStatus
from sglang.srt.messages.requests import (
    BatchTokenIDOutput,
    DecodeOptions,
    FinishReason,
    HiddenFileOptions,
    LogprobOptions,
    PositionLogprobs,
    TokenizedGenerateReqInput,
)
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.runtime_config import MAX_GRAPH_ROWS
from sglang.srt.registry import DEFAULT_OPERATIONS, load
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.scheduling.batch_planner import PlannerConfig
from sglang.srt.scheduling.request import HiddenStates, LaunchedStep
from sglang.srt.speculative.debug_trace import DebugTrace
from sglang.srt.speculative.drafter import PlannedDrafter
from sglang.srt.speculative.mask_drafter import MaskDrafter
from sglang.srt.step.price_table import StepShape
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import Worker
from sglang.srt.tokenizer import StopFinder
from sglang.srt.workers.tp_worker import TpModelWorker
from target import TARGET

CONTEXT_LEN = 512
MTP_MAX_K = 8
MTP_MAX_ROWS = 2 * MTP_MAX_K - 1
VOCAB_SIZE = 320


@dataclass(kw_only=True)
class Setup:
    """Everything that a test may want to vary of a scheduler.

    Attributes:
        make_budget: makes what says how many prompt tokens each step feeds; None for
            `chunked_prefill_size` in every step.
    """

    num_pages: int = 512
    page_size: int = 1
    use_radix_cache: bool = True
    max_running_requests: int = 8
    max_queued_requests: int | None = 1000
    chunked_prefill_size: int = 2048
    splits_prompts: bool = True
    make_budget: Callable[[], PromptBudget] | None = None
    schedule_policy: str = "fcfs"
    preemption_threshold: int | None = None
    retract_interval: int = 0
    enable_overlap: bool = TARGET.overlap
    eos_token_ids: frozenset[int] = frozenset()
    refuses_while_stopped: bool = False
    context_len: int = CONTEXT_LEN
    max_decode_rows: int = MTP_MAX_ROWS
    stream_interval: int = 1
    low_priority_first: bool = False
    decode_log_interval: int | None = 0
    weight_version: str = "default"
    strict_invariants: bool = True

    @property
    def row_width(self) -> int:
        return row_width(self.context_len, self.max_decode_rows, self.page_size)


class RandomBudget(PromptBudget):
    """Another number of prompt tokens in every step, up to `most`."""

    def __init__(self, most: int, seed: int = 0) -> None:
        super().__init__(most)
        self._random = random.Random(seed)
        self._most = most

    def open(self, decodes: StepShape, someone_streams: bool) -> PromptAllowance:
        return PromptAllowance(self._random.randint(1, self._most))

    def observe(self, price_ms: float, took_ms: float) -> None:
        """It goes by no prices."""


class FakeInbox:
    """Messages that a test has put there."""

    def __init__(self) -> None:
        self.messages: deque[Any] = deque()

    def drain(self) -> Iterable[Any]:
        while self.messages:
            yield self.messages.popleft()

    def wait(self, timeout_s: float | None) -> bool:
        """Nothing comes while the scheduler waits."""
        assert timeout_s is not None, "A test steps the scheduler itself."
        return bool(self.messages)


@dataclass
class Collected:
    """Holds what a client has been told of one request.

    Attributes:
        num_ends: last outputs; must become exactly 1.
    """

    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_ends: int = 0
    options: list[DecodeOptions] = field(default_factory=list)
    num_retractions: int = 0
    cached_tokens: int = 0
    queue_times_s: list[float] = field(default_factory=list)
    input_logprobs: list[PositionLogprobs] = field(default_factory=list)
    output_logprobs: list[PositionLogprobs] = field(default_factory=list)
    hidden_states: list[list[float]] = field(default_factory=list)
    step_lens: list[int] = field(default_factory=list)
    num_proposed_drafts: int = 0
    accept_histogram: list[int] = field(default_factory=list)
    drafts_by: dict[str, tuple[int, int]] = field(default_factory=dict)
    weight_spans: dict[str, list[tuple[str, int]]] = field(default_factory=dict)


class SchedulerHarness:
    """Steps a scheduler by hand and collects what it sends. The ledger is checked every step."""

    def __init__(
        self,
        setup: Setup,
        worker: Worker,
        debug: SchedulerDebug = NO_DEBUG,
        resources: ModelResources | None = None,
        make_stop_finder: Callable[[SamplingParams, list[int]], StopFinder] | None = None,
        grammars: GrammarSessions | None = None,
    ) -> None:
        self.setup = setup
        self.inbox = FakeInbox()
        self.replies: list[Any] = []
        self.pings: list[Any] = []
        self.outputs: dict[int, Collected] = {}
        self.ongoing: LaunchedStep | None = None
        self.num_steps = 0
        self.now = 0.0
        self._next_id = 0
        tree = RadixCache(setup.page_size) if setup.use_radix_cache else NullPrefixCache()
        allocator = PageAllocator(setup.num_pages, setup.page_size)
        self.ledger = KVLedger(setup.max_running_requests, allocator, tree, setup.row_width)
        self.scheduler = Scheduler(
            SchedulerConfig(
                planner=PlannerConfig(
                    chunked_prefill_size=setup.chunked_prefill_size,
                    max_running_requests=setup.max_running_requests,
                    schedule_policy=setup.schedule_policy,
                    preemption_threshold=setup.preemption_threshold,
                    retract_interval=setup.retract_interval,
                    splits_prompts=setup.splits_prompts,
                    finds_shared_kv=True,
                ),
                max_queued_requests=setup.max_queued_requests,
                schedule_conservativeness=1.0,
                eos_token_ids=setup.eos_token_ids,
                enable_overlap=setup.enable_overlap,
                strict_invariants=setup.strict_invariants,
                random_seed=0,
                stream_interval=setup.stream_interval,
                low_priority_first=setup.low_priority_first,
                refuses_while_stopped=setup.refuses_while_stopped,
                decode_log_interval=setup.decode_log_interval,
                weight_version=setup.weight_version,
            ),
            worker,
            ledger=self.ledger,
            resources=resources or ModelResources(weights=FakeWeights(worker), memory={}),
            inbox=self.inbox,
            to_detokenizer=self._to_detokenizer,
            to_frontend=self.on_reply,
            make_stop_finder=make_stop_finder or _no_stop_finder,
            debug=debug,
            budget=setup.make_budget and setup.make_budget(),
            clock=self.clock,
            grammars=grammars,
        )

    def clock(self) -> float:
        """Seconds; stands still unless a test moves it."""
        return self.now

    def on_reply(self, message: Any) -> None:
        """Takes a message for the front end."""
        self.replies.append(message)

    def submit(
        self,
        input_ids: list[int],
        rid: str = "",
        logprobs: LogprobOptions | None = None,
        hidden_states: HiddenStates = "none",
        hidden_file: HiddenFileOptions | None = None,
        priority: int = 0,
        cache_key: tuple[str, str] = ("", ""),
        streams: bool = False,
        **params: Any,
    ) -> int:
        """Sends a request; returns its number. `params` are sampling parameters."""
        self._next_id += 1
        self.outputs[self._next_id] = Collected()
        self.inbox.messages.append(
            TokenizedGenerateReqInput(
                req_id=self._next_id,
                rid=rid or f"request-{self._next_id}",
                input_ids=list(input_ids),
                sampling_params=SamplingParams(**params),
                logprobs=logprobs,
                hidden_states=hidden_states,
                hidden_file=hidden_file,
                priority=priority,
                cache_key=cache_key,
                streams=streams,
            )
        )
        return self._next_id

    def step(self) -> None:
        """One turn of the event loop."""
        scheduler = self.scheduler
        if self.setup.enable_overlap:
            self.ongoing = scheduler.event_loop_overlap(self.ongoing)
        else:
            scheduler.event_loop_normal()
        scheduler.checker.after_step("turn of the loop")
        self.num_steps += 1
        if self.ongoing is None:
            for req in scheduler.lifecycle.running:
                assert req.committed_bound == req.committed, "A bound was not settled."
                assert req.num_inflight == req.num_inflight_emits == 0

    @property
    def is_idle(self) -> bool:
        return self.ongoing is None and not self.inbox.messages and self.scheduler.lifecycle.is_idle

    def call(self, message: Any, max_steps: int = 50) -> Any:
        """Sends a control message and steps until it is answered."""
        self.inbox.messages.append(message)
        for _ in range(max_steps):
            self.step()
            if (reply := self.reply_to(message.call_id)) is not None:
                return reply
        raise AssertionError(f"No answer to {message} after {max_steps} steps.")

    def reply_to(self, call_id: int) -> Any:
        """The one answer to a call; None if there is none yet."""
        replies = [
            r for r in self.replies if not isinstance(r, EngineStatus) and r.call_id == call_id
        ]
        assert len(replies) <= 1, "A call was answered twice."
        return replies[0] if replies else None

    def run(self, max_steps: int = 100_000) -> None:
        """Steps until nothing is left to do."""
        for _ in range(max_steps):
            if self.is_idle and self.scheduler.processor.wait_for_files(60.0):
                self.scheduler.checker.when_idle()
                return
            self.step()
        raise AssertionError(f"Not idle after {max_steps} steps.")

    def generate(self, prompts: list[list[int]], **params: Any) -> list[list[int]]:
        """Output tokens of prompts that arrive together."""
        ids = [self.submit(prompt, **params) for prompt in prompts]
        self.run()
        return [self.outputs[req_id].token_ids for req_id in ids]

    def _to_detokenizer(self, message: Any) -> None:
        if not isinstance(message, BatchTokenIDOutput):
            self.pings.append(message)
            return
        for output in message.outputs:
            collected = self.outputs[output.req_id]
            assert collected.num_ends == 0, "An output came after the last one."
            collected.token_ids.extend(output.token_ids)
            collected.input_logprobs.extend(output.input_logprobs)
            collected.output_logprobs.extend(output.output_logprobs)
            rows = (array("f", row).tolist() for row in output.hidden_states)
            collected.hidden_states.extend(rows)
            collected.step_lens.extend(output.step_lens)
            collected.num_proposed_drafts = output.num_proposed_drafts
            collected.accept_histogram = output.accept_histogram
            collected.drafts_by = output.drafts_by
            collected.weight_spans = output.weight_spans or collected.weight_spans
            collected.num_retractions = output.num_retractions
            collected.cached_tokens = output.cached_tokens
            if output.queue_time_s is not None:
                collected.queue_times_s.append(output.queue_time_s)
            if output.options is not None:
                collected.options.append(output.options)
            assert output.completion_tokens == len(collected.token_ids)
            if output.finish_reason is not None:
                collected.finish_reason = output.finish_reason
                collected.num_ends += 1


def _no_stop_finder(params: SamplingParams, input_ids: list[int]) -> StopFinder:
    raise AssertionError("This harness has no tokenizer; test stop strings with one.")


def make_random_llama(path: Path, seed: int = 0, num_shards: int = 1, **changes: Any) -> Path:
    """Writes a small random Llama in Hugging Face layout; `changes` go to its config."""
    return make_random_model("llama", path, seed, num_shards, **changes)


def make_random_model(
    model_type: str, path: Path, seed: int = 0, num_shards: int = 1, **changes: Any
) -> Path:
    """Writes a small random model of a family that transformers knows, with random biases and norm
    weights too; `changes` go to its config."""
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": CONTEXT_LEN,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
        elif name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.5)
    size = sum(parameter.nbytes for parameter in model.parameters())
    model.save_pretrained(path, max_shard_size=size // num_shards + 1)
    return path


def make_execution(
    path: Path,
    setup: Setup,
    context_len: int = CONTEXT_LEN,
    max_decode_rows: int = 1,
    device: str | None = None,
    attention_backend: str | None = None,
    dtype: str | None = None,
    max_graph_width: int | None = None,
    **changes: Any,
) -> ExecutionConfig:
    """Returns what a runner over the model at `path` needs to know, on the target of this run
    unless it is told otherwise; `changes` are fields of `ExecutionConfig`."""
    device = device or TARGET.device
    if max_graph_width is None:
        max_graph_width = TARGET.graph_width(max_decode_rows)
    execution = ExecutionConfig(
        model=load_model_config(str(path)),
        load_format="auto",
        device=device,
        dtype=dtype or TARGET.dtype,
        attention_backend=attention_backend or TARGET.attention_backend,
        page_size=setup.page_size,
        max_total_tokens=setup.num_pages * setup.page_size,
        max_running_requests=setup.max_running_requests,
        context_len=context_len,
        row_width=row_width(context_len, max_decode_rows, setup.page_size),
        ops=DEFAULT_OPERATIONS[device],
        max_graph_width=max_graph_width,
        max_graph_rows=MAX_GRAPH_ROWS if max_graph_width == max_decode_rows else 0,
        poisons_graphs=True,
        kv_budget_bytes=1 << 30,
        num_threads=1,
    )
    return replace(execution, **changes)


def make_runner(
    path: Path, setup: Setup, context_len: int = CONTEXT_LEN, *args: Any, **changes: Any
) -> ModelRunner:
    """A runner over the model at `path`; see `make_execution`."""
    return make_runners(make_execution(path, setup, context_len, *args, **changes)).target


def make_model_worker(path: Path, setup: Setup, context_len: int = CONTEXT_LEN) -> TpModelWorker:
    """The plain worker over the model at `path`; a mask token of the model is suppressed."""
    runner = make_runner(path, setup, context_len)
    state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
    mask = load_model_config(str(path)).hf.get("mtp_mask_token_id")
    return TpModelWorker(runner, state, () if mask is None else (int(mask),))


def make_mtp_worker(
    runner: ModelRunner,
    mask_token_id: int,
    policy: LengthPolicy | None = None,
    trace: DebugTrace | None = None,
    **config: Any,
) -> TpModelWorker:
    """The worker that predicts up to MTP_MAX_K tokens per step, over a runner with rows for it."""
    settings = MTPConfig(mask_token_id=mask_token_id, max_k=MTP_MAX_K, **config)
    state = RequestRows(runner.req_to_token_pool, MTP_MAX_K, runner.vocab_size)
    masks = load(runner.operations.masks)
    policy = policy or FixedLength(mask_parts(MTP_MAX_K))
    planner = MaskPlanner(settings, state.num_rows, policy)
    planned = PlannedDrafter(planner, MaskDrafter(state, settings, masks))
    on_step = None if trace is None else trace.launched
    return TpModelWorker(runner, state, (mask_token_id,), planned, on_step)
