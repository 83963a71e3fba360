"""The control routes: what they send and answer, and what they refuse before they send it."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import msgspec
import pytest

from fake_backend import LIMITS
from serving_utils import make_model_dir
from sglang.srt.entrypoints.http_server import create_app
from sglang.srt.entrypoints.server_state import ServerState
from sglang.srt.managers.control_messages import (
    ContinueGenerationReq,
    ControlReply,
    EngineStatus,
    FlushCacheReqInput,
    FlushCacheReqOutput,
    FromBytes,
    FromDirectory,
    FromFile,
    FromGroup,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    HealthPing,
    MemoryOccupationReq,
    PauseGenerationReq,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
)
from sglang.srt.managers.tokenizer_manager import TokenizerManager
from sglang.srt.model_config import load_model_config
from sglang.srt.server_args import ServerArgs
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

PAUSED = "Generation paused successfully."
BYTES = base64.b64encode(b"weights").decode()
GROUP = {"master_address": "host", "master_port": 5000, "rank_offset": 1, "world_size": 2}
TENSORS = {"names": ["a", "b"], "dtypes": ["float32"] * 2, "shapes": [[2, 3], []]}
RAW = {"content-type": "application/octet-stream"}
MAX_WEIGHT_BYTES = 400


@dataclass(frozen=True)
class Model:
    path: str
    tokenizer: Tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = make_model_dir(tmp_path_factory.mktemp("model"))
    return Model(str(path), load_tokenizer(path))


class Server:
    """The application, over a scheduler that answers every message at once."""

    def __init__(self, model: Model) -> None:
        self.sent: list[Any] = []
        self.reply: dict[str, Any] = {}
        self.internal_state: dict[str, Any] = {"engine_paused": False, "running_batch_size": 2}
        args = ServerArgs(
            model_path=model.path, max_request_bytes=8000, max_weight_bytes=MAX_WEIGHT_BYTES
        )
        self.state = ServerState(args, load_model_config(model.path))
        never: Callable[[], Awaitable[Any]] = asyncio.Event().wait
        self.manager = TokenizerManager(model.tokenizer, LIMITS, self._take, never)
        self.state.manager = self.manager
        self._app = create_app(self.state)

    def _take(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, PauseGenerationReq):
            self.manager.handle(EngineStatus(stopped="Generation is paused."))
        if isinstance(message, ContinueGenerationReq):
            self.manager.handle(EngineStatus())
        answer: Any
        if isinstance(message, FlushCacheReqInput):
            answer = FlushCacheReqOutput(call_id=message.call_id, success=True, flushed_items=5)
        elif isinstance(message, GetInternalStateReq):
            state = self.internal_state
            answer = GetInternalStateReqOutput(call_id=message.call_id, internal_state=state)
        elif isinstance(message, HealthPing):
            answer = message
        else:
            reply = {"success": True, "message": "Done.", **self.reply}
            answer = ControlReply(call_id=message.call_id, **reply)
        self.manager.handle(answer)

    def request(self, method: str, path: str, **kwargs: Any) -> httpx.Response:
        async def send() -> httpx.Response:
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
                return await client.request(method, path, **kwargs)

        return asyncio.run(asyncio.wait_for(send(), 10))

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.request("POST", path, json=body, **kwargs)

    def only(self, kind: type) -> Any:
        """The one message of a kind that was sent."""
        (message,) = [m for m in self.sent if isinstance(m, kind)]
        return message


@pytest.fixture
def server(model: Model) -> Server:
    return Server(model)


# ---------------------------------------------------------------- pause and continue


@pytest.mark.parametrize(
    ("body", "mode"),
    [
        (None, "abort"),
        ({}, "abort"),
        ({"mode": None}, "abort"),
        ({"mode": "retract"}, "retract"),
        ({"mode": "in_place"}, "in_place"),
        ({"mode": "in-place"}, "in_place"),
        ({"mode": "drain", "drain_timeout_s": 2, "lease_s": 9, "lease_end": "abort"}, "drain"),
    ],
)
def test_pause_sends_its_mode_and_answers_with_counts(server: Server, body: Any, mode: str) -> None:
    server.reply = {"message": PAUSED, "fields": {"aborted": 1, "epoch": 3}}
    kwargs = {} if body is None else {"json": body}
    answer = server.request("POST", "/pause_generation", **kwargs)
    assert answer.status_code == 200
    assert answer.json() == {"message": PAUSED, "status": "ok", "aborted": 1, "epoch": 3}
    message = server.only(PauseGenerationReq)
    given = body or {}
    assert message.mode == mode
    assert message.lease_s == given.get("lease_s")
    assert message.lease_end == given.get("lease_end", "continue")
    assert message.drain_timeout_s == given.get("drain_timeout_s")


@pytest.mark.parametrize("body", [b"", b" ", b"{}", b'{"torch_empty_cache": true}'])
def test_continue_takes_what_clients_send(server: Server, body: bytes) -> None:
    server.reply = {"message": "Generation continued successfully."}
    answer = server.request("POST", "/continue_generation", content=body)
    assert answer.json() == {"message": "Generation continued successfully.", "status": "ok"}
    server.only(ContinueGenerationReq)


def test_paused_server_is_alive_but_not_ready(server: Server) -> None:
    assert server.request("GET", "/ready").status_code == 200
    server.post("/pause_generation")
    ready = server.request("GET", "/ready")
    assert ready.status_code == 503
    assert ready.headers["retry-after"]
    for path in ("/health", "/health_generate"):
        assert server.request("GET", path).status_code == 200
    server.post("/continue_generation")
    assert server.request("GET", "/ready").status_code == 200


# ---------------------------------------------------------------- abort and flush


def test_abort_of_an_unknown_name_is_no_error(server: Server) -> None:
    for body in ({"rid": "x"}, {"rid": "x", "prefix": True}, {"abort_all": True}):
        assert server.post("/abort_request", body).json() == {"aborted": 0}
    assert not server.sent


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_flush_passes_its_time_on(server: Server, method: str) -> None:
    answer = server.request(method, "/flush_cache?timeout=2.5")
    assert answer.status_code == 200
    assert answer.text.endswith("Flushed items: 5\n")
    assert server.only(FlushCacheReqInput).timeout_s == 2.5


def test_flush_does_not_wait_unless_told(server: Server) -> None:
    server.request("POST", "/flush_cache")
    assert server.only(FlushCacheReqInput).timeout_s == 0


# ---------------------------------------------------------------- weight updates


def test_update_from_disk_answers_in_sglangs_form(server: Server) -> None:
    server.reply = {"fields": {"num_paused_requests": 2}}
    ignored = {"load_format": "auto", "is_async": False, "keep_pause": True, "token_step": 3}
    ignored |= {"torch_empty_cache": True, "recapture_cuda_graph": False}
    body = {"model_path": "checkpoint", "weight_version": "v2", "flush_cache": False, **ignored}
    answer = server.post("/update_weights_from_disk", body)
    assert answer.status_code == 200
    assert answer.json() == {"success": True, "message": "Done.", "num_paused_requests": 2}
    message = server.only(UpdateWeightsReq)
    assert message.source == FromDirectory("checkpoint")
    assert (message.weight_version, message.flush_cache) == ("v2", False)


def test_failed_update_says_so_in_both_forms(server: Server) -> None:
    server.manager.handle(EngineStatus(stopped="Paused."))
    for code in (400, 500, 503):
        server.reply = {"success": False, "message": "No such file.", "status_code": code}
        answer = server.post("/update_weights_from_disk", {"model_path": "x"})
        assert answer.status_code == code
        body = answer.json()
        assert (body["success"], body["message"]) == (False, "No such file.")
        assert body["error"]["message"] == "No such file."
        assert body["error"]["code"] == code
        assert ("retry-after" in answer.headers) == (code == 503)


def test_tensors_come_as_base64_as_shared_memory_or_raw(server: Server) -> None:
    path = "/update_weights_from_tensor"
    for body in ({"safetensors": BYTES}, {"shared_memory": "weights-1.bin"}):
        assert server.post(path, body).status_code == 200
    raw = server.request(
        "POST", f"{path}?weight_version=7&flush_cache=false", content=b"weights", headers=RAW
    )
    assert raw.status_code == 200
    updates = [m for m in server.sent if isinstance(m, UpdateWeightsReq)]
    assert [m.source for m in updates] == [
        FromBytes(b"weights"),
        FromFile("/dev/shm/weights-1.bin"),
        FromBytes(b"weights"),
    ]
    assert (updates[2].weight_version, updates[2].flush_cache) == ("7", False)


@pytest.mark.parametrize(
    ("size", "headers"), [(MAX_WEIGHT_BYTES + 1, RAW), (MAX_WEIGHT_BYTES + 1, {})]
)
def test_too_many_bytes_of_weights_are_refused(
    server: Server, size: int, headers: dict[str, str]
) -> None:
    """The limit is that of the flag, not that of other bodies."""
    path = "/update_weights_from_tensor"
    answer = server.request("POST", path, content=b"x" * size, headers=headers)
    assert answer.status_code == 413
    assert "--max-weight-bytes" in answer.json()["message"]
    assert not server.sent


def test_pickled_tensors_are_refused_with_the_remedy(server: Server) -> None:
    body = {"serialized_named_tensors": ["gASV"], "flush_cache": True}
    answer = server.post("/update_weights_from_tensor", body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "serialized_named_tensors"
    assert "pickle is never read" in answer.json()["message"]
    assert "safetensors" in answer.json()["message"]


def test_group_is_joined_used_and_left(server: Server) -> None:
    assert server.post("/init_weights_update_group", GROUP).status_code == 200
    assert server.post("/update_weights_from_distributed", TENSORS).status_code == 200
    assert server.post("/destroy_weights_update_group").status_code == 200
    joined, left = (m for m in server.sent if isinstance(m, WeightGroupReq))
    assert (joined.join.master_port, joined.join.rank_offset) == (5000, 1)
    assert (left.group_name, left.join) == ("weight_update_group", None)
    source = server.only(UpdateWeightsReq).source
    assert source == FromGroup("weight_update_group", **TENSORS)


@pytest.mark.parametrize("commit", ["/commit_weight_update", "/end_weight_update"])
def test_session_is_begun_and_ended(server: Server, commit: str) -> None:
    assert server.request("POST", "/begin_weight_update").json()["success"] is True
    assert server.post(commit, {"weight_version": "v3"}).json()["success"] is True
    assert server.request("POST", commit, content=b"").json()["success"] is True
    assert server.post("/rollback_weight_update", {}).json()["success"] is True
    sessions = [m for m in server.sent if isinstance(m, WeightSessionReq)]
    assert [m.action for m in sessions] == ["begin", "commit", "commit", "rollback"]
    assert [m.weight_version for m in sessions] == [None, "v3", None, None]


def test_version_is_told_everywhere(server: Server) -> None:
    answer = server.post("/update_weight_version", {"new_version": "v9"})
    assert answer.json() == {"success": True, "message": "Done.", "new_version": "v9"}
    assert server.only(UpdateWeightVersionReq).new_version == "v9"
    server.manager.handle(EngineStatus(weight_version="v9"))
    assert server.request("GET", "/get_weight_version").json() == {"weight_version": "v9"}
    assert server.request("GET", "/model_info").json()["weight_version"] == "v9"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("action", ["release", "resume"])
def test_memory_is_released_and_resumed(server: Server, method: str, action: str) -> None:
    path = f"/{action}_memory_occupation"
    assert server.request(method, path).json() == {"success": True, "message": "Done."}
    assert server.request(method, path, json={"tags": ["kv_cache"]}).status_code == 200
    messages = [m for m in server.sent if isinstance(m, MemoryOccupationReq)]
    assert [(m.action, m.tags) for m in messages] == [(action, None), (action, ["kv_cache"])]


def test_metrics_are_for_prometheus(server: Server) -> None:
    answer = server.request("GET", "/metrics")
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nsglang:num_running_reqs{" in answer.text


# ---------------------------------------------------------------- refusals

DISK = {"model_path": "x"}
BAD: dict[str, list[tuple[Any, str]]] = {
    "/pause_generation": [
        ({"mode": "stop"}, "mode"),
        ({"mode": "ABORT"}, "mode"),
        ({"mode": 1}, "mode"),
        ({"mode": ["abort"]}, "mode"),
        ({"lease_s": 0}, "lease_s"),
        ({"lease_s": -1}, "lease_s"),
        ({"lease_s": True}, "lease_s"),
        ({"lease_s": "5"}, "lease_s"),
        ({"lease_s": float("nan")}, "lease_s"),
        ({"lease_s": float("inf")}, "lease_s"),
        ({"lease_s": 86_401}, "lease_s"),
        ({"mode": "drain", "drain_timeout_s": 0}, "drain_timeout_s"),
        ({"mode": "drain", "drain_timeout_s": False}, "drain_timeout_s"),
        ({"mode": "drain", "drain_timeout_s": 1e9}, "drain_timeout_s"),
        ({"mode": "abort", "drain_timeout_s": 5}, "drain_timeout_s"),
        ({"lease_end": "abort"}, "lease_end"),
        ({"lease_s": 1, "lease_end": "stop"}, "lease_end"),
        ({"reason": "x"}, "reason"),
    ],
    "/continue_generation": [({"mode": "abort"}, "mode")],
    "/abort_request": [
        ({"prefix": True}, "rid"),
        ({"rid": "", "prefix": True}, "rid"),
        ({"rid": "x", "prefix": 1}, "prefix"),
        ({"rid": "x" * 257}, "rid"),
    ],
    "/update_weights_from_disk": [
        ({}, ""),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"model_path": "x" * 4097}, "model_path"),
        ({**DISK, "load_format": "pt"}, "load_format"),
        ({**DISK, "is_async": True}, "is_async"),
        ({**DISK, "weight_version": ""}, "weight_version"),
        ({**DISK, "weight_version": "x" * 129}, "weight_version"),
        ({**DISK, "flush_cache": 1}, "flush_cache"),
        ({**DISK, "abort_all_requests": "no"}, "abort_all_requests"),
        ({**DISK, "revision": "x"}, "revision"),
    ],
    "/update_weights_from_tensor": [
        ({}, "safetensors"),
        ({"safetensors": BYTES, "shared_memory": "x"}, "safetensors"),
        ({"safetensors": "not base64!"}, "safetensors"),
        ({"safetensors": ""}, "safetensors"),
        ({"shared_memory": ""}, "shared_memory"),
        ({"shared_memory": "."}, "shared_memory"),
        ({"shared_memory": ".."}, "shared_memory"),
        ({"shared_memory": "a/b"}, "shared_memory"),
        ({"shared_memory": "../x"}, "shared_memory"),
        ({"shared_memory": "a\n"}, "shared_memory"),
        ({"shared_memory": "x" * 129}, "shared_memory"),
        ({"safetensors": BYTES, "load_format": "direct"}, "load_format"),
    ],
    "/update_weights_from_distributed": [
        ({**TENSORS, "dtypes": ["float32"]}, "dtypes"),
        ({**TENSORS, "shapes": [[1]]}, "shapes"),
        ({"names": [], "dtypes": [], "shapes": []}, "names"),
        ({**TENSORS, "names": ["a", "a"]}, "names"),
        ({**TENSORS, "names": ["a", ""]}, "names[1]"),
        ({**TENSORS, "names": ["a", "b" * 513]}, "names[1]"),
        ({**TENSORS, "dtypes": ["float32", ""]}, "dtypes[1]"),
        ({**TENSORS, "shapes": [[1], [0]]}, "shapes[1]"),
        ({**TENSORS, "shapes": [[1], [-2]]}, "shapes[1]"),
        ({**TENSORS, "shapes": [[1] * 9, [1]]}, "shapes[0]"),
        ({**TENSORS, "shapes": [[2**30, 2**30], [1]]}, "shapes[0]"),
        ({**TENSORS, "shapes": [[1], [True]]}, "shapes[1][0]"),
        ({**TENSORS, "group_name": ""}, "group_name"),
    ],
    "/init_weights_update_group": [
        ({**GROUP, "master_address": ""}, "master_address"),
        ({**GROUP, "master_port": 0}, "master_port"),
        ({**GROUP, "master_port": 65_536}, "master_port"),
        ({**GROUP, "world_size": 1}, "world_size"),
        ({**GROUP, "world_size": 4_097}, "world_size"),
        ({**GROUP, "rank_offset": 0}, "rank_offset"),
        ({**GROUP, "rank_offset": 2}, "rank_offset"),
        ({**GROUP, "backend": "mpi"}, "backend"),
        ({**GROUP, "timeout_s": 0}, "timeout_s"),
        ({**GROUP, "timeout_s": 3_601}, "timeout_s"),
        ({**GROUP, "timeout_s": True}, "timeout_s"),
        ({**GROUP, "group_name": "x" * 129}, "group_name"),
    ],
    "/destroy_weights_update_group": [({"group_name": ""}, "group_name")],
    "/begin_weight_update": [({"weight_version": "x"}, "weight_version")],
    "/commit_weight_update": [({"weight_version": ""}, "weight_version")],
    "/end_weight_update": [({"selector": "all"}, "selector")],
    "/rollback_weight_update": [({"x": 1}, "x")],
    "/update_weight_version": [
        ({}, ""),
        ({"new_version": ""}, "new_version"),
        ({"new_version": "a\nb"}, "new_version"),
        ({"new_version": "x", "abort_all_requests": 0}, "abort_all_requests"),
    ],
    "/release_memory_occupation": [
        ({"tags": []}, "tags"),
        ({"tags": ["disk"]}, "tags"),
        ({"tags": ["weights", "weights"]}, "tags"),
        ({"tags": "weights"}, "tags"),
    ],
    "/resume_memory_occupation": [({"tags": ["kv"]}, "tags")],
}
CASES = [(path, body, field) for path, cases in BAD.items() for body, field in cases]
WEIGHT_PATHS = [path for path in BAD if "weight" in path or "memory" in path]


@pytest.mark.parametrize(("path", "body", "field"), CASES)
def test_bad_field_is_named_and_nothing_is_sent(
    server: Server, path: str, body: Any, field: str
) -> None:
    answer = server.request("POST", path, content=_json(body))
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == (field or None)
    assert not server.sent
    if path in WEIGHT_PATHS:
        assert answer.json()["success"] is False
        assert answer.json()["message"] == error["message"]


def _json(body: Any) -> bytes:
    """JSON with Python's own spelling of what JSON does not have."""
    return json.dumps(body).encode()


