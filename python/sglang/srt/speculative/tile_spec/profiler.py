"""Keeps the prices that are measured at the start, so that the next start need not measure them.

Prices are times of the captured graphs, of larger steps and of the head's draft steps
(`price_measurement.py`, `draft_price_measurement.py`): that takes seconds, and no text and no
requests. They are kept as JSON, of the target and of its head, each with what it was measured with.
Whatever else is in the file, it is only ever read as numbers: what is no such file, or was measured
with anything else, is measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import sgl_kernel
from sglang.srt.layers.forward_batch import GraphKey
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import graph_finder, priced_graphs
from sglang.srt.platform import Platform, driver_version
from sglang.srt.speculative.tile_spec.core import PiecewiseLinearLatency
from sglang.srt.step.price_table import Curve, DraftPrices, PriceTable

logger = logging.getLogger(__name__)

FILE_NAME = "prices.json"
FORMAT = 1
MAX_BYTES = 4 << 20
MAX_MS = 1e7  # of any price
# Folders of this package whose code decides how long a step takes.
TIMED_CODE = ("layers", "models", "model_executor", "step")
# Fields of `ExecutionConfig` that do, or which steps are measured.
TIMED_FIELDS = (
    "attention_backend",
    "device",
    "dtype",
    "max_decode_rows",
    "max_graph_rows",
    "max_graph_width",
    "max_prompt_rows",
    "max_running_requests",
    "num_threads",
    "ops",
    "page_size",
    "row_width",
)
TARGET, HEAD = "target", "head"


class ProfileError(Exception):
    """A kept profile cannot be used; the text says why."""


class TileSpecProfiler:
    """Prices of a target and its head, from the cache or measured.

    Args:
        cache_dir: has a folder for each model on each kind of GPU.
        target: runner of the target.
    """

    def __init__(self, cache_dir: Path, target: ModelRunner) -> None:
        self._path = folder_of(cache_dir, target) / FILE_NAME
        self._target = target

    def target(self, measure: Callable[[], PriceTable]) -> PriceTable:
        """Prices of the target's steps."""
        try:
            kept = self._kept(TARGET, self._target)
            if kept is not None:
                return _price_table(kept, self._target)
        except ProfileError as error:
            logger.warning("--tile-spec: %s: %s; measured again.", self._path, error)
        return measure()

    def head(
        self, runner: ModelRunner, target_prices: PriceTable, measure: Callable[[], DraftPrices]
    ) -> DraftPrices:
        """Prices of the head's steps; what was measured, of it or of the target, is kept.

        Args:
            target_prices: what `target` returned.
        """
        ends = cliffs(target_prices)
        logger.info("--tile-spec: steps take far longer behind %s rows.", ends or "no number of")
        try:
            # Whatever is wrong with the target's part has been told.
            kept_target = _or_none(lambda: self._kept(TARGET, self._target))
            has_target = kept_target == _encoded_table(target_prices)
            kept = self._kept(HEAD, runner) if has_target else None
            if kept is not None:
                prices = _draft_prices(kept, runner)
                logger.info("--tile-spec: prices of steps are those of %s.", self._path)
                return prices
        except ProfileError as error:
            logger.warning("--tile-spec: %s: %s; measured again.", self._path, error)
        prices = measure()
        self._keep(runner, target_prices, prices)
        return prices

    def _kept(self, part: str, runner: ModelRunner) -> Any:
        """What is kept of a part; None where nothing is.

        Raises:
            ProfileError: if it is of something else, or damaged.
        """
        whole = read_json(self._path)
        if whole is None:
            return None
        if not isinstance(whole, dict) or whole.get("format") != FORMAT:
            raise ProfileError(f"not a profile of format {FORMAT}")
        found = whole.get(part)
        if not isinstance(found, dict) or not isinstance(found.get("measured_with"), dict):
            raise ProfileError(f"it has no prices of the {part}")
        for name, value in measured_with(runner).items():
            if found["measured_with"].get(name) != value:
                raise ProfileError(f"measured with another {name}")
        return found.get("prices")

    def _keep(self, head: ModelRunner, target_prices: PriceTable, prices: DraftPrices) -> None:
        parts = (
            (TARGET, self._target, _encoded_table(target_prices)),
            (HEAD, head, _encoded_drafts(prices)),
        )
        whole: dict[str, Any] = {"format": FORMAT}
        for part, runner, encoded in parts:
            whole[part] = {"measured_with": measured_with(runner), "prices": encoded}
        try:
            write_json(self._path, whole)
        except (OSError, ValueError) as error:  # the latter of a path that no file can have
            logger.warning(
                "--tile-spec: prices of steps cannot be kept in %s (%s), so each start measures"
                " them; name a folder by --tile-spec-cache-dir.",
                self._path.parent,
                _reason(error),
            )


