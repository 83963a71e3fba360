"""The scheduler's process: `python -m sglang.srt.processes.scheduler_process`, started by the
launcher, which writes one line of JSON (`ChildConfig`) to its standard input."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from sglang.srt.constrained.grammar_sessions import GrammarSessions
from sglang.srt.control.control import ModelResources
from sglang.srt.distributed.channel import FrameSender
from sglang.srt.environ import Environ
from sglang.srt.managers.scheduler import Scheduler, SchedulerDebug
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.mem_cache.radix_cache import NullPrefixCache, RadixCache
from sglang.srt.messages.ipc import IpcAddresses, Receiver, Sender
from sglang.srt.messages.requests import ProcessFailed, ProcessReady, SchedulerInfo, ToScheduler
from sglang.srt.model_config import ModelConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.child_process import (
    configure_logging,
    start_beats,
    start_child_process,
)
from sglang.srt.processes.flag_checks import CONTEXT_LIMIT, DTYPE_BYTES, MTP_IS_OFF, POOL_LIMIT
from sglang.srt.processes.grammar_flags import grammar_setup
from sglang.srt.processes.model_parts import (
    ModelParts,
    ends_at_once,
    join_ranks,
    make_model_parts,
)
from sglang.srt.processes.rank_calls import resources_of_ranks
from sglang.srt.processes.resources import make_resources
from sglang.srt.processes.runtime_config import RuntimeConfig
from sglang.srt.processes.tokenizer_flags import tokenizer_from_flags
from sglang.srt.processes.worker_factory import make_prompt_budget
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.debug_trace import DebugTrace
from sglang.srt.step.worker import Worker
from sglang.srt.step_profiler import StepProfiler
from sglang.srt.stops import StopSet
from sglang.srt.tokenizer import StopFinder, Tokenizer
from sglang.srt.workers.broadcast_worker import BroadcastWorker

logger = logging.getLogger(__name__)


def main() -> int:
    """Loads the model, says ready, serves until the launcher goes away."""
    child = start_child_process()
    args = msgspec.convert(child.server_args, ServerArgs)
    configure_logging(args.log_level, "scheduler")
    launcher: Sender[ProcessReady | ProcessFailed] = Sender(child.addresses.launcher)
    inbox: Receiver[Any] = Receiver(child.addresses.scheduler, ToScheduler)
    try:
        scheduler, info = build(args, child.addresses, inbox)
    except (ValueError, MemoryError, RuntimeError, OSError) as error:
        logger.debug("The scheduler cannot start.", exc_info=True)
        launcher.send(ProcessFailed(role="scheduler", message=" ".join(str(error).split())))
        launcher.close()
        return 1
    start_beats(child, inbox, args.watchdog_timeout)
    launcher.send(ProcessReady(role="scheduler", scheduler=info))
    with ends_at_once():
        scheduler.run()
    return 1


def build(
    args: ServerArgs, addresses: IpcAddresses, inbox: Receiver[Any]
) -> tuple[Scheduler, SchedulerInfo]:
    """Makes the scheduler and everything below it.

    Raises:
        ValueError: for a flag, model or size that cannot be had.
    """
    environ = Environ.read()
    tokenizer = tokenizer_from_flags(args)
    ranks = join_ranks(args, addresses, rank=0)
    parts = make_model_parts(args, tokenizer, addresses.private_cache, ranks)
    config, runners = parts.config, parts.runners
    worker, resources = _for_all_ranks(args, addresses, parts, environ)
    scheduler = Scheduler(
        config.scheduler,
        worker,
        ledger=make_ledger(config, runners.memory.num_pages),
        resources=resources,
        inbox=inbox,
        to_detokenizer=Sender[Any](addresses.detokenizer).send,
        to_frontend=Sender[Any](addresses.frontend).send,
        make_stop_finder=_stop_finders(tokenizer),
        debug=_debug(environ, parts.trace),
        budget=make_prompt_budget(config, parts.prices),
        grammars=_grammars(args, config),
    )
    return scheduler, _info(config, runners, parts.draft_models)


def _for_all_ranks(
    args: ServerArgs, addresses: IpcAddresses, parts: ModelParts, environ: Environ
) -> tuple[Worker, ModelResources]:
    """Makes the worker, and what control calls may change, of all ranks."""
    is_gpu = parts.config.execution.device != "cpu"
    profiler = StepProfiler(environ.torch_profiler_dir, is_gpu)
    resources = make_resources(parts.runners, profiler)
    if parts.ranks is None:
        return parts.worker, resources
    others = [addresses.of_rank(rank) for rank in range(1, args.tp_size)]
    send = FrameSender(others).send
    return BroadcastWorker(parts.worker, send), resources_of_ranks(resources, parts.ranks, send)


def _grammars(args: ServerArgs, config: RuntimeConfig) -> GrammarSessions | None:
    model, suppressed = config.model, config.needs.suppressed_token_ids
    setup = grammar_setup(args, model.vocab_size, model.eos_token_ids, suppressed)
    return None if setup is None else GrammarSessions(setup)


def _debug(environ: Environ, trace: DebugTrace | None) -> SchedulerDebug:
    kv = environ.kv_leak_debug
    return SchedulerDebug(
        on_step_read=None if trace is None else trace.read,
        release_audit=(lambda report: logger.info("KV released: %s", report)) if kv else None,
        logs_idle_ledger=kv,
    )


def make_ledger(config: RuntimeConfig, num_pages: int) -> KVLedger:
    """The ledger over a pool of `num_pages`."""
    execution, page_size = config.execution, config.execution.page_size
    tree = RadixCache(page_size) if config.use_radix_cache else NullPrefixCache()
    allocator = PageAllocator(num_pages, page_size)
    return KVLedger(execution.max_running_requests, allocator, tree, execution.row_width)


def _stop_finders(tokenizer: Tokenizer) -> Callable[[SamplingParams, list[int]], StopFinder]:
    def make(params: SamplingParams, input_ids: list[int]) -> StopFinder:
        stops = StopSet(params.stop_strings, params.stop_regexes)
        return StopFinder(
            tokenizer, stops, params.skip_special_tokens, input_ids, params.min_new_tokens
        )

    return make


def _described(model: ModelConfig, runner: ModelRunner) -> dict[str, Any]:
    """Returns what `/server_info` says of a model; `model_impl` as it was chosen."""
    return {
        "path": model.folder,
        "architecture": model.architecture,
        "model_impl": model.impl,
        "num_parameters": runner.num_parameters,
        "weights": runner.weights.remark,
    }


def _info(
    config: RuntimeConfig, runners: RunnerGroup, draft_models: Sequence[ModelConfig]
) -> SchedulerInfo:
    execution = config.execution
    memory, runner, dtype = runners.memory, runners.target, execution.dtype
    hidden_layers = [*execution.capture.returned, config.model.num_layers]
    pool = memory.num_pages * execution.page_size
    in_pool = pool - config.needs.max_slots
    drafter = None if config.mtp is not None else config.drafter
    if execution.context_len <= in_pool:
        limit, reason = execution.context_len, CONTEXT_LIMIT
    else:
        limit, reason = in_pool, POOL_LIMIT
    return SchedulerInfo(
        vocab_size=config.model.vocab_size,
        context_len=execution.context_len,
        max_total_num_tokens=pool,
        max_req_len=limit,
        max_req_len_reason=reason,
        max_running_requests=execution.max_running_requests,
        eos_token_ids=list(config.model.eos_token_ids),
        mtp_max_k=0 if config.mtp is None else config.mtp.max_k,
        mtp_refusal=None if config.drafter is None or config.mtp is not None else MTP_IS_OFF,
        drafters={} if drafter is None else dict(drafter.names),
        hidden_layers=hidden_layers,
        hidden_row_bytes=len(hidden_layers) * config.model.hidden_size * DTYPE_BYTES[dtype],
        resolved={
            **_described(config.model, runner),
            "device": execution.device,
            "dtype": execution.dtype,
            "attention_backend": execution.attention_backend,
            "cuda_graphs": runner.num_graphs,
            "page_size": execution.page_size,
            "num_threads": execution.num_threads,
            "max_total_num_tokens": pool,
            "kv_bytes_per_token": memory.bytes_per_token,
            "kv_size_reason": memory.size_reason,
            "draft_models": [
                {**_described(model, drafting), "remark": model.remark}
                for model, drafting in zip(draft_models, runners.runners[1:], strict=True)
            ],
            "context_len": execution.context_len,
            "max_queued_requests": config.scheduler.max_queued_requests,
            "enable_overlap": config.scheduler.enable_overlap,
            "num_draft_steps": config.needs.num_steps,
            "num_draft_tokens": 1 + config.needs.max_drafts,
            "draft_topk": config.needs.topk,
            "draft_tiers": list(config.needs.tiers),
            "use_radix_cache": config.use_radix_cache,
            "schedule": asdict(config.scheduler.planner),
        },
    )


if __name__ == "__main__":
    sys.exit(main())
