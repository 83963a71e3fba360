"""Which attention kernels of a step run beside each other; the interpreter runs one at a time."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from sglang.srt.layers import triton_launch
from sglang.srt.layers.attention import triton_backend
from sglang.srt.layers.attention.triton_backend import TritonBackend
from sglang.srt.layers.forward_batch import RAGGED, ForwardBatch, GraphKey
from sglang.srt.layers.triton_launch import ParallelLaunch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool

CPU = torch.device("cpu")
ALONE = ParallelLaunch()
WITH_PREVIOUS, WITH_NEXT = ParallelLaunch(with_previous=True), ParallelLaunch(with_next=True)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_launch, "supports_dependent_launch", lambda device: True)
    for module in (triton_launch, triton_backend):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 132)


@pytest.mark.parametrize(
    ("q_lens", "launches"),
    [
        ([1], [("split", ALONE)]),
        ([1] * 40, [("items", ALONE)]),
        ([100], [("items", ALONE)]),
        ([100, 1], [("items", WITH_NEXT), ("split", WITH_PREVIOUS)]),
        ([*[1] * 40, 100], [("items", WITH_NEXT), ("items", WITH_PREVIOUS)]),
    ],
    ids=str,
)
@pytest.mark.usefixtures("hopper")
def test_only_kernels_of_one_step_run_beside_each_other(
    q_lens: list[int], launches: list[tuple[str, ParallelLaunch]]
) -> None:
    kv_pool = MHATokenToKVPool(8, 1, 1, 8, 128, torch.bfloat16, "cpu")
    backend = TritonBackend(ReqToTokenPool(64, 256, "cpu"), kv_pool, 32, [None])
    numbers = torch.zeros(sum(q_lens), dtype=torch.int64)
    rows = numbers[: len(q_lens)]
    backend.plan(ForwardBatch(numbers, numbers, numbers, rows, q_lens, rows, [200] * len(q_lens)))
    found = []

    def record(kind: str) -> mock.Mock:
        def launch(*arguments: object) -> None:
            found.append((kind, *(each for each in arguments if isinstance(each, ParallelLaunch))))

        return mock.Mock(side_effect=launch)

    with (
        mock.patch.object(triton_backend, "attend_items", record("items")),
        mock.patch.object(triton_backend, "attend_items_split", record("split")),
    ):
        backend.forward(0, torch.zeros(sum(q_lens), 32, 128, dtype=torch.bfloat16))
    assert found == launches


@pytest.mark.usefixtures("hopper")
def test_the_first_of_two_lets_the_second_start() -> None:
    assert ALONE.options(CPU, 1000) == {"PDL": True, "early": 0, "beside": 0, "launch_pdl": True}
    assert ALONE.options(CPU, 100)["early"] == 1
    assert WITH_NEXT.options(CPU, 1000)["early"] == 1
    assert WITH_NEXT.options(CPU, 1000)["beside"] == 0
    assert WITH_PREVIOUS.options(CPU, 1000)["beside"] == 1


def test_gpus_that_cannot_run_them_one_after_the_other() -> None:
    assert WITH_PREVIOUS.options(CPU, 1)["PDL"] is False


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
        with mock.patch.object(triton_backend, "attend_items_split") as launch:
            backend.forward(0, torch.zeros(key.num_tokens, 32, 128, dtype=torch.bfloat16))
        items: torch.Tensor = launch.call_args.args[3]
        return items

    backend = TritonBackend(table, kv_pool, 32, [None])
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