def cliffs(prices: PriceTable) -> list[int]:
    """Numbers of rows behind which steps take far longer, by the cheapest graph of each size and by
    larger steps."""
    by_rows = dict(zip(prices.eager.sizes, prices.eager.costs_ms, strict=True))
    dearest_first = sorted(prices.graphs_ms.items(), key=lambda each: -each[1])
    by_rows |= {key.num_tokens: cost_ms for key, cost_ms in dearest_first}
    sizes = sorted(by_rows)
    costs = [by_rows[size] for size in sizes]
    return list(PiecewiseLinearLatency.fit(sizes, costs).ends[:-1])


def folder_of(cache_dir: Path, target: ModelRunner) -> Path:
    """`{model}_{gpu}_tp1`: names of files alone, whatever the model is called."""
    config = target.config
    gpu = Platform.probe().device_name if config.device == "cuda" else config.device
    names = (re.sub(r"[^A-Za-z0-9.-]+", "-", name) for name in (config.model.path.name, gpu))
    model, gpu = (name.strip(".-")[:100] or "unnamed" for name in names)
    return cache_dir / f"{model}_{gpu}_tp1"


def measured_with(runner: ModelRunner) -> dict[str, str]:
    """What the prices of a runner's steps depend on."""
    config, keys = runner.config, runner.graph_keys
    fields = {name: getattr(config, name) for name in TIMED_FIELDS}
    graphs = [] if keys is None else [dataclasses.astuple(key) for key in keys.all]
    return {
        "model": _digest(config.model.hf),
        "setting": _digest([fields, sorted(config.draft_steps)]),
        "set of graphs": _digest(graphs),
        "GPU": Platform.probe().device_name,
        "driver": driver_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "Triton": _version("triton"),
        "set of kernels": _code_digest(),
    }


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


@cache
def _code_digest() -> str:
    found = hashlib.sha256()
    for folder in timed_folders():
        for path in sorted(folder.rglob("*")):
            if path.suffix in (".py", ".cu", ".cuh"):
                found.update(path.read_bytes())
    return found.hexdigest()[:16]


def timed_folders() -> list[Path]:
    """Those with the code that decides how long a step takes."""
    root, kernels = Path(__file__).resolve().parents[2], Path(sgl_kernel.__file__).resolve().parent
    folders = [*(root / name for name in TIMED_CODE), kernels]
    if not (kernels / "csrc").is_dir():  # CUDA sources are in the package only once installed
        folders += [kernels.parents[1] / name for name in ("csrc", "include")]
    return folders


def read_json(path: Path) -> Any:
    """What a file holds; None where there is none, or a folder, or none that may be opened: if it
    cannot be replaced either, `_keep` says so.

    Raises:
        ProfileError: if it is no file, too large, cannot be read or is no JSON.
    """
    try:
        if not path.exists() or path.is_dir():
            return None
        # A pipe would block, and a device never end.
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            raise ProfileError(f"not a file of at most {MAX_BYTES >> 20} MiB")
        return json.loads(path.read_bytes())
    except PermissionError:
        return None
    except OSError as error:
        raise ProfileError(_reason(error)) from None
    except (ValueError, RecursionError):
        raise ProfileError("not JSON") from None


def _reason(error: OSError | ValueError) -> str:
    """Without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_json(path: Path, value: Any) -> None:
    """Replaces a file as a whole: whoever reads it at that time gets the old one or the new one.

    Raises:
        OSError: if that cannot be done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.write("\n")
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


# ------------------------------------------------------------ prices as JSON


