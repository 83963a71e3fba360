"""Tests what trainers start by SGLang's names: a server in their own process tree, and forks."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sent_weights import pickle_of
from serving_utils import environ, make_model_dir
from sglang import Engine, ServerArgs, bench_serving
from sglang.srt.entrypoints.EngineBase import EngineBase
from sglang.srt.entrypoints.http_server_engine import HttpServerEngineAdapter
from sglang.srt.entrypoints.launch import LaunchError
from sglang.srt.utils import MultiprocessingSerializer, get_open_port
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

pytestmark = pytest.mark.long_matrix

GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
NORM = "model.norm.weight"
ROWS = "model.layers.0.self_attn.k_proj.weight"  # of a fused weight


class Touch:
    """Makes a file when it is read as a pickle."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkfifo, (str(self._path),)


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("profiles")


@pytest.fixture(scope="module")
def adapter(model_dir: Path, profiles: Path) -> Iterator[HttpServerEngineAdapter]:
    args = ServerArgs(
        model_path=str(model_dir),
        load_format="dummy",
        port=get_open_port(),
        api_key="user-key",
        admin_api_key="user-key",
        allow_pickled_weights=True,
        log_level="error",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SGLANG_TORCH_PROFILER_DIR", str(profiles))
        with HttpServerEngineAdapter(args) as adapter:
            yield adapter


def test_the_adapter_generates_and_streams(adapter: HttpServerEngineAdapter) -> None:
    whole = adapter.generate("hello", GREEDY)
    assert len(whole["output_ids"]) == 4
    *_, last = adapter.generate("hello", GREEDY, stream=True)
    assert last["output_ids"] == whole["output_ids"]
    with pytest.raises(ValueError, match=r"^sampling_params\.top_p"):
        adapter.generate("hello", {"top_p": 7})


def test_the_adapter_controls_its_server(adapter: HttpServerEngineAdapter) -> None:
    assert adapter.update_weights_from_tensor([(NORM, torch.full((64,), 0.5))], flush_cache=True)[
        "success"
    ]
    body = {"name": NORM, "truncate_size": 3}
    assert adapter._call("/get_weights_by_name", body) == [0.5] * 3
    assert adapter.pause_generation("retract")["status"] == "ok"
    assert adapter.continue_generation()["status"] == "ok"
    assert adapter.flush_cache()
    assert adapter.release_memory_occupation(["kv_cache"])["success"]
    assert adapter.resume_memory_occupation()["success"]
    with pytest.raises(ValueError, match=r"^tags"):
        adapter.release_memory_occupation(["disk"])
    assert isinstance(adapter, EngineBase)


@pytest.mark.parametrize("serialize", [MultiprocessingSerializer.serialize, pickle_of])
@pytest.mark.parametrize("is_bucket", [False, True])
def test_what_a_trainer_serializes_changes_what_serves(
    adapter: HttpServerEngineAdapter, is_bucket: bool, serialize: Callable[[Any], bytes]
) -> None:
    """Sends weights of several types; pickles name memory shared with the server."""
    strategy = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")  # the server is no child by fork
    try:
        value = 0.25 + is_bucket + 2 * (serialize is pickle_of)
        norm = torch.full((64,), value, dtype=torch.bfloat16)
        rows = torch.full((32, 64), value)
        named = [(NORM, norm), (ROWS, rows)]
        parcel: Any = named
        if is_bucket:
            bucket = FlattenedTensorBucket(named_tensors=named)
            flat, metadata = bucket.get_flattened_tensor(), bucket.get_metadata()
            parcel = {"flattened_tensor": flat, "metadata": metadata}
        load_format = "flattened_bucket" if is_bucket else None
        answer = adapter.update_weights_from_tensor(
            [serialize(parcel)], load_format, weight_version="p"
        )
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    assert (answer["num_tensors"], answer["weight_version"]) == (2, "p")
    for name in (NORM, ROWS):
        found = adapter._call("/get_weights_by_name", {"name": name, "truncate_size": 2})
        assert torch.all(torch.tensor(found) == value)


def test_hostile_pickles_run_nothing_and_the_server_serves(
    adapter: HttpServerEngineAdapter, tmp_path: Path
) -> None:
    canary = tmp_path / "canary"
    for protocol in (0, 4):
        pickled = pickle.dumps(Touch(canary), protocol)
        with pytest.raises(ValueError, match=r"^serialized_named_tensors: its entry is refused"):
            adapter.update_weights_from_tensor([pickled])
    assert not canary.exists()
    assert len(adapter.generate("hello", GREEDY)["output_ids"]) == 4
    pickle.loads(pickle.dumps(Touch(canary)))  # noqa: S301 (to show that it would run)
    assert canary.exists()


def test_a_trainer_can_tell_whether_its_weights_arrived(adapter: HttpServerEngineAdapter) -> None:
    name = ROWS

    def values() -> list[list[float]]:
        return adapter._call("/get_weights_by_name", {"name": name, "truncate_size": 2})

    def check(action: str) -> dict[str, Any]:
        return adapter._call("/weights_checker", {"action": action})

    before = torch.tensor(values())
    assert before.shape == (2, 64)
    assert check("snapshot")["success"]
    adapter.update_weights_from_tensor([(name, torch.full((32, 64), 0.25))])
    assert values() == [[0.25] * 64] * 2
    with pytest.raises(ValueError, match=rf"1 of \d+ weights are not those .*{name}"):
        check("compare")
    assert check("snapshot")["success"]
    assert check("compare")["success"]
    assert check("reset_tensors")["success"]
    assert values() == [[0.0] * 64] * 2
    assert len(adapter.generate("hello", GREEDY)["output_ids"]) == 4
    with pytest.raises(ValueError, match="weights are not those of the snapshot"):
        check("compare")
    with pytest.raises(ValueError, match=r"there is no weight 'model\.none'"):
        adapter._call("/get_weights_by_name", {"name": "model.none"})


def test_a_bench_client_may_profile_the_server(
    adapter: HttpServerEngineAdapter, profiles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "user-key")
    flags = ["--port", str(adapter.server_args.port), "--num-prompts", "2", "--disable-tqdm"]
    flags += ["--random-input-len", "5", "--random-output-len", "3", "--profile"]
    assert bench_serving.main(flags) == 0
    [trace] = profiles.iterdir()
    events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    assert any(event.get("cat") == "cpu_op" for event in events)


def test_no_key_is_in_the_list_of_processes(adapter: HttpServerEngineAdapter) -> None:
    line = Path(f"/proc/{adapter.process.pid}/cmdline").read_bytes()
    assert b"server_child" in line
    assert b"-key" not in line


def test_a_server_that_cannot_start_is_an_error() -> None:
    with pytest.raises(LaunchError, match="exit code 1"):
        HttpServerEngineAdapter(model_path="no such model", port=get_open_port())


def test_no_other_server_is_taken_for_its_own(adapter: HttpServerEngineAdapter) -> None:
    with pytest.raises(LaunchError, match="is in use"):
        HttpServerEngineAdapter(adapter.server_args)


def test_launch_server_serves_until_it_is_told_to_stop(model_dir: Path) -> None:
    program = (
        "import sys\n"
        "from sglang.srt.entrypoints.http_server import launch_server\n"
        "from sglang.srt.server_args import ServerArgs\n"
        "launch_server(ServerArgs(model_path=sys.argv[1], load_format='dummy',"
        " port=int(sys.argv[2]), log_level='info'))\n"
    )
    command = [sys.executable, "-c", program, str(model_dir), str(get_open_port())]
    process = subprocess.Popen(command, env=environ(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if "Ready after" in line:
            break
    process.send_signal(signal.SIGTERM)
    assert process.wait(30) == 0
    command[-2] = "no such model"
    assert subprocess.run(command, env=environ(), check=False, timeout=60).returncode != 0


@pytest.fixture(scope="module")
def engine(model_dir: Path) -> Iterator[Engine]:
    flags = {"max_running_requests": 1, "max_queued_requests": 3}
    with Engine(model_path=str(model_dir), load_format="dummy", **flags) as engine:
        yield engine


def test_a_place_to_run_and_three_to_wait_are_four_places(engine: Engine) -> None:
    for _ in range(5):
        assert len(engine.generate(["hello"] * 4, GREEDY)) == 4
    with pytest.raises(RuntimeError, match="queue is full"):
        engine.generate(["hello"] * 5, {**GREEDY, "max_new_tokens": 300})


def test_an_engine_in_a_forked_child_raises_at_once_and_goes_on_in_its_parent(
    engine: Engine,
) -> None:
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        said = b"no error"
        try:
            engine.generate("hello", GREEDY)
        except RuntimeError as error:
            said = str(error).encode()
        engine.shutdown()
        os.write(writing, said)
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        said = pipe.read()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert b"spawn" in said
    assert len(engine.generate("hello", GREEDY)["output_ids"]) == 4
    assert isinstance(engine, EngineBase)
