"""SGLang's module paths import, also those of its branches for multi-token prediction and TileSpec,
and nothing of the package goes by one that only gives names."""

from __future__ import annotations

import importlib
import runpy
import sys
from functools import reduce

import pytest

from code_shape import PACKAGE, ROOT, imported_names, module_name, only_gives_names, python_sources

# By path: names in it, with a dot those in a class.
PATHS: dict[str, tuple[str, ...]] = {
    "sgl_kernel": (
        "build_tree_kernel_efficient",
        "tree_speculative_sampling_target_only",
        "verify_tree_greedy",
    ),
    "sglang": (
        "Engine.abort_request",
        "Engine.continue_generation",
        "Engine.flush_cache",
        "Engine.pause_generation",
    ),
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
    "sglang.srt.layers.logits_processor": (
        "LogprobTensors",
        "query_logprobs",
        "query_prompt_logprobs",
    ),
    "sglang.srt.layers.sampler": ("Sampler",),
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
    "sglang.srt.managers.overlap_utils": ("RequestRows",),
    "sglang.srt.managers.schedule_batch": ("Req", "ScheduleBatch"),
    "sglang.srt.managers.schedule_policy": ("AdmissionPolicy",),
    "sglang.srt.managers.scheduler": ("Scheduler",),
    "sglang.srt.managers.scheduler_output_processor_mixin": ("BatchResultProcessor",),
    "sglang.srt.managers.scheduler_runtime_checker_mixin": ("InvariantChecker", "LedgerViolation"),
    "sglang.srt.managers.tokenizer_manager": ("ServerStatus", "TokenizerManager"),
    "sglang.srt.managers.tp_worker": ("TpModelWorker.forward_batch_generation",),
    "sglang.srt.mem_cache.allocator": (),
    "sglang.srt.mem_cache.base_prefix_cache": (),
    "sglang.srt.mem_cache.common": ("KVLedger", "ReleaseAudit"),
    "sglang.srt.mem_cache.memory_pool": ("ReqToTokenPool",),
    "sglang.srt.mem_cache.radix_cache": ("RadixCache",),
    "sglang.srt.model_executor.cuda_graph_runner": ("CudaGraphRunner",),
    "sglang.srt.model_executor.forward_batch_info": ("ForwardBatch",),
    "sglang.srt.model_executor.model_runner": ("ModelRunner",),
    "sglang.srt.sampling.sampling_params": ("SamplingParams",),
    "sglang.srt.server_args": ("ServerArgs",),
    "sglang.srt.speculative.adaptive_runtime_state": (
        "AdaptiveController.activate_step_by_batch",
        "AdaptiveController.on_verify_complete",
        "SpecRuntimeState",
    ),
    "sglang.srt.speculative.adaptive_spec_params": ("AdaptiveSpeculativeParams",),
    "sglang.srt.speculative.eagle_info": (
        "EagleDraftInput",
        "EagleVerifyInput.draft_token",
        "EagleVerifyInput.per_request_draft_token_num",
    ),
    "sglang.srt.speculative.eagle_utils": (
        "build_tree_kernel_efficient",
        "organize_draft_results",
    ),
    "sglang.srt.speculative.eagle_worker": ("EAGLEWorker.draft",),
    "sglang.srt.speculative.ngram_worker": ("NGRAMWorker",),
    "sglang.srt.speculative.spec_info": ("SpeculativeAlgorithm.from_string",),
    "sglang.srt.speculative.spec_utils": ("select_top_k_tokens",),
    "sglang.srt.speculative.standalone_worker": ("StandaloneWorker.draft",),
    "sglang.srt.speculative.tile_spec.core": (
        "Calibration",
        "PiecewiseLinearLatency",
        "compute_optimal_k",
    ),
    "sglang.srt.speculative.tile_spec.profiler": ("TileSpecProfiler",),
    "sglang.srt.utils": ("MultiprocessingSerializer", "get_open_port", "kill_process_tree"),
    "sglang.srt.utils.common": ("get_ip", "is_cuda"),
    "sglang.srt.weight_sync.utils": ("update_weights",),
    "sglang.utils": ("print_highlight", "terminate_process", "wait_for_server"),
}


# By path: names that nothing here has the role of, and what is done instead.
LEFT_OUT = {
    "sglang.srt.layers.logits_processor": {
        "LogitsProcessor": "a model makes logits, the sampler log-probabilities; no layer does both"
    },
    "sglang.srt.managers.io_struct": {"BaseReq": "messages are structs without a common base"},
    "sglang.srt.managers.overlap_utils": {
        "FutureMap": "no token is named by a future: the step before writes it to `RequestRows`"
    },
    "sglang.srt.managers.schedule_batch": {
        "ScheduleBatch.input_ids": "tokens are on the device, in `RequestRows`",
        "ScheduleBatch.seq_lens": "lengths are on the device, in `RequestRows`",
        "ScheduleBatch.spec_info": "drafts are on the device, in `RequestRows`",
    },
    "sglang.srt.managers.scheduler": {
        "Scheduler.continue_generation": "`srt/control/pause.py` does it",
        "Scheduler.pause_generation": "`srt/control/pause.py` does it",
    },
    "sglang.srt.managers.scheduler_output_processor_mixin": {
        "SchedulerOutputProcessorMixin": "a `BatchResultProcessor` is held, nothing is inherited"
    },
    "sglang.srt.managers.scheduler_runtime_checker_mixin": {
        "SchedulerRuntimeCheckerMixin": "an `InvariantChecker` is held, nothing is inherited"
    },
    "sglang.srt.managers.tokenizer_manager": {
        "TokenizerManager.flush_cache": "`srt/control/client.py` asks for it",
        "TokenizerManager.pause_generation": "`srt/control/client.py` asks for it",
    },
    "sglang.srt.speculative.eagle_info": {
        "EagleVerifyInput.generate_attn_arg_prefill": "backends read `ForwardBatch.q_starts`",
        "EagleVerifyInput.prepare_for_verify": "the planner has reserved the slots (`StepWidth`)",
        "EagleVerifyInput.verify": "`TpModelWorker` does it by `confirm.py`",
    },
    "sglang.srt.speculative.eagle_worker": {
        "EAGLEWorker.apply_runtime_state": "a step's plan names its tier; nothing is swapped",
        "EAGLEWorker.draft_forward": "`ModelRunner.draft` and `ModelRunner.draft_trees` do it",
        "EAGLEWorker.forward_batch_generation": "`TpModelWorker` does it",
        "EAGLEWorker.forward_draft_extend_after_decode": "`forward_draft_extend` feeds all steps",
        "EAGLEWorker.verify": "`TpModelWorker` does it by `confirm.py`",
    },
}


def _gives(path: str, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), importlib.import_module(path))
    except AttributeError:
        return False
    return True


@pytest.mark.parametrize("path", PATHS)
def test_the_path_gives_its_names(path: str) -> None:
    importlib.import_module(path)
    assert [name for name in PATHS[path] if not _gives(path, name)] == []


def test_what_is_left_out_is_not_there() -> None:
    assert [name for path, names in LEFT_OUT.items() for name in names if _gives(path, name)] == []


@pytest.mark.parametrize(
    ("script", "package_module"),
    [
        ("scripts/playground/mtp_cudagraph_ab.py", "benchmark.measure.mtp_cudagraph_ab"),
        ("tile_spec/run_bench.py", "benchmark.measure.experiment"),
    ],
)
def test_the_script_runs_the_experiment(
    script: str, package_module: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "path", sys.path[:])
    names = runpy.run_path(str(ROOT / script), run_name="imported")
    assert names["main"] is importlib.import_module(package_module).main


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
