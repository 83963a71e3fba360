"""make_wheelhouse.sh and run_gpu_suite.sh: their arguments, what they refuse, what goes on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang.srt.server_args import ServerArgs

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
FAKE_TORCH = '''\
"""torch as far as the check of the host looks at it."""
__version__ = "2.0"
class version:
    cuda = "13.0"
class cuda:
    is_available = staticmethod(lambda: {available})
    device_count = staticmethod(lambda: 1)
    get_device_name = staticmethod(lambda index: "Fake GPU")
'''


# Instead of running tests it writes down for which target they are, and their files.
NOTING_PYTHON = """\
#!/usr/bin/env bash
if [ "$1 $2" = "-m pytest" ]; then
    echo "$SGLANG_TEST_TARGET $*" >>"{notes}"
    echo "1 passed"
elif [ "$2" = "import flashinfer" ]; then
    exit 1
else
    exec "{python}" "$@"
fi
"""


def run_script(
    name: str, *arguments: object, path: Path | None = None, python: object = sys.executable
) -> tuple[int, str]:
    """Exit status and all output; `path` goes first on the script's Python path."""
    environment = {
        **os.environ,
        "PYTHON": str(python),
        "PYTHONPATH": str(path or ""),
        "PYTEST_ADDOPTS": "-p no:schemathesis -p no:hypothesispytest",  # slow to load, and unused
    }
    command = ["bash", str(SCRIPTS / name), *map(str, arguments)]
    result = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=120, check=False
    )
    return result.returncode, result.stdout + result.stderr


def fake_host(folder: Path, available: bool) -> Path:
    (folder / "fake").mkdir()
    (folder / "fake" / "torch.py").write_text(FAKE_TORCH.format(available=available))
    return folder / "fake"


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("make_wheelhouse.sh", ["--fast"], "Unknown argument: --fast"),
        ("make_wheelhouse.sh", ["one", "two"], "One folder only"),
        ("make_wheelhouse.sh", ["--python"], "--python needs a value"),
        ("make_wheelhouse.sh", ["--python", "2.7"], "--python takes X.Y"),
        ("make_wheelhouse.sh", ["--platform", "win_amd64"], "--platform takes a tag"),
        ("run_gpu_suite.sh", ["here"], "Unknown argument: here"),
        ("run_gpu_suite.sh", ["--out"], "--out needs a value"),
        ("run_gpu_suite.sh", ["--test-limit", "1m"], "whole number of seconds"),
        ("run_gpu_suite.sh", ["--workers", "all"], "a number of processes"),
    ],
)
def test_wrong_arguments_show_the_usage(script: str, arguments: list[str], reason: str) -> None:
    status, output = run_script(script, *arguments)
    assert status == 2
    assert reason in output
    assert "Usage:" in output


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--tests", "test/nowhere.py"], "there is no test/nowhere.py"),
        (["--wheelhouse", "/nowhere"], "make_wheelhouse.sh"),
        (["--ways", "triton; tritan"], "there is no 'tritan'"),
        (["--ways", "triton, no graph"], "there is no 'triton, no graph'"),
    ],
)
def test_a_wrong_name_is_refused_before_anything_runs(arguments: list[str], reason: str) -> None:
    status, output = run_script("run_gpu_suite.sh", *arguments)
    assert status == 1
    assert reason in output
    assert "[1/3]" not in output


def test_a_host_without_a_gpu_is_refused_with_the_remedy(tmp_path: Path) -> None:
    host = fake_host(tmp_path, available=False)
    status, output = run_script("run_gpu_suite.sh", "--out", tmp_path / "out", path=host)
    assert status == 1
    assert "finds no CUDA GPU" in output
    assert "bash scripts/test.sh" in output
    assert not (tmp_path / "out").exists()


@pytest.mark.long_matrix
def test_all_runs_go_on_after_a_failure_and_the_table_tells(tmp_path: Path) -> None:
    bodies = {"bad": "assert False", "slow": "import time; time.sleep(60)", "good": "pass"}
    for name, body in bodies.items():
        (tmp_path / f"test_{name}.py").write_text(f"def test_it():\n    {body}\n")
    status, output = run_script(
        "run_gpu_suite.sh",
        *("--out", tmp_path / "out", "--wheelhouse", tmp_path, "--test-limit", 8),
        *("--gpu-tests", tmp_path / "test_bad.py"),
        *("--tests", f"{tmp_path}/test_slow.py {tmp_path}/test_good.py"),
        path=fake_host(tmp_path, available=True),
    )
    assert status == 1
    table = (tmp_path / "out" / "summary.txt").read_text()
    assert output.endswith(table)
    rows = table.split("last line\n")[1].splitlines()
    for row, name, verdict in zip(rows, bodies, ("FAILED (1)", "TIME LIMIT", "ok"), strict=True):
        assert f"test_{name}" in row
        assert verdict in row
    assert "Fake GPU" in table
    assert len(list((tmp_path / "out").glob("*.log"))) == 3


@pytest.mark.long_matrix
def test_a_way_runs_its_suites_with_the_flags_that_it_names(tmp_path: Path) -> None:
    notes, python = tmp_path / "notes", tmp_path / "python"
    python.write_text(NOTING_PYTHON.format(notes=notes, python=sys.executable))
    python.chmod(0o755)
    status, output = run_script(
        "run_gpu_suite.sh",
        *("--out", tmp_path / "out", "--wheelhouse", tmp_path, "--gpu-tests", tmp_path / "none"),
        *("--ways", "flashinfer; triton, no graphs, no overlap"),
        path=fake_host(tmp_path, available=True),
        python=python,
    )
    assert status == 0, output
    assert "flashinfer left out" in output
    [line] = notes.read_text().splitlines()
    target = json.loads(line[: line.index("}") + 1])
    flags = ServerArgs(model_path="demo", **target)
    assert (flags.attention_backend, len(target)) == ("triton", 3)
    assert flags.disable_cuda_graph
    assert flags.disable_overlap_schedule
    suites = [word for word in line.split() if word.startswith("test/")]
    assert len(suites) == 14
    assert all((SCRIPTS.parent / suite).exists() for suite in suites)
    assert (tmp_path / "out" / "triton-no-graphs-no-overlap.log").exists()
