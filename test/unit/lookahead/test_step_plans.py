"""Plans as data: those of every kind of drafter are sent through bytes, and steps are the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch

from draft_heads import EAGLE
from drafted_serving import Drafted, serve
from eagle_models import write_models
from eagle_serving import Served, right_tokens, setup_for
from jumping_tier import RESTING, jumping_tiers
from ngram_serving import Served as ServedNgrams
from ngram_serving import ngram_config
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.draft_planner import DraftPlanner
from sglang.srt.lookahead.mask_planner import MaskPlanner
from tile_spec_rounds import DEAR_ROWS, RandomBudgets
from utils import MTP_MAX_ROWS, SchedulerHarness, Setup, WithRoom, make_mtp_worker, make_runner

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("plans"))


@contextmanager
def through_bytes() -> Iterator[list[StepPlan]]:
    """While this lasts each plan is sent, and the one that arrives is executed and learnt from."""
    arrived: list[StepPlan] = []

    def sent(plan: Callable[..., StepPlan]) -> Callable[..., StepPlan]:
        def planned(planner: Any, batch: Any, lens: Sequence[int] | None = None) -> StepPlan:
            data = msgspec.msgpack.encode(plan(planner, batch, lens))
            arrived.append(msgspec.msgpack.decode(data, type=StepPlan))
            assert msgspec.msgpack.encode(arrived[-1]) == data
            return arrived[-1]

        return planned

    of_drafts = mock.patch.object(DraftPlanner, "plan", sent(DraftPlanner.plan))
    with of_drafts, mock.patch.object(MaskPlanner, "plan", sent(MaskPlanner.plan)):
        yield arrived


Made = Callable[[dict[str, Path], Path], Drafted]
KINDS: dict[str, tuple[Made, Callable[[StepPlan], object]]] = {
    "a head that rests": (
        lambda paths, _: Served(paths, EAGLE, 3, setup_for(3), tier_policy=RESTING),
        lambda plan: plan.rests,
    ),
    "cut trees": (
        lambda paths, folder: ServedNgrams(
            paths["target"], ngram_config(7, 3, tile_spec_cache=folder), setup_for(7), DEAR_ROWS
        ),
        lambda plan: plan.wants_scores and plan.wants_paths and plan.counts.packed,
    ),
}


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", KINDS)
def test_a_drafter_executes_plans_that_were_sent(
    paths: dict[str, Path], tmp_path: Path, name: str
) -> None:
    """Other kinds of drafters give no other fields; ranks execute those of all kinds."""
    made, wanted = KINDS[name]
    right, budgets = right_tokens(paths["target"]), RandomBudgets(0)
    with jumping_tiers(), budgets.chosen(), through_bytes() as arrived:
        serve(made(paths, tmp_path), right)
    assert sum(bool(wanted(plan)) for plan in arrived) > 5


@pytest.mark.parametrize("layout", ["", "trims_rows", "packs_rows"])
def test_masks_are_fed_by_plans_that_were_sent(small_model: Path, layout: str) -> None:
    """Static, by confidence and verified side by side."""
    modes: list[dict[str, Any]] = [{}, {"mtp_strategy": ["conf_adapt", 0.6]}, {"mtp_verify": True}]
    runner = make_runner(small_model, Setup(), 128, MTP_MAX_ROWS)

    def served() -> list[list[int]]:
        options: dict[str, Any] = {layout: True} if layout else {}
        worker = make_mtp_worker(runner, 5, WithRoom(), **options)
        harness = SchedulerHarness(Setup(), worker)
        params = {"temperature": 0.0, "max_new_tokens": 12, "mtp_enabled": True, "mtp_k": 4}
        ids = [harness.submit([3, 1, 4], **mode, **params) for mode in modes]
        harness.run()
        return [harness.outputs[req_id].token_ids for req_id in ids]

    right = served()
    with through_bytes() as arrived:
        assert served() == right
    assert not all(all(plan.counts.emits_only_confirmed) for plan in arrived)
    assert any(plan.draft_length > 1 and plan.max_pending > 1 for plan in arrived)
    assert any(plan.counts.packed is not None for plan in arrived) == (layout == "packs_rows")
