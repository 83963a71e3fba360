"""Weight updates and memory as a trainer does them, over HTTP and the Engine."""

from __future__ import annotations

import base64
import itertools
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import httpx
import pytest
import safetensors.torch
import torch

import sglang
from serving_utils import (
    ENDLESS_DEMO,
    RunningServer,
    free_port,
    in_background,
    running_server,
    wait_for_running,
    wait_for_waiting,
    wait_until,
)
from sglang.srt.model_config import resolve_model_path

pytestmark = pytest.mark.long_matrix

PROMPTS = ["def add(a, b):\n    ", "import os\n", "class Queue:\n    def __init__"]
PARAMS = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
NUM_NEW = 100
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
LONG = {**PARAMS, "max_new_tokens": NUM_NEW}
DEMO = Path(resolve_model_path("demo"))

# What a trainer does, with nothing of this project: rank 0 of a group of two.
TRAINER = """
import datetime, sys
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
import safetensors.torch
port, path, name = int(sys.argv[1]), sys.argv[2], sys.argv[3]
LIMIT = datetime.timedelta(seconds=20)
store, rank, size = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, 2))
store = c10d.PrefixStore(name, store)
group, _ = c10d._new_process_group_helper(2, 0, [], "gloo", store, group_name=name, timeout=LIMIT)
c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
for _, tensor in sorted(safetensors.torch.load_file(path).items()):
    dist.broadcast(tensor.contiguous(), src=0, group=group)
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of the demo model with other weights, which give other outputs."""
    directory = tmp_path_factory.mktemp("other")
    shutil.copytree(DEMO, directory, dirs_exist_ok=True)
    for file in directory.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        generator = torch.Generator().manual_seed(1)
        for name, tensor in tensors.items():
            noise = torch.randn(tensor.shape, generator=generator) * 0.02
            tensors[name] = (tensor.float() + noise).to(tensor.dtype)
        safetensors.torch.save_file(tensors, file)
    return directory


