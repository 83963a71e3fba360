"""Measures prices of a drafting model, once at start-up, in the same way as those of the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial

import torch

from sglang.srt.model_executor.measured_times import Launch, shortest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.price_table import DraftPrices, PassPrices

logger = logging.getLogger(__name__)

CPU_PASSES_S = 0.2  # for each number of draft steps or shape of trees, with any head


@torch.inference_mode()
def measure_draft_prices(
    runner: ModelRunner,
    max_requests: int,
    max_width: int,
    shapes: Collection[DraftShape],
    clock: Callable[[], float] = time.perf_counter,
) -> DraftPrices:
    """Measures the prices of a drafting model's runner: its graphs and larger steps, logits,
    attention, and passes of draft steps or trees with what they read of KV.

    Args:
        max_requests, max_width, clock: as for `PriceMeter`.
        shapes: numbers of draft steps that passes may have, or trees that they may draft.
    """
    start = clock()
    meter = PriceMeter(runner, max_requests, max_width, clock)
    fewer = [size for size in meter.timer.pass_requests if size < max_requests]

    def launch_of(shape: DraftShape, num_reqs: int, kv_len: int = 0) -> Launch:
        first = meter.random_step([1] * num_reqs, runner.model.draft_hidden_width, kv_len)
        if isinstance(shape, TreeShape):
            return lambda: runner.draft_trees(first, shape)
        return lambda: runner.draft(first, shape)

    extend, passes = meter.measure(), dict[DraftShape, PassPrices]()
    for shape in shapes:
        launch, what = partial(launch_of, shape), f"drafting ({shape})"
        times_ms = meter.timer.times_of([*fewer, max_requests], launch, CPU_PASSES_S, what)
        passes[shape] = PassPrices(shortest(times_ms), meter.kv_ms(launch))
    logger.info("Measured prices of a draft model in %.1f s.", clock() - start)
    return DraftPrices(extend, passes)
