"""The control routes: what they send and answer, and what they refuse before they send it."""

from __future__ import annotations

import asyncio
import json
import time
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from fake_server import BYTES, GROUP, MAX_WEIGHT_BYTES, RAW, TENSORS, Server
from scheduler_infos import scheduler_info
from serving_utils import make_model_dir
from sglang import __version__
from sglang.srt.messages.control import (
    DEFAULT_GROUP,
    AbortReq,
    CheckWeightsReq,
    ContinueGenerationReq,
    EngineStatus,
    FlushCacheReqInput,
    FromBytes,
    FromDirectory,
    FromFile,
    FromGroup,
    GetWeightsByNameReq,
    MemoryOccupationReq,
    PauseGenerationReq,
    StartProfileReq,
    StopProfileReq,
    UpdateWeightsReq,
    UpdateWeightVersionReq,
    WeightGroupReq,
    WeightSessionReq,
)
from sglang.srt.messages.requests import (
    BatchStrOutput,
    FinishReason,
    ReqTextOutput,
    TokenizedGenerateReqInput,
)
from sglang.srt.tokenizer import load_tokenizer

PAUSED = "Generation paused successfully."


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model_path: Path) -> Server:
    return Server(str(model_path), load_tokenizer(model_path))


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
    for path in ("/health", "/ping", "/health_generate"):
        assert server.request("GET", path).status_code == 200
    server.post("/continue_generation")
    assert server.request("GET", "/ready").status_code == 200


# ---------------------------------------------------------------- abort and flush


def test_abort_of_an_unknown_name_is_no_error(server: Server) -> None:
    bodies = ({"rid": "x"}, {"rid": "x", "prefix": True}, {"abort_all": True}, {}, {"rid": ""})
    for body in (*bodies, {"rid": "x", "abort_message": "m" * 512}):
        assert server.post("/abort_request", body).json() == {"aborted": 0}
    assert not server.sent


@pytest.mark.parametrize("name", ["abort_message", "aborted_message"])
def test_message_of_an_abort_travels_with_it(server: Server, name: str) -> None:
    server.held = {TokenizedGenerateReqInput, AbortReq}

    async def scenario() -> tuple[httpx.Response, httpx.Response]:
        body = {"text": "a", "rid": "job-1"}
        request = asyncio.create_task(server.send("POST", "/generate", json=body))
        while not server.sent:
            await asyncio.sleep(0.01)
        abort = {"rid": "job", "prefix": True, name: "too old"}
        answer = await server.send("POST", "/abort_request", json=abort)
        reason = FinishReason(type="abort", message=server.sent[-1].aborted_message)
        output = ReqTextOutput(server.sent[0].req_id, "", [], reason, 3, 0, 0, 0)
        server.manager.handle(BatchStrOutput(outputs=[output]))
        return answer, await request

    answer, request = asyncio.run(asyncio.wait_for(scenario(), 10))
    assert answer.json() == {"aborted": 1}
    reason = request.json()["meta_info"]["finish_reason"]
    assert reason == {"type": "abort", "message": "too old"}


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


def test_every_update_says_which_models_it_is_of(server: Server) -> None:
    """Changes all, unless it says otherwise; with all a draft model's folder may come along."""
    bodies = {
        "/update_weights_from_disk": {"model_path": "x"},
        "/update_weights_from_tensor": {"safetensors": BYTES},
        "/update_weights_from_distributed": TENSORS,
    }
    for path, body in bodies.items():
        for selector in ("target", "draft", "all"):
            assert server.post(path, {**body, "selector": selector}).status_code == 200
        assert server.post(path, body).status_code == 200
    raw = server.request(
        "POST", "/update_weights_from_tensor?selector=draft", content=b"weights", headers=RAW
    )
    assert raw.status_code == 200
    updates = [message for message in server.sent if isinstance(message, UpdateWeightsReq)]
    assert [m.selector for m in updates] == [*["target", "draft", "all", "all"] * 3, "draft"]
    server.post("/update_weights_from_disk", {"model_path": "x", "draft_model_path": "d"})
    assert server.sent[-1].source == FromDirectory("x", "d")
    server.post("/weights_checker", {"action": "reset", "selector": "draft"})
    assert server.sent[-1].selector == "draft"
    assert server.post("/begin_weight_update", {"selector": "draft"}).status_code == 200
    wrong = server.post("/update_weights_from_disk", {"model_path": "x", "selector": "head"})
    assert "must be one of target, draft, all" in wrong.json()["message"]


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
        FromFile(str(server.files[0]), delete=True),
    ]
    assert server.contents == [b"weights"]
    assert not server.files[0].exists()
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


