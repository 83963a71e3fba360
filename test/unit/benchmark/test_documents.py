"""Tables and plots are what the stored results give; `--check` and every refusal can happen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.experiments import DRAFTED, PLAIN
from benchmark.report import __main__ as report
from benchmark.report import plots
from benchmark.report.places import TABLES
from benchmark.report.speculation_tables import replay_shares

PAGE = "docs/performance.md"
MACHINE = {"machine": {"cpu": "c", "cores": 2}, "versions": {"torch": "2"}, "commit": "a" * 40}
PROVENANCE = {**MACHINE, "dirty": False, "command": "python x"}


def write_results(root: Path, **changes: Any) -> None:
    folder = root / "benchmark" / "results"
    folder.mkdir(parents=True)
    times = {"alone_s": [4.8, 4.9], "unbounded_s": [4.8, 4.8], "beside_s": [5.2, 5.4]}
    lists = [{"name": "16 x 8,192", **times, "beside_over_alone": [1.08, 1.1]}]
    result = {**PROVENANCE, "lists": lists, **changes}
    (folder / "lists_beside_streams.json").write_text(json.dumps(result))


def write_pages(root: Path, *names: str) -> None:
    """Pages that hold these tables, with other text in them."""
    (root / "docs").mkdir()
    for page in {TABLES[name].page for name in names}:
        parts = [
            f"# {name}\n<!-- {name}:begin -->\nold\n<!-- {name}:end -->\n"
            for name in names
            if TABLES[name].page == page
        ]
        (root / page).write_text("before\n" + "".join(parts) + "after\n")


def test_tables_and_figures_of_the_documents_are_what_the_results_give() -> None:
    assert report.main(["--check"]) == 0


def test_a_page_is_filled_between_its_marks_and_then_passes_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [name for name, table in TABLES.items() if table.page == PAGE]
    write_results(tmp_path)
    write_pages(tmp_path, *names)
    assert report.main([*names, "--check"], tmp_path) == 1
    assert "Remedy: python -m benchmark.report headline_measured" in capsys.readouterr().out
    assert report.main(names, tmp_path) == 0
    assert report.main([*names, "--check"], tmp_path) == 0
    text = (tmp_path / PAGE).read_text()
    assert text.startswith("before\n# headline_measured\n")
    assert text.endswith("after\n")
    for line in (
        "`python -m benchmark.headline` has not been run at this commit.",
        "| list, s | alone | without any bound | beside one | of alone |",
        "| 16 x 8,192 | 4.85 | 4.80 | 5.30 | 1.090 |",
        "Not measured: there is no `benchmark/results/streams_by_bound.json`.",
        f"c, 2 cores, torch 2; commit {'a' * 12} (at that commit: `python x`).",
    ):
        assert f"{line}\n" in text, line
    (tmp_path / PAGE).write_text(text.replace("5.30", "5.20"))
    assert report.main([*names, "--check"], tmp_path) == 1


@pytest.mark.parametrize("changes", [{"dirty": True}, {"commit": "unknown"}])
def test_no_page_takes_a_result_of_changed_files(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_results(tmp_path, **changes)
    write_pages(tmp_path, "lists_beside_streams")
    with pytest.raises(SystemExit, match="not those of a commit"):
        report.main(["lists_beside_streams"], tmp_path)


def test_only_the_named_tables_are_written(tmp_path: Path) -> None:
    write_results(tmp_path)
    write_pages(tmp_path, "headline_start", "lists_beside_streams")
    assert report.main(["lists_beside_streams"], tmp_path) == 0
    text = (tmp_path / PAGE).read_text()
    assert "headline_start:begin -->\nold\n" in text
    assert "lists_beside_streams:begin -->\nold\n" not in text


def test_an_unknown_name_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        report.main(["headlin", "--check"])
    assert "There is no headlin; there are headline_first" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["", "<!-- start:begin -->", "<!-- start:end -->"])
def test_a_missing_mark_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="start:begin"):
        report.fill(page, "start", "text")


def test_a_missing_matplotlib_or_result_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=plots.MISSING):
        report.main(["adaptive_steps.svg"])
    with pytest.raises(
        SystemExit, match=r"python -m benchmark\.measure\.experiment adaptive_steps"
    ):
        report.main(["adaptive_steps.svg"], tmp_path)


def test_replay_shows_shares_of_its_speed_and_rounds() -> None:
    """128 tokens/s and 4 tokens a round are 31.25 ms a round of one request."""
    ways = {"replay 3": (128.0, 4.0), DRAFTED: (96.0, 3.0), PLAIN: (40.0, 1.0)}
    row = {
        "load": [1, "code"],
        "ways": {way: {"tok_s": [s], "tokens_per_step": [n]} for way, (s, n) in ways.items()},
        "ratios": {
            f"{DRAFTED} / replay 3": {"mean": 0.75},
            f"replay 3 / {PLAIN}": {"mean": 3.2},
            f"{DRAFTED} / {PLAIN}": {"mean": 2.4},
        },
    }
    other = {**row, "load": [8, "code"]}
    results = [{"algorithm": "EAGLE3", "rows": [row]}, {"algorithm": "STANDALONE", "rows": [other]}]
    assert replay_shares(*results).splitlines()[2:] == [
        "| EAGLE3 / replay 3 | 0.750 | - |",
        "| STANDALONE / replay 3 | - | 0.750 |",
        "| replay 3, per round | 31.25 ms, 4.00, 0.80 | 250.00 ms, 4.00, 0.80 |",
        "| EAGLE3, per round | 31.25 ms, 3.00, 0.80 | - |",
        "| plain, per round | 25.00 ms, 1.00 | 200.00 ms, 1.00 |",
        "| STANDALONE, per round | - | 250.00 ms, 3.00, 0.80 |",
    ]
