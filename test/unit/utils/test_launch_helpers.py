"""Says what launch scripts import: processes and ports, and what sends weights."""

from __future__ import annotations

import asyncio
import io
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from sent_weights import assert_same
from serving_utils import wait_until
from sglang import utils
from sglang.srt.entrypoints import engine
from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
from sglang.srt.utils import (
    MultiprocessingSerializer,
    assert_pkg_version,
    get_ip,
    get_open_port,
    is_port_available,
    kill_process_tree,
    set_ulimit,
)
from sglang.srt.utils.refused_names import RefusedName
from sglang.srt.weight_sync.utils import _preprocess_tensor_for_update_weights, update_weights

TREE = (
    "import subprocess, sys, time\n"
    "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
    "print('up', flush=True)\n"
    "time.sleep(60)\n"
)


def tree() -> tuple[subprocess.Popen[str], psutil.Process]:
    """A process, and one that it has started."""
    process = subprocess.Popen([sys.executable, "-c", TREE], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    [child] = psutil.Process(process.pid).children()
    return process, child


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_tree_is_killed_with_its_root() -> None:
    process, child = tree()
    kill_process_tree(process.pid)
    assert process.wait(10) < 0
    wait_until(lambda: is_gone(child), timeout_s=5)
    kill_process_tree(process.pid)  # nobody is there


def test_the_root_and_the_one_that_is_named_may_stay() -> None:
    process, child = tree()
    try:
        kill_process_tree(process.pid, include_parent=False, skip_pid=child.pid)
        assert not is_gone(child)
        kill_process_tree(process.pid, include_parent=False)
        wait_until(lambda: is_gone(child), timeout_s=5)
        assert process.poll() is None
    finally:
        utils.terminate_process(process)
    assert process.returncode is not None


def test_this_process_stays_unless_it_is_meant() -> None:
    with pytest.raises(SystemExit) as end:
        kill_process_tree(psutil.Process().pid, skip_pid=None)
    assert end.value.code == 0
    kill_process_tree()


def test_a_port_that_is_open_is_one() -> None:
    port = get_open_port()
    assert is_port_available(port)
    with closing(socket.create_server(("", port))):
        assert not is_port_available(port)
    assert not is_port_available(70_000)


def test_the_wished_port_is_taken_if_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    port = get_open_port()
    monkeypatch.setenv("SGLANG_PORT", str(port))
    assert get_open_port() == port
    with closing(socket.create_server(("", port))):
        assert get_open_port() > port


def test_the_address_is_one_or_what_the_operator_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert get_ip()
    monkeypatch.setenv("HOST_IP", "10.1.2.3")
    assert get_ip() == "10.1.2.3"


def test_versions_are_compared_as_numbers() -> None:
    assert_pkg_version("msgspec", "0.9", "Update it.")
    for name, version in (("msgspec", "999.1"), ("no-such-package", "1")):
        with pytest.raises(RuntimeError, match=r"Update it\."):
            assert_pkg_version(name, version, "Update it.")


def test_limits_are_never_lowered() -> None:
    set_ulimit(1)
    set_ulimit()
    io.BytesIO()  # files can still be opened


def test_a_server_that_ends_or_never_comes_is_noticed() -> None:
    url = f"http://127.0.0.1:{get_open_port()}"
    with pytest.raises(TimeoutError, match="not ready in"):
        utils.wait_for_server(url, timeout=0.01)
    process = utils.execute_shell_command('python -c "raise SystemExit(3)"')
    with pytest.raises(RuntimeError, match="exit code 3"):
        utils.wait_for_server(url, process=process)


@pytest.mark.parametrize(
    ("refused", "name", "remedy"),
    [
        (engine.run_scheduler_process, "run_scheduler_process", "leave the argument out"),
        (engine.init_tokenizer_manager, "init_tokenizer_manager", "leave the argument out"),
    ],
)
def test_what_runs_a_server_s_parts_elsewhere_says_what_to_use_instead(
    refused: RefusedName, name: str, remedy: str
) -> None:
    def set_attribute() -> None:
        refused.warmup_thread_args = ()

    for use in (lambda: refused(server_args=None), lambda: refused.Up, set_attribute):
        with pytest.raises(NotImplementedError, match=rf"^{name}.* is not here\..*{remedy}"):
            use()
    assert name in repr(refused)
    assert not hasattr(refused, "__wrapped__")


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    """The process group of a trainer of one process."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_a_tensor_that_is_spread_out_is_whole_for_an_update(one_process: None) -> None:
    plain = torch.arange(6.0)
    assert _preprocess_tensor_for_update_weights(plain) is plain
    spread = distribute_tensor(plain, init_device_mesh("cpu", (1,)), [Shard(0)])
    whole = _preprocess_tensor_for_update_weights(spread)
    assert type(whole) is torch.Tensor
    assert torch.equal(whole, plain)


class AsyncEngine:
    """As a trainer's own client of a server."""

    async def update_weights_from_tensor(self, request: Any) -> list[Any]:
        return [request]


class BlockingEngine:
    def update_weights_from_tensor(self, request: Any) -> list[Any]:
        return [request]


@pytest.mark.parametrize("engine", [AsyncEngine(), BlockingEngine()])
def test_what_trainers_send_weights_with_sends_what_a_server_reads(
    one_process: None, engine: Any
) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "infer_tp"))
    spread = distribute_tensor(torch.arange(6.0), mesh["infer_tp"], [Shard(0)])
    batch = [("a", torch.zeros(2, 3)), ("b", spread)]
    work = update_weights(engine, batch, "infer_tp", mesh, None, flush_cache=False)
    [request] = asyncio.run(work)
    assert isinstance(request, UpdateWeightsFromTensorReqInput)
    assert (request.load_format, request.flush_cache) == (None, False)
    [data] = request.serialized_named_tensors
    assert_same(
        dict(MultiprocessingSerializer.deserialize(data)),
        {"a": torch.zeros(2, 3), "b": torch.arange(6.0)},
    )