# ---------------------------------------------------------------- groups, sessions, labels


def test_group_is_joined_used_and_left(server: Server) -> None:
    assert server.post("/init_weights_update_group", GROUP).status_code == 200
    assert server.post("/update_weights_from_distributed", TENSORS).status_code == 200
    assert server.post("/destroy_weights_update_group").status_code == 200
    joined, left = (m for m in server.sent if isinstance(m, WeightGroupReq))
    assert (joined.join.master_port, joined.join.rank) == (5000, 1)
    assert (left.group_name, left.join) == (DEFAULT_GROUP, None)
    source = server.only(UpdateWeightsReq).source
    assert source == FromGroup(DEFAULT_GROUP, **TENSORS)


def test_one_tensor_may_be_sent_without_lists(server: Server) -> None:
    body = {"name": "a", "dtype": "bfloat16", "shape": [2, 3]}
    path = "/update_weights_from_distributed"
    assert server.post(path, body).status_code == 200
    source = server.only(UpdateWeightsReq).source
    assert source == FromGroup(DEFAULT_GROUP, ["a"], ["bfloat16"], [[2, 3]])
    for wrong in ({"name": "a"}, {**body, "names": ["a"]}, {**body, "dtype": "int4"}):
        assert server.post(path, wrong).status_code == 400
    assert len(server.sent) == 1


@pytest.mark.parametrize("body", [{}, {"restore_weights_before_load": True}])
def test_quantized_weights_need_no_processing(server: Server, body: dict[str, Any]) -> None:
    answer = server.post("/post_process_weights", body)
    assert (answer.status_code, answer.json()["success"]) == (200, True)
    wrong = server.post("/post_process_weights", {"post_process_quantization": "x"})
    assert (wrong.status_code, wrong.json()["success"]) == (400, False)
    assert not server.sent


def test_deltas_of_a_checkpoint_are_refused_with_the_remedy(server: Server) -> None:
    body = {"local_checkpoint_dir": "/l", "source_dir": "/s", "target_version": 1}
    answer = server.post("/pull_weights", body)
    assert (answer.status_code, answer.json()["success"]) == (501, False)
    assert "--update-weight-mode full" in answer.json()["message"]


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
    server.reply = {"fields": {"new_version": "v9"}}
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
    accept = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.3"
    answer = server.request("GET", "/metrics", headers={"accept": accept})
    assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
    assert "\nsglang:num_running_reqs{" in answer.text


@pytest.mark.parametrize("is_paused", [False, True])
def test_loads_are_those_of_the_metrics(server: Server, is_paused: bool) -> None:
    server.internal_state = {
        "engine_paused": is_paused,
        "running_batch_size": 2,
        "waiting_queue_size": 3,
        "available_kv_tokens": 60,
        "tree_cache_size": 15,
        "last_gen_throughput": 12.5,
        "recent_spec_accept_length": 2.5,
        "recent_spec_accept_rate": 0.5,
        "speculative_num_steps": 3,
    }
    resolved = scheduler_info(max_total_num_tokens=100, max_running_requests=4)
    server.state.scheduler = resolved
    answer = server.request("GET", "/v1/loads").json()
    # A text as SGLang writes it: routers read no load with another `timestamp`.
    now = datetime.fromisoformat(answer.pop("timestamp"))
    assert abs(now.timestamp() - time.time()) < 60
    assert now.utcoffset() == timedelta(0)
    assert answer == {
        "version": __version__,
        "dp_rank_count": 1,
        "loads": [
            {
                "dp_rank": 0,
                "num_running_reqs": 2,
                "num_waiting_reqs": 3,
                "num_total_reqs": 5,
                "num_used_tokens": 25,
                "max_total_num_tokens": 100,
                "token_usage": 0.25,
                "gen_throughput": 12.5,
                "speculative": {"accept_length": 2.5, "accept_rate": 0.5, "num_steps": 3},
                "queues": {"waiting": 3, "paused": 3 if is_paused else 0},
                "paused": is_paused,
            }
        ],
        "aggregate": {
            "total_running_reqs": 2,
            "total_waiting_reqs": 3,
            "total_reqs": 5,
            "avg_token_usage": 0.25,
        },
    }
    load = {"dp_rank": 0, "num_reqs": 5, "num_waiting_reqs": 3, "num_tokens": 25}
    assert server.request("GET", "/get_load").json() == [load]
    assert "num_used_tokens{" in server.request("GET", "/metrics").text


