"""The headline: parts are stored, skipped, refused and merged; its table says what is reached."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmark import headline
from benchmark.goals import HEADLINE
from benchmark.headline_parts import PARTS, Figure, Setting
from benchmark.paired import Interval
from benchmark.report import headline_tables

COMMIT = "a" * 40
ENVIRONMENT: dict[str, Any] = {
    "machine": {"gpu": "H100", "cpu": "c", "driver": "570"},
    "commit": COMMIT,
    "dirty": False,
    "command": "python -m benchmark.headline --out x",
    "versions": {"torch": "2.11", "cuda": "13.0"},
}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The parts that were measured, in this process; each has one figure."""
    done: list[str] = []

    def part(name: str) -> Any:
        def measure(setting: Setting) -> dict[str, Any]:
            done.append(name)
            return {"figures": [Figure.of_runs(f"figure of {name}", "s", [2.0, 1.0, 4.0])]}

        return measure

    def run(command: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        return subprocess.CompletedProcess(command, headline.main(command[3:]))

    parts = {name: part(name) for name in PARTS}
    monkeypatch.setattr(headline, "PARTS", parts)
    monkeypatch.setattr(headline, "describe_environment", lambda: ENVIRONMENT)
    monkeypatch.setattr(headline.subprocess, "run", run)
    return done


def test_a_part_that_fails_or_takes_too_long_leaves_the_others(
    tmp_path: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_well = headline.subprocess.run

    def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
        if "server" in command:
            raise subprocess.TimeoutExpired(command, 1.0)
        if "eagle" in command:
            return subprocess.CompletedProcess(command, 1)
        return run_well(command, **more)

    monkeypatch.setattr(headline.subprocess, "run", run)
    assert headline.main(["--out", str(tmp_path)]) == 1
    assert measured == ["plain", "look-ahead"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["look-ahead.json", "plain.json"]


def test_parts_that_are_there_are_not_measured_again(tmp_path: Path, measured: list[str]) -> None:
    assert headline.main(["--out", str(tmp_path), "--parts", "server"]) == 0
    assert headline.main(["--out", str(tmp_path)]) == 0
    assert sorted(measured) == sorted(PARTS)
    assert measured[0] == "server"


def test_a_merged_result_has_all_figures_and_says_what_is_missing(
    tmp_path: Path, measured: list[str]
) -> None:
    assert headline.main(["--out", str(tmp_path), "--parts", "plain", "eagle"]) == 0
    out = tmp_path / "headline.json"
    assert headline.main(["--merge", str(tmp_path), "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert [figure["name"] for figure in result["figures"]] == [
        "figure of plain",
        "figure of eagle",
    ]
    assert {figure["value"] for figure in result["figures"]} == {2.0}
    assert result["missing"] == ["server", "look-ahead"]
    assert (result["commit"], result["machine"]["gpu"]) == (COMMIT, "H100")
    text = headline_tables.measured(result)
    assert text.startswith("H100, driver 570, torch 2.11, CUDA 13.0; commit aaaaaaaaaaaa;")
    assert "Not measured at this commit: server, look-ahead." in text


def test_parts_of_changed_files_are_measured_again_at_the_commit(
    tmp_path: Path, measured: list[str]
) -> None:
    assert headline.main(["--out", str(tmp_path), "--parts", "plain"]) == 0
    file = tmp_path / "plain.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"dirty": True}))
    assert headline.main(["--out", str(tmp_path), "--parts", "plain"]) == 0
    assert measured == ["plain", "plain"]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"commit": "b" * 40}, "b" * 40),
        ({"machine": {"gpu": "H200", "cpu": "c"}}, "H200"),
        ({"dirty": True}, "not those of a commit"),
        ({"commit": "unknown"}, "unknown"),
        ({"trial": True}, "is a trial"),
    ],
)
def test_a_part_that_does_not_belong_there_is_refused(
    tmp_path: Path,
    measured: list[str],
    changes: dict[str, Any],
    reason: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert headline.main(["--out", str(tmp_path), "--parts", "plain", "eagle"]) == 0
    file = tmp_path / "eagle.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    assert headline.main(["--merge", str(tmp_path), "--out", str(tmp_path / "x.json")]) == 1
    assert reason in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
    if changes.keys() & {"machine", "commit"}:
        assert headline.main(["--out", str(tmp_path), "--parts", "server"]) == 1
        assert "server" not in measured


@pytest.mark.parametrize("content", ["{", "[]", "{}"])
def test_a_damaged_part_is_refused_by_name(
    tmp_path: Path, measured: list[str], content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plain.json").write_text(content)
    for arguments in (["--out", str(tmp_path)], ["--merge", str(tmp_path)]):
        assert headline.main(arguments) == 1
        assert "plain.json is no part" in capsys.readouterr().err
    assert measured == []


def test_nothing_is_measured_for_a_folder_that_cannot_be_made(
    tmp_path: Path, measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert headline.main(["--out", str(tmp_path / "file")]) == 1
    assert "file cannot be made" in capsys.readouterr().err
    assert measured == []


def test_changed_files_are_told_before_they_are_measured(
    tmp_path: Path,
    measured: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    environment = headline.describe_environment()
    monkeypatch.setattr(headline, "describe_environment", lambda: environment | {"dirty": True})
    headline.main(["--out", str(tmp_path), "--parts", "plain"])
    assert "not those of a commit" in capsys.readouterr().err
    headline.main(["--out", str(tmp_path), "--parts", "plain", "--trial"])
    assert "not those of a commit" not in capsys.readouterr().err


def ratio(name: str, *ratios: float) -> dict[str, Any]:
    interval = Interval.of(ratios)
    return {"name": name, "unit": "ratio", "value": interval.mean, "interval": interval.stored()}


@pytest.mark.parametrize(
    ("ratios", "reached"),
    [
        ((0.993, 0.995, 0.997), "yes"),  # the upper end of the interval is above 0.995
        ((0.990, 0.991, 0.990), "**no**"),
        ((1.01, 0.97, 1.02), "**no**"),  # a round is below 0.98
        ((1.2,), "**no**"),  # one round has no interval
        ((0.981, 0.999), "**no**"),  # an interval so wide that it would reach anything
    ],
)
def test_a_ratio_is_reached_by_the_upper_end_of_its_interval(
    ratios: tuple[float, ...], reached: str
) -> None:
    name = "conf_adapt / plain, 128"
    result = {"figures": [ratio(name, *ratios)]}
    text = headline_tables.figures(result, {name: "x"})
    asked = f"0.995, no round below 0.98 | {reached} | - |"
    assert text.splitlines()[2].endswith(f"{len(ratios)} rounds) | {asked}")


def test_times_are_to_be_short_and_speeds_high() -> None:
    def line(name: str, unit: str, value: float) -> str:
        figure = {"name": name, "unit": unit, "value": value, "interval": None}
        return headline_tables.figures({"figures": [figure]}, {name: "x"}).splitlines()[2]

    assert line("decode, 1", "ms/step", 5.7) == "| x | 5.7 ms/step | 5.76 | yes | 6.33 |"
    assert line("1 x 4,096", "s", 0.098) == "| x | 0.098 s | 0.097 | **no** | 0.106 |"
    assert line("512 x 512", "output tokens/s", 6299.0).endswith("| 6,300 | **no** | 5,252 |")
    assert line("HTTP, output", "tokens/s", 6051.0).endswith("| 6,050 | yes | 5,152 |")


def test_what_was_not_measured_says_so() -> None:
    text = headline_tables.figures({"figures": []}, {"start, warm": "x"})
    assert text.endswith("| x | not measured | 9 | - | - |\n")


def test_every_goal_stands_on_the_page() -> None:
    shown = {name for names in headline_tables.PAGE.values() for name in names}
    assert {*HEADLINE, *headline_tables.FIRST} <= shown
