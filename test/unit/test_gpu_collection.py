"""test/gpu without FlashInfer: what names it is skipped with the reason, and all else is there. No
GPU is needed, since a skipped test runs nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from code_shape import ROOT
from sglang.srt.layers.attention import flashinfer_backend

# A plugin of pytest: there is a GPU and no FlashInfer, as far as anybody asks.
PLUGIN = """
import importlib.util
import torch

torch.cuda.is_available = lambda: True
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "flashinfer" else find(name, *rest)
"""


def pytest_in(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Runs pytest over test/gpu, all cases, with the plugin written to `folder`."""
    (folder / "fake_host.py").write_text(PLUGIN)
    command = [sys.executable, "-m", "pytest", "-p", "fake_host", "-p", "no:cacheprovider"]
    paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        [*command, "test/gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TEST_TURN": "all"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.long_matrix
def test_what_names_flashinfer_is_skipped_with_the_reason(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    result = pytest_in(tmp_path, "-q", "-k", "flashinfer", f"--junitxml={report}")
    assert result.returncode == 0, result.stdout
    cases = list(ElementTree.parse(report).iter("testcase"))
    for case in cases:
        skipped = case.find("skipped")
        assert skipped is not None, case.attrib
        assert "flashinfer-python is not installed" in f"{skipped.get('message')}{skipped.text}"
    files = {str(case.get("classname") or case.get("name")).split(".")[-1] for case in cases}
    assert files >= {"test_decode", "test_graphs", "test_attention_kernels"}
    assert any("test_flashinfer_backend" in str(case.attrib) for case in cases)


def test_a_host_that_cannot_compile_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flashinfer_backend.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(flashinfer_backend, "missing_tools", lambda: ["ninja"])
    assert "no ninja" in str(flashinfer_backend.why_not_here())
    monkeypatch.setattr(flashinfer_backend, "missing_tools", list)
    assert flashinfer_backend.why_not_here() is None
