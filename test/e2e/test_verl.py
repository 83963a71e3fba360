"""verl's own start of a rollout server: the front end in its process, on its loop and web server.

The calls, their order and their arguments are those of `async_sglang_server.py` and of
`http_server_engine.py` of verl (docs/trainers.md).
"""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import torch
import uvicorn
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from serving_utils import make_model_dir
from sglang.srt.entrypoints import engine
from sglang.srt.entrypoints.http_server import (
    Engine,
    ServerArgs,
    _GlobalState,
    _launch_subprocesses,
    app,
    set_global_state,
)
from sglang.srt.entrypoints.launcher_parts import LauncherManager
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.managers.io_struct import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    PauseGenerationReqInput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
    UpdateWeightFromDiskReqInput,
    UpdateWeightsFromTensorReqInput,
)
from sglang.srt.managers.tokenizer_manager import ServerStatus
from sglang.srt.utils import MultiprocessingSerializer
from sglang.srt.utils.common import add_prometheus_middleware
from sglang.srt.weight_sync.utils import update_weights
from target import TARGET

pytestmark = pytest.mark.long_matrix

PROMPT = [5, 6, 7, 8, 9]
NORM, ROWS = "model.norm.weight", "model.layers.0.self_attn.k_proj.weight"
HOST = "127.0.0.1"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose folder has no tokenizer, so none can be loaded."""
    directory = make_model_dir(tmp_path_factory.mktemp("model"))
    (directory / "tokenizer.json").unlink()
    return directory


def rollout_args(model_dir: Path, **engine_kwargs: Any) -> dict[str, Any]:
    """Gives what verl passes for one GPU, by the defaults of its configuration.

    Args:
        engine_kwargs: arguments that its user adds.
    """
    return {
        "model_path": str(model_dir),
        "dtype": "bfloat16",
        "mem_fraction_static": 0.5,
        "disable_cuda_graph": True,
        "enable_memory_saver": True,
        "base_gpu_id": 0,
        "gpu_id_step": 1,
        "tp_size": 1,
        "dp_size": 1,
        "ep_size": 1,
        "node_rank": 0,
        "load_format": "dummy",
        "nnodes": 1,
        "trust_remote_code": False,
        "max_running_requests": 1024,
        "log_level": "error",
        "mm_attention_backend": None,
        "attention_backend": "fa3",
        "skip_tokenizer_init": True,
        "skip_server_warmup": True,
        "quantization": None,
        "json_model_override_args": json.dumps({}),
        "custom_weight_loader": None,
        "served_model_name": "policy",
        "enable_metrics": True,
        **engine_kwargs,
    }


@asynccontextmanager
async def rollout_server(
    args: ServerArgs,
) -> AsyncIterator[tuple[LauncherManager, httpx.AsyncClient]]:
    """The server as verl starts it, and a client of the routes that its trainer calls."""
    manager, template_manager, scheduler_info, *_ = Engine._launch_subprocesses(
        server_args=args,
        init_tokenizer_manager_func=engine.init_tokenizer_manager,
        run_scheduler_process_func=engine.run_scheduler_process,
        run_detokenizer_process_func=engine.run_detokenizer_process,
    )
    set_global_state(
        _GlobalState(
            tokenizer_manager=manager,
            template_manager=template_manager,
            scheduler_info=scheduler_info,
        )
    )
    app.is_single_tokenizer_mode = True
    app.server_args = args
    app.warmup_thread_kwargs = {"server_args": args}
    app.warmup_thread_args = (args, None, None)
    add_prometheus_middleware(app)
    server = uvicorn.Server(uvicorn.Config(app, host=HOST, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    manager.server_status = ServerStatus.Up
    [socket] = server.servers[0].sockets
    url = f"http://{HOST}:{socket.getsockname()[1]}"
    try:
        async with httpx.AsyncClient(base_url=url) as client:
            yield manager, client
    finally:
        server.should_exit = True
        await serving


async def rollout(manager: LauncherManager, **sampling: Any) -> dict[str, Any]:
    """The answer to a rollout's request, as verl makes it."""
    request = GenerateReqInput(
        rid="rollout-1",
        input_ids=PROMPT,
        sampling_params={"repetition_penalty": 1.0, "top_k": -1, "max_new_tokens": 6, **sampling},
        return_logprob=True,
        image_data=None,
    )
    answer = await manager.generate_request(request, None).__anext__()
    assert isinstance(answer, dict)
    return answer


