"""The kernels on emulated threads, compiled once for all tests."""

from __future__ import annotations

import shutil
from types import ModuleType

import emulated_library
import pytest
from emulated_trees import EmulatedTrees

import sgl_kernel
from sgl_kernel._library import KernelLibrary


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulated_library.compile_emulation(tmp_path_factory.mktemp("emulated"))


@pytest.fixture(params=["reference", "emulated"])
def trees(request: pytest.FixtureRequest) -> ModuleType | EmulatedTrees:
    """The ops of draft trees: on CPU tensors, and the kernels' code."""
    if request.param == "reference":
        return sgl_kernel
    return EmulatedTrees(request.getfixturevalue("library"))
