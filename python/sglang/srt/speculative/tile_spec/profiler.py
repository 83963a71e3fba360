"""Keeps the prices that are measured at the start, so that the next start need not measure them.

Prices are times of the captured graphs, of larger steps and of the head's draft steps
(`price_measurement.py`, `draft_price_measurement.py`): that takes seconds, and no text and no
requests. They are kept as JSON, of the target and of its head, each with what it was measured with.
What is no such file, or was measured with anything else, is measured again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import torch

import sgl_kernel
from sglang.srt.host import driver_version
from sglang.srt.layers.forward_batch import GraphKey
from sglang.srt.lookahead.cut import PiecewiseLinearLatency
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.price_measurement import graph_finder, priced_graphs
from sglang.srt.platform import Platform
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import Curve, DraftPrices, PriceTable

logger = logging.getLogger(__name__)

FILE_NAME = "prices.json"
MAX_BYTES = 4 << 20
DAMAGED = "damaged, or of another version"
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
    "poisons_graphs",
    "row_width",
)

# What a file may hold. JSON has neither NaN nor infinity.
Size = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Price = Annotated[float, msgspec.Meta(ge=0, le=1e7)]
StepPrice = Annotated[float, msgspec.Meta(gt=0, le=1e7)]  # a step takes time
Prices = Annotated[list[tuple[Size, Price]], msgspec.Meta(min_length=1)]
StepPrices = Annotated[list[tuple[Size, StepPrice]], msgspec.Meta(min_length=1)]

T = TypeVar("T")


class ProfileError(Exception):
    """A kept profile cannot be used; the text says why."""


class KeptTable(msgspec.Struct, forbid_unknown_fields=True):
    """A `PriceTable` as it is kept, without `find`: the runner finds its graphs."""

    graphs_ms: list[tuple[GraphKey, StepPrice]]
    eager: StepPrices
    head: Prices
    kv_ms: Price
    row_kv_ms: Price
    prompt_kv_ms: Prices
    spread: Price

    @classmethod
    def of(cls, prices: PriceTable) -> KeptTable:
        return cls(
            graphs_ms=list(prices.graphs_ms.items()),
            eager=_pairs(prices.eager),
            head=_pairs(prices.head),
            kv_ms=prices.kv_ms,
            row_kv_ms=prices.row_kv_ms,
            prompt_kv_ms=_pairs(prices.prompt_kv_ms),
            spread=prices.spread,
        )

    def table_of(self, runner: ModelRunner) -> PriceTable:
        """The prices of exactly the graphs that a runner has."""
        keys = priced_graphs(runner, runner.config.max_decode_rows)
        if Counter(keys) != Counter(key for key, _ in self.graphs_ms):
            raise ProfileError("measured with another set of graphs")
        return PriceTable(
            find=graph_finder(runner),
            graphs_ms=dict(self.graphs_ms),
            eager=_curve(self.eager),
            head=_curve(self.head),
            kv_ms=self.kv_ms,
            row_kv_ms=self.row_kv_ms,
            prompt_kv_ms=_curve(self.prompt_kv_ms),
            spread=self.spread,
        )


class KeptDrafts(msgspec.Struct, forbid_unknown_fields=True):
    """`DraftPrices` as they are kept."""

    extend: KeptTable
    passes: list[tuple[int | TreeShape, Prices]]

    @classmethod
    def of(cls, prices: DraftPrices) -> KeptDrafts:
        passes = [(shape, _pairs(curve)) for shape, curve in prices.passes.items()]
        return cls(KeptTable.of(prices.extend), passes)

    def prices_of(self, runner: ModelRunner) -> DraftPrices:
        """The prices of exactly the draft steps that a runner has."""
        if Counter(shape for shape, _ in self.passes) != Counter([*runner.config.draft_steps]):
            raise ProfileError("its prices are damaged")
        passes = {shape: _curve(pairs) for shape, pairs in self.passes}
        return DraftPrices(self.extend.table_of(runner), passes)


class Kept(msgspec.Struct, Generic[T]):
    """Prices of a runner's steps, and what they were measured with."""

    measured_with: dict[str, str]
    prices: T

    def checked(self, runner: ModelRunner) -> T:
        """The prices, if they are of this runner."""
        for name, value in measured_with(runner).items():
            if self.measured_with.get(name) != value:
                raise ProfileError(f"measured with another {name}")
        return self.prices


class Profile(msgspec.Struct):
    """The content of the file."""

    target: Kept[KeptTable]
    head: Kept[KeptDrafts]
    format: Literal[5] = 5


def _pairs(curve: Curve) -> list[tuple[int, float]]:
    return [*zip(curve.sizes, curve.costs_ms, strict=True)]


def _curve(pairs: list[tuple[int, float]]) -> Curve:
    sizes, costs_ms = zip(*pairs, strict=True)
    if list(sizes) != sorted({*sizes}):
        raise ProfileError("its prices are damaged")
    return Curve(sizes, costs_ms)


