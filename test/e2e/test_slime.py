"""slime's own start of a server and its calls, from its command line to new weights.

What `arguments.py`, `sglang_engine.py`, `server_control.py`, `sglang_rollout.py` and the weight
updates of slime do (docs/trainers.md), in their order and with their arguments; the group is of
gloo, where slime has NCCL.
"""

from __future__ import annotations

import argparse
import base64
import dataclasses
import functools
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import torch.distributed as dist

from serving_utils import environ, free_port, wait_until
from sglang.srt.constants import (
    GPU_MEMORY_TYPE_CUDA_GRAPH,
    GPU_MEMORY_TYPE_KV_CACHE,
    GPU_MEMORY_TYPE_WEIGHTS,
)
from sglang.srt.entrypoints.http_server import launch_server
from sglang.srt.model_config import resolve_model_path
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils import MultiprocessingSerializer, kill_process_tree
from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket
from target import TARGET
from trainer_group import trainers_group

pytestmark = pytest.mark.long_matrix

PROMPT = [40, 50, 60, 70]
GROUP = "slime-pp_0"
NORM = "model.norm.weight"
SET_BY_SLIME = {
    "model_path": "hf_checkpoint",
    "trust_remote_code": True,
    "random_seed": 1234,
    "enable_memory_saver": True,
    "tp_size": 1,
    "port": 0,
    "nnodes": 1,
    "node_rank": 0,
    "dist_init_addr": "127.0.0.1:1",
    "gpu_id_step": 1,
    "base_gpu_id": 0,
    "nccl_port": 1,
    "skip_server_warmup": True,
}


def parsed_flags(words: list[str]) -> argparse.Namespace:
    """A trainer's arguments: SGLang's flags behind a prefix, without those that it sets itself."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--hf-checkpoint")
    plain = parser.add_argument

    def add(*names: str, **settings: Any) -> None:
        name = settings.get("dest") or names[0].lstrip("-").replace("-", "_")
        if name in SET_BY_SLIME:
            return
        if "dest" in settings:
            settings["dest"] = f"sglang_{name}"
        plain(*(f"--sglang-{name.lstrip('-')}" for name in names), **settings)

    parser.add_argument = add  # type: ignore[method-assign, assignment]
    ServerArgs.add_cli_args(parser)
    return parser.parse_args(words)


def server_args(args: argparse.Namespace, host: str, port: int) -> ServerArgs:
    """Gives what slime sets for a rank, over what its user gave; unknown names are left out."""
    args.sglang_dp_size = args.sglang_data_parallel_size
    args.sglang_pp_size = args.sglang_pipeline_parallel_size
    args.sglang_ep_size = args.sglang_expert_parallel_size
    values: dict[str, Any] = {
        **SET_BY_SLIME,
        "model_path": args.hf_checkpoint,
        "host": host,
        "port": port,
        "tp_size": 1 // args.sglang_pp_size,
        "dp_size": args.sglang_dp_size,
        "pp_size": args.sglang_pp_size,
        "ep_size": args.sglang_ep_size,
        "enable_draft_weights_cpu_backup": True,
    }
    names = [field.name for field in dataclasses.fields(ServerArgs)]
    for name in names:
        if name not in values and hasattr(args, f"sglang_{name}"):
            values[name] = getattr(args, f"sglang_{name}")
    return ServerArgs(**{name: values[name] for name in values if name in names})


class Rollout:
    """One engine: a server process, and slime's calls of it."""

    def __init__(self, args: ServerArgs) -> None:
        args.host = args.host.strip("[]")
        self.process = multiprocessing.get_context("spawn").Process(
            target=launch_server, args=(args,)
        )
        self.process.start()
        assert args.node_rank == 0
        self.url = args.url()
        self.client = httpx.Client(base_url=self.url, timeout=30)
        for path in ("/health_generate", "/flush_cache"):
            wait_until(functools.partial(self._is_healthy, path), timeout_s=60)

    def _is_healthy(self, path: str) -> bool:
        assert self.process.is_alive()
        try:
            return self.client.get(path, headers={"Authorization": "Bearer None"}).is_success
        except httpx.TransportError:
            return False

    def call(self, path: str, **payload: Any) -> Any:
        answer = self.client.post(f"/{path}", json=payload)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def generate(self, **params: Any) -> dict[str, Any]:
        """The answer to the body of `generate` of slime, by its defaults."""
        sampling = {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "max_new_tokens": 6,
            "stop": None,
            "stop_token_ids": None,
            "skip_special_tokens": False,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
            "sampling_seed": 7,
            **params,
        }
        return self.call(
            "generate", sampling_params=sampling, return_logprob=True, input_ids=PROMPT
        )

    def abort_until_idle(self) -> None:
        while True:
            self.call("abort_request", abort_all=True)
            if self.num_requests() == 0:
                return
            time.sleep(0.05)

    def num_requests(self) -> int:
        loads = self.client.get("/v1/loads?include=core,disagg,queues").json()["loads"]
        return sum(load["num_total_reqs"] for load in loads)

    def shutdown(self) -> None:
        self.client.close()
        kill_process_tree(self.process.pid)
        self.process.join(20)


@pytest.fixture(scope="module")
def rollout() -> Iterator[Rollout]:
    words = ["--hf-checkpoint", str(resolve_model_path("demo"))]
    words += ["--sglang-max-total-tokens", "8192", "--sglang-log-level", "warning"]
    words += [word.replace("--", "--sglang-", 1) for word in TARGET.command_line()]
    args = server_args(parsed_flags(words), "127.0.0.1", free_port())
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environ(SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION="false").items():
            patch.setenv(name, value)
        rollout = Rollout(args)
    yield rollout
    rollout.shutdown()


