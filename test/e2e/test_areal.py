"""AReaL's own start of a server and its requests, from the first health check to new weights.

The command line is what `SGLangConfig.build_cmd` makes of its defaults for one GPU; the program
behind it and the requests are those of `sglang_launch_server.py`, `sglang_remote.py` and
`remote_inf_engine.py` of AReaL (docs/trainers.md).
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import httpx
import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from serving_utils import environ, free_port, wait_until
from sglang.srt.model_config import resolve_model_path

pytestmark = pytest.mark.long_matrix

PROMPT = [40, 50, 60, 70]
GROUP = "update_weight_group"
NUM_LONG = 80
NORM = "model.norm.weight"
PROGRAM = """
import os, sys
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.server_args import prepare_server_args
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.common import suppress_noisy_warnings
suppress_noisy_warnings()
server_args = prepare_server_args(sys.argv[1:])
try:
    if getattr(server_args, "grpc_mode", False) or getattr(server_args, "encoder_only", False):
        raise SystemExit("another server")
    launch_server(server_args)
finally:
    kill_process_tree(os.getpid(), include_parent=False)
"""


def command_line(model_path: str, port: int) -> list[str]:
    """The words of AReaL's command: null, false and empty values are left out."""
    values: dict[str, Any] = {
        "tokenizer_path": model_path,
        "tokenizer_mode": "auto",
        "load_format": "auto",
        "trust_remote_code": True,
        "tp_size": 1,
        "base_gpu_id": 0,
        "nnodes": 1,
        "node_rank": 0,
        "dist_init_addr": f"localhost:{free_port()}",
        "model_path": model_path,
        "random_seed": 1,
        "disable_radix_cache": True,
        "torch_compile_max_bs": 32,
        "triton_attention_num_kv_splits": 8,
        "num_continuous_decode_steps": 1,
        "attention_backend": "fa3",
        "context_length": 2048,  # of its user: the default is more than the model has
        "mem_fraction_static": 0.9,
        "max_total_tokens": 8192,  # not AReaL's: a CPU need not fill its memory
        "chunked_prefill_size": -1,
        "max_prefill_tokens": 32768,
        "schedule_policy": "lpm",
        "schedule_conservativeness": 1.0,
        "cpu_offload_gb": 0,
        "dtype": "bfloat16",
        "kv_cache_dtype": "auto",
        "dp_size": 1,
        "ep_size": 1,
        "max_loaded_loras": 8,
        "lora_backend": "triton",
        "log_level": "warning",
        "log_level_http": "warning",
        "decode_log_interval": 1,
        "log_requests_level": 0,
        "enable_metrics": True,
        "host": "127.0.0.1",
        "port": port,
    }
    words = []
    for name, value in values.items():
        words += [f"--{name.replace('_', '-')}", *([] if value is True else [str(value)])]
    return words


@pytest.fixture(scope="module")
def server() -> Iterator[httpx.Client]:
    """A client of a server that AReaL has started and waited for."""
    port = free_port()
    words = command_line(str(resolve_model_path("demo")), port)
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *words], env=environ())
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
            for path in ("/v1/models", "/health"):
                while not answers(client, path):
                    assert process.poll() is None
                    time.sleep(0.05)
            yield client
    finally:
        process.terminate()
        process.wait(20)


def answers(client: httpx.Client, path: str) -> bool:
    try:
        return client.get(path, headers={"Authorization": "Bearer None"}).status_code == 200
    except httpx.TransportError:
        return False


def generation(**params: Any) -> dict[str, Any]:
    """AReaL's body of `/generate` by its defaults."""
    return {
        "input_ids": [*PROMPT],
        "image_data": None,
        "sampling_params": {
            "top_p": 1.0,
            "top_k": 100_000_000,
            "max_new_tokens": 6,
            "temperature": 0.0,
            "stop_token_ids": [],
            "ignore_eos": False,
            "skip_special_tokens": True,
            "frequency_penalty": 0.0,
            **params,
        },
        "return_logprob": True,
        "stream": False,
    }


def rollout(server: httpx.Client, **params: Any) -> tuple[str, list[int]]:
    """Tells how an answer ends, and its token ids as AReaL takes them, by log-probabilities."""
    answer = server.post("/generate", json=generation(**params))
    assert answer.status_code == 200, answer.text
    meta = answer.json()["meta_info"]
    logprobs = meta["output_token_logprobs"]
    assert all(logprob <= 0 for logprob, _, _ in logprobs)
    return meta["finish_reason"]["type"], [token for _, token, _ in logprobs]


