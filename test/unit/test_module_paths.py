"""SGLang's module paths import, and nothing of the package goes by one that only gives names."""

from __future__ import annotations

import importlib

import pytest

from code_shape import PACKAGE, imported_names, module_name, only_gives_names, python_sources

PATHS = {
    "sglang": ("Engine",),
    "sglang.srt.entrypoints.engine": ("Engine", "_launch_subprocesses"),
    "sglang.srt.entrypoints.EngineBase": ("EngineBase",),
    "sglang.srt.entrypoints.http_server": (
        "ServerArgs",
        "_GlobalState",
        "app",
        "launch_server",
        "set_global_state",
    ),
    "sglang.srt.entrypoints.http_server_engine": (
        "HttpServerEngineAdapter",
        "launch_server_process",
    ),
    "sglang.srt.layers.attention.flashinfer_backend": ("FlashInferBackend",),
    "sglang.srt.layers.attention.torch_native_backend": ("TorchNativeBackend",),
    "sglang.srt.layers.attention.triton_backend": ("TritonBackend",),
    "sglang.srt.managers.detokenizer_manager": ("DetokenizerManager",),
    "sglang.srt.managers.io_struct": (
        "AbortReq",
        "ContinueGenerationReqInput",
        "FlushCacheReqInput",
        "FlushCacheReqOutput",
        "GenerateReqInput",
        "InitWeightsUpdateGroupReqInput",
        "PauseGenerationReqInput",
        "ReleaseMemoryOccupationReqInput",
        "ResumeMemoryOccupationReqInput",
        "TokenizedGenerateReqInput",
        "UpdateWeightFromDiskReqInput",
        "UpdateWeightsFromDistributedReqInput",
        "UpdateWeightsFromTensorReqInput",
    ),
    "sglang.srt.managers.schedule_batch": ("Req",),
    "sglang.srt.managers.schedule_policy": (),
    "sglang.srt.managers.scheduler": ("Scheduler",),
    "sglang.srt.managers.tokenizer_manager": ("ServerStatus", "TokenizerManager"),
    "sglang.srt.managers.tp_worker": ("TpModelWorker",),
    "sglang.srt.mem_cache.allocator": (),
    "sglang.srt.mem_cache.base_prefix_cache": (),
    "sglang.srt.mem_cache.memory_pool": ("ReqToTokenPool",),
    "sglang.srt.mem_cache.radix_cache": ("RadixCache",),
    "sglang.srt.model_executor.cuda_graph_runner": ("CudaGraphRunner",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch",),
    "sglang.srt.model_executor.model_runner": ("ModelRunner",),
    "sglang.srt.sampling.sampling_params": ("SamplingParams",),
    "sglang.srt.server_args": ("ServerArgs",),
    "sglang.srt.utils": ("MultiprocessingSerializer", "get_open_port", "kill_process_tree"),
    "sglang.srt.utils.common": ("get_ip", "is_cuda"),
    "sglang.srt.weight_sync.utils": ("update_weights",),
    "sglang.utils": ("print_highlight", "terminate_process", "wait_for_server"),
}


@pytest.mark.parametrize("path", PATHS)
def test_the_path_gives_its_names(path: str) -> None:
    module = importlib.import_module(path)
    missing = [name for name in PATHS[path] if not hasattr(module, name)]
    assert not missing


def test_nothing_imports_a_module_that_only_gives_names() -> None:
    sources = {
        path: text
        for path, text in python_sources((PACKAGE,)).items()
        if not path.endswith("/__init__.py")
    }
    aliases = tuple(f"{module_name(p)}." for p, text in sources.items() if only_gives_names(text))
    assert len(aliases) >= 5
    through = [
        (path, name)
        for path, text in sources.items()
        for _, name in imported_names(path, text)
        if f"{name}.".startswith(aliases)
    ]
    assert not through
