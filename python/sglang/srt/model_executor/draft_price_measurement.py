"""Measures prices of a drafting model, once at start-up, in the same way as those of the target."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection

import torch

from sglang.srt.model_executor.measured_times import Launch, shortest
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.price_table import DraftPrices

logger = logging.getLogger(__name__)

PASS_REQUESTS = (1, 2, 4, *range(8, 129, 8), 256, 512, 1024)
CPU_PASS_REQUESTS = (1, 2, 4, 8, 16, 32, 64)
CPU_PASSES_S = 0.2  # for each number of draft steps or shape of trees, with any head


def _words(shape: DraftShape) -> str:
    if isinstance(shape, TreeShape):
        return f"trees of {shape.num_drafts} drafts"
    return f"{shape} draft steps"


@torch.inference_mode()
def measure_draft_prices(
    runner: ModelRunner,
    max_requests: int,
    max_width: int,
    shapes: Collection[DraftShape],
    clock: Callable[[], float] = time.perf_counter,
) -> DraftPrices:
    """Measures the prices of a drafting model's runner: its graphs and larger steps, logits,
    attention, and passes of draft steps or trees.

    Args:
        max_requests, max_width, clock: as for `PriceMeter`.
        shapes: numbers of draft steps that passes may have, or trees that they may draft.
    """
    start = clock()
    meter = PriceMeter(runner, max_requests, max_width, clock)
    sizes = CPU_PASS_REQUESTS if runner.device.type == "cpu" else PASS_REQUESTS
    sizes = tuple(sorted({*(size for size in sizes if size < max_requests), max_requests}))

    def passes_of(shape: DraftShape) -> Callable[[int], Launch]:
        def launch_of(num_reqs: int) -> Launch:
            first = meter.random_step([1] * num_reqs, runner.model.draft_hidden_width)
            if isinstance(shape, TreeShape):
                return lambda: runner.draft_trees(first, shape)
            return lambda: runner.draft(first, shape)

        return launch_of

    extend = meter.measure()
    passes = {}
    for shape in shapes:
        name = f"passes of {_words(shape)}"
        passes[shape] = shortest(meter.times_of(sizes, passes_of(shape), CPU_PASSES_S, name))
    logger.info(
        "Measured prices of a draft model, with passes of %s, in %.1f s.",
        " and ".join(map(_words, shapes)) or "no draft steps",
        clock() - start,
    )
    return DraftPrices(extend, passes)
