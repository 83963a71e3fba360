"""Attention of rows that are trees of draft tokens, by every backend that this machine can run;
`test_triton_attention.py` interprets Triton's kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_cases import (
    CASES,
    GROWN_CASES,
    HOLE_CASES,
    IDLE_MASKS,
    TOLERANCE,
    TREE_CASES,
    WITH_IDLE_MASKS,
    AttentionCase,
    PlacedCase,
    change_by_idle_masks,
    max_error,
)
from draft_chain import draft_chain_error
from sglang.srt.layers.attention import torch_native_backend
from sglang.srt.registry import ATTENTION_BACKENDS

torch.set_num_threads(1)
DEVICES = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
TARGETS = [
    (name, device)
    for name in ATTENTION_BACKENDS.names
    for device in DEVICES
    for capabilities in (ATTENTION_BACKENDS.load(name).capabilities(),)
    if capabilities.tree_masks and not capabilities.problems(device, torch.float32, 16)
]


@pytest.mark.parametrize("name", TREE_CASES | GROWN_CASES)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_row_sees_its_ancestors_and_what_was_before_the_step(
    target: tuple[str, str], name: str
) -> None:
    backend, device = target
    error = max_error(backend, (TREE_CASES | GROWN_CASES)[name], device, torch.float32)
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("name", HOLE_CASES)
def test_no_row_sees_what_the_model_was_not_fed(name: str) -> None:
    error = max_error("torch_native", HOLE_CASES[name], "cpu", torch.float32)
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_rows_of_draft_steps_see_their_own_branch_of_earlier_ones(
    target: tuple[str, str], page_size: int
) -> None:
    assert draft_chain_error(*target, page_size) <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("masks", IDLE_MASKS)
@pytest.mark.parametrize("name", WITH_IDLE_MASKS)
def test_masks_that_hide_nothing_change_no_bit(name: str, masks: str) -> None:
    change = change_by_idle_masks("torch_native", CASES[name], masks, "cpu", torch.float32)
    assert change == 0.0


@pytest.mark.parametrize("limit", [1, 400])
def test_trees_in_groups_split_for_memory(monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(torch_native_backend, "MAX_MASK_ENTRIES", limit)
    error = max_error("torch_native", TREE_CASES["uniform trees"], "cpu", torch.float32)
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_a_step_after_one_with_trees_sees_kv_that_was_moved_between(
    target: tuple[str, str],
) -> None:
    """As the KV of accepted drafts is: nothing of the step stays for the next one."""
    name, device = target
    case = TREE_CASES["uniform trees"]
    placed = PlacedCase(case, device, torch.float32, seed=0)
    backend, plain = placed.backend(name), replace(placed.batch, ancestors=None)
    for batch in (plain, placed.batch):
        backend.plan(batch)
        backend.forward(0, placed.q[0])
    kv = placed.pool.kv[0]
    kv[placed.batch.slots] = kv[placed.batch.slots.roll(1)]
    backend.plan(plain)
    out = backend.forward(0, placed.q[0])
    fresh = placed.backend(name)
    fresh.plan(plain)
    assert torch.equal(out, fresh.forward(0, placed.q[0]))


def test_the_written_out_attention_equals_the_oracle_where_there_are_no_trees() -> None:
    case = AttentionCase(shape=[(5, 7), (0, 3), (30, 1)], windows=(None, 4))
    placed = PlacedCase(case, "cpu", torch.float32, seed=0)
    for layer, right in enumerate(placed.expected()):
        torch.testing.assert_close(placed.written_out(layer), right.double(), rtol=1e-5, atol=1e-5)
