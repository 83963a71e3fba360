"""Turns `ServerArgs` into the frozen configs of the rooms below, by functions without side effects.

Every refusal names the flag and the remedy. `ServerArgs` stops here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang.srt.environ import Environ
from sglang.srt.lookahead.mask_planner import MTPConfig
from sglang.srt.managers.scheduler import SchedulerConfig
from sglang.srt.mem_cache.kv_sizing import row_width
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.platform import Platform
from sglang.srt.processes.config_error import ConfigError
from sglang.srt.processes.determinism import check_determinism, has_both_orders
from sglang.srt.processes.flag_bounds import UNSPLIT, check_numbers
from sglang.srt.processes.flag_checks import (
    GPU_STATIC_SHARE,
    MAX_CHUNKS,
    SECOND_GRAPHS_SHARE,
    attention_backend_of,
    check_masks,
    check_tables,
    context_len_of,
    cpu_kv_budget,
    drafter_of,
    dtype_of,
    no_gpu,
    num_threads_of,
)
from sglang.srt.processes.hidden_flags import returned_layers
from sglang.srt.processes.rank_flags import check_ranks
from sglang.srt.registry import DEFAULT_OPERATIONS, DRAFTERS, ROW_INDEPENDENT
from sglang.srt.scheduling.batch_planner import PlannerConfig
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import DrafterType
from sglang.srt.speculative.drafter_options import DrafterConfig, DrafterNeeds

MIN_CAPABILITY = (8, 0)  # of a CUDA GPU
MAX_GRAPH_ROWS = 2048  # beyond, a GPU is busy for longer than the launches take
# Without --max-step-ms. On a CPU one step of a few prompt tokens may take longer than any bound.
DEFAULT_MAX_STEP_MS = {"cpu": 0.0, "cuda": 30.0}
NO_DRAFTS = DrafterNeeds(max_drafts=0, max_rows=1)


@dataclass(frozen=True, kw_only=True)
class RuntimeConfig:
    """The settings of the processes below the command line.

    Attributes:
        drafter: None where no request looks ahead. `with_drafter` sets it, with what follows.
    """

    model: ModelConfig
    execution: ExecutionConfig
    scheduler: SchedulerConfig
    use_radix_cache: bool
    drafter: DrafterConfig | None = None

    @property
    def needs(self) -> DrafterNeeds:
        """Returns the needs of the drafter."""
        return drafter_needs(self.drafter)

    @property
    def mtp(self) -> MTPConfig | None:
        """The options of multi-token prediction; None where no request may have it."""
        options = None if self.drafter is None else self.drafter.options
        return options if isinstance(options, MTPConfig) else None


def resolve(
    args: ServerArgs, platform: Platform, model: ModelConfig, environ: Environ
) -> RuntimeConfig:
    """Resolves every wish, or refuses it.

    Raises:
        ConfigError: the message names the flag and the remedy.
    """
    check_numbers(args)
    device = _device(args, platform, model)
    check_ranks(args, model)
    context_len = context_len_of(args, model)
    available_bytes, backend = platform.available_host_bytes, attention_backend_of(args, device)
    captures, planner = _captures_graphs(args, device), _planner(args, environ, device, context_len)
    execution = ExecutionConfig(
        model=replace(model, rounds_weights=args.quantization is not None),
        load_format=args.load_format,
        device=device,
        dtype=dtype_of(args, model, device),
        attention_backend=backend,
        page_size=args.page_size,
        max_total_tokens=args.max_total_tokens,
        max_running_requests=args.max_running_requests,
        context_len=context_len,
        row_width=row_width(context_len, NO_DRAFTS.max_slots, args.page_size),
        kv_budget_bytes=cpu_kv_budget(args, available_bytes) if device == "cpu" else None,
        ops=backend if backend == ROW_INDEPENDENT else DEFAULT_OPERATIONS[device],
        max_graph_width=1 if captures else 0,
        max_graph_rows=MAX_GRAPH_ROWS if captures else 0,
        max_prompt_rows=planner.chunked_prefill_size,
        poisons_graphs=environ.graph_poison,
        static_memory_share=_static_share(args, captures),
        num_threads=num_threads_of(args, platform.num_cores),
        has_both_orders=has_both_orders(args),
    )
    scheduler = SchedulerConfig(
        planner=replace(planner, finds_shared_kv=execution.capabilities.shares_kv),
        max_queued_requests=args.max_queued_requests,
        schedule_conservativeness=args.schedule_conservativeness,
        eos_token_ids=frozenset(model.eos_token_ids),
        enable_overlap=not args.disable_overlap_schedule,
        strict_invariants=environ.strict_invariants,
        random_seed=args.random_seed,
        stream_interval=args.stream_interval,
        low_priority_first=args.schedule_low_priority_values_first,
        refuses_while_stopped=args.paused_requests == "reject",
        decode_log_interval=args.decode_log_interval,
        weight_version=args.weight_version,
    )
    config = RuntimeConfig(
        model=model,
        execution=execution,
        scheduler=scheduler,
        use_radix_cache=not args.disable_radix_cache,
    )
    drafter = _drafter(args, model, environ, execution)
    config = config if drafter is None else with_drafter(config, drafter)
    if device == "cpu":
        check_tables(args.max_running_requests, config.execution.row_width, available_bytes)
    return _with_hidden_files(config, args)


def _with_hidden_files(config: RuntimeConfig, args: ServerArgs) -> RuntimeConfig:
    """The same with the layers that go to files; there is the drafter already."""
    execution = config.execution
    returned = returned_layers(args, config.model, execution.capture.layers)
    capture = replace(execution.capture, returned=returned)
    return replace(config, execution=replace(execution, capture=capture))


def drafter_needs(drafter: DrafterConfig | None) -> DrafterNeeds:
    """Returns the needs of a drafter; `NO_DRAFTS` without one."""
    if drafter is None:
        return NO_DRAFTS
    kind: DrafterType = DRAFTERS.load(drafter.name)
    return kind.needs(drafter.options)


def with_drafter(config: RuntimeConfig, drafter: DrafterConfig) -> RuntimeConfig:
    """A configuration without a drafter gets one, and all that follows from what it needs.

    Raises:
        ValueError: for options of the drafter that cannot be had; the text names the remedy.
    """
    assert config.drafter is None, "There is a drafter already."
    needs, execution = drafter_needs(drafter), config.execution
    if needs.has_trees:
        _check_masks(config, needs.max_rows)
    captures = execution.max_graph_width > 0
    execution = replace(
        execution,
        row_width=row_width(execution.context_len, needs.max_slots, execution.page_size),
        max_decode_rows=needs.max_rows,
        # MIXED graphs would serve steps of several rows too.
        max_graph_width=needs.max_rows if captures and not needs.bypasses_graphs else int(captures),
        max_graph_rows=0 if needs.bypasses_graphs else execution.max_graph_rows,
        capture=needs.capture,
        captures_trees=needs.has_trees,
    )
    # Of other trees the steps say it.
    tree_tokens = 0 if needs.max_confirmed is None else 1 + needs.max_drafts
    scheduler = replace(
        config.scheduler,
        num_draft_steps=needs.num_steps,
        num_tree_tokens=tree_tokens,
        draft_tiers=tuple(needs.tiers),
        drafters=() if drafter is None or len(drafter.shown) == 1 else drafter.shown,
    )
    return replace(config, execution=execution, scheduler=scheduler, drafter=drafter)


def with_chunks_that_fit(config: RuntimeConfig, max_prompt_rows: int) -> RuntimeConfig:
    """The same with steps of no more prompt tokens than the device has memory for. A longer prompt
    is then split, even where none was to be."""
    planner = config.scheduler.planner
    if max_prompt_rows >= planner.chunked_prefill_size:
        return config
    planner = replace(planner, chunked_prefill_size=max_prompt_rows, splits_prompts=True)
    return replace(config, scheduler=replace(config.scheduler, planner=planner))


def _device(args: ServerArgs, platform: Platform, model: ModelConfig) -> str:
    device = platform.device if args.device == "auto" else args.device
    check_determinism(args, model, [device])
    if device == "cuda" and platform.device != "cuda":
        raise no_gpu()
    capability = platform.capability
    if device == "cuda" and capability is not None and capability < MIN_CAPABILITY:
        raise ConfigError(
            f"--device cuda: {platform.device_name} has compute capability"
            f" {capability[0]}.{capability[1]}, and the kernels need 8.0 (Ampere) or newer; use"
            " --device cpu."
        )
    return device


def _planner(args: ServerArgs, environ: Environ, device: str, context_len: int) -> PlannerConfig:
    threshold = args.priority_scheduling_preemption_threshold
    chunk, max_step_ms = args.chunked_prefill_size, 0.0
    if not isinstance(chunk, int):
        chunk = MAX_CHUNKS[device]
        wished_ms = args.max_step_ms
        max_step_ms = DEFAULT_MAX_STEP_MS[device] if wished_ms is None else wished_ms
    splits = chunk != UNSPLIT
    return PlannerConfig(
        chunked_prefill_size=chunk if splits else context_len,
        max_step_ms=max_step_ms,
        bounds_streams_alone=args.max_step_ms is None,
        splits_prompts=splits,
        max_running_requests=args.max_running_requests,
        schedule_policy=args.schedule_policy,
        preemption_threshold=threshold if args.enable_priority_scheduling else None,
        retract_interval=environ.test_retract_interval,
        has_both_orders=has_both_orders(args),
    )


def _drafter(
    args: ServerArgs, model: ModelConfig, environ: Environ, execution: ExecutionConfig
) -> DrafterConfig | None:
    """Returns the drafter of --speculative-algorithm, else multi-token prediction if the model has
    a mask token, which is never emitted in either case."""
    mask, drafter = drafter_of(args, model, environ)
    if drafter is not None or mask is None:
        return drafter
    return DrafterConfig("mtp", _mtp(args, mask, environ, execution))


def _static_share(args: ServerArgs, captures: bool) -> float:
    has_second = captures and has_both_orders(args)
    default = GPU_STATIC_SHARE - (SECOND_GRAPHS_SHARE if has_second else 0)
    return args.mem_fraction_static or default


def _captures_graphs(args: ServerArgs, device: str) -> bool:
    return device != "cpu" and not args.disable_cuda_graph


def _check_masks(config: RuntimeConfig, max_rows: int) -> None:
    """Refuses trees that the attention backend has no masks for, or too large ones."""
    execution, prompt_rows = config.execution, config.scheduler.planner.chunked_prefill_size
    backend = execution.attention_backend
    capabilities = execution.capabilities
    if not capabilities.tree_masks:
        raise ConfigError(
            f"--attention-backend {backend} has no masks for trees of drafts; use"
            " --attention-backend triton (torch_native on a CPU), or draft chains"
            " (--speculative-eagle-topk 1, with NGRAM --speculative-ngram-max-bfs-breadth 1)."
        )
    num_rows = prompt_rows + execution.max_running_requests * max_rows
    check_masks(backend, capabilities.max_mask_entries, num_rows, execution.context_len)


def _mtp(args: ServerArgs, mask: int, environ: Environ, execution: ExecutionConfig) -> MTPConfig:
    is_cpu = execution.device == "cpu"
    return MTPConfig(
        mask_token_id=mask,
        max_k=args.mtp_max_k,
        limits_unverified=args.mtp_load_aware_k,
        trims_rows=is_cpu,
        length_policy="fixed" if environ.mtp_fixed_k else "load_aware_masks",
        bypasses_graphs=execution.max_graph_width > 0 and args.disable_mtp_cuda_graph,
    )
