"""The drafts of a draft model are its greedy tokens behind the true sequence, by transformers and
without a cache: behind chunks, cached prefixes, retractions, drafts that were confirmed and drafts
that were not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from drafted_serving import Drafted, params_of, prompts
from eagle_models import STANDALONE, eagle_config_for, write_draft, write_target
from eagle_serving import group_for, setup_for
from jumping_tier import JUMPING, jumping_tiers
from mtp_oracle import load_reference
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.registry import DRAFTERS
from sglang.srt.speculative.draft_steps import DraftSteps
from sglang.srt.speculative.drafter import ComputedStep, DrafterParts, ExtendedStep
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.standalone_worker import StandaloneDrafter, all_verify
from sglang.srt.step.step_ops import PackedSize
from sglang.srt.step.worker import ScheduleBatch
from tile_spec_rounds import DEAR_ROWS, RandomBudgets

torch.set_num_threads(1)
NUM_STEPS, TOLERANCE = 3, 2e-3


class ComparedDrafter(StandaloneDrafter):
    """Compares each chain that it proposes.

    Attributes:
        seen: chains compared, by what happened before.
    """

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        self._is_asked = True
        self.seen: Counter[str] = Counter()
        self.reference: Any = None
        self._num_cached: dict[int, int] = {}
        self._scores: dict[int, torch.Tensor] = {}

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        super().prepare(batch, plan)
        self._num_cached.update((new.row, new.num_committed) for new in batch.new_rows)

    def draft(self, steps: DraftSteps, of_certain: torch.Tensor | None) -> EagleVerifyInput:
        drafts = super().draft(steps, of_certain)
        assert drafts.confidence is not None
        scores = drafts.confidence.cumprod(dim=1)
        self._scores = dict(zip(steps.rows.tolist(), scores, strict=True))
        return drafts

    def extend(self, step: ComputedStep) -> torch.Tensor | None:
        self._computed = step
        return super().extend(step)

    @torch.inference_mode()
    def propose(self, extended: ExtendedStep) -> None:
        super().propose(extended)
        step = self._computed
        self.seen["behind verified"] += all_verify(step)
        self.seen["behind others"] += not all_verify(step)
        lens = step.accepted.accept_lens.tolist()
        fed = [0] * len(lens) if step.plan.counts.is_plain else step.accepted.num_drafts.tolist()
        for index, (row, emits) in enumerate(zip(step.batch.rows, step.batch.emits, strict=True)):
            if not emits:
                self.seen["chunks"] += 1
                continue
            self._compare(row)
            if step.batch.num_prompt_tokens[index] == 0:
                self.seen["plain"] += fed[index] == 0
                self.seen["confirmed"] += lens[index] - 1
                self.seen["rejected"] += fed[index] - (lens[index] - 1)
            self.seen["behind cached"] += self._num_cached[row] > 0

    def _compare(self, row: int) -> None:
        state = self._state
        end = int(state.committed[row]) + 1
        num_drafts = int(state.pending_lens[row]) - 1
        known = state.tokens[row, : end + num_drafts].long()
        assert int(state.num_tokens[row]) == len(known)
        if num_drafts == 0:
            return
        assert num_drafts == len(self._scores[row])
        logits, score = self.reference(known[None]).logits[0], 1.0
        for index, told in enumerate(self._scores[row].tolist()):
            behind, draft = logits[end + index - 1], int(known[end + index])
            assert float(behind.max() - behind[draft]) <= TOLERANCE, (row, end, index, draft)
            score *= float(behind.softmax(0)[draft])
            assert told == pytest.approx(score, rel=5e-3)
            self.seen["ties"] += int(behind.argmax()) != draft
        self.seen["compared"] += 1


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A draft model of more noise than in other tests: it looks at all that it follows."""
    folder = tmp_path_factory.mktemp("standalone")
    draft = write_draft(folder / STANDALONE, noise=0.2)
    place = f"{ComparedDrafter.__module__}:{ComparedDrafter.__name__}"
    with mock.patch.dict(DRAFTERS.entries, {"compared": place}), jumping_tiers():
        yield {"target": write_target(folder / "target"), STANDALONE: draft}


