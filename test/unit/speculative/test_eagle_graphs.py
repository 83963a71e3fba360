"""EAGLE and EAGLE-3 with graphs of target and head: tokens are those of a plain server."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch

from draft_heads import EAGLE, EAGLE3
from drafted_serving import Drafted, params_of, prompts, serve
from drafter_checks import DraftCounter
from eagle_models import CONTEXT, eagle_config_for, write_models
from jumping_tier import JUMPING, jumping_tiers
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import copied
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.model_executor.runner_graphs import RunnerGraphs
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.price_table import PriceTable
from sglang.srt.step.worker import ScheduleBatch
from sglang.srt.workers.round_graphs import RoundGraphs, VerifiedStep
from tile_spec_rounds import DEAR_ROWS, RandomBudgets
from utils import Setup, make_execution

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


def runners(
    target: Path,
    drafter: DrafterConfig | None,
    setup: Setup,
    backend: str,
    max_graph_rows: int = 32,
) -> RunnerGroup:
    needs = drafter_needs(drafter)
    execution = make_execution(
        target,
        setup,
        setup.context_len,
        needs.max_rows,
        attention_backend=backend,
        max_graph_width=needs.max_rows if drafter else 0,
        row_width=setup.row_width,
        capture=needs.capture,
    )
    execution = replace(execution, max_graph_rows=max_graph_rows if drafter else 0)
    return make_runners(execution, *drafter_models(drafter, execution))


def harness(
    group: RunnerGroup,
    drafter: DrafterConfig | None,
    setup: Setup,
    prices: PriceTable | None = None,
    checks_kv: bool = True,
) -> tuple[Drafted, DraftCounter]:
    """KV of nobody is zero, which a mask makes nothing of; that of requests is checked in each step
    if it is to be. Then, and only then, steps are counted."""
    counter = DraftCounter()
    more = {"checks_kv": checks_kv and drafter is not None, "prices": prices}
    if checks_kv:
        more["on_step"] = counter
    made = Drafted(group, drafter, setup, **more)
    for pool in group.memory.pools:
        for kv in pool.kv:
            kv.zero_()
    return made, counter


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "backend", "page_size", "policy"),
    [
        (EAGLE, "ragged", 1, JUMPING),
        (EAGLE3, "ragged", 16, "fixed"),
        (EAGLE, "uniform", 16, "fixed"),
        (EAGLE3, "uniform", 1, JUMPING),
    ],
)
def test_tokens_with_graphs(
    paths: dict[str, Path], kind: str, backend: str, page_size: int, policy: str
) -> None:
    setup = Setup(
        num_pages=1024 // page_size,
        page_size=page_size,
        context_len=CONTEXT,
        max_decode_rows=6,
        chunked_prefill_size=40,
    )
    plain, _ = harness(runners(paths["target"], None, setup, "torch_native"), None, setup)
    right = [plain.generate([each], **params_of(i))[0] for i, each in enumerate(prompts())]
    drafter = eagle_config_for(paths["target"], paths[kind], kind, 3, policy)
    with recorded_graphs(), replayable_backends(), jumping_tiers():
        group = runners(paths["target"], drafter, setup, backend)
        head = group.runners[1]
        with (
            mock.patch.object(
                RunnerGraphs, "draft", autospec=True, side_effect=RunnerGraphs.draft
            ) as draft,
            mock.patch.object(head, "forward", wraps=head.forward) as forward,
        ):
            served, counter = harness(group, drafter, setup)
            draft.reset_mock()  # rounds were captured
            forward.reset_mock()
            serve(served, right)
    assert counter.seen["confirmed"] > 30
    assert counter.seen["fed"] - counter.seen["confirmed"] > 30
    assert draft.call_count > 10
    assert (forward.call_count <= served.num_steps) == (backend == "ragged")


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "backend", "policy", "checks_kv"),
    [
        (EAGLE, "ragged", JUMPING, True),
        (EAGLE3, "uniform", "fixed", True),
        (EAGLE3, "ragged", "fixed", False),
    ],
)
def test_tokens_with_graphs_of_steps_that_verify_some_of_the_drafts(
    paths: dict[str, Path], tmp_path: Path, kind: str, backend: str, policy: str, checks_kv: bool
) -> None:
    """Ragged graphs serve them; with uniform ones they run without, the head too. Between them
    other rounds replay graphs, where KV is not checked; they leave drafts with scores too."""
    setup = Setup(num_pages=1024, context_len=CONTEXT, max_decode_rows=6, chunked_prefill_size=40)
    plain, _ = harness(runners(paths["target"], None, setup, "torch_native"), None, setup)
    right = [plain.generate([each], **params_of(i))[0] for i, each in enumerate(prompts())]
    drafter = eagle_config_for(
        paths["target"], paths[kind], kind, 3, policy, tile_spec_cache=tmp_path
    )
    budgets, replayed, rounds = RandomBudgets(3), list[bool](), list[bool]()
    verify = RoundGraphs.verify

    def noted(graphs: RoundGraphs, batch: ScheduleBatch, plan: StepPlan) -> VerifiedStep | None:
        taken = verify(graphs, batch, plan)
        rounds.append(taken is not None)
        return None if taken is None else copied(taken)

    def note(step: ComputedStep) -> None:
        counter(step)
        if checks_kv:
            budgets.scramble(step)
        if step.plan.counts.packed is not None:
            replayed.append(step.forward.used_graph)

    with recorded_graphs(), replayable_backends(), jumping_tiers(), budgets.chosen():
        group = runners(paths["target"], drafter, setup, backend, max_graph_rows=64)
        with mock.patch.object(RoundGraphs, "verify", noted):
            served, counter = harness(group, drafter, setup, DEAR_ROWS, checks_kv)
            served.scheduler._worker._on_step = note
            serve(served, right)
    assert len(replayed) > 10
    assert all(replayed) if backend == "ragged" else not any(replayed)
    assert counter.seen["confirmed"] > 10
    assert (sum(rounds) > 3) != checks_kv
