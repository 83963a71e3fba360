"""The canary over a target and a drafter with a model and a pool of its own: silent while KV is
right, and finds what a worker or a drafter may do wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

import own_model_drafter
from own_model_drafter import OwnModelDrafter, OwnModelOptions
from sgl_kernel import ConfirmedDrafts, KVAddresses
from sglang.srt.mem_cache.kv_ledger import KVLedger
from sglang.srt.messages.control import MemoryOccupationReq
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.resources import make_resources
from sglang.srt.processes.worker_factory import drafter_models, make_worker
from sglang.srt.registry import DRAFTERS
from sglang.srt.speculative.drafter_options import DrafterConfig, DrafterNeeds
from sglang.srt.step.kv_canary import OWN, SUM, _mixed
from utils import SchedulerHarness, Setup, make_execution, make_random_llama

GREEDY = {"temperature": 0.0, "max_new_tokens": 16}
MAX_ROWS = 2 * (1 + own_model_drafter.NUM_DRAFTS)
KINDS: dict[str, dict[str, Any]] = {
    "chain": {},
    "tree": {"has_trees": True},
    "shifted": {"token_shift": 1},
    "shifted tree": {"has_trees": True, "token_shift": 1},
}
SETUP = Setup(
    num_pages=512,
    context_len=128,
    chunked_prefill_size=16,
    max_running_requests=4,
    max_decode_rows=MAX_ROWS,
)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("canary"))


@pytest.fixture(autouse=True)
def own_model(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(DRAFTERS.entries, "own model", own_model_drafter.PLACE)
    num_threads = torch.get_num_threads()
    yield
    torch.set_num_threads(num_threads)


class TwoModels(SchedulerHarness):
    """A scheduler over a target and a drafter whose model is the target's too, so that what it
    drafts is confirmed; without a drafter where there is no `kind`."""

    def __init__(
        self, path: Path, kind: str | None, setup: Setup = SETUP, checks_kv: bool = True
    ) -> None:
        target, drafter = make_execution(path, setup, setup.context_len, MAX_ROWS), None
        if kind is not None:
            drafter = DrafterConfig("own model", OwnModelOptions(target, **KINDS[kind]))
        self.runners = make_runners(target, *drafter_models(drafter, target))
        self.worker: Any = make_worker(self.runners, drafter, checks_kv=checks_kv)
        super().__init__(setup, self.worker, resources=make_resources(self.runners))
        self.drafter: OwnModelDrafter = self.worker._drafter
        self.table = self.runners.memory.table.req_to_token

    def start(self) -> TwoModels:
        """Two requests that decode, with drafts that will be confirmed."""
        for first in (10, 50):
            self.submit(list(range(first, first + 30)), **GREEDY)
        for _ in range(6):
            self.step()
        return self

    def replace_kernel(self, name: str, change: Callable[..., Any]) -> None:
        """`change` gets the worker's kernel, then its arguments."""
        kernels = vars(self.worker._kernels)
        ours = {**kernels, name: lambda *args: change(kernels[name], *args)}
        self.worker._kernels = SimpleNamespace(**ours)

    def assert_found(self, pool: int, what: str = "another token's KV is read") -> None:
        with pytest.raises(RuntimeError, match=rf"KV canary: .*{what}.* of pool {pool}"):
            self.run()


def prompts(seed: int) -> list[list[int]]:
    """Some have a common beginning."""
    source = random.Random(seed)
    beginning = [source.randrange(10, 60) for _ in range(40)]
    tails = [[source.randrange(10, 60) for _ in range(source.randint(1, 30))] for _ in range(6)]
    return [beginning[: source.choice([0, 17, 40])] + tail for tail in tails]


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("page_size", [1, 16])
def test_it_is_silent_and_tokens_are_those_without_a_drafter(
    model_path: Path, page_size: int, kind: str
) -> None:
    """Chunks, retractions and shared prefixes, whose next tokens differ."""
    setup = replace(
        SETUP,
        page_size=page_size,
        num_pages=512 // page_size,
        retract_interval=5,
    )
    plain = TwoModels(model_path, None, setup, checks_kv=False)
    expected = plain.generate(prompts(page_size), **GREEDY)
    harness = TwoModels(model_path, kind, setup)
    assert harness.generate(prompts(page_size), **GREEDY) == expected
    assert harness.generate(prompts(page_size), **GREEDY) == expected
    assert harness.drafter.num_confirmed > 60


