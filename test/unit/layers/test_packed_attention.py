"""Attention of packed batches, of which the device alone knows how many rows each request feeds, by
every backend that this machine can run; `test_triton_attention.py` interprets Triton's kernels."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attention_cases import (
    PACKED_CASES,
    TOLERANCE,
    AttentionCase,
    PlacedCase,
    max_error,
    random_packed,
)
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


@pytest.mark.parametrize("name", PACKED_CASES)
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_each_request_feeds_what_the_device_says(target: tuple[str, str], name: str) -> None:
    error = max_error(target[0], PACKED_CASES[name], target[1], torch.float32)
    assert error <= TOLERANCE[torch.float32]


@pytest.mark.long_matrix
@pytest.mark.parametrize("seed", range(40))
@pytest.mark.parametrize("target", TARGETS, ids="-".join)
def test_random_steps(target: tuple[str, str], seed: int) -> None:
    case = random_packed(seed)
    if sum(q_len for _, q_len in case.shape) > 0:
        error = max_error(target[0], case, target[1], torch.float32, seed)
        assert error <= TOLERANCE[torch.float32]


@pytest.mark.parametrize("limit", [1, 400, torch_native_backend.MAX_MASK_ENTRIES])
def test_a_packed_step_gives_bit_for_bit_what_the_host_would_have_planned(
    monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    """And zeros for the rows of padding, whatever they hold."""
    monkeypatch.setattr(torch_native_backend, "MAX_MASK_ENTRIES", limit)
    for seed in range(40):
        placed = PlacedCase(random_packed(seed), "cpu", torch.float32, seed)
        packed, known = placed.backend("torch_native"), placed.backend("torch_native")
        packed.plan(placed.batch)
        bounds = placed.batch.kv_len_upper_bounds
        known.plan(replace(placed.as_the_host_would_know_it(), kv_len_upper_bounds=bounds))
        for layer, q in enumerate(placed.q):
            q[placed.num_fed :] = float("nan")
            out = packed.forward(layer, q)
            right = known.forward(layer, q[: placed.num_fed])
            assert torch.equal(out[: placed.num_fed], right)
            assert (out[placed.num_fed :] == 0).all()
            assert len(out) == len(q)


def test_a_step_in_which_nobody_feeds_a_row_is_all_padding() -> None:
    case = AttentionCase(shape=[(3, 0), (9, 0)], bounds=[4] * 2, padding=8)
    placed = PlacedCase(case, "cpu", torch.float32, seed=0)
    backend = placed.backend("torch_native")
    backend.plan(placed.batch)
    assert torch.equal(backend.forward(0, placed.q[0]), torch.zeros(8, 256))


@pytest.mark.parametrize(
    ("bounds", "starts"),
    [
        ([4, 3], [0, 5, 7]),  # more than its bound
        ([4, 3], [1, 4, 7]),
        ([4, 9], [0, 4, 12]),  # more than there are rows
        ([4, 70], [0, 3, 10]),  # a prompt after a request of unknown length
        ([70, 3], [0, 3, 6]),  # a prompt of unknown length
    ],
    ids=str,
)
def test_a_step_that_breaks_the_contract_is_refused(bounds: list[int], starts: list[int]) -> None:
    placed = PlacedCase(AttentionCase(shape=[(9, 4), (9, 6)]), "cpu", torch.float32, seed=0)
    batch = replace(placed.batch, q_lens=bounds, q_starts=torch.tensor(starts))
    with pytest.raises(AssertionError):
        placed.backend("torch_native").plan(batch)
