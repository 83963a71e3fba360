"""Weights that another process has on the server's GPU, which it sends by their memory."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

import sglang
from serving_utils import environ, make_model_dir
from sglang.srt.entrypoints import serialized_updates

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

NORM, ROWS = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"

# A trainer: for each line a value and a form, what it sends. `free` frees what nobody uses.
TRAINER = """
import base64, io, sys, torch
from multiprocessing.reduction import ForkingPickler
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket, LocalSerializedTensor
def pickled(value):
    stream = io.BytesIO()
    ForkingPickler(stream).dump(value)
    return stream.getvalue()
serialize = pickled if sys.argv[1] == "pickled" else MultiprocessingSerializer.serialize
for line in sys.stdin:
    if line.strip() == "free":
        parcel = named = bucket = norm = rows = None
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()
        print(torch.cuda.memory_reserved(), flush=True)
        continue
    value, form = line.split()
    norm = torch.full((65,), float(value), dtype=torch.bfloat16, device="cuda")[1:]
    rows = torch.full((64, 32), float(value), device="cuda").t()
    parcel = named = [("model.norm.weight", norm), (
        "model.layers.0.self_attn.k_proj.weight", rows)]
    if form == "bucket":
        bucket = FlattenedTensorBucket(named_tensors=named)
        parcel = {"flattened_tensor": bucket.get_flattened_tensor(),
                  "metadata": bucket.get_metadata()}
    if form == "per_rank":
        parcel = [(name, LocalSerializedTensor([serialize(tensor)])) for name, tensor in named]
    print(base64.b64encode(serialize(parcel)).decode(), flush=True)
"""


class Trainer:
    """The other process."""

    def __init__(self, kind: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", TRAINER, kind],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environ(),
        )

    def ask(self, line: str) -> str:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return process.stdout.readline().strip()

    def end(self) -> None:
        if self._process.poll() is None:
            self._process.communicate(timeout=60)  # its input ends, and so does it


@pytest.fixture(params=["plain", "pickled"])
def trainer(request: pytest.FixtureRequest) -> Iterator[Trainer]:
    trainer = Trainer(request.param)
    yield trainer
    trainer.end()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sglang.Engine]:
    model = make_model_dir(tmp_path_factory.mktemp("model"))
    flags: dict[str, Any] = {"load_format": "dummy", "max_total_tokens": 4096}
    with sglang.Engine(model_path=str(model), allow_pickled_weights=True, **flags) as engine:
        yield engine


def values(engine: sglang.Engine, name: str) -> torch.Tensor:
    return torch.tensor(engine.get_weights_by_name(name, 1000))


def send(engine: sglang.Engine, sent: str, form: str) -> dict[str, Any]:
    load_format = "flattened_bucket" if form == "bucket" else None
    return engine.update_weights_from_tensor([sent], load_format)


@pytest.mark.parametrize("form", ["named", "bucket", "per_rank"])
def test_weights_on_the_gpu_change_what_serves(
    engine: sglang.Engine, trainer: Trainer, form: str
) -> None:
    for value in (0.5, 0.25):  # the second time the trainer's memory is elsewhere
        answer = send(engine, trainer.ask(f"{value} {form}"), form)
        assert answer["num_tensors"] == 2
        assert torch.all(values(engine, NORM) == value)
        assert torch.all(values(engine, ROWS) == value)
    assert trainer.ask("free") == "0"  # the server has told that it uses nothing any more


def test_memory_that_is_gone_is_refused_and_the_engine_serves(
    engine: sglang.Engine, trainer: Trainer
) -> None:
    sent = trainer.ask("0.125 bucket")
    trainer.end()
    with pytest.raises(ValueError, match="keep the tensors until the answer"):
        send(engine, sent, "bucket")
    answer = engine.generate(input_ids=[[1, 2, 3]], sampling_params={"max_new_tokens": 2})
    assert len(answer[0]["output_ids"]) == 2


def test_a_part_beyond_the_memory_is_refused_before_it_is_read(
    engine: sglang.Engine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the trainer said that its memory began 512 GiB later, where nothing is."""
    real = serialized_updates._read_entry

    def moved(*arguments: Any) -> Any:
        sent = real(*arguments)
        [memory] = sent.memories
        memory = msgspec.structs.replace(memory, first_byte=1 << 39)
        return msgspec.structs.replace(sent, memories=[memory])

    sent = trainer.ask("0.125 bucket")
    monkeypatch.setattr(serialized_updates, "_read_entry", moved)
    with pytest.raises(ValueError, match="not within the memory"):
        send(engine, sent, "bucket")
    monkeypatch.undo()
    assert send(engine, trainer.ask("2.0 bucket"), "bucket")["num_tensors"] == 2
    assert torch.all(values(engine, NORM) == 2.0)