GREEDY = {"temperature": 0, "top_p": 1.0}


async def check_rollouts(manager: LauncherManager, client: httpx.AsyncClient) -> list[int]:
    """Token ids come with their log-probabilities and without a text, in every way to ask."""
    whole = await rollout(manager, **GREEDY)
    ids = whole["output_ids"]
    assert "text" not in whole
    assert len(ids) == 6
    assert whole["meta_info"]["finish_reason"]["type"] == "length"
    assert [token for _, token, _ in whole["meta_info"]["output_token_logprobs"]] == ids
    mtp = {**GREEDY, "mtp_enabled": True, "mtp_verify": True, "mtp_k": 3}
    assert (await rollout(manager, **mtp))["output_ids"] == ids
    body = {"input_ids": PROMPT, "sampling_params": {**GREEDY, "max_new_tokens": 6}}
    assert (await client.post("/generate", json=body)).json()["output_ids"] == ids
    streamed = (await client.post("/generate", json={**body, "stream": True})).text
    *_, last, done = streamed.removesuffix("\n\n").split("\n\n")
    assert json.loads(last.removeprefix("data: "))["output_ids"] == ids
    assert done == "data: [DONE]"
    stopped = await rollout(manager, **GREEDY, stop_token_ids=[ids[2]])
    assert stopped["meta_info"]["finish_reason"]["matched"] == ids[2]
    with pytest.raises(ValueError, match=r"no tokenizer .* give stop_token_ids"):
        await rollout(manager, stop=["x"])
    with pytest.raises(ValueError, match=r"^image_data: is not supported here"):
        GenerateReqInput(input_ids=PROMPT, image_data=["x.png"])
    return ids


async def check_pause_and_memory(manager: LauncherManager, client: httpx.AsyncClient) -> None:
    """Makes the calls that verl makes between a rollout and the next one."""
    long = asyncio.create_task(rollout(manager, **GREEDY, max_new_tokens=5_000, ignore_eos=True))
    await asyncio.sleep(0.05)
    await manager.pause_generation(PauseGenerationReqInput(mode="abort"))
    assert (await long)["meta_info"]["finish_reason"]["type"] == "abort"
    await manager.continue_generation(ContinueGenerationReqInput())
    tags = ["kv_cache", "weights"]
    await manager.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags), None)
    await manager.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags), None)
    body = {"tags": tags, "reset_connector": True}
    for call in ("release", "resume"):
        answer = await client.post(f"/{call}_memory_occupation", json=body)
        assert answer.status_code == 200, answer.text
    assert (await manager.flush_cache()).success


class ServerAdapter:
    """The trainer's client of the server, which sends no key."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def update_weights_from_tensor(self, req: UpdateWeightsFromTensorReqInput) -> Any:
        texts = [base64.b64encode(data).decode("utf-8") for data in req.serialized_named_tensors]
        body = {
            "serialized_named_tensors": texts,
            "load_format": req.load_format,
            "flush_cache": req.flush_cache,
        }
        answer = await self._client.post("/update_weights_from_tensor", json=body)
        answer.raise_for_status()
        return answer.json()


@pytest.fixture
def mesh(tmp_path: Path) -> Iterator[DeviceMesh]:
    """The trainer's processes, of which there is one."""
    store = f"file://{tmp_path}/store"
    distributed.init_process_group("gloo", init_method=store, rank=0, world_size=1)
    yield init_device_mesh(
        "cpu", mesh_shape=(1, 1, 1), mesh_dim_names=("dp", "infer_tp", "infer_pp")
    )
    distributed.destroy_process_group()