# ---------------------------------------------------------------- moves


@pytest.mark.long_matrix
@pytest.mark.parametrize(("kind", "pool"), [("tree", 1), ("shifted tree", 0)])
def test_a_worker_that_forgets_to_move_is_found(model_path: Path, kind: str, pool: int) -> None:
    harness = TwoModels(model_path, kind).start()
    harness.replace_kernel("move_kept_kv", lambda move, *args: None)
    harness.assert_found(pool)


@pytest.mark.long_matrix
@pytest.mark.parametrize("moved", [0, 1])
def test_a_worker_that_moves_one_of_two_pools_is_found(model_path: Path, moved: int) -> None:
    harness = TwoModels(model_path, "tree").start()
    harness.worker._kv = KVAddresses(harness.runners.memory.pools[moved].tensors)
    harness.assert_found(pool=1 - moved)


def test_a_worker_that_moves_kv_but_no_notes_is_found(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree").start()
    pools = harness.runners.memory.pools
    harness.worker._kv = KVAddresses([kv for pool in pools for kv in pool.kv])
    harness.assert_found(pool=1)


def test_a_move_to_the_wrong_place_is_found(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree").start()

    def beside(move: Any, kv: Any, table: Any, rows: Any, committed: Any, *more: Any) -> None:
        move(kv, table, rows, committed + 1, *more)

    harness.replace_kernel("move_kept_kv", beside)
    harness.assert_found(pool=1)


def test_a_move_along_another_path_is_found(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree").start()

    def other_branch(move: Any, *args: Any) -> None:
        *most, path, num_confirmed = args
        move(*most, torch.where(path > 1, path - 1, path), num_confirmed)

    harness.replace_kernel("move_kept_kv", other_branch)
    harness.assert_found(pool=1)


def test_a_worker_that_confirms_another_path_is_found(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree").start()

    confirm = harness.worker._confirm

    def other_branch(*args: Any) -> tuple[ConfirmedDrafts, torch.Tensor]:
        confirmed, targets = confirm(*args)
        path = torch.where(confirmed.path > 1, confirmed.path - 1, confirmed.path)
        return confirmed._replace(path=path), targets

    harness.worker._confirm = other_branch
    harness.assert_found(pool=1)


# ---------------------------------------------------------------- the drafter's pool


@pytest.mark.parametrize("kind", KINDS)
def test_a_pool_that_was_not_filled_for_a_chunk_is_found(model_path: Path, kind: str) -> None:
    harness = TwoModels(model_path, kind)
    catch_up = harness.drafter.catch_up

    def skip_chunks(rows: Any, first: Any, emits: torch.Tensor) -> Any:
        return catch_up(rows, first, emits) if emits.any() else None

    with mock.patch.object(harness.drafter, "catch_up", skip_chunks):
        harness.submit(list(range(10, 40)), **GREEDY)
        harness.assert_found(pool=1)


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("off", [-1, 1])
def test_a_position_that_is_off_by_one_is_found(model_path: Path, kind: str, off: int) -> None:
    harness = TwoModels(model_path, kind).start()
    feed = harness.drafter.feed

    def beside(rows: Any, columns: Any, tokens: Any, positions: Any, *more: Any) -> Any:
        return feed(rows, columns, tokens, [position + off for position in positions], *more)

    with mock.patch.object(harness.drafter, "feed", beside):
        harness.assert_found(pool=1, what="as if at another position")


@pytest.mark.parametrize("kind", ["chain", "shifted"])
def test_a_draft_step_that_skips_a_column_is_found(model_path: Path, kind: str) -> None:
    """Its rows read what no step of this round has written."""
    harness = TwoModels(model_path, kind).start()
    feed = harness.drafter.feed

    def skip(rows: Any, columns: Any, tokens: Any, positions: Any, *more: Any) -> Any:
        if all(len(span) == 1 for span in columns):
            columns = positions = [span + 1 for span in columns]
        return feed(rows, columns, tokens, positions, *more)

    with mock.patch.object(harness.drafter, "feed", skip):
        harness.assert_found(pool=1)


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_of_other_positions_than_declared_are_found(model_path: Path, kind: str) -> None:
    """A drafter that feeds the next token without saying so, or says so without feeding it."""
    needs = OwnModelDrafter.needs

    def other_shift(options: OwnModelOptions) -> DrafterNeeds:
        return replace(needs(options), token_shift=1 - options.token_shift)

    with mock.patch.object(OwnModelDrafter, "needs", other_shift):
        harness = TwoModels(model_path, kind)
    harness.submit(list(range(10, 40)), **GREEDY)
    harness.assert_found(pool=1)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("page_size", "place", "changed"),
    [
        *[(page_size, 31, ()) for page_size in (1, 16)],
        *[(page_size, 31, (kind,)) for page_size in (1, 16) for kind in (SUM, OWN)],
        *[(page_size, 30, (SUM,)) for page_size in (1, 16)],
        (16, 30, (SUM, OWN)),  # another next token, but within a page
    ],
)
def test_of_a_prefix_the_next_token_behind_it_may_be_another_and_nothing_else(
    model_path: Path, page_size: int, place: int, changed: tuple[int, ...]
) -> None:
    """The last slot of a cached prefix may have its publisher's next token: its note is of that
    token behind the right ones. A note of anything else is found, there and before it."""
    setup = replace(SETUP, page_size=page_size, num_pages=512 // page_size)
    harness = TwoModels(model_path, "shifted", setup)
    beginning = list(range(10, 42))
    harness.generate([[*beginning, 50]], **GREEDY)
    harness.submit([*beginning, 51], **GREEDY)
    if not changed:
        harness.run()
        return
    notes = harness.runners.memory.pools[1].tensors[-1]
    [slot] = (notes[:, SUM] == sum_of([*beginning[1:], 50], place)).nonzero()[:, 0]
    for kind in changed:
        notes[slot, kind] += 1
    with pytest.raises(RuntimeError, match=rf"position {place}: .* read at .* of pool 1; 1 pos"):
        harness.run()


def sum_of(fed: list[int], place: int) -> int:
    """The checksum of what was fed up to position `place`."""
    tokens = torch.tensor(fed[: place + 1])
    return int(_mixed(tokens, torch.arange(place + 1)).sum())


# ---------------------------------------------------------------- memory and weights


def test_kv_of_memory_that_was_released_and_resumed_is_gone(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree")
    expected = harness.generate(prompts(0), **GREEDY)
    notes = [pool.tensors[-1] for pool in harness.runners.memory.pools]
    assert all(each.any() for each in notes)
    harness.call(MemoryOccupationReq(call_id=1, action="release", tags=["kv_cache"]))
    harness.call(MemoryOccupationReq(call_id=2, action="resume", tags=["kv_cache"]))
    assert not any(each.any() for each in notes)
    assert harness.generate(prompts(0), **GREEDY) == expected


def test_a_prefix_that_outlives_its_memory_is_found(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree")
    harness.generate(prompts(0), **GREEDY)
    with mock.patch.object(KVLedger, "flush", return_value=0):
        harness.call(MemoryOccupationReq(call_id=1, action="release", tags=["kv_cache"]))
        harness.call(MemoryOccupationReq(call_id=2, action="resume", tags=["kv_cache"]))
    for prompt in prompts(0):
        harness.submit(prompt, **GREEDY)
    harness.assert_found(pool=0)


def test_requests_may_go_on_with_other_weights(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree").start()
    harness.runners.target.weights.apply({})
    harness.run()


def test_a_prefix_of_other_weights_is_found(model_path: Path) -> None:
    harness = TwoModels(model_path, "tree")
    harness.generate(prompts(0), **GREEDY)
    harness.runners.target.weights.apply({})  # and the ledger does not know
    for prompt in prompts(0):
        harness.submit(prompt, **GREEDY)
    harness.assert_found(pool=0, what="KV of weights before its admission is read")


def test_a_worker_over_the_memory_of_another_has_a_canary_of_its_own(model_path: Path) -> None:
    first = TwoModels(model_path, "tree")
    expected = first.generate(prompts(0), **GREEDY)
    options = DrafterConfig("own model", OwnModelOptions(first.drafter.runner._config, True))
    for checks_kv in (True, False, True):
        worker = make_worker(first.runners, options, checks_kv=checks_kv)
        second = SchedulerHarness(SETUP, worker, resources=make_resources(first.runners))
        assert second.generate(prompts(0), **GREEDY) == expected
