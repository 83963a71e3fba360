"""`sglang NAME` and `python -m sglang NAME`."""

from __future__ import annotations

import subprocess
import sys
from importlib import import_module

import pytest

from sglang import __version__, launch_server
from sglang.__main__ import COMMANDS, main


class Recorder:
    """A `main` that notes what it gets."""

    def __init__(self, calls: list[list[str]]) -> None:
        self._calls = calls

    def __call__(self, argv: list[str]) -> int:
        self._calls.append(argv)
        return 7


def test_each_command_hands_its_flags_to_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, command in COMMANDS.items():
        calls: list[list[str]] = []
        monkeypatch.setattr(import_module(command.module), "main", Recorder(calls))
        assert main([name, "--port", "5"]) == 7
        assert main([name.replace("-", "_")]) == 7
        assert calls == [["--port", "5"], []]


def test_an_unknown_command_gets_the_nearest_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["server"]) == 2
    assert "unknown command server, did you mean serve?" in capsys.readouterr().err
    assert main([]) == 2
    assert "usage: sglang COMMAND" in capsys.readouterr().err


@pytest.mark.parametrize("word", ["--version", "-V", "version"])
def test_the_version_is_that_of_the_package(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([word]) == 0
    with pytest.raises(SystemExit) as end:
        launch_server.main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"sglang-adaptive {__version__}\n" * 2


@pytest.mark.parametrize("name", ["serve", "check-env"])
def test_what_a_command_refuses_is_said_in_its_name(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([name, "--model-path", "demo", "--prot", "5"])
    assert end.value.code == 2
    said = f"sglang {name}: error: unknown flag --prot, did you mean --port?\n"
    assert said in capsys.readouterr().err


def test_the_package_runs_as_a_module_and_lists_its_commands() -> None:
    command = [sys.executable, "-m", "sglang", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert all(f"  {name} " in text for name in COMMANDS)
