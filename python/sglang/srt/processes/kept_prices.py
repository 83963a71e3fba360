"""Keeps prices of steps from one start to the next, of everything but `--tile-spec`, which has its
own folder (`TileSpecProfiler`)."""

from __future__ import annotations

import hashlib
import logging
import statistics
from pathlib import Path

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.speculative.tile_spec.profiler import (
    Kept,
    KeptTable,
    ProfileError,
    measured_with,
    read_profile,
    write_profile,
)
from sglang.srt.step.price_table import PriceTable

logger = logging.getLogger(__name__)

# Graphs whose times are compared with their prices, and the share by which the median may be less.
CHECKED_GRAPHS, CHECK_REPEATS, MOST_GAIN = 5, 3, 0.1


def kept_or_measured(folder: Path, runner: ModelRunner, meter: PriceMeter) -> PriceTable:
    """Gives the prices that an earlier start measured with the same GPU, versions, model and flags,
    if they still hold; else measures them, for the next start too."""
    known = measured_with(runner)
    text = "\n".join(f"{name}: {value}" for name, value in sorted(known.items()))
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    prices = _read(path, runner)
    if prices is not None and still_holds(prices, meter):
        logger.info("Prices of steps are those of %s.", path)
        return prices
    prices = meter.measure()
    try:
        write_profile(path, Kept(known, KeptTable.of(prices)))
    except OSError as error:
        logger.warning("Prices of steps cannot be kept in %s: %s.", path, error.strerror)
    return prices


def still_holds(prices: PriceTable, meter: PriceMeter) -> bool:
    """Tells whether graphs take no less time than the prices say: what disturbs a measurement makes
    it longer. So prices that are too high were disturbed, and of longer times now the prices are
    right. The largest graphs come first, as a GPU at rest is slow at first."""
    keys = sorted(prices.graphs_ms, key=lambda key: -key.num_tokens)
    if not keys:
        return False
    checked = keys[:: max(1, len(keys) // CHECKED_GRAPHS)]
    ratios = [meter.graph_ms(key, CHECK_REPEATS) / prices.graphs_ms[key] for key in checked]
    logger.info(
        "Graphs take %s of their kept prices.", " / ".join(f"{ratio:.2f}" for ratio in ratios)
    )
    return statistics.median(ratios) >= 1 - MOST_GAIN


def _read(path: Path, runner: ModelRunner) -> PriceTable | None:
    """Gives the prices of a file that holds those of a runner."""
    try:
        kept = read_profile(path, Kept[KeptTable], runner)
        return None if kept is None else kept.checked(runner).table_of(runner)
    except ProfileError as error:
        logger.warning("%s: %s; measured again.", path, error)
        return None
