"""Weights that a trainer sends as plain data, by `MultiprocessingSerializer` of this package."""

from __future__ import annotations

import base64
import os
import pickle
import random
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.multiprocessing import reductions

from sent_weights import assert_same, weights
from sglang.srt.entrypoints import serialized_updates
from sglang.srt.frontend.errors import RequestError
from sglang.srt.plain_tensors import MAGIC, TEXT_MAGIC, decode_tensors
from sglang.srt.sent_tensors import (
    DTYPE_BYTES,
    DeviceMemory,
    SentTensor,
    SentTensors,
    TensorsRefused,
)
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync import plain_sending
from sglang.srt.weight_sync.sent_memory import opened_tensors, view_of
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, LocalSerializedTensor

serialize, deserialize = (
    MultiprocessingSerializer.serialize,
    MultiprocessingSerializer.deserialize,
)


def bucket_of(tensors: dict[str, torch.Tensor]) -> dict[str, Any]:
    bucket = FlattenedTensorBucket(named_tensors=list(tensors.items()))
    return {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}


def per_rank(tensors: dict[str, torch.Tensor]) -> list[tuple[str, LocalSerializedTensor]]:
    return [(name, LocalSerializedTensor([serialize(value)])) for name, value in tensors.items()]


FORMS = {"named": lambda tensors: tensors.items(), "bucket": bucket_of, "per rank": per_rank}


def stored(data: bytes, path: Path) -> SentTensors:
    """Gives what the server makes of an entry, with its file."""
    path.touch()
    return serialized_updates._read_plain(data, path, 1 << 20)


# ---------------------------------------------------------------- what trainers send


@pytest.mark.parametrize("form", FORMS)
def test_a_server_gets_the_tensors(form: str, tmp_path: Path) -> None:
    expected = weights()
    sent = stored(serialize(FORMS[form](expected)), tmp_path / "memory")
    assert_same({name: tensor.clone() for name, tensor in opened_tensors(sent)}, expected)


@pytest.mark.parametrize("form", FORMS)
def test_a_trainer_gets_its_tensors_again(form: str) -> None:
    expected = weights()
    found = deserialize(serialize(FORMS[form](expected), output_str=True))
    if form == "bucket":
        found = FlattenedTensorBucket(**found).reconstruct_tensors()
    assert_same(dict(found), expected)


def test_one_tensor_is_one_again() -> None:
    assert torch.equal(deserialize(serialize(torch.arange(3))), torch.arange(3))


def test_a_bucket_may_count_values_of_one_type() -> None:
    """As SGLang's own did before it had several types."""
    expected = {"a": torch.randn(2, 3), "b": torch.randn(4)}
    parts = bucket_of(expected)
    parts["flattened_tensor"] = parts["flattened_tensor"].view(torch.float32)
    for entry in parts["metadata"]:
        entry.start_idx, entry.end_idx = entry.start_idx // 4, entry.end_idx // 4
    again = FlattenedTensorBucket(**deserialize(serialize(parts))).reconstruct_tensors()
    assert_same(dict(again), expected)


def test_a_tensor_of_two_names_is_sent_once() -> None:
    tied = torch.zeros(1000)
    assert len(serialize([("a", tied), ("b", tied)])) < len(serialize([("a", tied)])) + 200


def test_nothing_is_left_in_shared_memory_and_no_tensor_must_live_on(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    tensor = torch.ones(1000)
    data = serialize([("a", tensor)])
    tensor.zero_()
    assert set(os.listdir("/dev/shm")) <= before
    assert_same(dict(opened_tensors(stored(data, tmp_path / "a"))), {"a": torch.ones(1000)})


GPU_ARGUMENTS = (0, b"\x03c" + b"h" * 64, 96, 512, b"/torch_7_123_0", 5, b"e" * 64, True)


def fake_gpu(patch: pytest.MonkeyPatch, arguments: tuple[Any, ...] = GPU_ARGUMENTS) -> list[int]:
    """Has torch say of tensors of the CPU what it says of those of a GPU; counts how often."""
    calls: list[int] = []

    def reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
        calls.append(tensor.untyped_storage().data_ptr())
        return None, (*range(6), *arguments[:4], False, *arguments[4:])

    class OnGpu(torch.Tensor):
        device = torch.device("cuda", 0)

    patch.setattr(torch.Tensor, "detach", lambda tensor: tensor.as_subclass(OnGpu))
    patch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"uuid": "u-1"}))
    patch.setattr(reductions, "reduce_tensor", reduce)
    return calls