@pytest.mark.parametrize("timeout", ["-1", "nan", "inf", "3601", "soon", "", "1e999"])
def test_bad_flush_timeout_is_named(server: Server, timeout: str) -> None:
    answer = server.request("GET", f"/flush_cache?timeout={timeout}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "timeout"
    assert not server.sent


@pytest.mark.parametrize(
    ("query", "field"),
    [("flush_cache=maybe", "flush_cache"), ("weight_version=", "weight_version"), ("x=1", "x")],
)
def test_bad_option_of_raw_weights_is_named(server: Server, query: str, field: str) -> None:
    path = f"/update_weights_from_tensor?{query}"
    answer = server.request("POST", path, content=b"weights", headers=RAW)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert not server.sent


def test_raw_weights_must_not_be_empty(server: Server) -> None:
    answer = server.request("POST", "/update_weights_from_tensor", content=b"", headers=RAW)
    assert answer.status_code == 400
    assert not server.sent


@pytest.mark.parametrize("path", [*BAD, "/flush_cache"])
def test_starting_server_says_so(server: Server, path: str) -> None:
    server.state.manager = None
    good: dict[str, Any] = {
        "/abort_request": {"abort_all": True},
        "/update_weights_from_disk": DISK,
        "/update_weights_from_tensor": {"safetensors": BYTES},
        "/update_weights_from_distributed": TENSORS,
        "/init_weights_update_group": GROUP,
        "/update_weight_version": {"new_version": "v"},
    }
    answer = server.post(path, good.get(path, {}))
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert server.request("GET", "/model_info").json()["weight_version"] == "default"


def test_every_body_is_documented(server: Server) -> None:
    document = server.request("GET", "/openapi.json").json()
    schemas = document["components"]["schemas"]
    for path in BAD:
        if path == "/end_weight_update":
            continue
        content = document["paths"][path]["post"].get("requestBody", {}).get("content", {})
        for entry in content.values():
            assert entry["schema"]["$ref"].rpartition("/")[2] in schemas
    assert msgspec.json.encode(document)
