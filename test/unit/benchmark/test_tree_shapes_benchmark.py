"""The benchmark of trees and chains: what it makes of speeds, and that it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmark.engine_load import Budget, LoadResult
from benchmark.measure import tree_shapes
from benchmark.measure.tree_shapes import PLAIN, Rounds, Shape


def rounds_of(speeds: dict[str, list[float]]) -> Rounds:
    engines: dict[str, Any] = dict.fromkeys(speeds)
    rounds = Rounds(engines, [], [4], {})
    rounds.accept_lengths[4] = {kind: 2.5 for kind in speeds if kind != PLAIN}
    for kind, tok_s in speeds.items():
        rounds.results[4][kind] = [LoadResult(1.0, speed, 1.0, 4) for speed in tok_s]
    return rounds


def test_the_best_tree_is_beside_the_best_chain() -> None:
    speeds = {
        PLAIN: [100.0, 110.0, 90.0],
        "1x3x4": [200.0, 220.0, 180.0],
        "1x5x6": [150.0, 165.0, 135.0],
        "2x4x8": [210.0, 242.0, 180.0],
        "4x5x8": [100.0, 100.0, 100.0],
    }
    [row] = rounds_of(speeds).rows()
    assert (row["best_chain"], row["best_tree"]) == ("1x3x4", "2x4x8")
    assert row["tree_over_chain"] == 1.05
    assert row["shapes"]["1x5x6"]["speed_up"] == 1.5
    assert row["shapes"]["4x5x8"]["accept_length"] == 2.5


def test_chains_alone_are_beside_plain_decoding() -> None:
    [row] = rounds_of({PLAIN: [100.0], "1x3x4": [150.0]}).rows()
    assert row["shapes"]["1x3x4"]["speed_up"] == 1.5
    assert "tree_over_chain" not in row


def test_a_shape_is_three_numbers() -> None:
    assert Shape.parse("4x5x8") == Shape(topk=4, num_steps=5, num_tokens=8)
    assert str(Shape.parse("1x3x4")) == "1x3x4"
    for text in ("4x5", "4x5x8x1", "x", "axbxc"):
        with pytest.raises(ValueError, match=r"values to unpack|invalid literal"):
            Shape.parse(text)


def test_all_engines_answer(tmp_path: Path) -> None:
    """The bundled model on a CPU."""
    out = tmp_path / "found.json"
    argv = ["--model-path", "demo", "--device", "cpu", "--shapes", "1x2x3", "2x3x6"]
    argv += ["--concurrency", "2", "--prompt-tokens", "16", "--new-tokens", "12", "--rounds", "1"]
    arguments = tree_shapes.parse([*argv, "--out", str(out)])
    result = tree_shapes.measure(arguments, "demo", "demo-eagle3", Budget(300.0, 0.0))
    if "rows" not in result:
        pytest.fail("no round was run")
    stored = json.loads(out.read_text())
    [row] = stored["rows"]
    assert row["shapes"].keys() == {"1x2x3", "2x3x6"}
    assert all(found["speed_up"] > 0 for found in row["shapes"].values())
    assert 1 <= row["shapes"]["1x2x3"]["accept_length"] <= 3
    assert 1 <= row["shapes"]["2x3x6"]["accept_length"] <= 4
    tree_shapes.print_result(stored)
