"""Weights that a trainer, a real process with plain torch.distributed, broadcasts to a group."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from sglang.srt.control import bodies
from sglang.srt.weight_sync.weight_group import BACKENDS, DTYPES, TensorSpec, WeightGroup
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from utils import Setup, make_random_llama, make_runner

TIMEOUT_S = 20.0
SHORT_S = 0.7  # for what does not come
JOINED_S = 1.0  # where a trainer must join within it, before something does not come
SLACK_S = 1.0  # of a busy machine

# What RL trainers run on their side: nothing of this project. A process with torch loaded forks a
# trainer for each line that it reads, since loading takes a second.
TRAINERS = """
import json, os, signal, sys, threading, time
from datetime import timedelta
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from safetensors.torch import load_file

def train(port, rank, world_size, script):
    timeout = timedelta(seconds=30)
    store, rank, world_size = next(
        dist.rendezvous(f"tcp://127.0.0.1:{port}", rank, world_size, timeout=timeout)
    )
    store.set_timeout(timeout)
    def join():
        group, _ = c10d._new_process_group_helper(
            world_size, rank, [], "gloo", dist.PrefixStore("updates", store),
            group_name="updates", timeout=timeout,
        )
        c10d._world.pg_group_ranks[group] = {index: index for index in range(world_size)}
        return group
    group = None if "no group" in script else join()
    def send(*tensors):
        for tensor in tensors:
            dist.broadcast(tensor, src=0, group=group)
    exec(script, {**globals(), "send": send, "group": group})
    time.sleep(30)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    pid = os.fork()
    if pid == 0:
        try:
            train(**json.loads(line))
        finally:
            os._exit(0)
    print(pid, flush=True)