def compared(
    paths: dict[str, Path], setup: Any, policy: str, cache: Path | None = None, **more: Any
) -> Drafted:
    target, draft = paths["target"], paths[STANDALONE]
    config = eagle_config_for(target, draft, STANDALONE, NUM_STEPS, policy, tile_spec_cache=cache)
    drafter = replace(config, name="compared")
    harness = Drafted(group_for(target, drafter, setup), drafter, setup, **more)
    harness.drafter.reference = load_reference(draft)
    return harness


def pad(harness: Drafted, more: int) -> None:
    """From now on, packed steps are given so many rows of padding."""
    plan = harness.planner.plan

    def padded(batch: ScheduleBatch, lens: Sequence[int] | None) -> StepPlan:
        found: StepPlan = plan(batch, lens)
        size = found.counts.packed
        if size is None:
            return found
        size = PackedSize(size.num_rows + more, size.num_reads + more)
        return replace(found, counts=replace(found.counts, packed=size))

    harness.planner.plan = padded


def serve_all(harness: Drafted) -> None:
    """The prompts, then prompts that begin with them."""
    for index, prompt in enumerate(prompts()):
        harness.submit(prompt, **params_of(index))
        if index % 3 == 2:
            harness.step()
    harness.run()
    for index, prompt in enumerate(prompts()):
        harness.submit([*prompt, 5, 7], **params_of(index))
    harness.run()
    harness.check()


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("page_size", "chunk", "retract_interval", "use_radix_cache", "policy"),
    [
        (1, 6, 0, True, "fixed"),
        (16, 2048, 3, True, "fixed"),
        (16, 6, 0, False, "fixed"),
        (1, 6, 0, True, JUMPING),
    ],
)
def test_drafts_are_what_the_draft_model_says_of_the_true_sequence(
    paths: dict[str, Path],
    page_size: int,
    chunk: int,
    retract_interval: int,
    use_radix_cache: bool,
    policy: str,
) -> None:
    """Also behind steps in which nothing was drafted."""
    changes = {"retract_interval": retract_interval, "use_radix_cache": use_radix_cache}
    setup = setup_for(NUM_STEPS, page_size, chunked_prefill_size=chunk, **changes)
    harness = compared(paths, setup, policy)
    serve_all(harness)
    seen = harness.drafter.seen
    assert seen["compared"] > (50 if policy == JUMPING else 100), seen
    assert seen["confirmed"] > 20, seen
    assert seen["rejected"] > 20, seen
    assert seen["behind verified"] > 10, seen
    assert seen["behind others"] > 10, seen
    assert (seen["plain"] > 50) == (policy == JUMPING), seen
    assert seen["ties"] <= seen["compared"] // 50, seen
    assert (seen["chunks"] > 10) == (chunk == 6), seen
    assert (seen["behind cached"] > 20) == use_radix_cache, seen
    if retract_interval:
        assert any(each.num_retractions for each in harness.outputs.values())


@pytest.mark.long_matrix
@pytest.mark.parametrize("num_padding", [0, 2])
def test_so_they_are_behind_steps_that_verify_some_of_the_drafts(
    paths: dict[str, Path], tmp_path: Path, num_padding: int
) -> None:
    """Lets the device decide which drafts are verified (TileSpec). Rows of padding change no KV of
    anybody."""
    setup = setup_for(NUM_STEPS, chunked_prefill_size=16)
    budgets, cut = RandomBudgets(3), list[bool]()

    def note(step: ComputedStep) -> None:
        budgets.scramble(step)
        cut.append(step.plan.counts.packed is not None and all_verify(step))

    with budgets.chosen():
        harness = compared(paths, setup, "fixed", tmp_path, prices=DEAR_ROWS, on_step=note)
        pad(harness, num_padding)
        serve_all(harness)
    seen = harness.drafter.seen
    assert sum(cut) > 10
    assert seen["compared"] > 100, seen
    assert seen["confirmed"] > 10, seen