def post(server: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = server.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_rollout_and_its_score(server: httpx.Client) -> None:
    reason, ids = rollout(server)
    assert reason in ("length", "stop")
    sequence, num_scored = PROMPT + ids, len(ids)
    body = {
        "input_ids": sequence,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": len(sequence) - num_scored - 1,
        "top_logprobs_num": 0,
        "stream": False,
    }
    scored = post(server, "/generate", **body)["meta_info"]["input_token_logprobs"]
    assert [token for _, token, _ in scored[-num_scored:]] == ids
    assert all(float(logprob) <= 0 for logprob, _, _ in scored[-num_scored:])


def num_waiting(server: httpx.Client) -> int:
    state = server.get("/server_info").json()["internal_states"][0]
    return int(state["waiting_queue_size"])


def test_requests_that_are_interrupted_go_on_by_their_tokens(server: httpx.Client) -> None:
    """A pause makes them wait, an abort returns what there is, AReaL sends that again."""
    whole = rollout(server, max_new_tokens=NUM_LONG, ignore_eos=True)[1]
    with ThreadPoolExecutor() as threads:
        running = threads.submit(rollout, server, max_new_tokens=NUM_LONG, ignore_eos=True)
        time.sleep(0.03)
        post(server, "/pause_generation", mode="retract")
        waiting = threads.submit(rollout, server)
        wait_until(lambda: num_waiting(server) == 2)
        post(server, "/abort_request", abort_all=True)
        reason, part = running.result(10)
        assert waiting.result(10) == ("abort", [])
        post(server, "/continue_generation")
    assert reason == "abort"
    body = generation(max_new_tokens=NUM_LONG - len(part), ignore_eos=True)
    rest = post(server, "/generate", **{**body, "input_ids": PROMPT + part})["output_ids"]
    assert part + rest == whole


def trainers_group(port: int) -> dist.ProcessGroup:
    """Rank 0 of a group of two, as AReaL's trainer makes it beside its own groups."""
    store = dist.TCPStore("127.0.0.1", port, 2, True, timedelta(seconds=20), wait_for_workers=False)
    prefixed = c10d.PrefixStore(GROUP, store)
    limit = timedelta(seconds=20)
    group, _ = c10d._new_process_group_helper(
        2, 0, [], "gloo", prefixed, group_name=GROUP, timeout=limit
    )
    c10d._world.pg_group_ranks[group] = {0: 0, 1: 1}
    return group


def test_new_weights_come_by_broadcast_and_from_a_folder(server: httpx.Client) -> None:
    before = rollout(server)[1]
    port = free_port()
    with ThreadPoolExecutor() as threads:
        joining = threads.submit(
            post,
            server,
            "/init_weights_update_group",
            master_address="127.0.0.1",
            master_port=str(port),
            rank_offset=1,
            world_size=2,
            backend="gloo",
            group_name=GROUP,
        )
        group = trainers_group(port)
        assert joining.result(20)["success"]
        width = len(post(server, "/get_weights_by_name", name=NORM, truncate_size=100_000))
        post(server, "/pause_generation", mode="retract")
        updating = threads.submit(
            post,
            server,
            "/update_weights_from_distributed",
            names=[NORM],
            dtypes=["bfloat16"],
            shapes=[[width]],
            group_name=GROUP,
            abort_all_requests=True,
        )
        dist.broadcast(torch.linspace(-3, 3, width).bfloat16(), src=0, group=group)
        assert updating.result(20)["success"]
    post(server, "/continue_generation")
    assert rollout(server)[1] != before
    post(server, "/pause_generation", mode="retract")
    folder = str(resolve_model_path("demo"))
    assert post(server, "/update_weights_from_disk", model_path=folder, abort_all_requests=True)[
        "success"
    ]
    post(server, "/continue_generation")
    assert rollout(server)[1] == before
    for call in ("release", "resume"):
        assert post(server, f"/{call}_memory_occupation", tags=["kv_cache"])["success"]
    assert rollout(server)[1] == before


@pytest.mark.parametrize("path", ["/load_lora_adapter", "/unload_lora_adapter"])
def test_adapters_are_refused_with_the_remedy(server: httpx.Client, path: str) -> None:
    body = {"lora_name": "policy-1", "lora_path": "adapter"}
    answer = server.post(path, json=body)
    assert answer.status_code == 400
    assert "update_weights_from" in answer.json()["error"]["message"]
