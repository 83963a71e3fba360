"""Tiers that change with graphs of target and head, recorded ones on a CPU: what
test/gpu/test_adaptive_steps_gpu.py checks with real ones."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import switched_graphs
from jumping_tier import CHANGING, jumping_tiers
from oracle import Reference
from recorded_graphs import recorded_graphs, replayable_backends
from switched_graphs import Place

torch.set_num_threads(1)
LEAST_SWITCHES = 20


def num_tensors() -> tuple[int, ...]:
    gc.collect()
    return (sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects()),)


SMALL = {"prompt_tokens": 24, "new_tokens": 8, "warm_waves": 1, "context_len": 64}
PLACE = Place("cpu", "ragged", 16, num_tensors, **SMALL)
WITHOUT_GRAPHS = Place("cpu", "torch_native", 0, num_tensors, **SMALL)


@pytest.fixture(autouse=True, scope="module")
def graphs() -> Iterator[None]:
    with recorded_graphs(), replayable_backends(), jumping_tiers():
        yield


@pytest.fixture(scope="module")
def right(graphs: None) -> list[Reference]:
    return switched_graphs.references(PLACE)


@pytest.mark.long_matrix
def test_tokens_are_those_without_a_head(right: list[Reference]) -> None:
    switched_graphs.check_tokens(PLACE, right, CHANGING, switched_graphs.NUM_STEPS)


@pytest.mark.long_matrix
def test_switches_capture_and_keep_nothing() -> None:
    switched_graphs.check_storm(PLACE, LEAST_SWITCHES)


@pytest.mark.long_matrix
def test_thresholds_below_1_repeat_and_those_of_1_change_nothing() -> None:
    switched_graphs.check_thresholds(WITHOUT_GRAPHS)
