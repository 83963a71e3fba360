"""`--dp-size`: how flags and the machine are divided, and how the processes end, with a router that
is a stand-in, and servers that are none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

from code_shape import ROOT
from serving_utils import wait_until
from sglang import Engine
from sglang.srt.entrypoints import replicas
from sglang.srt.entrypoints.launch_error import LaunchError
from sglang.srt.entrypoints.replica_flags import ReplicaFlags, parse_serve
from sglang.srt.entrypoints.replicas import ReplicaPlan, Replicas, make_plan, run_replicas
from sglang.srt.entrypoints.router_child import router_settings
from sglang.srt.host import Host
from sglang.srt.server_args import ServerArgs

FAKE = ROOT / "test/support/fake_router"
MODEL = ("--model-path", "demo")
URLS = ("http://127.0.0.1:5001", "http://127.0.0.1:5002")


def loaded_router() -> list[str]:
    return [name for name in sys.modules if name.split(".")[0] == "sglang_router"]


def without_router(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in loaded_router():
        monkeypatch.delitem(sys.modules, name)


@pytest.fixture
def _router(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    without_router(monkeypatch)
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(FAKE))
    yield
    for name in loaded_router():
        del sys.modules[name]  # the stand-in; the real one comes back, if it was there


# ---------------------------------------------------------------- flags


@pytest.mark.parametrize("name", ["--dp-size", "--dp", "--data-parallel-size"])
def test_flags_of_the_router_stay_together(name: str) -> None:
    words = [*MODEL, "--router-policy", "random", "--port", "5", name, "3", "--router-mini-lb"]
    args, flags = parse_serve(words)
    assert args == ServerArgs(model_path="demo", port=5)
    assert flags == ReplicaFlags(3, ("--router-policy", "random", "--router-mini-lb"))


def test_a_file_of_flags_may_have_the_number(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text("dp-size: 2\nport: 5\n")
    args, flags = parse_serve([*MODEL, "--config", str(file)])
    assert (args.port, flags) == (5, ReplicaFlags(2))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--dp 0", "must be a whole number from 1 to 64"),
        ("--dp 2.5", "must be a whole number from 1 to 64"),
        ("--router-policy random", "is for the router of --dp-size 2 and more"),
        ("--dp 2 --prot 5", "did you mean --port?"),
    ],
)
def test_a_wrong_flag_is_refused(line: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parse_serve([*MODEL, *line.split()])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_an_engine_is_one_server() -> None:
    with pytest.raises(ValueError, match=r"^dp_size=2: .*`sglang serve`"):
        Engine(model_path="demo", dp_size=2)


def test_without_the_package_one_line_names_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_router(monkeypatch)
    monkeypatch.setitem(sys.modules, "sglang_router", None)
    args = ServerArgs(model_path="demo", device="cpu", port=0)
    assert run_replicas(args, ReplicaFlags(2)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "pip install 'sglang-router" in line


@pytest.mark.usefixtures("_router")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--router-mini-lb",), "cannot be with --dp-size"),
        (("--router-polcy", "random"), "did you mean --router-policy?"),
    ],
)
def test_what_the_router_cannot_have_is_refused(
    words: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises((SystemExit, LaunchError)) as end:
        router_settings(ServerArgs(model_path="m"), words, URLS, 7)
    assert said in f"{end.value} {capsys.readouterr().err}"


@pytest.mark.usefixtures("_router")
def test_keys_origins_and_times_of_the_servers_are_those_of_the_router() -> None:
    args = ServerArgs(model_path="m", api_key="k", admin_api_key="a", shutdown_timeout_s=2.5)
    found = router_settings(args, ["--router-policy", "random"], URLS, 7)
    assert found["api_key"] == "k"
    assert found["control_plane_api_keys"] == [("admin", "admin", "a", "admin")]
    assert found["cors_allowed_origins"] == ["http://127.0.0.1:30000"]  # none would mean all
    assert found["shutdown_grace_period_secs"] == 3
    assert (found["host"], found["port"]) == ("127.0.0.1", 30000)
    assert (found["policy"], found["worker_urls"]) == ("random", [*URLS])
    assert (found["prometheus_port"], found["log_level"]) == (7, "warn")
    args = ServerArgs(model_path="m", allowed_origins="https://a.example")
    words = ["--router-prometheus-port=9", "--router-log-level", "debug"]
    found = router_settings(args, words, URLS, 7)
    assert found["cors_allowed_origins"] == ["https://a.example"]
    assert (found["prometheus_port"], found["log_level"]) == (9, "debug")
    assert not {*found["control_plane_api_keys"]}
    assert found["api_key"] is None


# ---------------------------------------------------------------- division


@pytest.fixture
def _four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    host = Host(frozenset({"cpu", "cuda"}), 4, 1 << 34)
    monkeypatch.setattr(replicas.Host, "probe", lambda: host)
    monkeypatch.setattr(replicas, "check_start", lambda args: (Folders(), None))


class Folders:
    """Stands for the folders of a model whose weights are there."""

    def with_weights(self) -> None:
        """Fetches nothing."""


@pytest.mark.usefixtures("_router", "_four_cores")
def test_each_server_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7,6,5,4,3")
    args = ServerArgs(model_path="demo", tp_size=2, base_gpu_id=1, port=0)
    plan = make_plan(args, ReplicaFlags(2))
    assert [each.base_gpu_id for each in plan.servers] == [1, 3]
    assert {each.device for each in plan.servers} == {"cuda"}
    ports = {each.port for each in plan.servers}
    assert len(ports | {plan.settings["port"], plan.settings["prometheus_port"]}) == 4
    assert plan.settings["worker_urls"] == [each.url() for each in plan.servers]
    with pytest.raises(LaunchError, match=r"ask for GPU 6 .*CUDA_VISIBLE_DEVICES"):
        make_plan(args, ReplicaFlags(3))


@pytest.mark.usefixtures("_router", "_four_cores")
@pytest.mark.parametrize(("tp_size", "wished", "expected"), [(1, None, 2), (2, None, 1), (1, 6, 3)])
def test_servers_share_the_cores(tp_size: int, wished: int | None, expected: int) -> None:
    args = ServerArgs(
        model_path="demo", device="cpu", tp_size=tp_size, num_threads=wished, host="0.0.0.0"
    )
    plan = make_plan(args, ReplicaFlags(2))
    assert [each.num_threads for each in plan.servers] == [expected] * 2
    assert {(each.host, each.base_gpu_id) for each in plan.servers} == {("127.0.0.1", 0)}
    assert plan.settings["host"] == "0.0.0.0"


# ---------------------------------------------------------------- processes

PROGRAM = "import time; time.sleep(60)"


class FakeServers:
    """Starts processes that are no servers, and says that they are ready."""

    def __init__(self, program_of_1: str = PROGRAM) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._program_of_1 = program_of_1

    def start(self, args: ServerArgs, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
        program = self._program_of_1 if environ["SGLANG_DP_RANK"] == "1" else PROGRAM
        self.processes.append(subprocess.Popen([sys.executable, "-c", program]))
        return self.processes[-1]


@pytest.fixture
def _signals() -> Iterator[None]:
    kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


def run(servers: FakeServers, monkeypatch: pytest.MonkeyPatch, port: int = 0) -> int:
    monkeypatch.setattr(replicas, "start_server", servers.start)
    monkeypatch.setattr(replicas, "is_ready", lambda args: True)
    monkeypatch.setattr(replicas, "POLL_S", 0.02)
    *ports, free = replicas._free_ports(3)
    args = tuple(ServerArgs(model_path="demo", port=each) for each in ports)
    at = ServerArgs(model_path="demo", port=port or free)
    settings = router_settings(at, (), [each.url() for each in args], 7)
    return Replicas(ReplicaPlan(at.url(), args, settings)).run()


def children() -> list[psutil.Process]:
    return [child for child in psutil.Process().children() if child.status() != "zombie"]


@pytest.mark.usefixtures("_router", "_signals")
def test_a_server_that_ends_while_starting_ends_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers("raise SystemExit(3)")
    assert run(servers, monkeypatch) == 1
    said = capsys.readouterr().err
    assert "The server 1 (http://127.0.0.1:" in said
    assert "ended with exit code 3; all others stop." in said
    assert [process.returncode for process in servers.processes] == [-signal.SIGTERM, 3]


@pytest.mark.usefixtures("_router", "_signals")
@pytest.mark.parametrize("victim", ["router", "server", "none"])
def test_all_end_with_one_or_with_a_signal(
    victim: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = FakeServers()

    def end_one(*_: object) -> None:
        (router,) = (child for child in children() if "router_child" in child.cmdline()[-1])
        if victim == "router":
            router.kill()
        elif victim == "server":
            servers.processes[0].kill()
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(replicas.logger, "info", end_one)  # they are ready
    before = {child.pid for child in children()}
    assert run(servers, monkeypatch) == (0 if victim == "none" else 1)
    assert {child.pid for child in children()} == before
    said = capsys.readouterr().err
    assert ("signal 9; all others stop." in said) == (victim != "none")


@pytest.mark.usefixtures("_signals")
def test_a_signal_while_starting_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = FakeServers()
    monkeypatch.setattr(replicas, "start_server", servers.start)
    monkeypatch.setattr(replicas, "is_ready", lambda args: False)
    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    args = tuple(ServerArgs(model_path="demo", port=port) for port in (1, 2))
    assert Replicas(ReplicaPlan("", args, {})).run() == 0
    assert [process.returncode for process in servers.processes] == [-signal.SIGTERM] * 2


@pytest.mark.usefixtures("_router")
def test_the_router_does_not_outlive_a_launcher_that_is_killed() -> None:
    settings: dict[str, Any] = {"port": replicas._free_ports(1)[0], "host": "127.0.0.1"}
    program = (
        "import os, time\n"
        "from sglang.srt.entrypoints.children import start_child\n"
        "from sglang.srt.entrypoints.router_child import MODULE\n"
        f"told = {{'parent': os.getpid(), 'settings': {settings!r}}}\n"
        "print(start_child(MODULE, told).pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    paths = os.pathsep.join((str(FAKE), str(ROOT / "python")))
    launcher = subprocess.Popen(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert launcher.stdout is not None
    router = psutil.Process(int(launcher.stdout.readline()))
    wait_until(lambda: bool(router.net_connections()))  # it listens
    launcher.kill()
    launcher.communicate()
    deadline = time.monotonic() + 5
    while router.is_running() and router.status() != "zombie":
        assert time.monotonic() < deadline
        time.sleep(0.01)
