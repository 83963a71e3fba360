"""Gathers what control calls may change of the models of a process."""

from __future__ import annotations

from sglang.srt.control.control import ModelResources
from sglang.srt.control.memory_control import GRAPH_TAG, KV_TAG, WEIGHTS_TAG, MemoryPart
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.step_profiler import StepProfiler
from sglang.srt.weight_sync.serving_weights import ServingWeights


def make_resources(runners: RunnerGroup, profiler: StepProfiler | None = None) -> ModelResources:
    """Gathers what control calls may change: the weights and the memory of all models, and the
    memory of their graphs."""
    memory = {
        KV_TAG: MemoryPart(runners.memory.release, runners.restore_kv),
        WEIGHTS_TAG: MemoryPart(runners.release_weights, runners.restore_weights),
    }
    if runners.has_graphs:
        memory[GRAPH_TAG] = MemoryPart(runners.release_graphs, runners.restore_graphs)
    weights = ServingWeights(*(runner.weights for runner in runners.runners))
    return ModelResources(weights=weights, memory=memory, profiler=profiler)
