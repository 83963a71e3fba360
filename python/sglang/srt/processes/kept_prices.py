"""Keeps prices of steps from one start to the next, of everything but `--tile-spec`, which has its
own folder (`TileSpecProfiler`)."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter
from sglang.srt.speculative.tile_spec.profiler import (
    Kept,
    KeptTable,
    ProfileError,
    held,
    measured_with,
    read_profile,
    write_profile,
)
from sglang.srt.step.price_table import PriceTable

logger = logging.getLogger(__name__)


def kept_or_measured(folder: Path, runner: ModelRunner, meter: PriceMeter) -> PriceTable:
    """Gives the prices that an earlier start measured with the same GPU, versions, model and flags,
    if they still hold; else measures them, for the next start too."""
    known = measured_with(runner)
    text = "\n".join(f"{name}: {value}" for name, value in sorted(known.items()))
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"
    kept = _read(path, runner)
    prices = None if kept is None else held(kept, meter)
    if prices is not None:
        logger.info("Prices of steps are those of %s.", path)
        return prices
    prices = meter.measure()
    try:
        write_profile(path, Kept(known, KeptTable.of(prices)))
    except OSError as error:
        logger.warning("Prices of steps cannot be kept in %s: %s.", path, error.strerror)
    return prices


def _read(path: Path, runner: ModelRunner) -> PriceTable | None:
    """Gives the prices of a file that holds those of a runner."""
    try:
        kept = read_profile(path, Kept[KeptTable])
        return None if kept is None else kept.checked(runner).table_of(runner)
    except ProfileError as error:
        logger.warning("%s: %s; measured again.", path, error)
        return None
