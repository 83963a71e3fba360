"""Which worker runs a model, and what the scheduler goes by beside it."""

from __future__ import annotations

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.mtp.debug_trace import DebugTrace
from sglang.srt.mtp.mtp_worker import MTPConfig, MTPWorker
from sglang.srt.processes.runtime_config import RuntimeConfig
from sglang.srt.registry import LENGTH_POLICIES
from sglang.srt.scheduling.prompt_budget import PromptBudget, make_budget
from sglang.srt.speculative.length_policy import LengthPolicy
from sglang.srt.step.kv_canary import KVCanary
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import Worker
from sglang.srt.workers.tp_worker import TpModelWorker


def measure_prices(config: RuntimeConfig, runner: ModelRunner) -> PriceTable | None:
    """Prices of steps, for all that go by them: how far requests look ahead, how many prompt tokens
    a step feeds. None where nothing does."""
    mtp = config.mtp
    looks_ahead = mtp is not None and LENGTH_POLICIES.load(mtp.length_policy).needs_prices
    if not looks_ahead and config.scheduler.planner.max_step_ms == 0:
        return None
    num_rows = runner.req_to_token_pool.req_to_token.shape[0]
    return PriceMeter(runner, num_rows, config.max_decode_rows).measure()


def make_prompt_budget(config: RuntimeConfig, prices: PriceTable | None) -> PromptBudget:
    """How many prompt tokens a step feeds."""
    planner = config.scheduler.planner
    return make_budget(planner.chunked_prefill_size, planner.max_step_ms, prices)


def make_worker(
    runner: ModelRunner,
    mtp: MTPConfig | None,
    prices: PriceTable | None = None,
    trace: DebugTrace | None = None,
    checks_kv: bool = False,
) -> Worker:
    """An `MTPWorker` for a model with a mask token (`mtp` is not None), else a `TpModelWorker`.

    Args:
        prices: of steps; for a length policy that needs them.
        trace: is told of every step that an `MTPWorker` launches.
        checks_kv: check in each step what the KV slots hold that it reads (`KVCanary`).
    """
    max_pending = 1 if mtp is None else mtp.max_k
    # Its token table is not in the sizing of the KV pool: as much as the page table (33 MB for 64
    # requests of 131,072 tokens), out of the share of memory that the pool leaves.
    state = RequestRows(runner.req_to_token_pool, max_pending, runner.vocab_size)
    if checks_kv:
        kv = runner.kv_pool.kv[0]
        state.canary = KVCanary(kv.shape[0], kv.device)
    if mtp is None:
        return TpModelWorker(runner, state, ())
    policy: LengthPolicy = LENGTH_POLICIES.load(mtp.length_policy)(prices, mtp.max_k)
    return MTPWorker(runner, state, mtp, policy, trace)
