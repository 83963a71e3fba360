"""The kernels on emulated threads, compiled once for all tests."""

from __future__ import annotations

import shutil

import emulated_library
import pytest

from sgl_kernel._library import KernelLibrary


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> KernelLibrary:
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    return emulated_library.compile_emulation(tmp_path_factory.mktemp("emulated"))