def _encoded_curve(curve: Curve) -> list[list[float]]:
    return [[size, cost] for size, cost in zip(curve.sizes, curve.costs_ms, strict=True)]


def _encoded_table(prices: PriceTable) -> dict[str, Any]:
    """`find` is not kept: the runner finds its graphs."""
    keys = sorted(prices.graphs_ms, key=dataclasses.astuple)
    return {
        "graphs_ms": [[*dataclasses.astuple(key), prices.graphs_ms[key]] for key in keys],
        "eager": _encoded_curve(prices.eager),
        "head": _encoded_curve(prices.head),
        "kv_ms": prices.kv_ms,
        "row_kv_ms": prices.row_kv_ms,
        "prompt_kv_ms": _encoded_curve(prices.prompt_kv_ms),
        "spread": prices.spread,
    }


def _encoded_drafts(prices: DraftPrices) -> dict[str, Any]:
    passes = {str(count): _encoded_curve(curve) for count, curve in prices.passes.items()}
    return {"extend": _encoded_table(prices.extend), "passes": passes}


def _price_table(data: Any, runner: ModelRunner) -> PriceTable:
    entries = _entries(
        data, ["graphs_ms", "eager", "head", "kv_ms", "row_kv_ms", "prompt_kv_ms", "spread"]
    )
    return PriceTable(
        find=graph_finder(runner),
        graphs_ms=_graphs_ms(
            entries["graphs_ms"], priced_graphs(runner, runner.config.max_decode_rows)
        ),
        eager=_curve(entries["eager"], _cost),
        head=_curve(entries["head"]),
        kv_ms=_number(entries["kv_ms"]),
        row_kv_ms=_number(entries["row_kv_ms"]),
        prompt_kv_ms=_curve(entries["prompt_kv_ms"]),
        spread=_number(entries["spread"]),
    )


def _draft_prices(data: Any, runner: ModelRunner) -> DraftPrices:
    entries = _entries(data, ["extend", "passes"])
    wanted = sorted(runner.config.draft_steps)
    passes = _entries(entries["passes"], [str(count) for count in wanted])
    curves = {count: _curve(passes[str(count)]) for count in wanted}
    return DraftPrices(_price_table(entries["extend"], runner), curves)


def _entries(data: Any, names: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict) or {*data} != {*names}:
        raise ProfileError("its prices are damaged")
    return data


def _number(value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= MAX_MS:
        raise ProfileError("its prices are damaged")
    return float(value)


def _cost(value: Any) -> float:
    """Of a step, which takes time."""
    if (cost := _number(value)) == 0:
        raise ProfileError("its prices are damaged")
    return cost


def _pairs(data: Any) -> list[list[Any]]:
    is_list = isinstance(data, list) and len(data) > 0
    if not is_list or not all(isinstance(pair, list) and len(pair) == 2 for pair in data):
        raise ProfileError("its prices are damaged")
    pairs: list[list[Any]] = data
    return pairs


def _curve(data: Any, read: Callable[[Any], float] = _number) -> Curve:
    pairs = _pairs(data)
    sizes = tuple(int(_number(size)) for size, _ in pairs)
    if sizes[0] < 1 or list(sizes) != sorted({*sizes}):
        raise ProfileError("its prices are damaged")
    return Curve(sizes, tuple(read(cost) for _, cost in pairs))


def _graphs_ms(data: Any, keys: Iterable[GraphKey]) -> dict[GraphKey, float]:
    """Of exactly the graphs that there are."""
    by_fields = {dataclasses.astuple(key): key for key in keys}
    if not isinstance(data, list) or len(data) != len(by_fields):
        raise ProfileError("measured with another set of graphs")
    found = {}
    for entry in data:
        if not isinstance(entry, list) or not all(isinstance(x, str | int | float) for x in entry):
            raise ProfileError("its prices are damaged")
        key = by_fields.get(tuple(entry[:-1]))
        if key is None:
            raise ProfileError("measured with another set of graphs")
        found[key] = _cost(entry[-1])
    if len(found) != len(by_fields):
        raise ProfileError("measured with another set of graphs")
    return found


def _or_none(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except ProfileError:
        return None