async def check_weights(
    manager: LauncherManager, client: httpx.AsyncClient, before: list[int], mesh: DeviceMesh
) -> None:
    """New weights give other tokens; the trainer's process sends them and empties the cache."""
    device = TARGET.device
    for name, values in ((NORM, torch.linspace(-1, 1, 64)), (ROWS, torch.full((32, 64), 0.25))):
        answer = await update_weights(
            engine=ServerAdapter(client),
            params_batch=[(name, values.bfloat16().to(device))],
            device_mesh_key="infer_tp",
            device_mesh=mesh,
            flush_cache=False,
        )
        assert answer["success"]
        body = {"name": name, "truncate_size": 1000}
        found = (await client.post("/get_weights_by_name", json=body)).json()
        assert torch.equal(torch.tensor(found), values.bfloat16().float())
    again = [MultiprocessingSerializer.serialize([(NORM, torch.linspace(-1, 1, 64))])]
    done, message = await manager.update_weights_from_tensor(
        UpdateWeightsFromTensorReqInput(serialized_named_tensors=again, flush_cache=False), None
    )
    assert done, message
    flushed = await client.get("/flush_cache", params={"reset_connector": "true"})
    assert flushed.status_code == 200
    assert (await rollout(manager, **GREEDY))["output_ids"] != before
    done, message, _ = await manager.update_weights_from_disk(
        UpdateWeightFromDiskReqInput(model_path="no such folder"), None
    )
    assert not done
    assert "no such folder" in message


async def check_routes(client: httpx.AsyncClient) -> None:
    models = (await client.get("/v1/models")).json()["data"]
    assert [model["id"] for model in models] == ["policy"]
    assert (await client.get("/health_generate")).status_code == 200
    assert "sglang:" in (await client.get("/metrics")).text
    for path in ("/v1/chat/completions", "/v1/completions"):
        answer = await client.post(path, json={"model": "policy", "prompt": "hi", "messages": []})
        assert answer.status_code == 400
        message = answer.json()["error"]["message"]
        assert "--skip-tokenizer-init" in message
        assert "/generate with input_ids" in message


async def check_death(manager: LauncherManager, others: list[psutil.Process]) -> None:
    """A launcher's calls fail once a process of the server has.

    Args:
        others: children of this process, of engines that other tests have started.
    """
    running = asyncio.create_task(rollout(manager, max_new_tokens=5_000, ignore_eos=True))
    await asyncio.sleep(0.05)
    children = [child for child in psutil.Process().children() if child not in others]
    children = [child for child in children if child.status() != psutil.STATUS_ZOMBIE]
    [scheduler] = [child for child in children if "scheduler_process" in child.cmdline()[-1]]
    [detokenizer] = [child for child in children if "detokenizer_process" in child.cmdline()[-1]]
    scheduler.kill()
    with pytest.raises(ServiceError, match="scheduler process ended with signal 9"):
        await running
    await asyncio.to_thread(detokenizer.wait, 10)


def test_a_rollout_server_generates_and_takes_new_weights(
    model_dir: Path, mesh: DeviceMesh
) -> None:
    args = ServerArgs(**rollout_args(model_dir, mtp_mask_token_id=2, max_total_tokens=16_384))

    others = psutil.Process().children()

    async def train() -> None:
        async with rollout_server(args) as (manager, client):
            before = await check_rollouts(manager, client)
            await check_pause_and_memory(manager, client)
            await check_weights(manager, client, before, mesh)
            await check_routes(client)
            await check_death(manager, others)

    asyncio.run(train())


def test_the_trainer_s_client_makes_arguments_without_a_server() -> None:
    """`AsyncHttpServerAdapter(launch_server=False)` reads these of the arguments it makes."""
    args = ServerArgs(model_path="policy", host=HOST, port=8123, trust_remote_code=False)
    assert (args.host, args.port, args.node_rank) == (HOST, 8123, 0)
    assert not args.is_embedding
    with pytest.raises(AttributeError, match="no 'node_ranks'"):
        _ = args.node_ranks  # type: ignore[attr-defined]


def test_parts_need_the_loop_that_they_run_on_and_no_process_of_others(model_dir: Path) -> None:
    args = ServerArgs(model_path=str(model_dir))
    with pytest.raises(RuntimeError, match="must be called on the event loop"):
        _launch_subprocesses(server_args=args)
    with pytest.raises(NotImplementedError, match=r"cannot run here.*launch_server"):
        _launch_subprocesses(server_args=args, run_scheduler_process_func=print)
