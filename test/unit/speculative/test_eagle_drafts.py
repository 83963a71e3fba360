"""The drafts of a head are what it says of the true sequence, by an oracle without a cache: behind
chunks, cached prefixes, retractions, drafts that were confirmed and drafts that were not.

The target's hidden states are those of transformers. Of each slot of the head's pool it is noted
which token was fed there: the next one of the sequence, but for the last slot of a page in a cached
prefix, where it may be its publisher's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from draft_heads import EAGLE, EAGLE3, Oracle
from drafted_serving import Drafted, params_of, prompts
from eagle_models import (
    CONTEXT,
    EMBEDDING,
    OUTPUT_HEAD,
    eagle_config_for,
    write_eagle3_head,
    write_eagle_head,
    write_target,
)
from jumping_tier import JUMPING, jumping_tiers
from mtp_oracle import load_reference
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.registry import DRAFTERS
from sglang.srt.speculative.draft_steps import DraftSteps
from sglang.srt.speculative.drafter import ComputedStep, DrafterParts
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_worker import EagleDrafter
from sglang.srt.step.worker import NewRow
from utils import Setup, make_execution

torch.set_num_threads(1)
NUM_STEPS, TOLERANCE = 3, 2e-3


class ComparedDrafter(EagleDrafter):
    """Compares each chain that it proposes.

    Attributes:
        seen: chains compared, by what happened before.
    """

    def __init__(self, parts: DrafterParts) -> None:
        super().__init__(parts)
        self.seen: Counter[str] = Counter()
        self.reference: Any = None
        self.oracle: Any = None
        self._layers = parts.options.capture.layers
        self._fed = torch.full((len(self._runner.kv_pool.kv[0]),), -1)
        self._num_cached: dict[int, int] = {}
        self._scores: dict[int, torch.Tensor] = {}
        self._runner.checks.append(self._note)

    def _note(self, batch: ForwardBatch) -> None:
        self._fed[batch.slots.cpu()] = batch.input_ids.cpu()

    def admit(self, new_rows: list[NewRow]) -> None:
        super().admit(new_rows)
        self._num_cached.update((new.row, new.num_committed) for new in new_rows)

    def draft(self, steps: DraftSteps, hidden: torch.Tensor) -> EagleVerifyInput:
        drafts = super().draft(steps, hidden)
        torch.testing.assert_close(drafts.confidence.cumprod(dim=1), drafts.scores)
        self._scores = dict(zip(steps.rows.tolist(), drafts.scores, strict=True))
        return drafts

    @torch.inference_mode()
    def propose(self, step: ComputedStep) -> None:
        super().propose(step)
        lens = step.accepted.accept_lens.tolist()
        fed = [0] * len(lens) if step.plan.is_plain else step.accepted.num_drafts.tolist()
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
        end = int(state.committed[row])
        num_drafts = int(state.pending_lens[row]) - 1
        known = state.tokens[row, : end + 1 + num_drafts].long().cpu()
        assert int(state.num_tokens[row]) == len(known)
        if num_drafts == 0:
            return
        fed = self._fed[self._table.req_to_token[row, :end].long().cpu()]
        wrong = (fed != known[1 : end + 1]).nonzero()[:, 0]
        size = self._page_size
        assert ((wrong + 1) % size == 0).all(), wrong
        assert (wrong < self._num_cached[row]).all(), wrong
        self.seen["publishers' tokens"] += len(wrong) > 0
        states = self.reference(known[None, :end], output_hidden_states=True).hidden_states
        layers = [states[layer][0] for layer in self._layers]
        taps = torch.cat(layers, dim=1) if layers else states[-1][0]
        tokens, hidden = fed.tolist(), self.oracle.combine(taps)
        score = 1.0
        for draft, told in zip(known[end + 1 :].tolist(), self._scores[row].tolist(), strict=True):
            carried, logits = self.oracle.run(tokens, hidden)
            column = self._column_of(draft)
            gap = float(logits[-1].max() - logits[-1, column])
            assert gap <= TOLERANCE, (row, end, draft, gap)
            score *= float(logits[-1].softmax(0)[column])
            assert told == pytest.approx(score, rel=5e-3)
            self.seen["ties"] += int(logits[-1].argmax()) != column
            tokens, hidden = [*tokens, draft], torch.cat((hidden, carried[-1:]))
        self.seen["compared"] += 1

    def _column_of(self, token: int) -> int:
        columns = torch.arange(self.oracle.num_tokens, device=self._runner.device)
        ids = self._head.to_target_ids(columns)
        [column] = (ids == token).nonzero()[:, 0].tolist()
        return column

    @property
    def _page_size(self) -> int:
        return self._runner.kv_pool.page_size


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Heads of more noise than in other tests: they look at all that they follow."""
    folder = tmp_path_factory.mktemp("eagle")
    target = write_target(folder / "target")
    eagle3 = write_eagle3_head(folder / EAGLE3, target, noise=0.2)
    heads = {EAGLE: write_eagle_head(folder / EAGLE, noise=0.2), EAGLE3: eagle3}
    place = f"{ComparedDrafter.__module__}:{ComparedDrafter.__name__}"
    with mock.patch.dict(DRAFTERS._entries, {"compared": place}), jumping_tiers():
        yield {"target": target, **heads}


