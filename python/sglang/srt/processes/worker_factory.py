"""Makes the worker of a server, and what the scheduler goes by beside it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from sglang.srt.lookahead.prompt_budget import PromptBudget
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.runtime_config import RuntimeConfig, drafter_needs
from sglang.srt.registry import DRAFTERS
from sglang.srt.speculative.confirm import Confirm, ConfirmByThresholds, ConfirmSoMany
from sglang.srt.speculative.drafter import ComputedStep, DrafterParts, DrafterType, PlannedDrafter
from sglang.srt.speculative.drafter_options import DrafterConfig, DrafterNeeds
from sglang.srt.speculative.tile_spec.profiler import TileSpecProfiler, folder_of
from sglang.srt.step.kv_canary import KVCanary
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import Worker
from sglang.srt.workers.tp_worker import TpModelWorker

logger = logging.getLogger(__name__)

# As `make_worker`, of its first three arguments.
WorkerMaker = Callable[[RunnerGroup, DrafterConfig | None, PriceTable | None], Worker]

# As `make_prompt_budget`.
BudgetMaker = Callable[[RuntimeConfig, PriceTable | None], PromptBudget]


def drafter_models(
    drafter: DrafterConfig | None, target: ExecutionConfig
) -> tuple[ExecutionConfig, ...]:
    """The models of a drafter, for `make_runners` behind the target. They only draft, in any order
    of sums."""
    if drafter is None:
        return ()
    kind: DrafterType = DRAFTERS.load(drafter.name)
    return kind.models(drafter.options, replace(target, has_both_orders=False))


def measure_prices(
    config: RuntimeConfig, runner: ModelRunner, kept: Path | None = None
) -> PriceTable | None:
    """Prices of steps, for all that go by them: how far requests look ahead, how many prompt tokens
    a step feeds. None where nothing does.

    Args:
        kept: folder for prices of a GPU that earlier starts have measured.
    """
    looks_ahead = config.needs.needs_prices
    if not looks_ahead and config.scheduler.planner.max_step_ms == 0:
        return None
    num_rows = runner.req_to_token_pool.num_rows
    meter = PriceMeter(runner, num_rows, config.execution.max_decode_rows)
    if (cache := config.needs.price_cache) is not None:
        kept = folder_of(cache, runner)
    prices = meter.measure() if kept is None else TileSpecProfiler(kept, runner).target(meter)
    runner.prefer_cheaper_graphs(prices.graphs_ms)
    return prices


def make_prompt_budget(config: RuntimeConfig, prices: PriceTable | None) -> PromptBudget:
    """Makes the budget of prompt tokens of a step."""
    planner = config.scheduler.planner
    return PromptBudget(
        planner.chunked_prefill_size, prices, planner.max_step_ms, planner.bounds_streams_alone
    )


def make_worker(
    runners: RunnerGroup,
    drafter: DrafterConfig | None,
    prices: PriceTable | None = None,
    on_step: Callable[[ComputedStep], object] | None = None,
    checks_kv: bool = False,
    simulated_accept_len: float | None = None,
) -> TpModelWorker:
    """The worker over the target, with the drafter or without one.

    Args:
        runners: of the target and of `drafter_models`.
        prices: of steps, where the drafter needs them.
        on_step: see `TpModelWorker`.
        checks_kv: check in each step what the KV slots hold that it reads (`KVCanary`).
        simulated_accept_len: for benchmarks, see `ConfirmSoMany`.

    Raises:
        ValueError: if acceptance cannot be simulated with this drafter, or cannot go by its
            thresholds.
    """
    needs, target = drafter_needs(drafter), runners.target
    # Its token table is not in the sizing of the KV pool: as much as the page table (33 MB for 64
    # requests of 131,072 tokens), out of the share of memory that the pool leaves.
    state = RequestRows(
        target.req_to_token_pool,
        1 + needs.max_drafts,
        target.vocab_size,
        needs.has_trees,
        needs.keeps_confidence,
    )
    for runner in runners.runners:
        runner.checks.clear()  # of a worker that was made before
    made: PlannedDrafter | None = None
    if drafter is not None:
        kind: DrafterType = DRAFTERS.load(drafter.name)
        made = kind.make(DrafterParts(drafter.options, runners, state, prices))
    if checks_kv:  # from here on: a drafter may have measured steps of no request
        check_kv(runners, state, needs.token_shift)
    confirm: Confirm | None = _simulated(simulated_accept_len, needs, state.committed.device)
    if confirm is None and drafter is not None:
        confirm = _by_thresholds(drafter, needs, state.committed.device)
    worker = TpModelWorker(target, state, needs.suppressed_token_ids, made, on_step, confirm)
    worker.capture_rounds(runners, needs)
    return worker


def _simulated(
    accept_len: float | None, needs: DrafterNeeds, device: torch.device
) -> ConfirmSoMany | None:
    if accept_len is None:
        return None
    if needs.has_trees or not 1 <= accept_len <= 1 + needs.max_drafts:
        raise ValueError(
            f"SGLANG_SIMULATE_ACC_LEN={accept_len:g} must be between 1 and the"
            f" {1 + needs.max_drafts} tokens that a step can accept, of drafts in chains; unset it."
        )
    logger.warning(
        "SGLANG_SIMULATE_ACC_LEN: drafts are accepted unseen, %g tokens per step, and outputs mean"
        " nothing. For benchmarks alone.",
        accept_len,
    )
    return ConfirmSoMany(accept_len, device)


def _by_thresholds(
    drafter: DrafterConfig, needs: DrafterNeeds, device: torch.device
) -> ConfirmByThresholds | None:
    if drafter.thresholds.is_exact:
        return None
    return ConfirmByThresholds(drafter.thresholds, needs.suppressed_token_ids, device)


def check_kv(runners: RunnerGroup, state: RequestRows, token_shift: int = 0) -> None:
    """Has every runner check in each step what the KV slots hold that it reads. To be called before
    the worker is made.

    Args:
        token_shift: of the drafter's models, see `DrafterNeeds`.
    """
    canary = KVCanary(
        state,
        runners.memory,
        lambda: sum(runner.weights.num_updates for runner in runners.runners),
        [0] + [token_shift] * (len(runners.runners) - 1),
    )
    for index, runner in enumerate(runners.runners):
        runner.checks.append(partial(canary.check, index))
