"""Keeps the prices that are measured at the start, so that the next start need not measure them.

Prices are times of the captured graphs, of larger steps and of the head's draft steps, which take
seconds to measure and no requests (`price_measurement.py`). They are kept as JSON, with what they
were measured with: the file's name is a digest of that. What is no such file is measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import statistics
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import torch

import sgl_kernel
from sglang.srt.compile_cache import plain_name, version_of
from sglang.srt.host import driver_version
from sglang.srt.layers.forward_batch import GraphKey
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import PriceMeter, graph_finder, priced_graphs
from sglang.srt.plain_files import UnreadableFileError, read_bytes
from sglang.srt.platform import Platform
from sglang.srt.step.draft_shapes import DraftShape, TreeShape
from sglang.srt.step.price_table import Curve, DraftPrices, PassPrices, Price, PriceTable

logger = logging.getLogger(__name__)

# Graphs whose times are compared with their prices, and the share by which the median may be less.
CHECKED_GRAPHS, CHECK_REPEATS, MOST_GAIN = 5, 3, 0.1
CLIFF = 0.15  # share by which the next size takes longer, for people
MAX_BYTES = 4 << 20
KEPT_NAMES, MOST_KEPT = "[0-9a-f]" * 16 + ".json", 64  # files of a folder, the newest
# Folders of this package whose code decides how long a step takes.
TIMED_CODE = ("layers", "models", "model_executor", "step")
# Fields of `ExecutionConfig` on which no time depends; `measured_with` has the model's own.
UNTIMED_FIELDS = (
    "model",
    "load_format",
    "max_total_tokens",
    "context_len",
    "kv_budget_bytes",
    "static_memory_share",
)

TABLE_FIELDS = [field.name for field in dataclasses.fields(PriceTable) if field.name != "find"]


class KeptPrices(msgspec.Struct, forbid_unknown_fields=True):
    """A file: what prices were measured with, `PriceTable` but `find`, a head's passes, and a
    digest of all that."""

    measured_with: dict[str, str]
    graphs_ms: list[tuple[GraphKey, Price]]
    eager: Curve
    head: Curve
    kv_ms: Price
    row_kv_ms: Price
    prompt_kv_ms: Curve
    spread: Price
    passes: list[tuple[int | TreeShape, PassPrices]]
    digest: str = ""

    def own_digest(self) -> str:
        return _digest(msgspec.to_builtins(msgspec.structs.replace(self, digest="")))

    def fits(self, graphs: Iterable[GraphKey], shapes: Iterable[DraftShape]) -> bool:
        """Tells whether it has prices of these graphs and passes alone, and steps take time."""
        least_ms = min([*self.eager.costs_ms, *(ms for _, ms in self.graphs_ms)])
        has_all = {key for key, _ in self.graphs_ms} == {*graphs}
        return has_all and {shape for shape, _ in self.passes} == {*shapes} and least_ms > 0


class TileSpecProfiler:
    """Gives prices of a runner's steps that an earlier start measured with the same GPU, versions,
    models and flags; else measures them, for the next start too. Files are in a folder; a head's
    depend on its target too."""

    def __init__(
        self, folder: Path, runner: ModelRunner, target: ModelRunner | None = None
    ) -> None:
        self._runner, self._known = runner, measured_with(runner, target)
        self._shapes = () if target is None else runner.config.draft_steps
        self._path = folder / f"{_digest(self._known)}.json"

    def target(self, meter: PriceMeter) -> PriceTable:
        """Gives prices of the runner's steps; kept ones if they still hold."""
        kept = self._read()
        if kept is None or not still_holds(kept.extend, meter):
            self._keep(kept := DraftPrices(meter.measure(), {}))
        return kept.extend

    def head(self, measure: Callable[[], DraftPrices]) -> DraftPrices:
        """Gives prices of the runner as a head over its target."""
        prices = self._read()
        if prices is None:
            self._keep(prices := measure())
        return prices

    def _read(self) -> DraftPrices | None:
        """Returns what the file holds if it is whole; of a target there are no passes. All ranks
        get what the first one reads."""
        path, data, problem = self._path, b"", "damaged, or of another version"
        try:
            data = read_bytes(path, MAX_BYTES)
        except UnreadableFileError as error:
            problem = error.reason
        if (ranks := self._runner.ranks) is not None:
            data = ranks.from_first(data)
        with suppress(msgspec.MsgspecError, ValueError, RecursionError):
            kept = msgspec.json.decode(data, type=KeptPrices)
            is_known = kept.measured_with == self._known and kept.digest == kept.own_digest()
            graphs = priced_graphs(self._runner, self._runner.config.max_decode_rows)
            if is_known and kept.fits(graphs, self._shapes):
                logger.info("Read prices of steps from %s.", path)
                fields = {name: getattr(kept, name) for name in TABLE_FIELDS}
                fields["graphs_ms"] = dict(kept.graphs_ms)
                table = PriceTable(graph_finder(self._runner), **fields)
                return DraftPrices(table, dict(kept.passes))
        # If what cannot be opened cannot be replaced either, `_keep` says so.
        if os.path.exists(path) and not path.is_dir() and os.access(path, os.R_OK):
            logger.warning("%s: %s; measured again.", path, problem)
        return None

    def _keep(self, prices: DraftPrices) -> None:
        """Replaces the file as a whole, for who reads it now. Of old files the newest stay."""
        ranks = self._runner.ranks
        if ranks is not None and ranks.shard.rank > 0:
            return  # the first one keeps what all have
        fields = {name: getattr(prices.extend, name) for name in TABLE_FIELDS}
        fields["graphs_ms"] = [*prices.extend.graphs_ms.items()]
        path, kept = self._path, KeptPrices(self._known, **fields, passes=[*prices.passes.items()])
        kept.digest = kept.own_digest()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
                new = Path(folder) / path.name  # who may read it is the umask's matter
                new.write_bytes(msgspec.json.format(msgspec.json.encode(kept), indent=1) + b"\n")
                os.replace(new, path)
            files = path.parent.glob(KEPT_NAMES)
            with suppress(FileNotFoundError):  # another start removes files too
                for old in sorted(files, key=os.path.getmtime)[:-MOST_KEPT]:
                    old.unlink()
        except (OSError, ValueError) as error:  # the latter of a path that no file can have
            text = "Prices of steps cannot be kept in %s (%s), so each start measures them."
            logger.warning(text, path.parent, error)


