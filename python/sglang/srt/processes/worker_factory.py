"""Which worker runs a model."""

from __future__ import annotations

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.mtp.debug_trace import DebugTrace
from sglang.srt.mtp.length_policy import FullLength, LengthPolicy, LoadAwareLength
from sglang.srt.mtp.mtp_worker import MTPConfig, MTPWorker
from sglang.srt.mtp.price_measurement import PriceMeter
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import Worker
from sglang.srt.workers.tp_worker import TpModelWorker


def make_worker(
    runner: ModelRunner, mtp: MTPConfig | None, trace: DebugTrace | None = None
) -> Worker:
    """An `MTPWorker` for a model with a mask token (`mtp` is not None), else a `TpModelWorker`.

    Args:
        trace: is told of every step that an `MTPWorker` launches.
    """
    table = runner.req_to_token_pool.req_to_token
    num_rows, device = table.shape[0], str(table.device)
    max_pending = 1 if mtp is None else mtp.max_k
    state = RequestRows(num_rows, max_pending, runner.vocab_size, device)
    if mtp is None:
        return TpModelWorker(runner, state, ())
    policy: LengthPolicy = FullLength()
    if mtp.measures_costs:
        prices = PriceMeter(runner, num_rows, 2 * mtp.max_k - 1).measure()
        policy = LoadAwareLength(prices, mtp.max_k)
    return MTPWorker(runner, state, mtp, policy, trace)