def test_shutdown_answers_waiting_control_calls_with_503(server: Server) -> None:
    server.held = {PauseGenerationReq, UpdateWeightsReq}

    async def scenario() -> list[httpx.Response]:
        calls = [("/pause_generation", {}), ("/update_weights_from_disk", {"model_path": "x"})]
        waiting = [asyncio.create_task(server.send("POST", p, json=body)) for p, body in calls]
        while len(server.sent) < len(calls):
            await asyncio.sleep(0.01)
        await server.manager.drain(1000, asyncio.Event())
        return await asyncio.gather(*waiting)

    for answer in asyncio.run(asyncio.wait_for(scenario(), 10)):
        assert answer.status_code == 503
        assert "shutting down" in answer.json()["error"]["message"]
        assert answer.headers["retry-after"]


@pytest.mark.parametrize("method", ["GET", "POST"])
def test_a_weight_is_answered_as_sglang_does(server: Server, method: str) -> None:
    server.reply = {"message": "", "fields": {"parameter": [[1.5, 2.0]]}}
    answer = server.request(method, "/get_weights_by_name", json={"name": "w"})
    assert (answer.status_code, answer.json()) == (200, [[1.5, 2.0]])
    message = server.only(GetWeightsByNameReq)
    assert (message.name, message.truncate_size) == ("w", 100)


@pytest.mark.parametrize(("action", "sent"), [("compare", "compare"), ("reset_tensors", "reset")])
def test_the_checker_is_told_what_to_do(server: Server, action: str, sent: str) -> None:
    answer = server.post("/weights_checker", {"action": action})
    assert answer.json() == {"success": True, "message": "Done."}
    assert server.only(CheckWeightsReq).action == sent


def test_a_profile_is_started_as_bench_clients_do(server: Server) -> None:
    body = {
        "activities": ["CPU", "GPU"],
        "num_steps": 5,
        "profile_by_stage": False,
        "output_dir": None,
        "profile_prefix": None,
    }
    assert server.post("/start_profile", body).json()["success"]
    message = server.only(StartProfileReq)
    assert (message.activities, message.num_steps, message.output_dir) == (["CPU", "GPU"], 5, "")
    assert server.post("/stop_profile").json()["success"]
    assert server.only(StopProfileReq)


def test_routes_have_the_other_names_that_clients_use(server: Server) -> None:
    assert server.request("GET", "/weight_version").json() == {"weight_version": "default"}
    loads, others = (server.request("GET", path).json() for path in ("/get_loads", "/v1/loads"))
    assert loads["loads"] == others["loads"]
    for path in ("/health", "/ping"):
        answer = server.request("HEAD", path)
        assert (answer.status_code, answer.content) == (200, b"")


def test_the_tokenizer_says_how_texts_begin(server: Server) -> None:
    answer = server.request("GET", "/tokenizer_info").json()
    tokenizer = server.manager.tokenizer
    assert answer["bos_token_id"] == tokenizer.bos_token_id
    assert answer["bos_token"] == tokenizer.decode([tokenizer.bos_token_id or 0], False)


