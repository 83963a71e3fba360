"""Tests which attention kernels of a step run beside each other; the interpreter runs one at a
time."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang.srt.layers import triton_launch
from sglang.srt.layers.attention import triton_backend, triton_tuning
from sglang.srt.layers.attention.triton_backend import TritonBackend
from sglang.srt.layers.attention.triton_ops.kernels import Shares
from sglang.srt.layers.forward_batch import (
    DECODE,
    DRAFT_STEPS,
    MIXED,
    RAGGED,
    ForwardBatch,
    GraphKey,
)
from sglang.srt.layers.triton_launch import ParallelLaunch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

CPU = torch.device("cpu")
ALONE = ParallelLaunch()
WITH_PREVIOUS, WITH_NEXT = ParallelLaunch(with_previous=True), ParallelLaunch(with_next=True)
WITH_BOTH = ParallelLaunch(with_previous=True, with_next=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "supports_dependent_launch", lambda device: True)
    for module in (triton_launch, triton_tuning):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("q_lens", "launches"),
    [
        ([1], [("split", ALONE), "sums"]),
        ([1] * 40, [("items", ALONE)]),
        ([100], [("items", ALONE)]),
        ([100, 1], [("items", WITH_NEXT), ("split", WITH_PREVIOUS), "sums"]),
        ([*[1] * 40, 100], [("items", WITH_NEXT), ("items", WITH_PREVIOUS)]),
        ([15, 1], [("split", WITH_NEXT), ("split", WITH_PREVIOUS), "sums", "sums"]),
        (
            [*[1] * 40, 15, 100],
            [("items", WITH_NEXT), ("split", WITH_BOTH), ("items", WITH_PREVIOUS), "sums"],
        ),
        (
            [*[15] * 40, *[1] * 40, 100],
            [("items", WITH_NEXT), ("items", WITH_BOTH), ("items", WITH_PREVIOUS)],
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_only_kernels_of_one_step_run_beside_each_other(
    q_lens: list[int], launches: list[tuple[str, ParallelLaunch] | str]
) -> None:
    """One right after the other: what adds up splits comes after all of them."""
    assert launched(q_lens, None) == launches


@pytest.mark.parametrize(
    ("key", "launches"),
    [
        (GraphKey(DECODE, 64, 1, 64), [("items", ALONE)]),
        (GraphKey(RAGGED, 2, 15, 32), [("split", ALONE), "sums"]),
        (GraphKey(RAGGED, 64, 15, 256), [("items", WITH_NEXT), ("items", WITH_PREVIOUS)]),
        (GraphKey(MIXED, 64, 1, 256), [("items", WITH_NEXT), ("items", WITH_PREVIOUS), "sums"]),
        (
            GraphKey(MIXED, 64, 15, 256),
            [("items", WITH_NEXT), ("items", WITH_BOTH), ("items", WITH_PREVIOUS), "sums"],
        ),
        (
            GraphKey(MIXED, 8, 15, 256),
            [
                *(("items", WITH_NEXT), ("split", WITH_BOTH), ("split", WITH_PREVIOUS)),
                *("sums", "sums", "sums"),
            ],
        ),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_a_graph_launches_every_group_of_items_that_its_steps_may_have(
    key: GraphKey, launches: list[tuple[str, ParallelLaunch] | str]
) -> None:
    """Whatever the step at hand has."""
    for q_lens in ([1], [key.width] * (key.num_reqs // 2)):
        assert launched(q_lens, key) == launches


def launched(q_lens: list[int], key: GraphKey | None) -> list[object]:
    """The kernels of a layer, in order."""
    kv_pool = MHATokenToKVPool(8, 1, 1, 8, 128, torch.bfloat16, "cpu")
    backend = TritonBackend(ReqToTokenPool(128, 256, "cpu"), kv_pool, 32, [None])
    numbers = torch.zeros(sum(q_lens), dtype=torch.int64)
    rows, bounds = numbers[: len(q_lens)], [200] * len(q_lens)
    backend.plan(ForwardBatch(numbers, numbers, numbers, rows, q_lens, rows, bounds, graph_key=key))
    found: list[object] = []
    workspaces: list[int] = []

    def record(kind: str) -> mock.Mock:
        def launch(*arguments: object) -> None:
            [parallel] = (each for each in arguments if isinstance(each, ParallelLaunch))
            found.append((kind, parallel))
            if kind == "split":
                workspaces.append(id(arguments[-1]))
            elif isinstance(shares := arguments[-1], Shares):
                workspaces.append(id(shares.workspace))

        return mock.Mock(side_effect=launch)

    def add_up(*arguments: object, device_splits: torch.Tensor | None = None) -> None:
        assert id(arguments[-1]) in workspaces
        found.append("sums")

    with (
        mock.patch.object(triton_backend, "attend_items", record("items")),
        mock.patch.object(triton_backend, "attend_items_split", record("split")),
        mock.patch.object(triton_backend, "add_up_splits", add_up),
    ):
        backend.forward(0, torch.zeros(sum(q_lens), 32, 128, dtype=torch.bfloat16))
    assert len(set(workspaces)) == len(workspaces), "Two kernels write to the same memory."
    return found


@pytest.mark.usefixtures("hopper")
def test_the_first_of_two_lets_the_second_start() -> None:
    assert ALONE.options(CPU, 1000) == {"PDL": True, "early": 0, "beside": 0, "launch_pdl": True}
    assert ALONE.options(CPU, 100)["early"] == 1
    assert WITH_NEXT.options(CPU, 1000)["early"] == 1
    assert WITH_NEXT.options(CPU, 1000)["beside"] == 0
    assert WITH_PREVIOUS.options(CPU, 1000)["beside"] == 1
    assert WITH_PREVIOUS.options(CPU, 1000)["early"] == 0
    assert [WITH_BOTH.options(CPU, 1000)[name] for name in ("early", "beside")] == [1, 1]


def test_gpus_that_cannot_run_them_one_after_the_other() -> None:
    assert WITH_PREVIOUS.options(CPU, 1)["PDL"] is False


def used_before(tensor: torch.Tensor, *size: Any) -> torch.Tensor:
    """As `Tensor.new_empty`, of memory that held something else."""
    return torch.empty(*size, dtype=tensor.dtype).fill_(7)


@pytest.mark.usefixtures("hopper")
def test_items_of_a_graph_are_copied_only_where_they_change() -> None:
    """To the same address each time, and always those of the step at hand."""
    key = GraphKey(RAGGED, 2, 15, 32)
    kv_pool = MHATokenToKVPool(8, 1, 1, 8, 128, torch.bfloat16, "cpu")
    table = ReqToTokenPool(64, 256, "cpu")

    def items_of(backend: TritonBackend, q_lens: list[int]) -> torch.Tensor:
        numbers = torch.zeros(key.num_tokens, dtype=torch.int64)
        rows = numbers[: key.num_reqs]
        bounds = [200] * len(q_lens)
        backend.plan(
            ForwardBatch(numbers, numbers, numbers, rows, q_lens, rows, bounds, graph_key=key)
        )
        with (
            mock.patch.object(triton_backend, "attend_items_split") as launch,
            mock.patch.object(triton_backend, "add_up_splits"),
        ):
            backend.forward(0, torch.zeros(key.num_tokens, 32, 128, dtype=torch.bfloat16))
        items: torch.Tensor = launch.call_args.args[2]
        return items

    backend = TritonBackend(table, kv_pool, 32, [None])
    with mock.patch.object(torch.Tensor, "new_empty", used_before):
        assert not any(map(any, items_of(TritonBackend(table, kv_pool, 32, [None]), []).tolist()))
    addresses = set()
    with mock.patch.object(triton_backend, "overwrite", wraps=triton_backend.overwrite) as copy:
        for q_lens, num_copies in (
            ([15, 15], 1),
            ([15, 15], 1),
            ([15, 3], 2),
            ([15], 3),
            ([15, 15], 4),
        ):
            items = items_of(backend, q_lens)
            assert copy.call_count == num_copies
            copied = copy.call_count
            fresh = items_of(TritonBackend(table, kv_pool, 32, [None]), q_lens)
            copy.call_count = copied  # without the other's
            assert items.tolist() == fresh.tolist()
            addresses.add(items.data_ptr())
    assert len(addresses) == 1


class _Launches(TorchDispatchMode):
    """Records the names of operations that compute or copy."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_reqs", [1, 4, 64])
