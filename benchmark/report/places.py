"""Every table and plot: the document it stands in and the results it is made of."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmark.report import (
    document_tables,
    headline_tables,
    plots,
    speculation_tables,
    stream_tables,
)
from benchmark.report.markdown import Result, provenance

RESULTS = "benchmark/results"
Maker = Callable[..., str]  # of one result, or of several


def read_results(root: Path, pattern: str) -> list[Result]:
    """Reads the stored results of a pattern, in the order of their names."""
    files = sorted((root / RESULTS).glob(pattern))
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@dataclass(frozen=True)
class Table:
    """A part NAME of a page, between `<!-- NAME:begin -->` and `<!-- NAME:end -->`.

    Attributes:
        page: from the root of the repository.
        results: pattern of the files in benchmark/results/; each becomes a column or a row.
        make: the Markdown, from the contents of those files, in order.
        has_provenance: below the table stands where each result was measured.
        command: that makes the results, where one command makes all.
    """

    page: str
    results: str
    make: Maker
    has_provenance: bool = False
    command: str | None = None

    def text(self, root: Path) -> str:
        """The part, from the results under `root`.

        Raises:
            SystemExit: a result is of no commit, or of changed files.
        """
        found = read_results(root, self.results)
        if not found:
            if self.command is not None:
                return f"`{self.command}` has not been run at this commit.\n"
            return f"Not measured: there is no `{RESULTS}/{self.results}`.\n"
        for result in found:
            if result.get("dirty") or result.get("commit") == "unknown":
                raise SystemExit(f"{self.results}: of files that are not those of a commit.")
        text = self.make(*found)
        if self.has_provenance:
            text += "\n" + "\n".join(provenance(result) for result in found)
        return text


README, MTP, PERFORMANCE = "README.md", "docs/mtp.md", "docs/performance.md"
MODELS = "docs/models.md"
RELIABILITY, ADAPTIVE = "docs/reliability.md", "docs/adaptive.md"


def headline(page: str, make: Maker) -> Table:
    """Makes a table of the result of `benchmark.headline`."""
    return Table(page, "headline.json", make, command="python -m benchmark.headline")


def of_own_result(page: str, has_provenance: bool = True, **makers: Maker) -> dict[str, Table]:
    """Makes tables that are named as the result that each is made of."""
    return {
        name: Table(page, f"{name}.json", make, has_provenance) for name, make in makers.items()
    }


TABLES = {
    "headline_first": headline(
        README, partial(headline_tables.figures, names=headline_tables.FIRST)
    ),
    "headline_measured": headline(PERFORMANCE, headline_tables.measured),
    **{
        f"headline_{name}": headline(PERFORMANCE, partial(headline_tables.figures, names=names))
        for name, names in headline_tables.PAGE.items()
    },
    **of_own_result(
        PERFORMANCE,
        streams_by_bound=stream_tables.streams_by_bound,
        lists_beside_streams=stream_tables.lists_beside,
    ),
    "replay_shares": Table(PERFORMANCE, "replay_*.json", speculation_tables.replay_shares, True),
    "train_mtp": Table(MTP, "train_mtp_tiny_code.json", document_tables.train_mtp),
    **of_own_result(
        ADAPTIVE,
        adaptive_steps=speculation_tables.adaptive_steps,
        adaptive_stationary_auto=speculation_tables.adaptive_stationary,
        adaptive_costs=speculation_tables.adaptive_costs,
    ),
    **of_own_result(
        MODELS,
        fp8_quality=document_tables.fp8_quality,
        expert_model=document_tables.expert_model,
    ),
    **of_own_result(RELIABILITY, costly_requests=document_tables.costly_requests),
    **of_own_result(
        RELIABILITY,
        has_provenance=False,
        soak=document_tables.ledger,
        hostile=document_tables.ledger,
        faults=document_tables.faults,
    ),
}
PLOTS = {"adaptive_steps.svg": plots.draw_adaptive_steps}  # each of the experiment of its name


def draw_plot(name: str, root: Path) -> None:
    """Draws a file of docs/ from the result under `root`.

    Raises:
        SystemExit: without a result or matplotlib; the message names the remedy.
    """
    experiment = name.removesuffix(".svg")
    found = read_results(root, f"{experiment}.json")
    if not found:
        command = f"python -m benchmark.measure.experiment {experiment}"
        sys.exit(f"There is no {RESULTS}/{experiment}.json: {command}")
    PLOTS[name](*found, root / "docs" / name)
