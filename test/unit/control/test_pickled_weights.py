"""Weights that trainers pickle: read as they are, by a process that runs nothing of a pickle."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import reductions

from sent_weights import assert_same, pickle_of, weights
from sglang.srt.control.pickle_process import ReadPickle, sent_tensors
from sglang.srt.control.pickle_records import ALLOWED, read_records
from sglang.srt.control.pickled_tensors import WeightsInRecords
from sglang.srt.entrypoints import serialized_updates
from sglang.srt.frontend.errors import RequestError
from sglang.srt.sent_tensors import (
    DeviceMemory,
    HostMemory,
    SentTensor,
    SentTensors,
    TensorsRefused,
)
from sglang.srt.utils import patch_torch
from sglang.srt.weight_sync.sent_memory import opened_tensors
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, LocalSerializedTensor
from sglang.srt.weight_sync.weight_reader import WeightUpdateError

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture(params=["file_descriptor", "file_system"])
def strategy(request: pytest.FixtureRequest) -> Iterator[str]:
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy(request.param)
    yield request.param
    torch.multiprocessing.set_sharing_strategy(before)


def request_of(pickled: bytes, path: Path, is_bucket: bool = False) -> ReadPickle:
    key = bytes(multiprocessing.current_process().authkey)
    return ReadPickle(pickled, is_bucket, str(path), 1 << 20, key)


def read(pickled: bytes, path: Path, is_bucket: bool = False) -> dict[str, torch.Tensor]:
    """Gives what the scheduler would get, with the process's work done here."""
    sent = sent_tensors(request_of(pickled, path, is_bucket))
    return {name: tensor.clone() for name, tensor in opened_tensors(sent)}


# ---------------------------------------------------------------- what trainers send


def test_tensors_arrive_with_their_values(strategy: str, tmp_path: Path) -> None:
    expected = weights()
    pickled = pickle_of(list(expected.items()))
    assert_same(read(pickled, tmp_path / "memory"), expected)


def test_a_bucket_of_several_types_arrives(strategy: str, tmp_path: Path) -> None:
    expected = weights()
    bucket = FlattenedTensorBucket(named_tensors=list(expected.items()))
    assert_same(dict(bucket.reconstruct_tensors()), expected)
    parts = {
        "flattened_tensor": bucket.get_flattened_tensor(),
        "metadata": bucket.get_metadata(),
    }
    pickled = pickle_of(parts)
    assert_same(read(pickled, tmp_path / "memory", is_bucket=True), expected)


def test_a_bucket_may_count_values_of_one_type(strategy: str, tmp_path: Path) -> None:
    """As SGLang's own did before it had several types."""
    expected = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    bucket = FlattenedTensorBucket(named_tensors=list(expected.items()))
    metadata = bucket.get_metadata()
    for entry in metadata:
        entry.start_idx, entry.end_idx = entry.start_idx // 4, entry.end_idx // 4
        entry.numel //= 4
    flat = bucket.get_flattened_tensor().view(torch.float32)
    pickled = pickle_of({"flattened_tensor": flat, "metadata": metadata})
    assert_same(read(pickled, tmp_path / "memory", is_bucket=True), expected)


def test_a_tensor_of_two_names_and_one_per_rank_arrive(strategy: str, tmp_path: Path) -> None:
    tied, alone = torch.randn(3, 3), torch.randn(2)
    inner = pickle_of(alone)
    named = [("embed", tied), ("alone", LocalSerializedTensor([inner])), ("head", tied)]
    found = read(pickle_of(named), tmp_path / "memory")
    assert_same(found, {"embed": tied, "head": tied, "alone": alone})


def test_nothing_is_left_in_shared_memory(tmp_path: Path) -> None:
    before = {file.name for file in SHARED_MEMORY.iterdir()}
    torch.multiprocessing.set_sharing_strategy("file_system")
    try:
        tensor = torch.randn(1000)
        pickled = pickle_of([("a", tensor)])
        [file] = {file.name for file in SHARED_MEMORY.glob(f"torch_{os.getpid()}_*")} - before
        read(pickled, tmp_path / "memory")
        assert (SHARED_MEMORY / file).exists()  # it is still the trainer's
        del tensor
        assert not (SHARED_MEMORY / file).exists()
    finally:
        torch.multiprocessing.set_sharing_strategy("file_descriptor")


