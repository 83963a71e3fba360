"""Frames that are no messages; the directory of the sockets: short enough, its user's own, and gone
when a start fails."""

from __future__ import annotations

import asyncio
import random
import stat
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from serving_utils import make_model_dir
from sglang.srt.entrypoints import launch
from sglang.srt.entrypoints.launch import LaunchError, ProcessTree
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.messages import ipc
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.ipc import AsyncReceiver, IpcAddresses, Receiver
from sglang.srt.messages.requests import ToScheduler
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


def broken_frames() -> list[bytes]:
    """Frames that are no message for a scheduler, such as one whose text is not UTF-8, one that is
    nested deeply, and many that a flipped byte has spoilt."""
    good = msgspec.msgpack.encode(AbortReq(req_ids=[1], aborted_message="over"))
    chooser = random.Random(0)
    spoilt = [b"", b"\xc1", good[:-1], good.replace(b"over", b"\xff\xff\xff\xff")]
    spoilt.append(b"\x91" * 100_000 + b"\x90")
    for _ in range(200):
        frame = bytearray(good)
        frame[chooser.randrange(len(frame))] = chooser.randrange(256)
        spoilt.append(bytes(frame))
    return [frame for frame in spoilt if not is_message(frame)]


def is_message(frame: bytes) -> bool:
    try:
        msgspec.msgpack.decode(frame, type=ToScheduler)
    except Exception:  # noqa: BLE001 - whatever it is
        return False
    return True


@pytest.mark.parametrize("kind", ["receive", "drain", "async"])
def test_a_frame_that_is_no_message_is_dropped_with_a_line(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = f"ipc://{tmp_path}/s"
    message, frames = AbortReq(req_ids=[7]), broken_frames()
    assert len(frames) > 100
    with zmq.Context.instance().socket(zmq.PUSH) as socket:
        socket.connect(address)
        for frame in (*frames, msgspec.msgpack.encode(message)):
            socket.send(frame)
        if kind == "async":
            found = asyncio.run(receive_one(address))
        else:
            receiver: Receiver[Any] = Receiver(address, ToScheduler)
            found = receiver.receive() if kind == "receive" else drain_one(receiver)
            receiver.close()
    assert found == message
    dropped = [record for record in caplog.records if "dropped" in record.message]
    assert len(dropped) == len(frames)
    assert not any(record.exc_info for record in dropped)


async def receive_one(address: str) -> Any:
    receiver: AsyncReceiver[Any] = AsyncReceiver(address, ToScheduler)
    try:
        return await asyncio.wait_for(receiver.receive(), 10)
    finally:
        receiver.close()


def drain_one(receiver: Receiver[Any]) -> Any:
    while receiver.wait(10):
        for found in receiver.drain():
            return found
    raise AssertionError("No message.")
