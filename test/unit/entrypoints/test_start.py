"""The start of a server: what cannot be had is one line and exit code 1, before any process."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fake_hub import fake_hub, lay_out, reach
from scheduler_infos import scheduler_info
from serving_utils import make_model_dir
from sglang import Engine, launch_server
from sglang.srt.entrypoints import server_process
from sglang.srt.entrypoints.children import CHILD_MODULES, Child, child_environ
from sglang.srt.entrypoints.launch import FrontendChannels, LaunchError, ProcessTree
from sglang.srt.entrypoints.limits_from_flags import limits_from_flags
from sglang.srt.entrypoints.server_process import run_server
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.messages.ipc import IpcAddresses
from sglang.srt.model_config import load_model_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import load_tokenizer

INFO = scheduler_info(context_len=50)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ServerArgs, int]]:
    """The arguments and the port of each server that would have started."""
    servers: list[tuple[ServerArgs, int]] = []

    class Server:
        def __init__(self, args: ServerArgs, _: Any, listener: socket.socket, __: Any) -> None:
            servers.append((args, listener.getsockname()[1]))

        async def run(self) -> int:
            return 0

    monkeypatch.setattr(server_process, "_Server", Server)
    monkeypatch.setattr(server_process, "configure_logging", lambda *_: None)
    return servers


def write(text: str) -> Callable[[Path], Any]:
    return lambda path: path.write_text(text)


BAD_CONFIGS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pipe": (os.mkfifo, "no regular file"),
    "endless": (lambda path: path.symlink_to("/dev/zero"), "no regular file"),
    "deep": (write("[" * 200_000), "nested too deeply"),
}
BAD_FLAGS = {"port": 99_999, "random_seed": 10**30, "num_threads": 0, "stream_interval": -1}


def check_one_line(text: str, *words: str) -> None:
    (line,) = text.splitlines()
    assert line.startswith("sglang: error: ")
    for word in words:
        assert word in line


@pytest.mark.parametrize(("make", "said"), BAD_CONFIGS.values(), ids=list(BAD_CONFIGS))
def test_a_config_that_cannot_be_read_is_one_line(
    make: Callable[[Path], Any],
    said: str,
    tmp_path: Path,
    started: list[tuple[ServerArgs, int]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = make_model_dir(tmp_path / "model") / "config.json"
    config.unlink()
    make(config)
    assert run_server(ServerArgs(model_path=str(tmp_path / "model"), port=0)) == 1
    check_one_line(capsys.readouterr().err, "config.json", said)
    with pytest.raises(ValueError, match=said):
        Engine(model_path=str(tmp_path / "model"))
    assert not started


@pytest.mark.parametrize("name", BAD_FLAGS)
def test_a_number_that_cannot_be_is_one_line(
    name: str, started: list[tuple[ServerArgs, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    flags = {"model_path": "demo", name: BAD_FLAGS[name]}
    assert run_server(ServerArgs(**flags)) == 1
    check_one_line(capsys.readouterr().err, f"--{name.replace('_', '-')} {BAD_FLAGS[name]} must be")
    with pytest.raises(ValueError, match="must be a whole number"):
        Engine(**flags)
    assert not started


def test_port_0_becomes_the_port_that_is_listened_on(
    started: list[tuple[ServerArgs, int]],
) -> None:
    assert run_server(ServerArgs(model_path="demo", port=0)) == 0
    ((args, port),) = started
    assert args.port == port > 0


def test_a_name_of_the_hub_is_what_clients_see_and_its_folder_what_is_served(
    started: list[tuple[ServerArgs, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    snapshot = lay_out(tmp_path / "hub", "owner/model", make_model_dir(tmp_path / "model"))
    flags = {"model_path": "owner/model", "load_format": "dummy", "port": 0}
    assert run_server(ServerArgs(**flags)) == 0
    assert run_server(ServerArgs(**flags, served_model_name="mine")) == 0
    ((first, _), (second, _)) = started
    assert (first.model_path, first.served_model_name) == (str(snapshot), "owner/model")
    assert (second.model_path, second.served_model_name) == (str(snapshot), "mine")


def test_what_can_be_refused_is_refused_before_weights_are_fetched(
    started: list[tuple[ServerArgs, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    folder = make_model_dir(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(b"weights")
    other = make_model_dir(tmp_path / "other")
    config = (other / "config.json").read_text().replace("LlamaForCausalLM", "OtherForCausalLM")
    (other / "config.json").write_text(config)
    with (
        fake_hub({"owner/model": folder, "owner/other": other}) as hub,
        socket.create_server(("127.0.0.1", 0)) as busy,
    ):
        reach(hub, monkeypatch)
        port = busy.getsockname()[1]
        for name, said in (
            ("owner/model", "Cannot listen on"),
            ("owner/other", "OtherForCausalLM"),
        ):
            assert run_server(ServerArgs(model_path=name, port=port)) == 1
            check_one_line(capsys.readouterr().err.splitlines()[-1], said)
        assert run_server(ServerArgs(model_path="owner/model", port=port, num_threads=0)) == 1
        check_one_line(capsys.readouterr().err, "--num-threads")
    assert "config.json" in hub.fetched
    assert "model.safetensors" not in hub.fetched
    assert not started


def test_an_interrupted_download_ends_the_start_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    waiting: list[Child] = []

    def interrupt(args: ServerArgs, children: Mapping[str, Child]) -> int:
        waiting.extend(children.values())
        raise KeyboardInterrupt

    monkeypatch.setattr(server_process, "run_server", interrupt)
    assert launch_server.main(["--model-path", "owner/model"]) == 130
    check_one_line(capsys.readouterr().err, "interrupted")
    assert len(waiting) == 2
    assert all(child.process.poll() is not None for child in waiting)


def test_a_child_that_is_told_nothing_ends_without_a_word() -> None:
    command = [sys.executable, "-m", CHILD_MODULES["detokenizer"]]
    ended = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, env=child_environ(), timeout=60
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")


def test_children_that_end_while_they_wait_end_the_start_and_leave_nothing() -> None:
    waiting = {role: Child("keyword") for role in CHILD_MODULES}  # a module that does nothing
    for child in waiting.values():
        child.process.wait()
    tree = ProcessTree(ServerArgs(model_path="demo"), lambda reason: None, waiting)
    with pytest.raises(LaunchError, match="scheduler process ended with exit code 0"):
        tree.start()
    tree.stop()
    assert not tree.private_directory.exists()


def test_the_label_of_the_weights_is_known_before_the_scheduler_says_anything() -> None:
    args = ServerArgs(model_path="demo", weight_version="step-7")
    state = ServerState(args, load_model_config("demo"))
    assert state.weight_version == "step-7"
    addresses, directory = IpcAddresses.create()

    async def version() -> str:
        channels = FrontendChannels(addresses)
        tokenizer, limits = load_tokenizer(state.model_config.path), limits_from_flags(args, INFO)
        state.manager = channels.make_manager(tokenizer, limits, weight_version=args.weight_version)
        channels.close()
        return state.weight_version

    assert asyncio.run(version()) == "step-7"
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("visible", "gpu_id", "seen"),
    [(None, 0, None), (None, 2, "2"), ("4,6,7", 0, "4,6,7"), ("4,6,7", 2, "7")],
)
def test_children_see_one_gpu_of_those_that_there_are(
    visible: str | None, gpu_id: int, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert child_environ(gpu_id).get("CUDA_VISIBLE_DEVICES") == seen
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6,7")
    with pytest.raises(LaunchError, match=r"ask for GPU 3 .* it is '4,6,7'"):
        child_environ(3)