@pytest.fixture(scope="module")
def tensors(other: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in other.glob("*.safetensors"):
        found.update(safetensors.torch.load_file(file))
    return found


@pytest.fixture(scope="module")
def engine(other: Path) -> Iterator[sglang.Engine]:
    """Started with the other weights."""
    with sglang.Engine(model_path=str(other)) as engine:
        yield engine


def outputs_of(engine: sglang.Engine) -> list[list[int]]:
    return [answer["output_ids"] for answer in engine.generate(PROMPTS, PARAMS)]


@pytest.fixture(scope="module")
def running() -> Iterator[RunningServer]:
    with running_server("demo") as server:
        yield server


@pytest.fixture(scope="module")
def old_outputs(running: RunningServer) -> list[list[int]]:
    """Returns outputs of the weights that the server was started with: `server` asks for them
    before updates."""
    return outputs(running)


@pytest.fixture(scope="module")
def new_outputs(engine: sglang.Engine, old_outputs: list[list[int]]) -> list[list[int]]:
    """Returns outputs of the weights that the engine was started with; its one test asks for them
    first."""
    found = outputs_of(engine)
    assert all(new != old for new, old in zip(found, old_outputs, strict=True))
    return found


@pytest.fixture
def server(running: RunningServer, old_outputs: list[list[int]]) -> Iterator[RunningServer]:
    """The server with the demo weights, which it gets back."""
    yield running
    running.post("/rollback_weight_update")
    running.post("/continue_generation")
    restore = {"model_path": str(DEMO), "weight_version": "default", "abort_all_requests": True}
    assert running.post("/update_weights_from_disk", restore).status_code == 200
    assert running.wait_idle()["weight_version"] == "default"


def outputs(server: RunningServer) -> list[list[int]]:
    answers = server.post("/generate", {"text": PROMPTS, "sampling_params": PARAMS}).json()
    return [answer["output_ids"] for answer in answers]


# ---------------------------------------------------------------- sources


@pytest.mark.parametrize("flush", [True, False])
@pytest.mark.parametrize("mode", [None, "abort", "retract", "in_place"])
def test_weights_from_disk(
    server: RunningServer,
    other: Path,
    new_outputs: list[list[int]],
    old_outputs: list[list[int]],
    mode: str | None,
    flush: bool,
) -> None:
    assert outputs(server) == old_outputs
    if mode is not None:
        server.post("/pause_generation", {"mode": mode})
    body = {"model_path": str(other), "weight_version": "v2", "flush_cache": flush}
    response = server.post("/update_weights_from_disk", body)
    assert response.status_code == 200
    assert response.json()["success"]
    assert response.json()["weight_version"] == "v2"
    assert server.client.get("/model_info").json()["weight_version"] == "v2"
    server.post("/continue_generation")
    assert outputs(server) == new_outputs


@pytest.mark.parametrize("how", ["octets", "base64", "shared memory"])
def test_weights_from_tensors(
    server: RunningServer,
    tensors: dict[str, torch.Tensor],
    new_outputs: list[list[int]],
    how: str,
) -> None:
    """In two halves, each a message of its own."""
    names = sorted(tensors)
    for half in (names[::2], names[1::2]):
        data = safetensors.torch.save({name: tensors[name] for name in half})
        response = send_tensors(server, data, how)
        assert response.status_code == 200, response.text
    assert outputs(server) == new_outputs


def send_tensors(server: RunningServer, data: bytes, how: str) -> httpx.Response:
    path = "/update_weights_from_tensor"
    if how == "octets":
        headers = {"content-type": "application/octet-stream"}
        return server.client.post(path, content=data, headers=headers)
    if how == "base64":
        return server.post(path, {"safetensors": base64.b64encode(data).decode()})
    file = Path("/dev/shm") / f"sglang-test-{uuid.uuid4().hex}"
    file.write_bytes(data)
    try:
        return server.post(path, {"shared_memory": file.name})
    finally:
        file.unlink()


def test_weights_from_a_trainers_group(
    server: RunningServer,
    other: Path,
    tensors: dict[str, torch.Tensor],
    new_outputs: list[list[int]],
) -> None:
    [file] = other.glob("*.safetensors")
    port, name = free_port(), "trainer"
    command = [sys.executable, "-c", TRAINER, str(port), str(file), name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        group = {
            "master_address": "127.0.0.1",
            "master_port": port,
            "rank_offset": 1,
            "world_size": 2,
            "group_name": name,
        }
        assert server.post("/init_weights_update_group", group).status_code == 200
        server.post("/pause_generation", {"mode": "retract"})
        order = sorted(tensors)
        body = {
            "names": order,
            "dtypes": [str(tensors[n].dtype) for n in order],
            "shapes": [list(tensors[n].shape) for n in order],
            "group_name": name,
            "weight_version": "from the trainer",
        }
        response = server.post("/update_weights_from_distributed", body)
        assert response.status_code == 200, response.text
        assert server.post("/destroy_weights_update_group", {"group_name": name}).status_code == 200
        trainer.communicate(timeout=20)
    server.post("/continue_generation")
    assert outputs(server) == new_outputs
    assert server.internal_state()["weight_version"] == "from the trainer"


def test_weights_through_an_engine(
    engine: sglang.Engine, other: Path, new_outputs: list[list[int]], old_outputs: list[list[int]]
) -> None:
    """From the other weights to the demo model's, and back."""
    demo: dict[str, torch.Tensor] = {}
    for file in DEMO.glob("*.safetensors"):
        demo.update(safetensors.torch.load_file(file))
    engine.begin_weight_update()
    names = sorted(demo)
    engine.update_weights_from_tensor([(name, demo[name]) for name in names[:5]])
    engine.update_weights_from_tensor({name: demo[name] for name in names[5:]})
    assert outputs_of(engine) == new_outputs, "Staged weights serve."
    engine.commit_weight_update(weight_version="v2")
    assert outputs_of(engine) == old_outputs
    assert engine.get_weight_version() == "v2"
    engine.update_weights_from_disk(str(other))
    assert outputs_of(engine) == new_outputs
    with pytest.raises(ValueError, match="not a directory"):
        engine.update_weights_from_disk(str(other / "nothing"))
    engine.release_memory_occupation(["kv_cache"])
    with pytest.raises(ValueError, match="already"):
        engine.release_memory_occupation(["kv_cache"])
    engine.resume_memory_occupation()
    assert outputs_of(engine) == new_outputs


# ---------------------------------------------------------------- sessions, failures


def test_a_rolled_back_session_never_serves(
    server: RunningServer, tensors: dict[str, torch.Tensor], old_outputs: list[list[int]]
) -> None:
    server.post("/begin_weight_update")
    assert send_tensors(server, safetensors.torch.save(tensors), "octets").status_code == 200
    assert outputs(server) == old_outputs
    assert server.post("/rollback_weight_update").status_code == 200
    assert outputs(server) == old_outputs
    assert server.post("/commit_weight_update").status_code == 400


@pytest.mark.parametrize(
    ("path", "body", "reason"),
    [
        ("/update_weights_from_disk", {"model_path": "/nowhere"}, "not a directory"),
        ("/update_weights_from_disk", {}, "model_path"),
        ("/update_weights_from_tensor", {"safetensors": "AAAA"}, "safetensors"),
        ("/update_weights_from_tensor", {"serialized_named_tensors": ["gASV"]}, "pickle"),
        ("/update_weights_from_tensor", {"shared_memory": "../etc/passwd"}, "shared_memory"),
        ("/update_weights_from_tensor", {"shared_memory": "sglang-no-such"}, "not a file"),
        (
            "/update_weights_from_distributed",
            {"names": ["a"], "dtypes": ["float32"], "shapes": [[1]]},
            "init_weights_update_group",
        ),
        ("/pause_generation", {"mode": "sometimes"}, "mode"),
    ],
)
def test_bad_calls_are_400_with_the_reason_and_change_nothing(
    server: RunningServer,
    old_outputs: list[list[int]],
    path: str,
    body: dict[str, Any],
    reason: str,
) -> None:
    before = server.internal_state()
    response = server.post(path, body)
    assert response.status_code == 400
    assert reason in response.text
    after = server.internal_state()
    for name in ("weight_epoch", "weight_version", "engine_paused", "tree_cache_size"):
        assert after[name] == before[name]
    assert outputs(server) == old_outputs


@pytest.mark.parametrize("fault", ["name", "shape", "type", "head"])
def test_weights_that_do_not_fit_are_refused_whole(
    server: RunningServer,
    tensors: dict[str, torch.Tensor],
    old_outputs: list[list[int]],
    fault: str,
) -> None:
    name = sorted(tensors)[3]
    wrong: dict[str, tuple[str, torch.Tensor]] = {
        "name": ("model.layers.99.mlp.weight", tensors[name]),
        "shape": (name, tensors[name][..., :-1].contiguous()),
        "type": (name, tensors[name].to(torch.int32)),
        "head": (HEAD, -tensors[EMBEDDING]),
    }
    key, tensor = wrong[fault]
    data = safetensors.torch.save({**tensors, name: tensors[name].clone(), key: tensor})
    response = send_tensors(server, data, "octets")
    assert response.status_code == 400
    assert response.json()["success"] is False
    assert key in response.json()["message"]
    assert outputs(server) == old_outputs


def test_a_tied_head_is_compared_at_the_commit_of_its_session(
    server: RunningServer,
    tensors: dict[str, torch.Tensor],
    old_outputs: list[list[int]],
    new_outputs: list[list[int]],
) -> None:
    embedding = tensors[EMBEDDING]
    server.post("/begin_weight_update")
    for part in ({HEAD: -embedding}, tensors):
        assert send_tensors(server, safetensors.torch.save(part), "octets").status_code == 200
    refused = server.post("/commit_weight_update")
    assert refused.status_code == 400
    assert HEAD in refused.json()["message"]
    assert outputs(server) == old_outputs
    part = {HEAD: embedding.clone()}
    assert send_tensors(server, safetensors.torch.save(part), "octets").status_code == 200
    assert server.post("/commit_weight_update").status_code == 200
    assert outputs(server) == new_outputs
    found = server.post("/get_weights_by_name", {"name": HEAD, "truncate_size": 2})
    assert found.json() == embedding[:2].tolist()


# ---------------------------------------------------------------- labels, live requests


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_a_stream_goes_through_an_update_with_spans_in_every_chunk(
    server: RunningServer, other: Path, mode: str
) -> None:
    body = {"text": PROMPTS[0], "sampling_params": LONG, "stream": True}
    pieces: list[dict[str, Any]] = []
    with server.client.stream("POST", "/generate", json=body) as response:
        lines = (line for line in response.iter_lines() if line)
        for line in lines:
            if line == "data: [DONE]":
                break
            pieces.append(sglang_json(line))
            if len(pieces) == 5:
                with httpx.Client(base_url=server.url, timeout=30) as second:
                    second.post("/pause_generation", json={"mode": mode})
                    second.post(
                        "/update_weights_from_disk",
                        json={"model_path": str(other), "weight_version": "v2"},
                    )
                    second.post("/continue_generation", json={})
    last = pieces[-1]
    spans = last["meta_info"]["weight_versions"]
    assert [span["version"] for span in spans] == ["default", "v2"]
    assert spans[0]["start"] == 0 < spans[0]["end"] == spans[1]["start"]
    assert spans[1]["end"] == len(last["output_ids"]) == NUM_NEW
    for before, after in itertools.pairwise(pieces):
        assert after["text"].startswith(before["text"])
        ids = before["output_ids"]
        assert after["output_ids"][: len(ids)] == ids
        assert before["meta_info"]["weight_versions"][-1]["end"] == len(ids)


def sglang_json(line: str) -> dict[str, Any]:
    import json

    return json.loads(line.removeprefix("data: "))


def test_an_update_without_a_pause_lets_running_requests_finish_first(
    server: RunningServer, other: Path
) -> None:
    """The update waits until running requests end, and new requests wait for the update."""
    running = endless(server)
    update = {"model_path": str(other), "weight_version": "v2"}
    updating = in_background(lambda: server.post("/update_weights_from_disk", update))
    wait_until(lambda: server.client.get("/ready").status_code == 503, running, updating)
    assert server.internal_state()["running_batch_size"] == 1
    newcomer = in_background(lambda: server.generate())
    wait_for_waiting(server, 1, running, updating, newcomer)
    meta = end(server, running)
    count = meta["completion_tokens"]
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": count}]
    assert updating.result().status_code == 200
    versions = newcomer.result().json()["meta_info"]["weight_versions"]
    assert versions == [{"version": "v2", "start": 0, "end": 8}]


def endless(server: RunningServer) -> Future[httpx.Response]:
    """A request that runs until it is aborted."""
    body = {"text": PROMPTS[0], "rid": "endless", "sampling_params": ENDLESS_DEMO}
    call = in_background(lambda: server.post("/generate", body))
    wait_for_running(server, 1, call)
    return call


def end(server: RunningServer, call: Future[httpx.Response]) -> dict[str, Any]:
    """Aborts it; its `meta_info`."""
    assert server.post("/abort_request", {"rid": "endless"}).json() == {"aborted": 1}
    return call.result().json()["meta_info"]


def test_a_new_label_aborts_unless_told_otherwise(server: RunningServer) -> None:
    running = endless(server)
    change = {"new_version": "keeps", "abort_all_requests": False}
    assert server.post("/update_weight_version", change).status_code == 200
    wait_for_steps(server, 2)
    assert not running.done()
    assert server.post("/update_weight_version", {"new_version": "aborts"}).status_code == 200
    meta = running.result().json()["meta_info"]
    assert meta["finish_reason"]["type"] == "abort"
    assert [span["version"] for span in meta["weight_versions"]] == ["default", "keeps"]
    answer = server.client.get("/get_weight_version").json()
    assert answer == {"weight_version": "aborts"}


def wait_for_steps(server: RunningServer, count: int) -> None:
    """Until so many decode steps have been launched from now on."""
    start = server.internal_state()["forward_ct_decode"]
    wait_until(lambda: server.internal_state()["forward_ct_decode"] >= start + count)


# ---------------------------------------------------------------- memory


def test_memory_is_released_and_resumed_by_tag(
    server: RunningServer, old_outputs: list[list[int]]
) -> None:
    assert server.post("/resume_memory_occupation").status_code == 400
    server.post("/pause_generation", {"mode": "retract"})
    assert server.post("/release_memory_occupation", {"tags": ["kv_cache"]}).status_code == 200
    assert server.post("/release_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/release_memory_occupation").status_code == 400
    assert server.post("/continue_generation").status_code == 400
    assert server.client.get("/ready").status_code == 503
    assert server.client.get("/health").status_code == 200
    refused = server.post("/update_weights_from_disk", {"model_path": str(DEMO)})
    assert refused.status_code == 400
    assert "released" in refused.text
    assert server.post("/resume_memory_occupation", {"tags": ["weights"]}).status_code == 200
    assert server.post("/update_weights_from_disk", {"model_path": str(DEMO)}).status_code == 200
    assert server.post("/resume_memory_occupation").status_code == 200
    assert server.post("/continue_generation").status_code == 200
    assert outputs(server) == old_outputs


def test_memory_in_use_is_not_released(server: RunningServer) -> None:
    running = endless(server)
    server.post("/pause_generation", {"mode": "in_place"})
    response = server.post("/release_memory_occupation")
    assert response.status_code == 400
    assert "1 requests hold KV" in response.json()["message"]
    server.post("/continue_generation")
    wait_for_steps(server, 2)
    end(server, running)