def test_unavailable_is_said_in_both_forms(server: Server) -> None:
    server.state.manager = None
    answer = server.post("/generate", {"text": "x"})
    body = answer.json()
    assert answer.status_code == body["code"] == body["error"]["code"] == 503
    assert body["object"] == "error"
    assert body["message"] == body["error"]["message"] == "The server is starting."


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
        ({"rid": "x", "abort_message": 1}, "abort_message"),
        ({"rid": "x", "abort_message": "m" * 513}, "abort_message"),
        ({"rid": "x", "aborted_message": "m" * 513}, "aborted_message"),
        ({"rid": "x", "abort_message": "a", "aborted_message": "b"}, "aborted_message"),
        ({"rid": "x", "torch_empty_cache": True}, "torch_empty_cache"),
    ],
    "/update_weights_from_disk": [
        ({}, "model_path"),
        ({"model_path": ""}, "model_path"),
        ({"model_path": "a\0b"}, "model_path"),
        ({"model_path": "x" * 4097}, "model_path"),
        ({**DISK, "load_format": "pt"}, "load_format"),
        ({**DISK, "load_format": "flattened_bucket"}, "load_format"),
        ({**DISK, "load_format": True}, "load_format"),
        ({**DISK, "is_async": True}, "is_async"),
        ({**DISK, "is_async": 0}, "is_async"),
        ({**DISK, "selector": "head"}, "selector"),
        ({**DISK, "selector": "draft", "draft_model_path": "d"}, "draft_model_path"),
        ({**DISK, "draft_model_path": ""}, "draft_model_path"),
        ({**DISK, "abort_all_request": "yes"}, "abort_all_request"),
        ({**DISK, "rid": "x"}, "rid"),
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
        ({"serialized_named_tensors": ["gASV"]}, "serialized_named_tensors"),
        (
            {"load_format": "flattened_bucket", "serialized_named_tensors": ["gASV"]},
            "serialized_named_tensors",
        ),
    ],
    "/update_weights_from_distributed": [
        ({**TENSORS, "dtypes": ["float32"]}, "dtypes"),
        ({**TENSORS, "shapes": [[1]]}, "shapes"),
        ({"names": [], "dtypes": [], "shapes": []}, "names"),
        ({**TENSORS, "names": ["a", "a"]}, "names"),
        ({**TENSORS, "names": ["a", ""]}, "names[1]"),
        ({**TENSORS, "names": ["a", "b" * 513]}, "names[1]"),
        ({**TENSORS, "dtypes": ["float32", ""]}, "dtypes[1]"),
        ({**TENSORS, "dtypes": ["int8", "float32"]}, "dtypes[0]"),
        ({**TENSORS, "dtypes": ["float32", "torch.load"]}, "dtypes[1]"),
        ({**TENSORS, "dtypes": ["float32", "f32"]}, "dtypes[1]"),
        ({**TENSORS, "shapes": [[1], [0]]}, "shapes[1][0]"),
        ({**TENSORS, "shapes": [[1], [2, -1]]}, "shapes[1][1]"),
        ({**TENSORS, "shapes": [[1], [-2, -1]]}, "shapes[1][0]"),
        ({**TENSORS, "shapes": [[1] * 9, [1]]}, "shapes[0]"),
        ({**TENSORS, "shapes": [[1], [2**20, 2**18 + 1]]}, "shapes[1]"),
        ({**TENSORS, "shapes": [[2**30, 2**30], [1]]}, "shapes[0]"),
        ({**TENSORS, "shapes": [[1], [True]]}, "shapes[1][0]"),
        ({**TENSORS, "group_name": ""}, "group_name"),
    ],
    "/init_weights_update_group": [
        ({**GROUP, "master_address": ""}, "master_address"),
        ({**GROUP, "master_address": "x" * 254}, "master_address"),
        ({**GROUP, "master_port": 0}, "master_port"),
        ({**GROUP, "master_port": "0"}, "master_port"),
        ({**GROUP, "master_port": "70000"}, "master_port"),
        ({**GROUP, "master_port": "5e3"}, "master_port"),
        ({**GROUP, "master_port": "-5"}, "master_port"),
        ({**GROUP, "master_port": ""}, "master_port"),
        ({**GROUP, "master_port": "٣٤"}, "master_port"),
        ({**GROUP, "master_port": "9" * 5_000}, "master_port"),
        ({**GROUP, "rank_offset": "1"}, "rank_offset"),
        ({**GROUP, "master_port": 65_536}, "master_port"),
        ({**GROUP, "world_size": 1}, "world_size"),
        ({**GROUP, "world_size": 4_097}, "world_size"),
        ({**GROUP, "rank_offset": 0}, "rank_offset"),
        ({**GROUP, "rank_offset": 2}, "rank_offset"),
        ({**GROUP, "backend": "mpi"}, "backend"),
        ({**GROUP, "backend": "cpu:gloo"}, "backend"),
        ({**GROUP, "timeout_s": 0}, "timeout_s"),
        ({**GROUP, "timeout_s": float("nan")}, "timeout_s"),
        ({**GROUP, "timeout_s": float("inf")}, "timeout_s"),
        ({**GROUP, "timeout_s": 3_601}, "timeout_s"),
        ({**GROUP, "timeout_s": True}, "timeout_s"),
        ({**GROUP, "group_name": ""}, "group_name"),
        ({**GROUP, "group_name": "x" * 129}, "group_name"),
    ],
    "/destroy_weights_update_group": [({"group_name": ""}, "group_name")],
    "/begin_weight_update": [
        ({"weight_version": "x"}, "weight_version"),
        ({"abort_all_request": True}, "abort_all_request"),
    ],
    "/commit_weight_update": [({"weight_version": ""}, "weight_version")],
    "/end_weight_update": [({"selector": "draft"}, "selector")],
    "/rollback_weight_update": [({"x": 1}, "x"), ({"selector": "all"}, "selector")],
    "/update_weight_version": [
        ({}, "new_version"),
        ({"new_version": ""}, "new_version"),
        ({"new_version": "a\nb"}, "new_version"),
        ({"new_version": "x", "abort_all_requests": 0}, "abort_all_requests"),
    ],
    "/release_memory_occupation": [
        ({"tags": []}, "tags"),
        ({"tags": ["disk"]}, "tags[0]"),
        ({"tags": ["weights", "weights"]}, "tags"),
        ({"tags": "weights"}, "tags"),
        ({"tags": ["cuda_graph"], "x": 1}, "x"),
    ],
    "/resume_memory_occupation": [({"tags": ["kv"]}, "tags[0]")],
    "/get_weights_by_name": [
        ({}, "name"),
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"name": "x" * 513}, "name"),
        ({"name": "x", "truncate_size": 0}, "truncate_size"),
        ({"name": "x", "truncate_size": "5"}, "truncate_size"),
    ],
    "/weights_checker": [
        ({}, "action"),
        ({"action": "steal"}, "action"),
        ({"action": 1}, "action"),
    ],
    "/start_profile": [
        ({"output_dir": ""}, "output_dir"),
        ({"output_dir": "a\0b"}, "output_dir"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_steps": 10_001}, "num_steps"),
        ({"activities": ["RPD"]}, "activities[0]"),
        ({"profile_by_stage": True}, "profile_by_stage"),
        ({"start_step": 5}, "start_step"),
        ({"with_stack": "yes"}, "with_stack"),
    ],
    "/stop_profile": [({"x": 1}, "x")],
}
CASES = [(path, body, field) for path, cases in BAD.items() for body, field in cases]
NO_UPDATES = ("/get_weights_by_name",)
WEIGHT_PATHS = [
    path for path in BAD if ("weight" in path or "memory" in path) and path not in NO_UPDATES
]


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


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (
            "/pause_generation",
            {"mode": "stop"},
            "mode: must be one of abort, retract, in_place, drain, in-place.",
        ),
        (
            "/pause_generation",
            {"lease_s": 1, "lease_end": "stop"},
            "lease_end: must be one of continue, abort.",
        ),
        (
            "/release_memory_occupation",
            {"tags": ["disk"]},
            "tags[0]: must be one of kv_cache, weights, cuda_graph.",
        ),
        (
            "/init_weights_update_group",
            {**GROUP, "master_port": 65_536},
            "master_port: expected int <= 65535.",
        ),
        (
            "/init_weights_update_group",
            {**GROUP, "rank_offset": 2},
            "rank_offset: must be at least 1 (0 is the trainer) and < world_size.",
        ),
        (
            "/update_weights_from_disk",
            {"model_path": ""},
            "model_path: expected str of length >= 1.",
        ),
    ],
)
def test_refusal_says_what_would_be_right(
    server: Server, path: str, body: dict[str, Any], text: str
) -> None:
    assert server.post(path, body).json()["error"]["message"] == text


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
        "/get_weights_by_name": {"name": "w"},
        "/weights_checker": {"action": "compare"},
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


def test_ranges_choices_and_defaults_are_documented(server: Server) -> None:
    schemas = server.request("GET", "/openapi.json").json()["components"]["schemas"]
    port = schemas["InitWeightsUpdateGroupReqInput"]["properties"]["master_port"]
    assert (port["minimum"], port["maximum"]) == (1, 65_535)
    pause = schemas["PauseGenerationReqInput"]["properties"]
    assert set(pause["mode"]["enum"]) == {"abort", "retract", "in_place", "in-place", "drain"}
    assert pause["lease_s"]["default"] is None


@pytest.mark.parametrize("path", ["/add_external_corpus", "/remove_external_corpus"])
def test_routes_that_change_the_corpus_of_ngram_are_not_there(server: Server, path: str) -> None:
    answer = server.post(path, {})
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "NotFoundError"
    assert not server.sent