def compared(paths: dict[str, Path], kind: str, setup: Setup, policy: str) -> Drafted:
    target, head = paths["target"], paths[kind]
    drafter = replace(eagle_config_for(target, head, kind, NUM_STEPS, policy), name="compared")
    needs = drafter_needs(drafter)
    execution = make_execution(
        target, setup, CONTEXT, needs.max_rows, row_width=setup.row_width, capture=needs.capture
    )
    harness = Drafted(make_runners(execution, *drafter_models(drafter, execution)), drafter, setup)
    made: ComparedDrafter = harness.drafter
    weights = load_file(target / "model.safetensors")
    made.reference = load_reference(target)
    made.oracle = Oracle(head, weights[EMBEDDING], weights[OUTPUT_HEAD])
    made.oracle.num_tokens = len(made.oracle.tensors.get("lm_head.weight", weights[OUTPUT_HEAD]))
    return harness


@pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
@pytest.mark.parametrize(
    ("page_size", "chunk", "retract_interval", "use_radix_cache", "policy"),
    [
        (1, 6, 0, True, "fixed"),
        (16, 2048, 3, True, "fixed"),
        (16, 6, 0, False, "fixed"),
        (1, 6, 0, True, JUMPING),
    ],
)
def test_drafts_are_what_the_head_says_of_the_true_sequence(
    paths: dict[str, Path],
    kind: str,
    page_size: int,
    chunk: int,
    retract_interval: int,
    use_radix_cache: bool,
    policy: str,
) -> None:
    """Also behind steps in which nothing was drafted."""
    setup = Setup(
        num_pages=1024 // page_size,
        page_size=page_size,
        chunked_prefill_size=chunk,
        retract_interval=retract_interval,
        use_radix_cache=use_radix_cache,
        context_len=CONTEXT,
        max_decode_rows=2 * NUM_STEPS,
    )
    harness = compared(paths, kind, setup, policy)
    for index, prompt in enumerate(prompts()):
        harness.submit(prompt, **params_of(index))
        if index % 3 == 2:
            harness.step()
    harness.run()
    for index, prompt in enumerate(prompts()):
        harness.submit([*prompt, 5, 7], **params_of(index))
    harness.run()
    harness.check()
    seen = harness.drafter.seen
    assert seen["compared"] > (50 if policy == JUMPING else 100), seen
    assert seen["confirmed"] > 20, seen
    assert seen["rejected"] > 20, seen
    assert (seen["plain"] > 50) == (policy == JUMPING), seen
    assert seen["ties"] <= seen["compared"] // 50, seen
    assert (seen["chunks"] > 10) == (chunk == 6), seen
    assert (seen["behind cached"] > 20) == use_radix_cache, seen
    assert (seen["publishers' tokens"] > 0) == use_radix_cache, seen
    if retract_interval:
        assert any(each.num_retractions for each in harness.outputs.values())