def test_memory_of_a_gpu_is_named_once_with_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.zeros(4, 6)
    with monkeypatch.context() as patch:
        calls = fake_gpu(patch)
        plain = decode_tensors(serialize([("rows", whole[1:3]), ("turned", whole.t())]))
    assert calls == [whole.data_ptr()]
    assert plain.memories == [
        DeviceMemory(
            device="u-1",
            handle=b"h" * 64,
            first_byte=512,
            num_bytes=96,
            counter_file="/torch_7_123_0",
            counter=5,
            event=b"e" * 64,
        )
    ]
    assert not plain.host
    rows, turned = plain.tensors
    assert (rows.shape, rows.strides, rows.first_byte) == ([2, 6], [6, 1], 24)
    assert (turned.shape, turned.strides, turned.first_byte) == ([6, 4], [1, 6], 0)


def test_an_expandable_segment_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        fake_gpu(patch, (0, b"\x03e" + b"h" * 64, *GPU_ARGUMENTS[2:]))
        with pytest.raises(ValueError, match="expandable_segments:False"):
            serialize(torch.zeros(4, 6))


class Shard(torch.Tensor):
    pass


ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (7, "give their tensors names"),
        ({"a": ONE}, "give their tensors names"),
        ({"flattened_tensor": ONE}, "give their tensors names"),
        ([ONE], "give their tensors names"),
        ([(1, ONE)], "give their tensors names"),
        ("text", "give their tensors names"),
        ([], "1 to 65536 tensors"),
        ([("", ONE)], "1 to 512 characters"),
        ([("a\n", ONE)], "1 to 512 characters"),
        ([("a", 7)], "an object of type int"),
        ([("a", ONE.as_subclass(Shard))], "full_tensor"),
        ([("a", ONE.to_sparse())], "dense"),
        ([("a", ONE.to("meta"))], "from the CPU"),
        ([("a", ONE.cfloat())], "float32"),
        ([("a", LocalSerializedTensor([serialize(ONE)] * 2))], "2 ranks"),
        ([("a", LocalSerializedTensor([pickle.dumps(ONE)]))], "of this package"),
        ([("a", LocalSerializedTensor([serialize([("b", ONE)])]))], "one tensor for a rank"),
        ({"flattened_tensor": ONE, "metadata": [7]}, "no FlattenedTensorMetadata"),
        ({**bucket_of({"a": ONE}), "flattened_tensor": torch.zeros(7)}, "do not fit"),
        ({**bucket_of({"a": ONE}), "flattened_tensor": torch.zeros(8, 1)}, "not flat"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_not_sent_says_why(value: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        serialize(value)


@pytest.mark.parametrize("data", [pickle.dumps(ONE), b"", "text", base64.b64encode(b"no").decode()])
def test_nothing_else_is_read(data: bytes | str) -> None:
    with pytest.raises(NotImplementedError, match="--allow-pickled-weights"):
        deserialize(data)


# ---------------------------------------------------------------- what others may send


def read_by_numpy(data: bytes) -> list[tuple[str, bytes]]:
    """Names and values, by a reader of its own, to which numpy gives nothing out of bounds."""
    found = msgspec.msgpack.decode(data[len(MAGIC) :])
    named = []
    for tensor in found["tensors"]:
        memory = found["memories"][tensor["memory"]]
        part = found["host"][memory["first_byte"] :][: memory["num_bytes"]]
        assert len(part) == memory["num_bytes"]
        size = DTYPE_BYTES[tensor["dtype"]]
        strides = [stride * size for stride in tensor["strides"]]
        kind, first = f"V{size}", tensor["first_byte"]
        if 0 in tensor["shape"]:
            part, strides, first = b"", None, 0
        array = np.ndarray(tensor["shape"], kind, part, first, strides)
        named.append((tensor["name"], array.tobytes()))
    return named


def test_changed_data_are_refused_or_are_what_they_say(tmp_path: Path) -> None:
    """Honest ones, in which bytes are changed, left out, doubled or taken from elsewhere."""
    chance, num_read, refusals = random.Random(5), 0, set()
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    seeds = [serialize(form(tensors)) for form in FORMS.values()]
    pieces = [*seeds, bytes(range(256)), b"\xce\xff\xff\xff\xff", b"\xcf" + b"\xff" * 8]
    for _ in range(5000):
        data = bytearray(chance.choice(seeds))
        for _ in range(chance.randrange(1, 4)):
            begin = chance.randrange(len(MAGIC), len(data))
            other = chance.choice(pieces)
            start = chance.randrange(len(other))
            piece = other[start : start + chance.choice((0, 1, 1, 2, 20))]
            end = begin + chance.choice((len(piece), len(piece), 0, 1, 9))
            data[begin:end] = piece
        try:
            sent = stored(bytes(data), tmp_path / "memory")
        except RequestError as error:
            refusals.add((error.status_code, error.field))
            continue
        num_read += 1
        found = [
            (name, tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            for name, tensor in opened_tensors(sent)
        ]
        assert sorted(found) == sorted(read_by_numpy(bytes(data)))
    assert num_read > 300
    assert refusals == {(400, "serialized_named_tensors")}


def changed(**changes: Any) -> bytes:
    """Honest data with other values of one tensor, of its memory or of the whole."""
    found = msgspec.msgpack.decode(serialize([("a", torch.zeros(2, 3))])[len(MAGIC) :])
    for place in (found["tensors"][0], found["memories"][0], found):
        place.update({name: changes.pop(name) for name in list(changes) if name in place})
    assert not changes
    return MAGIC + msgspec.msgpack.encode(found)


@pytest.mark.parametrize(
    "changes",
    [
        {"name": ""},
        {"name": "a\x00"},
        {"name": "a" * 513},
        {"dtype": "float31"},
        {"dtype": "float64"},
        {"shape": [3, 3]},
        {"shape": [-2, 3]},
        {"shape": [1 << 40, 1 << 40], "strides": [0, 0]},
        {"shape": [1] * 9, "strides": [1] * 9},
        {"strides": [3]},
        {"strides": [4, 1]},
        {"strides": [-3, 1]},
        {"memory": 1},
        {"memory": -1},
        {"first_byte": 4},
        {"first_byte": 1 << 62},
        {"num_bytes": 23},
        {"num_bytes": 25},
        {"type": "FromFile"},
        {"host": b""},
        {"host": "/dev/shm/x"},
        {"tensors": []},
        {"form": "tensor"},
        {"form": "os.system"},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"^serialized_named_tensors: its entry "):
        stored(changed(**changes), tmp_path / "memory")


def test_the_magic_is_no_beginning_of_a_pickle() -> None:
    assert base64.b64encode(serialize(ONE)).decode()[: len(TEXT_MAGIC)] == TEXT_MAGIC
    with pytest.raises(pickle.UnpicklingError):
        pickle.loads(MAGIC)  # noqa: S301 (made here)
    for protocol in range(6):
        with pytest.raises(TensorsRefused, match="of this package"):
            decode_tensors(pickle.dumps(["SGL"], protocol))
    assert plain_sending.NAMES.keys() == set(plain_sending.DTYPES.values())


def test_memory_that_begins_between_two_values_is_copied() -> None:
    values = np.arange(6, dtype=np.float32)
    room = np.zeros(values.nbytes + 1, np.uint8)
    room[1:] = values.view(np.uint8)
    memory = torch.from_numpy(room[1:])
    tensor = SentTensor(
        name="w", dtype="float32", shape=[2, 2], strides=[2, 1], memory=0, first_byte=4
    )
    found = view_of(memory, tensor)
    assert found.data_ptr() % 4 == 0
    assert found.tolist() == [[1, 2], [3, 4]]
