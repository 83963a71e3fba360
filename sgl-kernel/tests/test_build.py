"""Finding nvcc, compiling once, loading: with a stand-in for nvcc, and the real one if present."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from sgl_kernel import KernelUnavailableError, _build, build
from sgl_kernel._library import KernelLibrary

_FAKE_NVCC = """#!/bin/sh
echo "$@" >>"{log}"
case " $* " in *" --version "*) echo "Fake compiler, release 1.0"; exit 0 ;; esac
if [ -e "{broken}" ]; then echo "error: this source is broken" >&2; exit 2; fi
sleep 0.05
while [ "$1" != -o ]; do shift; done
printf compiled >"$2"
"""


class FakeToolkit:
    """A folder with bin/nvcc, which notes its calls."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.log = root / "calls.log"
        self.broken = root / "broken"
        nvcc = root / "bin" / "nvcc"
        nvcc.parent.mkdir(parents=True)
        nvcc.write_text(_FAKE_NVCC.format(log=self.log, broken=self.broken))
        nvcc.chmod(0o755)

    def compiles(self) -> list[str]:
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [line for line in lines if "--version" not in line]


@pytest.fixture
def toolkit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeToolkit:
    """CUDA_HOME points at a fake toolkit, and the cache and the package's library are empty."""
    toolkit = FakeToolkit(tmp_path / "toolkit")
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root))
    monkeypatch.setenv("SGL_KERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(_build, "PACKAGED_LIBRARY_DIR", tmp_path / "packaged")
    return toolkit


@pytest.fixture
def plan(toolkit: FakeToolkit) -> _build.BuildPlan:
    return _build.BuildPlan(_build.find_toolchain(), ("90a",), _build.find_source_root())


def test_the_second_request_finds_the_library_in_the_cache(
    toolkit: FakeToolkit, plan: _build.BuildPlan
) -> None:
    library = _build.cached_library(plan)
    num_sources = len(_build.cuda_sources(plan.source_root))
    assert library.read_text() == "compiled"
    assert len(toolkit.compiles()) == num_sources + 1
    assert _build.cached_library(plan) == library
    assert len(toolkit.compiles()) == num_sources + 1


def test_of_many_requests_at_once_one_compiles(
    toolkit: FakeToolkit, plan: _build.BuildPlan
) -> None:
    threads = [threading.Thread(target=_build.cached_library, args=(plan,)) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len([call for call in toolkit.compiles() if "-shared" in call]) == 1


def test_nothing_but_the_results_is_left_beside_the_library(plan: _build.BuildPlan) -> None:
    folder = _build.cached_library(plan).parent
    assert {path.name for path in folder.iterdir()} == {
        "build.lock",
        _build.LIBRARY_NAME,
        _build.MANIFEST_NAME,
    }


def test_the_key_depends_on_all_that_the_library_depends_on(
    plan: _build.BuildPlan, tmp_path: Path
) -> None:
    sources = tmp_path / "sources"
    for name in ("csrc", "include"):
        shutil.copytree(plan.source_root / name, sources / name)
    copied = replace(plan, source_root=sources)
    assert copied.key() == plan.key()
    keys = {plan.key(), replace(plan, architectures=("80",)).key()}
    keys.add(replace(plan, toolchain=replace(plan.toolchain, version="2.0")).key())
    header = next((sources / "include").rglob("*.cuh"))
    header.write_text(header.read_text() + "\n")
    keys.add(copied.key())
    assert len(keys) == 4


def test_sources_of_one_name_in_two_folders_are_both_compiled_and_linked(
    toolkit: FakeToolkit, plan: _build.BuildPlan, tmp_path: Path
) -> None:
    sources = tmp_path / "sources"
    for place in ("csrc/one.cu", "csrc/inner/one.cu", "include/one.cuh"):
        (sources / place).parent.mkdir(parents=True, exist_ok=True)
        (sources / place).write_text(place)
    copied = replace(plan, source_root=sources)
    _build.cached_library(copied)
    *compiles, link = toolkit.compiles()
    assert {call.split(" -c ")[1].split()[0] for call in compiles} == {
        str(sources / "csrc" / "one.cu"),
        str(sources / "csrc" / "inner" / "one.cu"),
    }
    assert len({word for word in link.split() if word.endswith(".o")}) == 2
    before = copied.key()
    (sources / "csrc" / "inner" / "one.cu").write_text("changed")
    assert copied.key() != before


def test_hopper_is_compiled_with_its_own_features(
    toolkit: FakeToolkit, plan: _build.BuildPlan
) -> None:
    _build.cached_library(plan)
    flag = "-gencode=arch=compute_90a,code=sm_90a"
    assert all(flag in call for call in toolkit.compiles())


def test_a_failed_compile_shows_the_compilers_message_and_leaves_no_library(
    toolkit: FakeToolkit, plan: _build.BuildPlan
) -> None:
    toolkit.broken.touch()
    with pytest.raises(KernelUnavailableError, match="this source is broken"):
        _build.cached_library(plan)
    toolkit.broken.unlink()
    assert _build.cached_library(plan).is_file()


def test_without_nvcc_the_error_names_the_remedies(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(KernelUnavailableError) as caught:
        _build.find_library("90a")
    for part in ("no compiled kernels", "CUDA_HOME", "CUDA toolkit", "sgl_kernel.build"):
        assert part in str(caught.value)


def test_an_nvcc_that_does_not_run_is_reported(toolkit: FakeToolkit) -> None:
    nvcc = toolkit.root / "bin" / "nvcc"
    nvcc.chmod(0o644)
    with pytest.raises(KernelUnavailableError, match="does not run"):
        _build.find_toolchain()


def test_a_build_ahead_of_time_is_found_without_nvcc(
    toolkit: FakeToolkit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    build.main(["--arch", "80", "90a", "--out", str(tmp_path / "packaged")])
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "nowhere"))
    monkeypatch.setenv("PATH", str(tmp_path))
    for architecture in ("80", "86", "90a"):
        assert _build.find_library(architecture).parent == tmp_path / "packaged"
    with pytest.raises(KernelUnavailableError, match="sm_80, sm_90a, not sm_100"):
        _build.find_library("100")


def test_the_state_says_where_the_library_comes_from_and_compiles_nothing(
    toolkit: FakeToolkit, plan: _build.BuildPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "nvcc compiles them at the first start" in _build.library_state("90a")
    assert toolkit.compiles() == []
    folder = _build.cached_library(plan).parent
    assert _build.library_state("90a") == f"compiled, in {folder}"
    with monkeypatch.context() as patch:  # a folder that cannot be looked into
        patch.setenv("SGL_KERNEL_CACHE_DIR", str(toolkit.root / ("x" * 300)))
        assert "nvcc compiles them at the first start" in _build.library_state("90a")
    _build.compile_library(plan, _build.PACKAGED_LIBRARY_DIR)
    assert _build.library_state("90a") == "compiled, in the install"
    monkeypatch.setenv("CUDA_HOME", str(toolkit.root / "nowhere"))
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(KernelUnavailableError, match="kernels for sm_90a, not sm_80"):
        _build.library_state("80")


def test_a_build_older_than_the_sources_is_not_used(toolkit: FakeToolkit, tmp_path: Path) -> None:
    build.main(["--arch", "90a", "--out", str(tmp_path / "packaged")])
    manifest = tmp_path / "packaged" / _build.MANIFEST_NAME
    content = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**content, "source_hash": "other"}))
    assert tmp_path / "cache" in _build.find_library("90a").parents


