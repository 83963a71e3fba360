"""The canary is silent while KV is right, and finds what is planted."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch

from sglang.srt.lookahead.mask_planner import MTPConfig
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.torch_step_ops import TorchStepOps
from utils import MTP_MAX_K, MTP_MAX_ROWS, SchedulerHarness, Setup, make_random_llama, make_runner

MASK = 5
GREEDY = {"temperature": 0.0, "max_new_tokens": 12}
LOOKAHEAD = {**GREEDY, "mtp_enabled": True, "mtp_k": 4}


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("canary"))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def make_harness(
    model_path: Path, setup: Setup, looks_ahead: bool = False, checks_kv: bool = True
) -> SchedulerHarness:
    max_rows = MTP_MAX_ROWS if looks_ahead else 1
    runner = make_runner(model_path, setup, setup.context_len, max_rows)
    config = MTPConfig(mask_token_id=MASK, max_k=MTP_MAX_K)
    mtp = DrafterConfig("mtp", config)
    worker = make_worker(RunnerGroup([runner]), mtp if looks_ahead else None, checks_kv=checks_kv)
    harness = SchedulerHarness(setup, worker)
    harness.runner = runner  # type: ignore[attr-defined]
    harness.table = runner.req_to_token_pool.req_to_token  # type: ignore[attr-defined]
    return harness


def prompts_with_common_beginnings(source: random.Random) -> list[list[int]]:
    beginning = [source.randrange(10, 60) for _ in range(40)]
    tails = [[source.randrange(10, 60) for _ in range(source.randint(1, 30))] for _ in range(6)]
    return [beginning[: source.choice([0, 17, 40])] + tail for tail in tails]


@pytest.mark.long_matrix
@pytest.mark.parametrize("looks_ahead", [False, True])
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("enable_overlap", [False, True])
def test_it_is_silent_and_changes_nothing_while_kv_is_right(
    model_path: Path, enable_overlap: bool, page_size: int, looks_ahead: bool
) -> None:
    """Shared prefixes, chunks, retractions, look-ahead of all kinds."""
    setup = Setup(
        page_size=page_size,
        num_pages=512 // page_size,
        context_len=128,
        chunked_prefill_size=16,
        max_running_requests=4,
        retract_interval=5,
        enable_overlap=enable_overlap,
    )
    found = []
    for checks_kv in (False, True):
        source, outputs = random.Random(page_size), list[list[int]]()
        harness = make_harness(model_path, setup, looks_ahead, checks_kv)
        kinds: list[dict[str, float | bool]] = [dict(GREEDY)]
        if looks_ahead:
            kinds += [{**LOOKAHEAD, "mtp_verify": True}, LOOKAHEAD]
        for params in kinds:
            outputs += harness.generate(prompts_with_common_beginnings(source), **params)
        found.append(outputs)
    assert found[0] == found[1]


def test_a_slot_of_another_request_in_the_page_table_is_found(model_path: Path) -> None:
    harness = make_harness(model_path, Setup(context_len=128))
    harness.submit(list(range(10, 40)), **GREEDY)
    harness.submit(list(range(50, 80)), **GREEDY)
    for _ in range(3):
        harness.step()
    table = harness.table  # type: ignore[attr-defined]
    first, second = (req.kv.row for req in harness.scheduler.lifecycle.running)
    table[first, 7] = table[second, 7]
    with pytest.raises(RuntimeError, match=rf"row {first}, position 7: .* read at"):
        harness.run()


def test_a_page_that_is_given_to_two_requests_is_found(model_path: Path) -> None:
    harness = make_harness(model_path, Setup(context_len=128))
    harness.scheduler.checker.after_step = lambda what: None  # type: ignore[method-assign]
    allocate, given = PageAllocator.allocate, []

    def allocate_again(self: PageAllocator, count: int):  # type: ignore[no-untyped-def]
        pages = allocate(self, count)
        given.append(pages)
        return given[0][:count] if len(given) == 2 and len(given[0]) >= count else pages

    with mock.patch.object(PageAllocator, "allocate", allocate_again):
        harness.submit(list(range(10, 40)), **GREEDY)
        harness.step()
        harness.submit(list(range(50, 70)), **GREEDY)
        with pytest.raises(RuntimeError, match="KV canary"):
            harness.run()


def test_a_page_that_was_freed_and_written_by_another_request_is_found(model_path: Path) -> None:
    harness = make_harness(model_path, Setup(context_len=128))
    harness.scheduler.checker.after_step = lambda what: None  # type: ignore[method-assign]
    harness.submit(list(range(10, 40)), **GREEDY)
    harness.step()
    (req,) = harness.scheduler.lifecycle.running
    harness.ledger._allocator.free(req.kv.pages[-4:])
    harness.submit(list(range(50, 80)), **GREEDY)
    with pytest.raises(RuntimeError, match=rf"row {req.kv.row}, .* read at"):
        harness.run()


def test_a_prefix_of_other_weights_is_found(model_path: Path) -> None:
    harness = make_harness(model_path, Setup(context_len=128))
    harness.generate([list(range(10, 40))], **GREEDY)
    harness.runner.weights.apply({})  # type: ignore[attr-defined]  # which no ledger hears of
    harness.submit(list(range(10, 40)), **GREEDY)
    with pytest.raises(RuntimeError, match="KV of weights before its admission is read at"):
        harness.run()


def test_a_cached_prefix_in_another_order_is_found(model_path: Path) -> None:
    harness = make_harness(model_path, Setup(context_len=128))
    harness.generate([list(range(10, 40))], **GREEDY)
    table = harness.table  # type: ignore[attr-defined]
    harness.submit(list(range(10, 40)), **GREEDY)
    harness.step()
    (req,) = harness.scheduler.lifecycle.running
    assert req.committed > 0, "Its prefix comes from the cache."
    table[req.kv.row, 0], table[req.kv.row, 1] = (
        int(table[req.kv.row, 1]),
        int(table[req.kv.row, 0]),
    )
    with pytest.raises(RuntimeError, match=r"position 0: .* 2 positions in all"):
        harness.run()


def test_a_row_that_is_written_to_another_slot_is_found(model_path: Path) -> None:
    harness = make_harness(model_path, Setup(context_len=128))
    harness.submit(list(range(10, 40)), **GREEDY)
    for _ in range(3):
        harness.step()
    lay_out = TorchStepOps.lay_out

    def lay_out_beside(*args):  # type: ignore[no-untyped-def]
        layout = lay_out(*args)
        layout.slots[-1] += 1
        return layout

    with (
        mock.patch.object(TorchStepOps, "lay_out", lay_out_beside),
        pytest.raises(RuntimeError, match="written beside"),
    ):
        harness.run()