@pytest.mark.usefixtures("hopper")
def test_draft_steps_are_planned_in_a_capture_and_never_again(num_reqs: int) -> None:
    """`captures_plans`: once it was called for a key, a plan launches and copies nothing, and the
    kernels of each step get that step's tensors, the same items and the same splits."""
    assert TritonBackend.capabilities().captures_plans
    key = GraphKey(DRAFT_STEPS, num_reqs, 1, num_reqs, hidden_width=64, num_steps=3)
    kv_pool = MHATokenToKVPool(8, 1, 1, 8, 128, torch.bfloat16, "cpu")
    backend = TritonBackend(ReqToTokenPool(128, 256, "cpu"), kv_pool, 32, [None])

    def batch(longest: int) -> ForwardBatch:
        numbers = torch.zeros((2, num_reqs), dtype=torch.int64)
        ids, lens = numbers
        ones = [1] * num_reqs
        bounds = [longest] * num_reqs
        return ForwardBatch(ids, ids, ids, ids, ones, lens, bounds, graph_key=key)

    backend.plan(batch(1))
    planned = []
    for longest in (1, 200, 256):
        step = batch(longest)
        with _Launches() as launches:
            backend.plan(step)
        assert launches.names in ([], ["aten.slice.Tensor"])
        assert backend._paged.kv_lens is step.kv_lens
        [group] = backend.few_rows
        planned.append((group.items.data_ptr(), len(group.items), group.tiles, group.num_splits))
    assert planned == [planned[0]] * 3