@pytest.mark.parametrize(
    ("architecture", "built", "covered"),
    [
        ("90a", ("90a",), True),
        ("90a", ("90",), True),
        ("90a", ("80",), False),
        ("89", ("80",), True),
        ("80", ("89",), False),
        ("100", ("90a", "100"), True),
        ("103", ("100",), True),
        ("120", ("100",), False),
    ],
)
def test_which_code_runs_where(architecture: str, built: tuple[str, ...], covered: bool) -> None:
    assert _build.is_covered(architecture, built) is covered


def test_gpus_before_ampere_are_refused_with_the_remedy() -> None:
    assert _build.architecture_of((9, 0)) == "90a"
    assert _build.architecture_of((8, 9)) == "89"
    with pytest.raises(KernelUnavailableError, match=r"sgl_kernel\.reference"):
        _build.architecture_of((7, 5))


def test_a_file_that_is_no_library_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "broken.so"
    path.write_text("not a library")
    with pytest.raises(KernelUnavailableError, match="does not load"):
        KernelLibrary(path)


ARCHITECTURES = ("80", "90a")  # the oldest one, and the newest one, whose features no other has


def test_the_real_build_covers_what_sources_ask_of_an_architecture() -> None:
    root = _build.find_source_root()
    sources = [*root.rglob("csrc/**/*.cu"), *root.rglob("include/**/*.cuh")]
    text = "".join(path.read_text() for path in sources)
    asked = re.findall(r"__CUDA_ARCH__\s*([<>=!]+\s*\d+)", text)
    assert set(asked) == {">= 900"}, "Build for one more in ARCHITECTURES."


@pytest.mark.long_matrix
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_real_compiler_makes_a_library_without_warnings_and_spills(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has all functions."""
    if shutil.which("nvcc") is None:
        pytest.skip("needs nvcc")
    messages: list[str] = []

    def run(command: list[str]) -> str:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        messages.append(result.stdout + result.stderr)
        return result.stdout

    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setattr(_build, "_FLAGS", (*_build._FLAGS, "-Xptxas", "-v"))
    monkeypatch.setattr(_build, "_run", run)
    plan = _build.BuildPlan(_build.find_toolchain(), (architecture,), _build.find_source_root())
    messages.clear()
    library = KernelLibrary(_build.compile_library(plan, tmp_path))
    assert library.num_chunks(4096) == 2
    assert library.num_chunks(128256) == 32
    with pytest.raises(RuntimeError, match="invalid argument"):
        library.check(1)
    spills = [line for message in messages for line in message.splitlines() if "spill" in line]
    assert len(messages) == len(_build.cuda_sources(_build.find_source_root())) + 1
    assert len(spills) > len(messages)
    assert all("warning" not in message for message in messages)
    assert all("0 bytes spill stores, 0 bytes spill loads" in line for line in spills)