class TileSpecProfiler:
    """Prices of a target and its head, from the cache or measured.

    Args:
        cache_dir: has a folder for each model on each kind of GPU.
        target: runner of the target.
    """

    def __init__(self, cache_dir: Path, target: ModelRunner) -> None:
        self._path = folder_of(cache_dir, target) / FILE_NAME
        self._target = target

    def target(
        self, measure: Callable[[], PriceTable], holds: Callable[[PriceTable], bool]
    ) -> PriceTable:
        """Prices of the target's steps: those that are kept, if `holds` says so of their graphs."""
        try:
            profile = read_profile(self._path, Profile, self._target)
            if profile is not None:
                prices = profile.target.checked(self._target).table_of(self._target)
                if not prices.graphs_ms or holds(prices):
                    return prices
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
        target = Kept(measured_with(self._target), KeptTable.of(target_prices))
        try:
            profile = read_profile(self._path, Profile, self._target)
        except ProfileError:  # `target` has told it
            profile = None
        try:
            if profile is not None and profile.target == target:
                prices = profile.head.checked(runner).prices_of(runner)
                logger.info("--tile-spec: prices of steps are those of %s.", self._path)
                return prices
        except ProfileError as error:
            logger.warning("--tile-spec: %s: %s; measured again.", self._path, error)
        prices = measure()
        self._keep(Profile(target, Kept(measured_with(runner), KeptDrafts.of(prices))))
        return prices

    def _keep(self, profile: Profile) -> None:
        try:
            write_profile(self._path, profile)
        except (OSError, ValueError) as error:  # the latter of a path that no file can have
            logger.warning(
                "--tile-spec: prices of steps cannot be kept in %s (%s), so each start measures"
                " them; name a folder by --tile-spec-cache-dir.",
                self._path.parent,
                _reason(error),
            )


def cliffs(prices: PriceTable) -> list[int]:
    """Returns numbers of rows after which the cheapest graph, or larger steps, take far longer."""
    dearest_first = sorted(prices.graphs_ms.items(), key=lambda each: -each[1])
    graphs = {key.num_tokens: cost_ms for key, cost_ms in dearest_first}
    by_rows = sorted((dict(_pairs(prices.eager)) | graphs).items())
    return list(PiecewiseLinearLatency.fit(*zip(*by_rows, strict=True)).ends[:-1])


def folder_of(cache_dir: Path, target: ModelRunner) -> Path:
    """`{model}_{gpu}_tp{ranks}`: names of files alone, whatever the model is called."""
    config = target.config
    gpu = Platform.probe().device_name if config.device == "cuda" else config.device
    names = (re.sub(r"[^A-Za-z0-9.-]+", "-", name) for name in (config.model.path.name, gpu))
    model, gpu = (name.strip(".-")[:100] or "unnamed" for name in names)
    return cache_dir / f"{model}_{gpu}_tp{_num_ranks(target)}"


def _num_ranks(runner: ModelRunner) -> int:
    return 1 if runner.ranks is None else runner.ranks.shard.num_ranks


def measured_with(runner: ModelRunner) -> dict[str, str]:
    """Returns what the prices of a runner's steps depend on."""
    config, keys = runner.config, runner.graph_keys
    fields = {name: getattr(config, name) for name in TIMED_FIELDS}
    graphs = [] if keys is None else [dataclasses.astuple(key) for key in keys.all]
    return {
        "model": _digest(config.model.hf),
        "setting": _digest([fields, sorted(config.draft_steps)]),
        "set of graphs": _digest(graphs),
        "number of ranks": str(_num_ranks(runner)),
        "GPU": Platform.probe().device_name,
        "driver": driver_version(),
        "torch": str(torch.__version__),
        "CUDA": str(torch.version.cuda),
        "Triton": _version("triton"),
        "set of kernels": code_digest(),
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
def code_digest() -> str:
    """Returns a digest of the code that decides how long a step takes; its files are read once in a
    process."""
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


def read_profile(path: Path, kind: type[T], runner: ModelRunner | None = None) -> T | None:
    """Reads what a file holds; None where there is none, or a folder, or none that may be opened:
    if it cannot be replaced either, whoever writes it says so. Of several ranks of a runner all get
    what the first one reads.

    Raises:
        ProfileError: if it is no file, too large, cannot be read or holds something else.
    """
    data, problem = _contents(path)
    if runner is not None and (ranks := runner.ranks) is not None:
        data, problem = ranks.from_first(data), ranks.from_first(problem.encode()).decode()
    if problem:
        raise ProfileError(problem)
    try:
        return msgspec.json.decode(data, type=kind) if data else None
    except (msgspec.MsgspecError, ValueError, RecursionError):
        raise ProfileError(DAMAGED) from None


def _contents(path: Path) -> tuple[bytes, str]:
    """Returns the bytes of a file, none if there is no file, and what is wrong with it."""
    try:
        if not path.exists() or path.is_dir():
            return b"", ""
        # A pipe would block, and a device never end.
        if not path.is_file() or path.stat().st_size > MAX_BYTES:
            return b"", f"not a file of at most {MAX_BYTES >> 20} MiB"
        data = path.read_bytes()
        return data, "" if data else DAMAGED
    except PermissionError:
        return b"", ""
    except OSError as error:
        return b"", _reason(error)
    except ValueError:  # of a path that no file can have
        return b"", DAMAGED


def _reason(error: OSError | ValueError) -> str:
    """Without the path."""
    return (isinstance(error, OSError) and error.strerror) or str(error)


def write_profile(path: Path, profile: msgspec.Struct) -> None:
    """Replaces a file as a whole: whoever reads it at that time gets the old one or the new one.

    Raises:
        OSError: if that cannot be done.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=f".{path.name}.") as folder:
        new = Path(folder) / path.name  # who may read it is the umask's matter
        new.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        os.replace(new, path)