def test_the_process_reads_what_another_one_sends(strategy: str, tmp_path: Path) -> None:
    tensor = torch.randn(3)
    pickled = pickle_of([("a", tensor)])
    sent = serialized_updates._read(request_of(pickled, tmp_path / "memory"))
    assert_same(dict(opened_tensors(sent)), {"a": tensor})


def test_a_stranger_s_files_are_refused_with_the_remedy(tmp_path: Path) -> None:
    pickled = pickle_of([("a", torch.randn(3))])
    request = request_of(pickled, tmp_path / "memory")
    request.key = b"another family"
    with pytest.raises(TensorsRefused, match=r"set_sharing_strategy\('file_system'\)"):
        sent_tensors(request)


def test_weights_have_a_limit(strategy: str, tmp_path: Path) -> None:
    pickled = pickle_of([("a", torch.zeros(1 << 18))])
    request = request_of(pickled, tmp_path / "memory")
    request.max_bytes -= 1
    with pytest.raises(TensorsRefused, match="--max-weight-bytes"):
        sent_tensors(request)


class OnGpu:
    """Pickled as torch pickles a tensor of a GPU."""

    function: Any = staticmethod(reductions.rebuild_cuda_tensor)

    def __init__(self, **changes: Any) -> None:
        memory = {"device": 0, "handle": b"\x03c" + b"h" * 64, "num_bytes": 64, "first_byte": 512}
        counts = {"file": b"/torch_7_123_0", "counter": 5, "event": b"e" * 64, "waits": True}
        self.arguments: dict[str, Any] = {
            "kind": torch.Tensor,
            "shape": torch.Size((2, 3)),
            "strides": (3, 1),
            "first": 2,
            "storage": torch.storage.TypedStorage,
            "dtype": torch.float32,
            **memory,
            "grad": False,
            **counts,
            **changes,
        }

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, tuple(self.arguments.values())


def test_memory_of_a_gpu_is_described() -> None:
    records = read_records(pickle_of([("a", OnGpu())]))
    found = WeightsInRecords()
    [tensor] = found.named(records)
    assert tensor == SentTensor(
        name="a", dtype="float32", shape=[2, 3], strides=[3, 1], memory=0, first_byte=8
    )
    assert found.sources == [
        DeviceMemory(
            device=0,
            handle=b"h" * 64,
            first_byte=512,
            num_bytes=64,
            counter_file="/torch_7_123_0",
            counter=5,
            event=b"e" * 64,
        )
    ]


def test_a_gpu_may_have_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    def rebuild() -> None: ...

    rebuild.__module__ = patch_torch.__name__
    rebuild.__qualname__ = "_rebuild_cuda_tensor_modified"  # by SGLang's package
    monkeypatch.setattr(patch_torch, rebuild.__qualname__, rebuild, raising=False)
    monkeypatch.setattr(OnGpu, "function", staticmethod(rebuild))
    uuid = "0a1b2c3d-0000-1111-2222-333344445555"
    found = WeightsInRecords()
    found.named(read_records(pickle_of([("a", OnGpu(device=uuid))])))
    [memory] = found.sources
    assert isinstance(memory, DeviceMemory)
    assert memory.device == uuid


@pytest.mark.parametrize(
    "changes",
    [
        {"handle": b"\x03e" + b"h" * 64},
        {"handle": b"\x03c" + b"h" * 63},
        {"handle": None},
        {"num_bytes": 0},
        {"num_bytes": 31},
        {"num_bytes": -1},
        {"num_bytes": 1 << 62},
        {"first_byte": -1},
        {"device": -1},
        {"device": True},
        {"device": "x" * 65},
        {"file": b"/torch_7_123_0/../x"},
        {"file": b"/sglang-weights"},
        {"file": b"torch_7_123_0\n"},
        {"counter": -1},
        {"counter": 10_000},
        {"event": b"e" * 63},
        {"shape": torch.Size((5, 3))},
        {"shape": (1 << 40, 1 << 40)},
        {"shape": (-2, 3)},
        {"shape": (2, 3.0)},
        {"shape": (1,) * 9, "strides": (1,) * 9},
        {"strides": (30, 1)},
        {"strides": (-3, 1)},
        {"strides": (3,)},
        {"first": 11},
        {"first": -1},
        {"dtype": torch.Tensor},
        {"grad": None},
    ],
    ids=str,
)
def test_memory_of_a_gpu_with_a_wrong_argument_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(TensorsRefused):
        WeightsInRecords().named(read_records(pickle_of([("a", OnGpu(**changes))])))


