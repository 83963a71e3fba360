"""Trees of sources in turn: Engines, whose ratio it is, what each process imports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from benchmark.environment import ROOT
from benchmark.experiments import MTP_WAYS, PLAIN, TILE_SPEC_WAYS
from benchmark.measure.trees import TreeEngine, main, paired_trees
from benchmark.paired import Figures
from benchmark.ways import servings


class FakeEngine:
    """Answers each run with its speed."""

    def __init__(self, tok_s: float) -> None:
        self._tok_s = tok_s
        self.asked = list[Any]()

    def send(self, message: Any) -> None:
        self.asked.append(message)

    def receive(self) -> Figures:
        return {"tok_s": self._tok_s}


def test_a_ratio_is_this_tree_over_each_other_one_way_by_way() -> None:
    fakes = {"this tree": FakeEngine(90.0), "old": FakeEngine(60.0), "older": FakeEngine(45.0)}
    of_trees = {"old": 1.5, "older": 2.0}
    engines = cast(dict[str, TreeEngine], fakes)
    paired = paired_trees(engines, dict.fromkeys((PLAIN, "static 3"), MTP_WAYS[PLAIN]), [1, 8])
    paired.round(0)
    paired.round(1)
    for row in paired.rows():
        ratios = {pair: found["mean"] for pair, found in row["ratios"].items()}
        assert ratios == {
            f"{way}, this tree / {way}, {other}": ratio
            for way in (PLAIN, "static 3")
            for other, ratio in of_trees.items()
        }
    asked = [
        (load, way, number) for number in (0, 1) for load in (1, 8) for way in (PLAIN, "static 3")
    ]
    for fake in fakes.values():
        assert sorted(fake.asked, key=str) == sorted(asked, key=str)


def test_ways_of_one_engine_are_measured_together() -> None:
    assert servings(MTP_WAYS) == [MTP_WAYS]
    chosen = {name: TILE_SPEC_WAYS[name] for name in (PLAIN, "static 1", "static 3")}
    assert servings(chosen) == [{name: way} for name, way in chosen.items()]


@pytest.mark.long_matrix
def test_each_process_imports_its_own_tree(tmp_path: Path) -> None:
    """The other tree counts how often it is imported."""
    other, out, imported = tmp_path / "other", tmp_path / "found.json", tmp_path / "imported"
    (other / "python").mkdir(parents=True)
    (other / "sgl-kernel").symlink_to(ROOT / "sgl-kernel")
    (other / "benchmark").symlink_to(ROOT / "benchmark")
    package = other / "python" / "sglang"
    package.mkdir()
    for each in (ROOT / "python" / "sglang").iterdir():
        if each.name != "__init__.py":
            (package / each.name).symlink_to(each)
    text = (ROOT / "python" / "sglang" / "__init__.py").read_text(encoding="utf-8")
    (package / "__init__.py").write_text(f"{text}\nopen({str(imported)!r}, 'a').write('.')\n")
    flags = ["--model-path", "demo", "--device", "cpu", "--concurrency", "1", "--new-tokens", "8"]
    flags += ["--rounds", "1", "--ways", PLAIN, "--out", str(out), "--other", str(other)]
    main(["mtp", *flags])
    [row] = json.loads(out.read_text(encoding="utf-8"))["rows"]
    [ratio] = row["ratios"].values()
    assert len(ratio["ratios"]) == 1
    assert imported.exists()