def still_holds(prices: PriceTable, meter: PriceMeter) -> bool:
    """Tells whether graphs take no less time than the prices say, which would have been disturbed:
    what disturbs makes times longer. Large graphs come first, as a GPU at rest is slow at first."""
    keys = sorted(prices.graphs_ms, key=lambda key: -key.num_tokens)
    if not keys:
        return True
    checked = keys[:: max(1, len(keys) // CHECKED_GRAPHS)]
    ratios = [meter.graph_ms(key, CHECK_REPEATS) / prices.graphs_ms[key] for key in checked]
    told = " / ".join(f"{ratio:.2f}" for ratio in ratios)
    logger.info("Graphs take %s of their kept prices.", told)
    return statistics.median(ratios) >= 1 - MOST_GAIN


def cliffs(prices: PriceTable) -> list[int]:
    """Returns numbers of rows after which the cheapest step takes far longer."""
    by_rows = pairwise(prices.by_rows.items())
    return [rows for (rows, ms), (_, more_ms) in by_rows if more_ms > ms * (1 + CLIFF)]


def folder_of(cache_dir: Path, target: ModelRunner) -> Path:
    """`{model}_{gpu}_tp{ranks}`: names of files alone, whatever the model is called."""
    config = target.config
    gpu = Platform.probe().device_name if config.device == "cuda" else config.device
    model, num_ranks = plain_name(config.model.path.name), config.model.shard.num_ranks
    return cache_dir / f"{model}_{plain_name(gpu)}_tp{num_ranks}"


def measured_with(runner: ModelRunner, target: ModelRunner | None = None) -> dict[str, str]:
    """Returns what the prices of a runner's steps depend on, as a head over a target if given."""
    config, keys, ranks = runner.config, runner.graph_keys, runner.ranks
    room = None if ranks is None or ranks.one_shot is None else ranks.one_shot.room
    names = (each.name for each in dataclasses.fields(config) if each.name not in UNTIMED_FIELDS)
    return {
        "model": _digest([config.model.hf, config.model.rounds_weights]),
        "code of the model": config.model.impl,
        "setting": _digest([str(getattr(config, name)) for name in names]),
        "set of graphs": _digest([] if keys is None else keys.all),
        "ranks": f"{config.model.shard.num_ranks}, {room or 'sums by the library'}",
        "GPU": Platform.probe().device_name,
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "Triton": version_of("triton"),
        "transformers": version_of("transformers"),
        "set of kernels": code_digest(),
        "target": "none" if target is None else _digest(measured_with(target)),
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def code_digest() -> str:
    """Returns a digest of the code that decides how long a step takes."""
    found = hashlib.sha256()
    for folder in timed_folders():
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def timed_folders() -> list[Path]:
    """Returns those with the code that decides how long a step takes."""
    root, kernels = Path(__file__).resolve().parents[2], Path(sgl_kernel.__file__).resolve().parent
    folders = [*(root / name for name in TIMED_CODE), kernels]
    if not (kernels / "csrc").is_dir():  # CUDA sources are in the package only once installed
        folders += [kernels.parents[1] / name for name in ("csrc", "include")]
    return folders