def test_a_view_beyond_its_memory_is_refused_by_the_scheduler_too(tmp_path: Path) -> None:
    (tmp_path / "memory").write_bytes(bytes(64))
    tensor = SentTensor(name="a", dtype="float32", shape=[16], strides=[1], memory=0, first_byte=4)
    sent = SentTensors(str(tmp_path / "memory"), [HostMemory(0, 64)], [tensor])
    with pytest.raises(WeightUpdateError, match="'a' is not within"):
        list(opened_tensors(sent))


def test_a_server_without_a_gpu_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    found = WeightsInRecords()
    tensors = found.named(read_records(pickle_of([("a", OnGpu())])))
    sent = SentTensors("", found.sources, tensors)  # type: ignore[arg-type]
    with pytest.raises(WeightUpdateError, match="from the CPU"):
        list(opened_tensors(sent))


# ---------------------------------------------------------------- what others may send


class Calls:
    """Calls something when it is read as a pickle."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, state: Any = None) -> None:
        self.parts = (function, arguments) if state is None else (function, arguments, state)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


def short(text: str) -> bytes:
    return b"\x8c" + bytes([len(text)]) + text.encode()


def name_of(module: str, name: str) -> bytes:
    return short(module) + short(name) + b"\x93"


TENSOR = name_of("torch.multiprocessing.reductions", "rebuild_tensor")
HEAD = b"\x80\x04"
TENSORS = [("a", torch.ones(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16))]
BUCKET = FlattenedTensorBucket(named_tensors=TENSORS)
PARTS = {"flattened_tensor": BUCKET.get_flattened_tensor(), "metadata": BUCKET.get_metadata()}
HONEST = [pickle_of(value) for value in (TENSORS, PARTS)]


def hostile(canary: Path) -> dict[str, bytes]:
    """Pickles of which the usual reader would run something, or work for ever."""
    command = f"touch {canary}"
    touch = struct.pack("<I", len(command)) + command.encode()
    system = Calls(os.system, command)
    run = name_of("os", "system") + b"X" + touch
    return {
        "system": pickle.dumps(system),
        "system in a pair": pickle.dumps([("a", system)]),
        "system of protocol 0": pickle.dumps(system, 0),
        "eval": pickle.dumps(Calls(eval, f"open({str(canary)!r}, 'w')")),
        "exec as argument": pickle.dumps([("a", Calls(reductions.rebuild_tensor, system, 1, ()))]),
        "popen": pickle.dumps(Calls(subprocess.Popen, ["touch", str(canary)])),
        "getattr": HEAD + name_of("builtins", "getattr") + b")R.",
        "import": HEAD + name_of("builtins", "__import__") + short("os") + b"\x85R.",
        "dotted name": HEAD + name_of("torch", "Tensor.__class__") + b"\x85R.",
        "dotted module": HEAD + name_of("torch.multiprocessing.reductions.os", "system") + b".",
        "global": HEAD + b"cos\nsystem\nX" + touch + b"\x85R.",
        "inst": HEAD + b"(X" + touch + b"ios\nsystem\n.",
        "obj": HEAD + b"(" + run + b"o.",
        "newobj": HEAD + run + b"\x85\x81.",
        "newobj_ex": HEAD + run + b"\x85}\x92.",
        "extension": HEAD + b"\x82\x01.",
        "extension 4": HEAD + b"\x84\x01\x00\x00\x00.",
        "persistent id": HEAD + b"Pos.system\n.",
        "persistent object": HEAD + short("os.system") + b"Q.",
        "out of band": b"\x80\x05\x97.",
        "read only": b"\x80\x05\x97\x98.",
        "build on a name": HEAD + TENSOR + b"}" + short("__call__") + run + b"sb.",
        "build on a list": HEAD + b"]}" + short("append") + run + b"sb.",
        "build with slots": HEAD + TENSOR + b")\x81N}" + short("x") + run + b"s\x86b.",
        "append to a name": HEAD + TENSOR + run + b"a.",
        "items of a name": HEAD + TENSOR + short("x") + run + b"s.",
        "key of a call": HEAD + b"}" + run + b"\x85RNs.",
        "pickle in a pickle": pickle.dumps([("a", LocalSerializedTensor([pickle.dumps(system)]))]),
        "load in torch": pickle.dumps(torch.zeros(2)),
        "memo bomb": HEAD + b"Nr\xff\xff\xff\xff.",
        "long": HEAD + b"\x8b\xff\xff\xff\x7f" + b"1" * 20,
        "long of text": HEAD + b"L" + b"9" * 10_000 + b"L\n.",
        "huge frame": HEAD + b"\x95" + b"\xff" * 8 + b"N.",
        "huge text": HEAD + b"\x8d" + b"\xff" * 8,
        "huge bytes": HEAD + b"\x8e" + b"\xff" * 7 + b"\x7f",
        "doubled lists": HEAD + b"]" + b"2(ee" * 40 + b".",
        "pairs of pairs": HEAD + b"N" + b"\x94h\x00\x86" * 3 + b".",
        "pops": HEAD + b"0000.",
        "no stack": HEAD + b"R.",
        "marks": HEAD + b"((((.",
        "memo of a mark": HEAD + b"(\x94.",
        "two objects": HEAD + b"NN.",
        "no end": HEAD + b"N",
        "empty": b"",
        "text": b"os.system('x')",
        "itself": HEAD + b"]\x94h\x00a.",
        "stop in front": b".",
    }


SPIED = {"compile", "exec", "os.exec", "os.posix_spawn", "os.system", "pickle.find_class"} | {
    "socket.connect",
    "subprocess.Popen",
}
spying: list[bool] = []
seen: list[str] = []


@pytest.fixture(scope="module")
def hooked() -> None:
    """An audit hook stays for ever, so there is one. What is imported once is imported before."""
    WeightsInRecords().named(read_records(pickle_of([("a", OnGpu())])))
    for codec in ("raw-unicode-escape", "ascii", "latin-1"):
        assert str(b"a", codec) == "a"
    sys.addaudithook(lambda event, _: seen.append(event) if spying and event in SPIED else None)


@pytest.fixture
def spy(hooked: None) -> Iterator[list[str]]:
    """Gives what has been run, of all that a pickle could want to."""
    seen.clear()
    spying.append(True)
    yield seen
    spying.clear()


def test_the_spy_sees_a_usual_reader(spy: list[str], tmp_path: Path) -> None:
    pickle.loads(hostile(tmp_path / "canary")["system"])  # noqa: S301 (made here)
    assert {"pickle.find_class", "os.system"} <= set(spy)
    assert (tmp_path / "canary").exists()


@pytest.mark.parametrize("is_bucket", [False, True])
@pytest.mark.parametrize("kind", hostile(Path("canary")))
def test_a_hostile_pickle_runs_nothing(
    kind: str, is_bucket: bool, spy: list[str], tmp_path: Path
) -> None:
    pickled = hostile(tmp_path / "canary")[kind]
    spy.clear()
    with pytest.raises(TensorsRefused):
        sent_tensors(request_of(pickled, tmp_path / "memory", is_bucket))
    assert not spy
    assert not list(tmp_path.iterdir())


def test_changed_pickles_run_nothing_and_read_no_other_memory(spy: list[str]) -> None:
    """Honest ones, in which bytes are changed, left out, doubled or taken from elsewhere."""
    chance = random.Random(5)
    seeds = [pickle_of([("a", OnGpu()), ("b", OnGpu(first=1))]), *HONEST]
    pieces = [*seeds, *hostile(Path("canary")).values()]
    num_read = 0
    spy.clear()
    for _ in range(4000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            begin = chance.randrange(len(data))
            end = begin + chance.choice((0, 1, 1, 2, 9))
            other = chance.choice(pieces) or b"."
            start = chance.randrange(len(other))
            data[begin:end] = other[start : start + chance.choice((0, 1, 1, 2, 20))]
        found = WeightsInRecords()
        try:
            records = read_records(bytes(data))
            is_bucket = isinstance(records, dict)
            tensors = found.of_bucket(records) if is_bucket else found.named(records)
        except TensorsRefused:
            continue
        num_read += 1
        for tensor in tensors:
            assert tensor.lies_within(found.sources[tensor.memory].num_bytes)
    assert not spy
    assert num_read > 100


def test_the_names_of_a_pickle_are_these() -> None:
    """Each more is a decision."""
    assert len(ALLOWED) == 29


def test_the_process_says_why_and_may_be_ended(tmp_path: Path) -> None:
    request = request_of(hostile(tmp_path / "canary")["system"], tmp_path / "memory")
    with pytest.raises(RequestError, match=r"^serialized_named_tensors: .*asks for posix\.system"):
        serialized_updates._read(request)
    bomb = request_of(b"\x80\x04" + b"]" * (1 << 25), tmp_path / "memory")
    with pytest.raises(RequestError, match=r"^serialized_named_tensors: "):
        serialized_updates._read(bomb)
    assert not list(tmp_path.iterdir())
