"""Every table and plot: the document it stands in and the results it is made of."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmark.report import (
    attention_tables,
    document_tables,
    performance_tables,
    plots,
    prompt_tables,
    speculation_tables,
)
from benchmark.report.markdown import Result, provenance

RESULTS = "benchmark/results"


@dataclass(frozen=True)
class Table:
    """A part NAME of a page, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    Attributes:
        page: from the root of the repository.
        results: pattern of the files in benchmark/results/; each becomes a column or a row.
        make: the Markdown, from the contents of those files in order.
        has_provenance: below the table stands where each result was measured.
    """

    page: str
    results: str
    make: Callable[[list[Result]], str]
    has_provenance: bool = False

    def text(self, root: Path) -> str:
        """The part, from the results under `root`."""
        files = sorted((root / RESULTS).glob(self.results))
        if not files:
            return f"Not measured yet: there is no `{RESULTS}/{self.results}`.\n"
        found: list[Result] = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        text = self.make(found)
        if self.has_provenance:
            text += "\n" + "\n".join(provenance(result) for result in found)
        return text


@dataclass(frozen=True)
class Plot:
    """An SVG file in docs/.

    Attributes:
        measure: module of benchmark/measure/ whose result it is made of.
        draw: takes the result and the path to write.
    """

    measure: str
    draw: Callable[[Result, Path], None]

    def write(self, root: Path, path: Path) -> None:
        """Draws the result under `root`.

        Raises:
            SystemExit: without the result or matplotlib; the message names the remedy.
        """
        file = root / RESULTS / f"{self.measure}.json"
        if not file.is_file():
            sys.exit(f"There is no {RESULTS}/{file.name}: python -m benchmark.measure.{file.stem}")
        self.draw(json.loads(file.read_text(encoding="utf-8")), path)


README, MTP, PAUSE = "README.md", "docs/mtp.md", "docs/pause.md"
RELIABILITY = "docs/reliability.md"
SPECULATION, ADAPTIVE = "docs/speculation.md", "docs/adaptive.md"
TILESPEC = "docs/tilespec.md"
TABLES = {
    "engine_vs_transformers": Table(
        README, "engine_vs_transformers.json", document_tables.engine_vs_transformers
    ),
    "train_mtp": Table(MTP, "train_mtp_tiny_code.json", document_tables.train_mtp),
    "mtp_cpu": Table(MTP, "mtp_cpu.json", document_tables.mtp_cpu),
    "eagle_rounds": Table(
        SPECULATION, "eagle_rounds.json", performance_tables.eagle_rounds, has_provenance=True
    ),
    "speculation_paired": Table(
        SPECULATION,
        "speculation_paired*.json",
        speculation_tables.speculation_paired,
        has_provenance=True,
    ),
    "standalone_paired": Table(
        SPECULATION,
        "standalone_paired*.json",
        speculation_tables.standalone_paired,
        has_provenance=True,
    ),
    "ngram_rounds": Table(
        SPECULATION, "ngram_rounds*.json", speculation_tables.ngram_rounds, has_provenance=True
    ),
    "adaptive_steps": Table(
        ADAPTIVE, "adaptive_steps*.json", speculation_tables.adaptive_steps, has_provenance=True
    ),
    "tile_spec": Table(
        TILESPEC, "tile_spec*.json", speculation_tables.tile_spec, has_provenance=True
    ),
    "swept_rows": Table(
        TILESPEC, "swept_rows*.json", speculation_tables.swept_rows, has_provenance=True
    ),
    "tree_shapes": Table(
        SPECULATION, "tree_shapes*.json", speculation_tables.tree_shapes, has_provenance=True
    ),
    **{
        f"adaptive_stationary_{name}": Table(
            ADAPTIVE,
            f"adaptive_stationary_{name}*.json",
            partial(speculation_tables.adaptive_stationary, way_name=way),
            has_provenance=True,
        )
        for name, way in (("throughput", "throughput"), ("ema", "EMA, conservative"))
    },
    "adaptive_costs": Table(
        ADAPTIVE, "adaptive_costs*.json", speculation_tables.adaptive_costs, has_provenance=True
    ),
    "costly_requests": Table(
        RELIABILITY, "costly_requests.json", document_tables.costly_requests, has_provenance=True
    ),
    "pause_latency": Table(PAUSE, "pause_latency_cpu.json", document_tables.pause_latency),
    **{
        name: Table("docs/performance.md", results, make, has_provenance=True)
        for name, results, make in (
            ("decode_steps", "decode_steps*.json", performance_tables.decode_steps),
            ("step_profile", "step_profile.json", performance_tables.step_profile),
            ("layer_ops", "layer_ops.json", performance_tables.layer_ops),
            ("return_costs", "return_costs.json", performance_tables.return_costs),
            ("before_after", "before_after*.json", performance_tables.before_after),
            ("throughput", "throughput*.json", performance_tables.throughput),
            ("startup", "startup*.json", performance_tables.startup),
            ("long_prompts", "long_prompts*.json", prompt_tables.long_prompts),
            ("prompt_lists", "prompt_lists*.json", prompt_tables.long_prompts),
            ("prefill_profile", "prefill_profile.json", prompt_tables.prefill_profile),
            ("attention_prompts", "attention.json", attention_tables.attention_prompts),
            ("attention_decodes", "attention.json", attention_tables.attention_decodes),
            ("step_gaps", "step_gaps*.json", prompt_tables.step_gaps),
            ("http_streams", "http_streams*.json", prompt_tables.http_streams),
            ("streams_by_bound", "streams_by_bound*.json", prompt_tables.http_streams),
            ("http_overhead", "http_overhead.json", prompt_tables.http_overhead),
            ("load_weights", "load_weights*.json", prompt_tables.load_weights),
            ("mtp_gpu", "mtp_gpu.json", performance_tables.mtp_gpu),
            ("mtp_checks", "mtp_gpu*.json", performance_tables.mtp_checks),
            ("mtp_paired", "mtp_paired*.json", performance_tables.mtp_paired),
        )
    },
}
PLOTS = {
    "mtp_throughput.svg": Plot("mtp_gpu", plots.draw_mtp_throughput),
    "adaptive_steps.svg": Plot("adaptive_steps", plots.draw_adaptive_steps),
    "tile_spec.svg": Plot("tile_spec", plots.draw_tile_spec),
    "eagle_rounds.svg": Plot("eagle_rounds", plots.draw_eagle_rounds),
    "step_profile.svg": Plot("step_profile", plots.draw_step_profile),
}