def tokens_of(answer: dict[str, Any]) -> list[int]:
    """As slime takes them: from the log-probabilities."""
    entries = answer["meta_info"]["output_token_logprobs"]
    assert all(logprob <= 0 for logprob, _, _ in entries)
    return [token for _, token, _ in entries]


def test_slime_finds_what_it_reads_of_a_server_and_of_an_answer(rollout: Rollout) -> None:
    info = rollout.client.get("/server_info").json()
    assert (info["tp_size"], info["pp_size"], info["disaggregation_mode"]) == (1, 1, "null")
    assert rollout.client.get("/get_server_info").json()["port"] == info["port"]
    answer = rollout.generate()
    meta = answer["meta_info"]
    assert len(tokens_of(answer)) == meta["completion_tokens"]
    assert meta["finish_reason"]["type"] in ("stop", "length")
    assert meta["weight_version"] == "default"
    assert {"prompt_tokens", "cached_tokens"} <= meta.keys()
    assert isinstance(answer["text"], str)
    assert tokens_of(rollout.generate()) == tokens_of(answer)


def test_slime_gets_the_tokens_that_top_p_kept(rollout: Rollout) -> None:
    custom = {"custom_params": {"return_top_p_token_ids": True}}
    answer = rollout.generate(top_p=0.8, **custom)
    kept, ends = (
        np.frombuffer(base64.b64decode(answer["meta_info"][f"top_p_token_{name}"]), np.int32)
        for name in ("ids", "offsets")
    )
    tokens = tokens_of(answer)
    assert len(ends) == len(tokens) + 1
    assert (ends[0], ends[-1]) == (0, len(kept))
    for position, token in enumerate(tokens):
        assert token in kept[ends[position] : ends[position + 1]]
    assert tokens_of(rollout.generate(top_p=0.8)) == tokens
    assert "top_p_token_ids" not in rollout.generate(**custom)["meta_info"]


def test_slime_drains_a_server_by_aborts(rollout: Rollout) -> None:
    with ThreadPoolExecutor() as threads:
        long = threads.submit(rollout.generate, max_new_tokens=1500, ignore_eos=True)
        wait_until(lambda: rollout.num_requests() == 1)
        rollout.abort_until_idle()
        answer = long.result(10)
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(tokens_of(answer)) < 1500


def test_slime_updates_weights_by_broadcast_and_from_a_folder(rollout: Rollout) -> None:
    before, port = tokens_of(rollout.generate()), free_port()
    with ThreadPoolExecutor() as threads:
        later: Callable[..., Any] = functools.partial(threads.submit, rollout.call)
        address = {"master_address": "127.0.0.1", "master_port": port, "backend": "gloo"}
        place = {"rank_offset": 1, "world_size": 2, "group_name": GROUP}
        joining = later("init_weights_update_group", **address, **place)
        group = trainers_group(port, GROUP)
        assert joining.result(20)["success"]
        width = len(rollout.call("get_weights_by_name", name=NORM, truncate_size=100_000))
        rollout.call("pause_generation")
        assert rollout.client.get("/flush_cache").status_code == 200
        rollout.call("post_process_weights", restore_weights_before_load=True)
        updating = later(
            "update_weights_from_distributed",
            names=[NORM],
            dtypes=["bfloat16"],
            shapes=[[width]],
            group_name=GROUP,
            flush_cache=False,
            weight_version="1",
        )
        dist.broadcast(torch.linspace(-3, 3, width).bfloat16(), src=0, group=group)
        assert updating.result(20)["success"]
    rollout.call("post_process_weights", post_process_quantization=True)
    rollout.call("continue_generation")
    answer = rollout.generate()
    assert tokens_of(answer) != before
    assert answer["meta_info"]["weight_version"] == "1"
    assert rollout.client.get("/get_weight_version").json()["weight_version"] == "1"
    rollout.call("destroy_weights_update_group", group_name=GROUP)
    rollout.call("pause_generation")
    folder = str(resolve_model_path("demo"))
    rollout.call("update_weights_from_disk", model_path=folder, weight_version="2")
    rollout.call("continue_generation")
    assert tokens_of(rollout.generate()) == before


def test_slime_updates_weights_by_a_bucket_of_its_own_machine(rollout: Rollout) -> None:
    """As with `--colocate`."""
    width = len(rollout.call("get_weights_by_name", name=NORM, truncate_size=100_000))
    values = torch.linspace(-1, 1, width)
    bucket = FlattenedTensorBucket(named_tensors=[(NORM, values)])
    parts = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    text = MultiprocessingSerializer.serialize(parts, output_str=True)
    rollout.call(
        "update_weights_from_tensor",
        serialized_named_tensors=[text],
        load_format="flattened_bucket",
        flush_cache=False,
        weight_version="3",
    )
    served = rollout.call("get_weights_by_name", name=NORM, truncate_size=100_000)
    assert torch.allclose(torch.tensor(served), values, atol=0.01)
    assert rollout.generate()["meta_info"]["weight_version"] == "3"


def test_slime_gives_memory_back_and_takes_it_again(rollout: Rollout) -> None:
    before = tokens_of(rollout.generate())
    rollout.call("weights_checker", action="snapshot")
    assert rollout.client.get("/flush_cache").status_code == 200
    rollout.call("release_memory_occupation")
    rollout.call("resume_memory_occupation", tags=[GPU_MEMORY_TYPE_WEIGHTS])
    rollout.call("weights_checker", action="compare")
    tags = [GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_CUDA_GRAPH]
    rollout.call("resume_memory_occupation", tags=tags)
    assert tokens_of(rollout.generate()) == before
