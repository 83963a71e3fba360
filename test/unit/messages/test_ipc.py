"""The directory of the sockets: short enough, its user's own, and gone when a start fails."""

from __future__ import annotations

import stat
import tempfile
from pathlib import Path

import pytest
import zmq

from serving_utils import make_model_dir
from sglang.srt.entrypoints import launch
from sglang.srt.entrypoints.launch import LaunchError, ProcessTree
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.messages import ipc
from sglang.srt.messages.ipc import IpcAddresses, Receiver
from sglang.srt.server_args import ServerArgs


@pytest.fixture
def long_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    directory = tmp_path / ("x" * 100)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    return directory


def test_path_too_long_for_sockets_falls_back(long_directory: Path) -> None:
    addresses, directory = IpcAddresses.create()
    try:
        assert stat.S_IMODE(Path(directory).stat().st_mode) == 0o700
        receiver: Receiver[int] = Receiver(addresses.detokenizer, int)
        receiver.close()
    finally:
        for path in Path(directory).iterdir():
            path.unlink()
        Path(directory).rmdir()
    assert not list(long_directory.iterdir())


def test_longest_path_that_fits_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = len(f"{tmp_path}/") + len("/sglang-12345678/detokenizer")
    for extra, fits in ((0, True), (1, False)):
        directory = tmp_path / ("y" * (zmq.IPC_PATH_MAX_LEN - used + extra))
        directory.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(directory))
        _, made = IpcAddresses.create()
        assert made.startswith(str(directory)) == fits
        Path(made).rmdir()


def test_no_place_for_sockets_is_one_line_that_names_tmpdir(
    long_directory: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(ipc, "FALLBACK_DIRECTORY", str(tmp_path / "nothing"))
    model = make_model_dir(tmp_path / "model")
    args = ServerArgs(model_path=str(model), load_format="dummy", port=0)
    with pytest.raises(LaunchError, match="TMPDIR"):
        ProcessTree(args, lambda reason: None)
    assert run_server(args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "TMPDIR" in line
    assert not list(long_directory.iterdir())


def test_sockets_that_cannot_be_made_leave_no_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    directory = tmp_path / "temporary"
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))

    def broken(*args: object) -> None:
        raise zmq.ZMQError(95, "Operation not supported")

    monkeypatch.setattr(launch, "AsyncReceiver", broken)
    model = make_model_dir(tmp_path / "model")
    args = ServerArgs(model_path=str(model), load_format="dummy", port=0)
    assert run_server(args) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "TMPDIR" in line
    assert not list(directory.iterdir())