"""


def free_port() -> int:
    with closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@dataclass(frozen=True)
class Trainer:
    """Address of a trainer that listens, or does not."""

    port: int
    world_size: int = 2

    def join(self, **changes: Any) -> WeightGroup:
        arguments = {
            "master_address": "127.0.0.1",
            "master_port": self.port,
            "rank": 1,
            "world_size": self.world_size,
            "group_name": "updates",
            "backend": "gloo",
            "timeout_s": TIMEOUT_S,
        }
        return WeightGroup.join(**{**arguments, **changes})


@pytest.fixture(scope="module")
def trainers() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", TRAINERS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield process
        process.kill()


Start = Callable[..., Trainer]


@pytest.fixture
def start(trainers: subprocess.Popen[str]) -> Iterator[Start]:
    """Starts a trainer that joins its group, runs a script and waits."""
    pids: list[int] = []

    def start_one(
        script: str, world_size: int = 2, rank: int = 0, port: int | None = None
    ) -> Trainer:
        trainer = Trainer(port or free_port(), world_size)
        order = {"port": trainer.port, "rank": rank, "world_size": world_size, "script": script}
        assert trainers.stdin is not None
        assert trainers.stdout is not None
        print(json.dumps(order), file=trainers.stdin, flush=True)
        pids.append(int(trainers.stdout.readline()))
        return trainer

    yield start_one
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def specs(*shapes: tuple[int, ...], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(f"w{index}", dtype, shape) for index, shape in enumerate(shapes)]


def refusal(call: Callable[[], Any], within_s: float = SHORT_S) -> str:
    """The one line that a call is refused with in time."""
    start_time = time.monotonic()
    with pytest.raises(WeightUpdateError) as error:
        call()
    assert time.monotonic() - start_time < within_s + SLACK_S
    message = str(error.value)
    assert "\n" not in message
    assert len(message) < 700
    return message


# --- what comes through --------------------------------------------------------------------------


def test_a_model_takes_over_what_a_trainer_broadcasts(start: Start, tmp_path: Path) -> None:
    old, new = (make_random_llama(tmp_path / str(seed), seed=seed) for seed in (1, 2))
    file = new / "model.safetensors"
    trainer = start(f"send(*[t for _, t in sorted(load_file({str(file)!r}).items())])")
    runner, expected = make_runner(old, Setup()), make_runner(new, Setup())
    wanted = [
        TensorSpec(name, "torch.float32", tuple(tensor.shape))
        for name, tensor in sorted(expected.weights.reader.from_file(str(file)).items())
    ]
    group = trainer.join()
    runner.weights.apply(runner.weights.reader.from_tensors(group.receive(wanted)))
    group.close()
    for (name, one), (_, other) in zip(
        runner.model.named_parameters(), expected.model.named_parameters(), strict=True
    ):
        assert torch.equal(one, other), name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "torch.float16"])
def test_values_come_in_order_with_their_types(start: Start, dtype: str) -> None:
    kind = dtype.removeprefix("torch.")
    group = start(
        f"dtype = torch.{kind}\n"
        "send(torch.arange(6.).view(2, 3).to(dtype), torch.zeros(0, dtype=dtype),"
        " torch.tensor(7., dtype=dtype), torch.full((3,), torch.nan, dtype=dtype))\n"
        ""
    ).join()
    received = dict(group.receive(specs((2, 3), (0,), (), (3,), dtype=dtype)))
    assert {tensor.dtype for tensor in received.values()} == {getattr(torch, kind)}
    assert received["w0"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert received["w1"].shape == (0,)
    assert received["w2"] == 7
    assert received["w3"].isnan().all()
    group.close()


def test_a_table_of_tokens_comes_with_values_beyond_32_bits(start: Start) -> None:
    group = start("send(torch.tensor([-3, 2**40]))").join()
    ((_, received),) = group.receive(specs((2,), dtype="torch.int64"))
    assert received.tolist() == [-3, 2**40]
    group.close()


def test_several_updates_come_through_one_group_and_another_follows(start: Start) -> None:
    for _ in range(2):
        group = start("send(torch.ones(2)); send(torch.ones(2) * 2)").join()
        for value in (1, 2):
            ((_, tensor),) = group.receive(specs((2,)))
            assert tensor.tolist() == [value] * 2
        group.close()
        group.close()


def test_several_receivers_get_the_same(start: Start, tmp_path: Path) -> None:
    trainer = start("send(torch.arange(5.), torch.arange(3.))", world_size=3)
    file = tmp_path / "received"
    start(
        "first, last = torch.zeros(5), torch.zeros(3)\nsend(first, last)\n"
        f"with open({str(file)!r}, 'w') as out: out.write(str([*first.tolist(), *last.tolist()]))",
        world_size=3,
        rank=2,
        port=trainer.port,
    )
    group = trainer.join()
    received = [tensor.tolist() for _, tensor in group.receive(specs((5,), (3,)))]
    assert received == [[0, 1, 2, 3, 4], [0, 1, 2]]
    _await(lambda: file.exists() and file.read_text() == str([*received[0], *received[1]]))
    group.close()


def test_a_trainer_may_come_later_than_the_server(start: Start) -> None:
    port = free_port()
    with ThreadPoolExecutor(1) as thread:
        joining = thread.submit(Trainer(port).join)
        time.sleep(0.3)
        assert not joining.done()
        start("send(torch.ones(1))", port=port)
        group = joining.result()
    assert next(group.receive(specs((1,))))[1].tolist() == [1]
    group.close()


def test_the_default_group_is_left_alone(start: Start, tmp_path: Path) -> None:
    script = "send(torch.ones(1))"
    group = start(script).join()
    list(group.receive(specs((1,))))
    assert not dist.is_initialized()
    group.close()
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        default = dist.group.WORLD
        group = start(script).join()
        list(group.receive(specs((1,))))
        group.close()
        assert dist.group.WORLD is default
        values = torch.ones(2)
        dist.all_reduce(values)
        assert values.tolist() == [1, 1]
    finally:
        dist.destroy_process_group()


# --- what fails ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "part"),
    [
        ("no such host", "no such host"),
        ("a\0\nb", "joined"),
    ],
)
def test_an_address_that_is_none_is_refused(address: str, part: str) -> None:
    trainer = Trainer(free_port())
    assert part in refusal(lambda: trainer.join(master_address=address, timeout_s=0.3))


def test_the_bodies_of_calls_have_the_same_backends_and_types() -> None:
    assert get_args(bodies.GroupBackend) == tuple(BACKENDS)
    assert get_args(bodies.Dtype) == (*DTYPES, *(f"torch.{name}" for name in DTYPES))


@pytest.mark.skipif(dist.is_nccl_available(), reason="needs a torch without NCCL")
def test_nccl_is_refused_where_there_is_none() -> None:
    trainer = Trainer(free_port())
    assert "nccl" in refusal(lambda: trainer.join(backend="nccl"))


def test_a_master_that_is_not_there_is_said_in_time(capfd: pytest.CaptureFixture[str]) -> None:
    trainer = Trainer(free_port())
    message = refusal(lambda: trainer.join(timeout_s=SHORT_S))
    assert str(trainer.port) in message
    assert "refused" in message
    assert "frame #" not in capfd.readouterr().err


def test_a_listener_that_is_no_trainer_is_said_in_time() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        trainer = Trainer(server.getsockname()[1])
        assert "0.7 s" in refusal(lambda: trainer.join(timeout_s=SHORT_S))


def test_a_trainer_that_makes_no_group_is_said_in_time(start: Start) -> None:
    trainer = start("'no group'")
    assert "updates" in refusal(lambda: trainer.join(timeout_s=SHORT_S))


def test_a_group_name_in_use_is_refused(start: Start) -> None:
    trainer = start("")
    group = trainer.join()
    assert "name" in refusal(lambda: start("").join())
    group.close()


def test_a_tensor_that_does_not_come_is_said_in_time_and_breaks_the_group(start: Start) -> None:
    trainer = start("send(torch.ones(1))")
    group = trainer.join(timeout_s=JOINED_S)
    received = group.receive(specs((1,), (2,)))
    assert next(received)[1].tolist() == [1]
    assert "w1" in refusal(lambda: next(received), JOINED_S)
    assert "broken" in refusal(lambda: group.receive(specs((1,))))
    group.close()


@pytest.mark.parametrize("ending", ["os._exit(1)", "sys.exit()", "os.kill(os.getpid(), 9)"])
def test_a_trainer_that_dies_between_tensors_is_said_at_once(start: Start, ending: str) -> None:
    group = start(f"send(torch.ones(1)); time.sleep(0.3); {ending}").join()
    received = group.receive(specs((1,), (2,)))
    next(received)
    assert "w1" in refusal(lambda: next(received))
    group.close()


def test_a_trainer_that_dies_within_a_tensor_is_said_in_time(start: Start) -> None:
    """gloo does not notice the end of a connection in the middle of a message."""
    size = 1 << 27
    script = (
        f"big = torch.empty({size})\n"
        "send(torch.ones(1))\n"
        "threading.Thread(target=lambda: (time.sleep(0.02), os._exit(1))).start()\n"
        "send(big)"
    )
    group = start(script).join(timeout_s=JOINED_S)
    received = group.receive(specs((1,), (size,)))
    next(received)
    assert "w1" in refusal(lambda: next(received), JOINED_S)
    group.close()


@pytest.mark.parametrize("sent", ["torch.ones(3)", "torch.ones(6).bfloat16()", "torch.ones(0)"])
def test_fewer_values_than_announced_are_refused(start: Start, sent: str) -> None:
    group = start(f"send({sent})").join()
    assert "fewer" in refusal(lambda: list(group.receive(specs((6,)))))
    group.close()


@pytest.mark.parametrize("sent", ["torch.ones(7)", "torch.ones(6).double()", "torch.ones(9999)"])
def test_more_values_than_announced_are_refused(start: Start, sent: str) -> None:
    group = start(f"send({sent})").join()
    assert "more" in refusal(lambda: list(group.receive(specs((6,)))))
    group.close()


def test_receiving_a_part_only_breaks_the_group(start: Start) -> None:
    group = start("send(torch.ones(1), torch.ones(1))").join()
    received = group.receive(specs((1,), (1,)))
    next(received)
    assert "broken" in refusal(lambda: group.receive(specs((1,))))
    group.close()


def test_a_refused_tensor_leaves_the_group_in_step(start: Start, tmp_path: Path) -> None:
    runner = make_runner(make_random_llama(tmp_path / "model"), Setup())
    script = "send(torch.ones(1), torch.ones(2))\nsend(torch.ones(64))"
    group = start(script).join()
    with pytest.raises(WeightUpdateError, match="w0"):
        runner.weights.reader.from_tensors(group.receive(specs((1,), (2,))))
    good = [TensorSpec("model.norm.weight", "float32", (64,))]
    staged = runner.weights.reader.from_tensors(group.receive(good))
    assert staged["model.norm.weight"].tolist() == [1] * 64
    group.close()


def test_a_closed_group_receives_nothing(start: Start) -> None:
    group = start("").join()
    group.close()
    assert "closed" in refusal(lambda: group.receive(specs((1,))))


@pytest.mark.parametrize(
    "script",
    ["send(torch.ones(1))", "send(torch.ones(1)); os.kill(os.getpid(), signal.SIGSTOP)"],
    ids=["silent", "stopped"],
)
def test_closing_ends_a_receive_that_waits(start: Start, script: str) -> None:
    group = start(script).join()
    received = group.receive(specs((1,), (2,), (3,)))
    next(received)
    with ThreadPoolExecutor(1) as thread:
        closing_it = thread.submit(lambda: (time.sleep(0.1), group.close()))
        message = refusal(lambda: next(received), 0.1)
        closing_it.result(SLACK_S)
    assert "'w1'" in message
    assert "the group was left; join it again." in message
    assert next(received, None) is None
    assert "closed" in refusal(lambda: group.receive(specs((1,))))


def test_closing_between_two_tensors_ends_a_receive(start: Start) -> None:
    group = start("send(torch.ones(1), torch.ones(2))").join()
    received = group.receive(specs((1,), (2,)))
    next(received)
    group.close()
    message = refusal(lambda: next(received))
    assert "'w1'" in message
    assert "the group was left" in message


def test_a_group_is_joined_again_after_a_receive_was_ended(start: Start) -> None:
    for _ in range(2):
        group = start("send(torch.ones(1))").join()
        received = group.receive(specs((1,), (2,)))
        assert next(received)[1].tolist() == [1]
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(refusal, lambda received=received: next(received), TIMEOUT_S)
            _await(lambda group=group: group._awaited is not None)
            group.close()
            assert "left" in waiting.result(SLACK_S)


def _await(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)
