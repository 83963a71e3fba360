"""Tiers that change on a CUDA GPU, with real graphs: tokens stay, and switches take nothing. The
same checks run on a CPU in test/unit/speculative/test_switched_graphs.py."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

import switched_graphs
from jumping_tier import jumping_tiers
from oracle import Reference
from switched_graphs import CASES, Place

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

LEAST_SWITCHES = 500


def gpu_memory() -> tuple[int, ...]:
    """Bytes in use, and bytes that torch keeps."""
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


PLACE = Place("cuda", "triton", 1024, gpu_memory)


@pytest.fixture(autouse=True, scope="module")
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


@pytest.fixture(scope="module")
def right() -> list[Reference]:
    return switched_graphs.references(PLACE)


@pytest.mark.parametrize(("policy", "num_steps"), CASES)
def test_tokens_are_those_without_a_head(
    right: list[Reference], policy: str, num_steps: int
) -> None:
    switched_graphs.check_tokens(PLACE, right, policy, num_steps)


def test_switches_capture_and_allocate_nothing() -> None:
    switched_graphs.check_storm(PLACE, LEAST_SWITCHES)


def test_thresholds_below_1_repeat_and_those_of_1_change_nothing() -> None:
    switched_graphs.check_thresholds(PLACE)
