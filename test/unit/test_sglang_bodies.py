"""Bodies of control calls as SGLang's clients send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from fake_server import BYTES, GROUP, RAW, TENSORS, Server
from serving_utils import make_model_dir
from sglang.srt.managers.control_messages import UpdateWeightsReq, WeightGroupReq
from sglang.srt.tokenizer import load_tokenizer

SGLANG = {
    "load_format": "auto",
    "selector": "all",
    "torch_empty_cache": True,
    "is_async": False,
    "keep_pause": True,
    "token_step": 3,
    "recapture_cuda_graph": True,
    "disable_draft_model": True,
    "crash_on_error": True,
    "post_load_weights": True,
    "rid": None,
    "http_worker_ipc": None,
    "serialized_named_tensors": None,
    "abort_all_request": False,
}
GOOD: dict[str, dict[str, Any]] = {
    "/update_weights_from_disk": {"model_path": "x"},
    "/update_weights_from_tensor": {"safetensors": BYTES},
    "/update_weights_from_distributed": TENSORS,
    "/init_weights_update_group": GROUP,
    "/destroy_weights_update_group": {},
    "/begin_weight_update": {},
    "/commit_weight_update": {},
    "/end_weight_update": {},
    "/update_weight_version": {"new_version": "v"},
    "/release_memory_occupation": {"tags": ["cuda_graph"]},
    "/resume_memory_occupation": {"tags": ["cuda_graph"]},
    "/pause_generation": {},
    "/continue_generation": {},
}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model"))


@pytest.fixture
def server(model_path: Path) -> Server:
    return Server(str(model_path), load_tokenizer(model_path))


@pytest.mark.parametrize("path", GOOD)
def test_fields_of_sglang_that_ask_for_nothing_are_accepted(server: Server, path: str) -> None:
    nulls = dict.fromkeys(SGLANG)
    other = {"load_format": "safetensors", "selector": "target"}
    for extra in (SGLANG, nulls, other):
        answer = server.post(path, {**GOOD[path], **extra})
        assert answer.status_code == 200, answer.text
    assert len(server.sent) == 3
    assert server.sent[0] == msgspec.structs.replace(server.sent[1], call_id=server.sent[0].call_id)


@pytest.mark.parametrize(
    "path", [path for path in GOOD if "update_weight" in path or "commit" in path]
)
def test_misspelt_abort_is_understood(server: Server, path: str) -> None:
    if path == "/update_weights_from_distributed":
        body = {**TENSORS, "abort_all_requests": False, "abort_all_request": True}
    else:
        body = {**GOOD[path], "abort_all_request": True}
    assert server.post(path, body).status_code == 200
    assert server.sent[-1].abort_all_requests is True


def test_port_of_a_group_may_be_a_string(server: Server) -> None:
    answer = server.post("/init_weights_update_group", {**GROUP, "master_port": "12345"})
    assert answer.status_code == 200
    assert server.only(WeightGroupReq).join.master_port == 12345


def test_options_of_raw_weights_may_have_fields_of_sglang(server: Server) -> None:
    query = "load_format=safetensors&is_async=False&abort_all_request=1&weight_version=1"
    path = f"/update_weights_from_tensor?{query}"
    answer = server.request("POST", path, content=b"weights", headers=RAW)
    assert answer.status_code == 200, answer.text
    message = server.only(UpdateWeightsReq)
    assert (message.weight_version, message.abort_all_requests) == ("1", True)
