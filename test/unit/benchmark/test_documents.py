"""Tables and plots are what the stored results give; `--check` and every refusal can happen."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmark.engine_load import LoadResult
from benchmark.measure import throughput
from benchmark.mtp_checks import KINDS, PLAIN, Samples, checks_of
from benchmark.report import __main__ as report
from benchmark.report import performance_tables, plots
from benchmark.report.places import TABLES

PAGE = "docs/performance.md"
MACHINE = {"machine": {"cpu": "c", "cores": 2}, "versions": {"torch": "2"}, "commit": "a" * 40}
PROVENANCE = {**MACHINE, "dirty": True, "command": "python x"}


def mtp_result() -> dict[str, Any]:
    samples = [Samples(load) for load in (4, 1)]
    for sample in samples:
        for kind in KINDS:
            sample.add(kind, LoadResult(100 / sample.num_requests, 1000, 1.0, 4))
    return {
        **PROVENANCE,
        "model": "demo",
        "prompt_tokens": 8,
        "new_tokens": 9,
        "rounds": 1,
        "prompts": {"packages": {"a": "1"}, "note": ""},
        "rows": [sample.row() for sample in samples],
        "checks": checks_of(samples),
    }


PROFILE: dict[str, Any] = {
    **PROVENANCE,
    "geometry": "tiny",
    "rows": [
        {
            "batch": batch,
            "load": f"batch {batch}",
            "kinds_us": {"norm": 1.0 * batch, "matrix products": 500.0},
            "idle_us": 7.0,
            "profiled_us": 600.0,
            "wall_us": 590.0,
            "host_us": 2100.0,
            "kernels_per_step": 40.0,
        }
        for batch in (1, 64)
    ],
}
DECODE = {**PROVENANCE, "attention_backend": "triton", "cuda_graphs": True}


def write_results(root: Path) -> None:
    folder = root / "benchmark" / "results"
    folder.mkdir(parents=True)
    results: dict[str, Any] = {
        "decode_steps": {**DECODE, "rows": [{"batch": 1, "ms": 6.0}, {"batch": 8, "ms": 6.3}]},
        "decode_steps_eager": {**DECODE, "cuda_graphs": False, "rows": [{"batch": 1, "ms": 30.0}]},
        "step_profile": PROFILE,
        "startup": {
            **PROVENANCE,
            "summary": [
                {"attention_backend": "triton", "cold_s": 41, "warm_s": 20, "compile_s": 21},
                {
                    "attention_backend": "flashinfer",
                    "cold_s": 90,
                    "warm_s": None,
                    "compile_s": None,
                },
            ],
        },
        "mtp_gpu": mtp_result(),
    }
    for name, result in results.items():
        (folder / f"{name}.json").write_text(json.dumps(result))


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
    assert "Remedy: python -m benchmark.report decode_steps" in capsys.readouterr().out
    assert report.main(names, tmp_path) == 0
    assert report.main([*names, "--check"], tmp_path) == 0
    text = (tmp_path / PAGE).read_text()
    assert text.startswith("before\n# decode_steps\n")
    assert text.endswith("after\n")
    for line in (
        "| 1 | 6.00 | 30.00 | 6.05 | 6.30 | yes |",
        "| 8 | 6.30 | - | 6.25 | 6.53 | **no** |",
        "Host time at batch 64, asked: 2 ms or less; reached: **no**.",
        "| triton | 41.0 | **no** | 20.0 | yes | 21.0 |",
        "| flashinfer | 90.0 | - | failed | - | - |",
        "| plain | 10 (1.00x) | 40 (1.00x) | 1.00 |",
        "Not measured yet: there is no `benchmark/results/throughput*.json`.",
        f"c, 2 cores, torch 2; commit {'a' * 12} with local changes (at that commit: `python x`).",
    ):
        assert f"{line}\n" in text, line
    (tmp_path / PAGE).write_text(text.replace("6.00", "5.00"))
    assert report.main([*names, "--check"], tmp_path) == 1


def test_only_the_named_tables_are_written(tmp_path: Path) -> None:
    write_results(tmp_path)
    write_pages(tmp_path, "decode_steps", "startup")
    assert report.main(["startup"], tmp_path) == 0
    text = (tmp_path / PAGE).read_text()
    assert "decode_steps:begin -->\nold\n" in text
    assert "startup:begin -->\nold\n" not in text


def test_an_unknown_name_is_refused_with_those_that_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        report.main(["layer_op", "--check"])
    assert "There is no layer_op; there are engine_vs_transformers" in capsys.readouterr().err


@pytest.mark.parametrize("page", ["", "<!-- startup:begin -->", "<!-- startup:end -->"])
def test_a_missing_mark_is_refused(page: str) -> None:
    with pytest.raises(ValueError, match="startup:begin"):
        report.fill(page, "startup", "text")


def test_a_throughput_of_the_asked_shape_is_judged() -> None:
    settings = throughput.settings(throughput.parse(["--in-process"]))
    result = {**PROVENANCE, **settings, "output_tok_s": 6299.0, "prefill_share": 0.5}
    text = performance_tables.throughput([result])
    assert "| default, in-process | 512 x (512 in, 128 out) | 128 | auto | 6,299 | 50% |" in text
    assert text.endswith("| 6,300 | 5,616 | **no** |\n")


def test_a_curve_has_a_point_per_load_in_ascending_order() -> None:
    curves = plots.series(mtp_result(), "tok_s")
    assert curves[PLAIN] == ([1, 4], [10.0, 40.0])
    assert curves.keys() == KINDS.keys() == plots.STYLES.keys()


def test_layers_are_stacked_from_the_largest_and_gaps_last() -> None:
    assert list(plots.layers(PROFILE["rows"]).items()) == [
        ("matrix products", [0.5, 0.5]),
        ("norm", [0.001, 0.064]),
        ("gaps", [0.007, 0.007]),
    ]


def test_a_missing_matplotlib_or_result_is_one_clear_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit, match=plots.MISSING):
        report.main(["mtp_throughput.svg"])
    with pytest.raises(SystemExit, match=r"python -m benchmark\.measure\.mtp_gpu"):
        report.main(["mtp_throughput.svg"], tmp_path)
