"""SkyRL's start of a server, and its remote engine's calls, from a batch to new weights.

What `sglang_server.py` and `remote_inference_engine.py` of SkyRL do (docs/trainers.md), in their
order and with their arguments; the group is of gloo, where SkyRL has NCCL.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist

from serving_utils import environ, free_port, wait_until
from sglang.srt.model_config import resolve_model_path
from target import TARGET
from trainer_group import trainers_group

pytestmark = pytest.mark.long_matrix

PROMPTS = [[40, 50, 60, 70], [80, 90]]
NORM = "model.norm.weight"
PROGRAM = """
import os, sys
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import ServerArgs, prepare_server_args
from sglang.srt.utils import kill_process_tree
server_args: ServerArgs = prepare_server_args(sys.argv[1:])
try:
    launch_server(server_args)
finally:
    kill_process_tree(os.getpid(), include_parent=False)
"""


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """A client of a server that SkyRL has started and waited for."""
    port = free_port()
    words = ["--model-path", str(resolve_model_path("demo")), "--tp-size", "1"]
    words += ["--dtype", "bfloat16", "--host", "127.0.0.1", "--port", str(port)]
    words += ["--max-total-tokens", "8192", *TARGET.command_line()]
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=environ())

    def is_healthy() -> bool:
        assert process.poll() is None
        try:
            return client.get("/health").is_success
        except httpx.TransportError:
            return False

    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            wait_until(is_healthy, timeout_s=60)
            yield client
    finally:
        process.terminate()
        process.wait(20)


def generate(server: httpx.Client) -> list[list[int]]:
    """A batch of token ids, and the ids that SkyRL takes from each answer."""
    params = {"max_new_tokens": 6, "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    body = {"input_ids": PROMPTS, "sampling_params": params}
    answers = server.post("/generate", json=body).json()
    assert {answer["meta_info"]["finish_reason"]["type"] for answer in answers} <= {
        "length",
        "stop",
    }
    return [answer["output_ids"] for answer in answers]


def test_skyrl_generates_and_updates_one_tensor_at_a_time(server: httpx.Client) -> None:
    def post(path: str, body: Any = None) -> dict[str, Any]:
        answer = server.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return dict(answer.json())

    before, port = generate(server), free_port()
    weight = {"name": NORM, "truncate_size": 100_000}
    width = len(server.post("/get_weights_by_name", json=weight).json())
    with ThreadPoolExecutor() as threads:
        address = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        place = {"rank_offset": 1, "world_size": 2, "group_name": "skyrl"}
        joining = threads.submit(post, "/init_weights_update_group", address | place)
        group = trainers_group(port, "skyrl")
        assert joining.result(20)["success"]
        tensor = {"name": NORM, "dtype": "bfloat16", "shape": [width]}
        updating = threads.submit(post, "/update_weights_from_distributed", tensor)
        dist.broadcast(torch.linspace(-3, 3, width).bfloat16(), src=0, group=group)
        assert updating.result(20)["success"]
    assert server.post("/flush_cache").status_code == 200
    assert generate(server) != before
    chat = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert post("/v1/chat/completions", chat)["choices"][0]["message"]["role"] == "assistant"
    assert post("/v1/completions", {"model": "demo", "prompt": PROMPTS[0]})["choices"]
    assert post("/destroy_weights_update_group")["success"]
