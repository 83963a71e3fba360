"""The Engine's control calls over a scripted scheduler, and the file that tensors travel in."""

from __future__ import annotations

import asyncio
import stat
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from fake_backend import FULL, LIMITS
from sent_weights import pickle_of
from serving_utils import make_model_dir
from sglang.srt.control.bodies import (
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.entrypoints import engine as engine_module
from sglang.srt.entrypoints import tensor_file
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.entrypoints.tensor_file import written_tensors
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.messages.control import (
    AbortReq,
    ControlReply,
    EngineStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FromDirectory,
    FromFile,
    PauseGenerationReq,
    UpdateWeightsReq,
)
from sglang.srt.messages.requests import (
    BatchStrOutput,
    ReqTextOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.sent_tensors import HostMemory
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer
from sglang.srt.utils import MultiprocessingSerializer


class FakeRuntime:
    """An `EngineRuntime` whose scheduler answers control calls at once and generates nothing."""

    def __init__(self, server_args: ServerArgs, tokenizer: Tokenizer) -> None:
        self.sent: list[Any] = []
        self.files: list[dict[str, torch.Tensor]] = []
        self.private_directory = Path(server_args.model_path)
        self.has_request = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        never: Callable[[], Awaitable[Any]] = asyncio.Event().wait
        self.manager = TokenizerManager(tokenizer, LIMITS, self._take, never)
        self.control = self.manager.control

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def wait_for(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def wait_for_async(self, work: Any) -> Any:
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _take(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, TokenizedGenerateReqInput):
            self.has_request.set()
            return
        if isinstance(message, AbortReq):
            outputs = [ReqTextOutput(i, "", [], FULL, 3, 0, 0, 0) for i in message.req_ids]
            self.manager.handle(BatchStrOutput(outputs=outputs))
            return
        answer: Any = ControlReply(call_id=message.call_id, success=True, message="Done.")
        if isinstance(message, FlushCacheReqInput):
            answer = FlushCacheReqOutput(call_id=message.call_id, success=True)
        if isinstance(message, PauseGenerationReq):
            self.manager.handle(EngineStatus(stopped="Paused."))
        if isinstance(message, UpdateWeightsReq) and isinstance(message.source, FromFile):
            self.files.append(load_file(message.source.path))
            Path(message.source.path).unlink()
        self.manager.handle(answer)


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Engine]:
    monkeypatch.setattr(engine_module, "EngineRuntime", FakeRuntime)
    with Engine(model_path=str(make_model_dir(tmp_path))) as made:
        yield made


def runtime_of(engine: Engine) -> Any:
    return engine._runtime


def sent_by(engine: Engine) -> list[Any]:
    messages: list[Any] = runtime_of(engine).sent
    return messages


def test_updates_of_an_engine_say_which_models_they_are_of(engine: Engine) -> None:
    engine.update_weights_from_disk("x", selector="draft")
    engine.update_weights_from_disk("x", draft_model_path="d")
    engine.update_weights_from_tensor([("fc.weight", torch.ones(2))], selector="draft")
    engine.update_weights_from_distributed(["a"], ["int64"], [[2]], selector="target")
    engine.check_weights("reset", selector="draft")
    selectors = [message.selector for message in sent_by(engine)]
    assert selectors == ["draft", "all", "draft", "target", "draft"]
    assert sent_by(engine)[1].source == FromDirectory("x", "d")
    with pytest.raises(ValueError, match="selector: must be one of target, draft, all"):
        engine.update_weights_from_disk("x", selector="head")


def test_pause_of_an_engine_retracts_unless_told_otherwise(engine: Engine) -> None:
    assert engine.pause_generation() == {"message": "Done.", "status": "ok"}
    engine.pause_generation("in-place", lease_s=3)
    engine.continue_generation()
    modes = [m.mode for m in sent_by(engine) if isinstance(m, PauseGenerationReq)]
    assert modes == ["retract", "in_place"]


def test_every_async_variant_sends_what_its_twin_sends(engine: Engine) -> None:
    async def scenario() -> None:
        await engine.async_pause_generation("drain", drain_timeout_s=2.0)
        await engine.async_continue_generation()
        assert (await engine.async_flush_cache(1.5)).success
        assert await engine.async_abort_request(abort_all=True) == 0

    asyncio.run(scenario())
    count = len(sent_by(engine))
    engine.pause_generation("drain", drain_timeout_s=2.0)
    engine.continue_generation()
    assert engine.flush_cache(1.5).success
    assert engine.abort_request(abort_all=True) == 0
    first, second = sent_by(engine)[:count], sent_by(engine)[count:]
    for message in (*first, *second):
        message.call_id = 0
    assert first == second


def test_a_thread_may_pause_and_abort_while_another_generates(engine: Engine) -> None:
    failures: list[Exception] = []

    def generate() -> None:
        try:
            engine.generate("hello", rid="job-1")
        except RuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=generate)
    thread.start()
    assert runtime_of(engine).has_request.wait(10)
    engine.pause_generation()
    assert engine.abort_request("job", prefix=False) == 0
    assert engine.abort_request("job", prefix=True) == 1
    thread.join(10)
    assert len(failures) == 1


@pytest.mark.parametrize(
    ("call", "field"),
    [
        (lambda e: e.pause_generation("stop"), "mode"),
        (lambda e: e.pause_generation(lease_s=True), "lease_s"),
        (lambda e: e.pause_generation(lease_s=float("nan")), "lease_s"),
        (lambda e: e.pause_generation(drain_timeout_s=1.0), "drain_timeout_s"),
        (lambda e: e.abort_request(prefix=True), "rid"),
        (lambda e: e.abort_request("", prefix=True), "rid"),
        (lambda e: e.flush_cache(-1), "timeout_s"),
        (lambda e: e.flush_cache(True), "timeout_s"),
        (lambda e: e.update_weights_from_disk(""), "model_path"),
        (lambda e: e.update_weights_from_disk("x", revision="y"), "revision"),
        (lambda e: e.update_weights_from_tensor({}), "named_tensors"),
        (lambda e: e.update_weights_from_tensor([("a", [1.0])]), "named_tensors"),
        (lambda e: e.update_weights_from_tensor([("a", torch.ones(1))] * 2), "named_tensors"),
        (lambda e: e.update_weights_from_distributed(["a"], [], [[1]]), "dtypes"),
        (lambda e: e.init_weights_update_group("host", 0, 1, 2), "master_port"),
        (
            lambda e: e.init_weights_update_group("host", 1, 1, 2, timeout_s=float("nan")),
            "timeout_s",
        ),
        (lambda e: e.destroy_weights_update_group(""), "group_name"),
        (lambda e: e.commit_weight_update(weight_version=""), "weight_version"),
        (lambda e: e.update_weight_version(""), "new_version"),
        (lambda e: e.release_memory_occupation(["disk"]), r"tags\[0\]"),
        (lambda e: e.resume_memory_occupation("weights"), "tags"),
    ],
)
def test_bad_argument_is_a_value_error_that_names_it(
    engine: Engine, call: Callable[[Engine], Any], field: str
) -> None:
    with pytest.raises(ValueError, match=f"^{field}: "):
        call(engine)
    assert not sent_by(engine)


def test_weight_calls_of_an_engine_reach_the_scheduler(engine: Engine) -> None:
    engine.pause_generation()
    engine.init_weights_update_group("host", 5000, 1, 2, timeout_s=5.0)
    engine.begin_weight_update()
    engine.update_weights_from_disk("checkpoint", weight_version="v2", flush_cache=False)
    engine.update_weights_from_distributed(["a"], ["float32"], [[2]])
    engine.commit_weight_update(weight_version="v3")
    engine.rollback_weight_update()
    engine.destroy_weights_update_group()
    assert engine.update_weight_version("v4", abort_all_requests=False)["success"] is True
    engine.release_memory_occupation()
    engine.resume_memory_occupation(["weights"])
    names = [type(message).__name__ for message in sent_by(engine)]
    assert names == [
        "PauseGenerationReq",
        "WeightGroupReq",
        "WeightSessionReq",
        *["UpdateWeightsReq"] * 2,
        *["WeightSessionReq"] * 2,
        "WeightGroupReq",
        "UpdateWeightVersionReq",
        *["MemoryOccupationReq"] * 2,
    ]
    assert engine.get_weight_version() == "default"


def test_keywords_of_sglang_are_accepted_by_an_engine_too(engine: Engine) -> None:
    assert engine.abort_request() == 0
    engine.update_weights_from_disk("x", load_format="auto", recapture_cuda_graph=True)
    with pytest.raises(ValueError, match=r"^load_format: "):
        engine.update_weights_from_disk("x", load_format="gguf")
    tensors = {"a": torch.ones(1)}
    engine.update_weights_from_tensor(tensors, load_format=None, torch_empty_cache=False)
    with pytest.raises(ValueError, match=r"^load_format: "):
        engine.update_weights_from_tensor(tensors, load_format="flattened_bucket")
    assert len(sent_by(engine)) == 2


def test_tensors_reach_the_scheduler_as_safetensors(engine: Engine) -> None:
    tied = torch.arange(6.0).reshape(2, 3)
    tensors = {"a": tied, "b": tied, "c": tied.t(), "d": torch.ones(2, dtype=torch.bfloat16)}
    engine.update_weights_from_tensor(tensors, weight_version="v2")
    engine.update_weights_from_tensor(iter(tensors.items()))
    for found in runtime_of(engine).files:
        assert set(found) == set(tensors)
        for name, tensor in tensors.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(found[name], tensor)


def serialized() -> Any:
    return MultiprocessingSerializer.serialize([("a", torch.ones(3))])


def test_what_a_trainer_serializes_reaches_the_scheduler(engine: Engine) -> None:
    engine.update_weights_from_tensor([serialized()], weight_version="v2")
    request = UpdateWeightsFromTensorReqInput(
        serialized_named_tensors=[serialized()], flush_cache=False
    )
    engine.update_weights_from_tensor(request)
    [first, second] = sent_by(engine)
    assert (first.weight_version, second.flush_cache) == ("v2", False)
    for message in (first, second):
        assert message.source.memories == [HostMemory(0, 12)]
    with pytest.raises(ValueError, match=r"^load_format: "):
        engine.update_weights_from_tensor([serialized()], "direct")


def test_pickled_tensors_reach_the_scheduler_where_they_are_allowed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = pickle_of([("a", torch.ones(3))])
    with pytest.raises(ValueError, match="--allow-pickled-weights"):
        engine.update_weights_from_tensor([kept])
    allowed = replace(engine.server_args, allow_pickled_weights=True)
    monkeypatch.setattr(engine, "server_args", allowed)
    engine.update_weights_from_tensor([kept])
    [message] = sent_by(engine)
    assert message.source.memories == [HostMemory(0, 12)]


def test_file_of_tensors_is_private_and_gone_after_use(tmp_path: Path) -> None:
    with written_tensors({"a": torch.ones(3)}, tmp_path) as source:
        path = Path(source.path)
        assert source.delete
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


@pytest.mark.parametrize("is_missing", [True, False])
def test_other_directory_is_used_where_shared_memory_is_missing_or_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_missing: bool
) -> None:
    if is_missing:
        monkeypatch.setattr(tensor_file, "SHARED_MEMORY", tmp_path / "none")
    else:
        monkeypatch.setattr(tensor_file, "HEADER_BYTES_PER_TENSOR", 2**60)
    with written_tensors({"a": torch.ones(3)}, tmp_path) as source:
        assert Path(source.path).parent == tmp_path
