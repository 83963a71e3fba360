"""check_env says what a start says, and fails where a start fails."""

from __future__ import annotations

import resource
import socket
from importlib import metadata
from pathlib import Path

import pytest

import sgl_kernel._build
from fake_hub import lay_out
from sglang import check_env
from sglang.srt import host, platform
from sglang.srt.compile_cache import PARTS
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.model_config import resolve_model_path
from sglang.srt.platform import Platform
from sglang.srt.server_args import parse_cli

HOPPER = Platform("cuda", 8, 1 << 36, "Fake GPU", (9, 0))


def test_a_start_that_would_work_is_called_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_env.main(["--port", "0"]) == 0
    text = capsys.readouterr().out
    for name in ("sglang", "packages", "processor", "GPU", "kernels", "model", "port"):
        assert f"\n{name} " in f"\n{text}"
    assert "PROBLEM" not in text
    assert text.endswith("should start.\n")


@pytest.mark.parametrize(
    "flags",
    [
        ["--port", "{taken}"],
        ["--port", "0", "--model-path", "no-such-folder"],
        ["--port", "0", "--tool-call-parser", "no-such-parser"],
        ["--port", "0", "--allow-pickled-weights"],
        ["--port", "0", "--tokenizer-path", "no-such-folder"],
    ],
)
def test_what_prevents_a_start_is_said_as_the_start_says_it(
    flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [word.format(taken=taken.getsockname()[1]) for word in flags]
        assert run_server(parse_cli(["--model-path", "demo", *words])) == 1
        (said,) = capsys.readouterr().err.splitlines()
        assert check_env.main(words) == 1
    assert f"PROBLEM: {said.removeprefix('sglang: error: ')}\n" in capsys.readouterr().out


def test_a_model_of_the_hub_is_looked_up_as_the_start_does(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lay_out(tmp_path, "someone/small", resolve_model_path("demo"))
    flags = ["--port", "0", "--download-dir", str(tmp_path), "--model-path", "someone/small"]
    assert check_env.main(flags) == 0
    assert "someone/small on " in capsys.readouterr().out


def test_flags_that_the_scheduler_would_refuse_are_problems(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert check_env.main(["--port", "0", "--context-length", "999999"]) == 1
    assert "PROBLEM: --context-length 999999" in capsys.readouterr().out


def test_each_package_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert check_env.main(["--port", "0"]) == 0
    (row,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("packages")]
    names = [word.split()[0] for word in row.removeprefix("packages").split(", ")]
    assert len(names) == len(set(names))


def test_a_missing_package_is_a_problem_with_the_command_that_installs_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needed = ["no-such-package>=1", "numpy>=1", "other; extra == 'dev'"]
    monkeypatch.setattr(metadata, "requires", lambda name: needed)
    assert check_env.main(["--port", "0"]) == 1
    text = capsys.readouterr().out
    assert "PROBLEM: no-such-package missing: pip install no-such-package" in text
    assert "other" not in text


def test_a_low_limit_of_open_files_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (64, 128))
    assert check_env.main(["--port", "0"]) == 0
    assert "note: 128 open files do not suffice" in capsys.readouterr().out


def test_a_gpu_without_kernels_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_library(architecture: str) -> str:
        raise sgl_kernel.KernelUnavailableError(f"No nvcc for {architecture}.")

    monkeypatch.setattr(Platform, "probe", lambda: HOPPER)
    monkeypatch.setattr(platform, "free_bytes", lambda device: 3 << 30)
    monkeypatch.setattr(sgl_kernel._build, "library_state", no_library)
    for variable in PARTS:  # which it would set
        monkeypatch.setenv(variable, "somewhere")
    assert check_env.main(["--port", "0"]) == 0
    text = capsys.readouterr().out
    assert "Fake GPU, 3.0 GiB free" in text
    assert "note: Sampling is slower without the CUDA kernels. No nvcc for 90a.\n" in text


def test_a_driver_without_a_torch_for_it_is_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(host, "driver_version", lambda: "NVRM version 580")
    monkeypatch.setattr(Platform, "probe", lambda: Platform("cpu", 2, 1 << 33, "cpu"))
    assert check_env.main(["--port", "0"]) == 0
    assert "install a torch with CUDA" in capsys.readouterr().out
