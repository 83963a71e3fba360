"""run_gpu_matrix.py: what it reads from pytest, and that its ways are real."""

from __future__ import annotations

import importlib.util
import sys
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from code_shape import ROOT
from sglang.srt.registry import ATTENTION_BACKENDS
from sglang.srt.server_args import ServerArgs

TESTS = """
import pytest

def test_good():
    print("8 at once: 2 near-ties in 50 prompts")
    print("alone: 1 near-ties in 50 prompts")

def test_bad():
    assert 1 == 2, "one is not two"

@pytest.fixture
def broken():
    raise RuntimeError

def test_error(broken): ...

def test_skipped():
    pytest.skip("no")
"""


@pytest.fixture(autouse=True)
def quick_pytest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runs under test load no plugins that take seconds."""
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:schemathesis -p no:hypothesispytest")


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / "scripts/run_gpu_matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_counts_of_a_run(matrix: Any, tmp_path: Path) -> None:
    path = tmp_path / "test_some.py"
    path.write_text(TESTS)
    found = matrix.run({"device": "cpu"}, [str(path)], num_workers=1, limit_s=60, gpu="")
    assert found["tests"] == 4
    assert found["skipped"] == 1
    messages = {name.split("::")[1]: text for name, text in found["failed_tests"].items()}
    assert sorted(messages) == ["test_bad", "test_error"]
    assert "one is not two" in messages["test_bad"]
    assert "RuntimeError" in messages["test_error"]
    assert [name.split(".")[-1] for name in found["seconds_by_file"]] == ["test_some"]
    assert found["near_ties"] == 3


def test_a_run_without_tests_is_a_failure(matrix: Any, tmp_path: Path) -> None:
    found = matrix.run({"device": "cpu"}, [str(tmp_path / "nothing.py")], 1, 60, "")
    assert found["tests"] == 0
    assert not matrix.is_good(found)
    assert not matrix.is_good({"tests": 3, "skipped": 3, "failed_tests": {}})
    assert not matrix.is_good({"tests": 3, "skipped": 0, "failed_tests": {"a": "b"}})
    assert matrix.is_good({"tests": 3, "skipped": 2, "failed_tests": {}})


def test_ways_run_on_the_gpus_that_the_caller_may_use(
    matrix: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5a")
    assert matrix.visible_gpus() == ["3", "GPU-5a"]
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for count, names in ((2, ["0", "1"]), (0, [""])):
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        assert matrix.visible_gpus() == names


def test_every_way_names_flags_and_every_suite_exists(matrix: Any) -> None:
    ways = [way for name, way in matrix.WAYS.items() if name != matrix.KERNELS]
    backends = {way["attention_backend"] for way in ways}
    assert backends == set(ATTENTION_BACKENDS.names)
    flags = {entry.name for entry in fields(ServerArgs)}
    assert all(way.keys() <= flags for way in ways)
    assert all((ROOT / path).exists() for name in matrix.WAYS for path in matrix.suites_of(name))


def test_ways_of_a_backend_that_is_not_installed_are_left_out(
    matrix: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(matrix, "run", lambda *_: {"tests": 1, "failed_tests": {}})
    monkeypatch.setattr(sys, "argv", ["matrix", "--ways", "flashinfer", "triton"])
    assert matrix.main() == 0
    printed = capsys.readouterr().out
    assert "left out: flashinfer-python is not installed" in printed
    assert "triton" in printed
    monkeypatch.setattr(sys, "argv", ["matrix", "--ways", "flashinfer"])
    assert matrix.main() == 1, "Nothing has run."
