"""Drafters with a head of EAGLE or DFlash that compare what they draft with what the head says of
the true sequence, by an oracle without a cache.

The target's hidden states are those of transformers. Of each slot of the head's pool it is noted
which token was fed there: the next one of the sequence, but for the last slot of a page in a cached
prefix, where it may be its publisher's. Of DFlash it is the sequence's own at that place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file

from block_heads import BlockOracle
from draft_heads import DFLASH, EAGLE, EAGLE3, MASK_TOKEN, P_EAGLE, Oracle
from drafted_serving import Drafted
from eagle_models import (
    CONTEXT,
    EMBEDDING,
    OUTPUT_HEAD,
    eagle_config_for,
    write_block_head,
    write_eagle3_head,
    write_eagle_head,
    write_p_eagle_head,
    write_target,
)
from mtp_oracle import load_reference
from ngram_serving import ngram_config
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.registry import DRAFTERS
from sglang.srt.speculative.dflash_worker import DFlashDrafter
from sglang.srt.speculative.draft_steps import DraftSteps
from sglang.srt.speculative.drafter import ComputedStep, Drafter, DrafterParts, ExtendedStep
from sglang.srt.speculative.drafter_configs import NGRAM_NAME, PairConfig
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.speculative.eagle_info import EagleVerifyInput
from sglang.srt.speculative.eagle_worker import EagleDrafter
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import ScheduleBatch
from tile_spec_rounds import DEAR_ROWS
from utils import Setup, make_execution

NUM_STEPS, TOLERANCE = 3, 2e-3
COMPARED, COMPARED_TREES, COMPARED_BLOCKS = "compared", "compared trees", "compared blocks"
LEFT_OUT = -2  # a token that the head was not fed


class Compared(Drafter):
    """Compares each chain that a drafter with a head proposes.

    Attributes:
        seen: chains compared, by what happened before.
    """

    _runner: ModelRunner
    _table: ReqToTokenPool
    _state: RequestRows
    _is_asked: bool
    _token_shift = 1

    def _compare_all(self, parts: DrafterParts) -> None:
        self._is_asked = True
        self.seen: Counter[str] = Counter()
        self.reference: Any = None
        self.oracle: Any = None
        self._layers = parts.options.capture.layers
        self._fed = torch.full((len(self._runner.kv_pool.kv[0]),), -1)
        self._num_cached: dict[int, int] = {}
        self._without_drafts = set[int]()  # rows of requests that take none of the model
        self._scores: dict[int, torch.Tensor] = {}
        self._runner.checks.append(self._note)
        parts.runners.target.checks.append(self._note_target)

    def _note(self, batch: ForwardBatch) -> None:
        assert self._without_drafts.isdisjoint(batch.rows.tolist()), "They take no drafts of it."
        self._fed[batch.slots.cpu()] = batch.input_ids.cpu()

    def _note_target(self, batch: ForwardBatch) -> None:
        """The target comes first, and what the head is fed then is noted over it."""
        self._fed[batch.slots.cpu()] = LEFT_OUT

    def prepare(self, batch: ScheduleBatch, plan: StepPlan) -> None:
        super().prepare(batch, plan)
        for new in batch.new_rows:
            self._num_cached[new.row] = new.num_committed
            self._without_drafts.discard(new.row)
            choice = new.params.speculative
            if choice.is_off or choice.drafter == NGRAM_NAME:
                self._without_drafts.add(new.row)

    def _noted(self, steps: DraftSteps, drafts: EagleVerifyInput) -> EagleVerifyInput:
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
        end = int(state.committed[row])
        num_drafts = int(state.pending_lens[row]) - 1
        known = state.tokens[row, : end + 1 + num_drafts].long().cpu()
        assert int(state.num_tokens[row]) == len(known)
        if num_drafts == 0:
            return
        self._compare_drafts(
            row, known[end + 1 :].tolist(), *self._true_sequence(row, known[: end + 1])
        )
        self.seen["compared"] += 1

    def _true_sequence(self, row: int, known: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """Returns what the head was fed so far, of the known tokens [n] int64: n - 1 tokens, or
        those behind the last one that was left out, and the hidden states beside them."""
        fed = self._fed[self._table.req_to_token[row, : len(known) - 1].long().cpu()]
        left_out = (fed == LEFT_OUT).nonzero()[:, 0].tolist()
        first = left_out[-1] + 1 if left_out else 0
        shift = self._token_shift
        right = known[shift + first : len(fed) + shift]
        wrong = (fed[first:] != right).nonzero()[:, 0] + first
        size = self._page_size
        assert ((wrong + 1) % size == 0).all(), wrong
        assert shift or not len(wrong), wrong
        assert (wrong < self._num_cached[row]).all(), wrong
        self.seen["publishers' tokens"] += len(wrong) > 0
        states = self.reference(known[None, :-1], output_hidden_states=True).hidden_states
        layers = [states[layer][0] for layer in self._layers]
        taps = torch.cat(layers, dim=1) if layers else states[-1][0]
        self.seen["behind tokens left out"] += first > 0
        self.seen["behind cached ones left out"] += 0 < first <= self._num_cached[row]
        return fed[first:].tolist(), self.oracle.combine(taps)[first:]

    def _compare_drafts(
        self, row: int, drafts: list[int], tokens: list[int], hidden: torch.Tensor
    ) -> None:
        """Compares a chain; the others are of `_true_sequence`."""
        raise NotImplementedError

    def _column_of(self, token: int) -> int:
        columns = torch.arange(self.oracle.num_tokens, device=self._runner.device)
        ids = self._runner.model.to_target_ids(columns)
        [column] = (ids == token).nonzero()[:, 0].tolist()
        return column

    @property
    def _page_size(self) -> int:
        return self._runner.kv_pool.page_size


class ComparedBlocks(Compared, DFlashDrafter):
    """Compares the drafts of blocks."""

    _token_shift = 0

    def __init__(self, parts: DrafterParts) -> None:
        DFlashDrafter.__init__(self, parts)
        self._compare_all(parts)

    def draft(self, steps: DraftSteps, num_drafts: int) -> EagleVerifyInput:
        return self._noted(steps, super().draft(steps, num_drafts))

    def _compare_drafts(
        self, row: int, drafts: list[int], tokens: list[int], hidden: torch.Tensor
    ) -> None:
        certain = int(self._state.tokens[row, int(self._state.committed[row])])
        logits = self.oracle.draft(certain, hidden)[: len(drafts)]
        columns = torch.tensor(drafts)
        assert (logits.amax(1) - logits.gather(1, columns[:, None])[:, 0]).max() <= TOLERANCE
        scores = logits.softmax(1).gather(1, columns[:, None])[:, 0].cumprod(0)
        told = self._scores[row][: len(drafts)]
        torch.testing.assert_close(told, scores, rtol=5e-3, atol=1e-6)
        self.seen["ties"] += bool((logits.argmax(1) != columns).any())


class ComparedDrafter(Compared, EagleDrafter):
    """Compares chains of EAGLE's heads."""

    def __init__(self, parts: DrafterParts) -> None:
        EagleDrafter.__init__(self, parts)
        self._compare_all(parts)

    def draft(self, steps: DraftSteps, hidden: torch.Tensor) -> EagleVerifyInput:
        return self._noted(steps, super().draft(steps, hidden))

    def _compare_drafts(
        self, row: int, drafts: list[int], tokens: list[int], hidden: torch.Tensor
    ) -> None:
        score = 1.0
        scores = self._scores[row][: len(drafts)].tolist()  # it may take fewer than the step has
        for draft, told in zip(drafts, scores, strict=True):
            carried, logits = self.oracle.run(tokens, hidden)
            column = self._column_of(draft)
            gap = float(logits[-1].max() - logits[-1, column])
            assert gap <= TOLERANCE, (row, len(tokens), draft, gap)
            score *= float(logits[-1].softmax(0)[column])
            assert told == pytest.approx(score, rel=5e-3)
            self.seen["ties"] += int(logits[-1].argmax()) != column
            fed, further = self._fed_after(draft, carried[-1:])
            tokens, hidden = [*tokens, fed], torch.cat((hidden, further))

    def _fed_after(self, draft: int, carried: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The token and the hidden input [1, hidden_size] of the row after a draft."""
        mask = self.oracle.tensors.get("mask_hidden")
        if mask is None:
            return draft, carried
        return MASK_TOKEN, self.oracle.combine(mask.view(1, -1))


class ComparedTrees(ComparedDrafter):
    """Compares each tree with the one that an oracle without a cache finds."""

    def draft(self, steps: DraftSteps, hidden: torch.Tensor) -> EagleVerifyInput:
        drafts = super().draft(steps, hidden)
        assert drafts.parents is not None
        self._parents = dict(zip(steps.rows.tolist(), drafts.parents.tolist(), strict=True))
        return drafts

    def _compare_drafts(
        self, row: int, drafts: list[int], tokens: list[int], hidden: torch.Tensor
    ) -> None:
        shape, scores = self._rounds.tree, self._scores[row].tolist()
        assert shape is not None
        count = len(drafts)
        self.seen["short"] += count < shape.num_drafts
        scores = scores[:count]
        assert scores == sorted(scores, reverse=True)
        paths: list[tuple[int, ...]] = [()]
        for draft, parent in zip(drafts, self._parents[row][:count], strict=True):
            paths.append((*paths[parent], draft))
        assert len(set(paths)) == len(paths)
        found = self._expanded(shape, tokens, hidden)
        right = sorted(found.values(), reverse=True)[:count]
        assert scores == pytest.approx(right, rel=5e-3)
        best = sorted(found, key=lambda path: -found[path])[:count]
        self.seen["ties"] += set(best) != set(paths[1:])
        for path, told in zip(paths[1:], scores, strict=True):
            if path in found:
                assert told == pytest.approx(found[path], rel=5e-3)
        self.seen["branches"] += len({path[:1] for path in paths[1:]}) > 1
        self.seen["deep"] += max(map(len, paths)) == shape.depth

    def _expanded(
        self, shape: TreeShape, tokens: list[int], hidden: torch.Tensor
    ) -> dict[tuple[int, ...], float]:
        """The probabilities of all paths that beams find."""
        found: dict[tuple[int, ...], float] = {}
        columns = torch.arange(self.oracle.num_tokens)
        ids = self._head.to_target_ids(columns).tolist()
        beam: list[tuple[tuple[int, ...], float, torch.Tensor]] = [((), 1.0, hidden)]
        for _ in range(shape.depth):
            level: list[tuple[tuple[int, ...], float, torch.Tensor]] = []
            for path, score, fed in beam:
                carried, logits = self.oracle.run([*tokens, *path], fed)
                probs = logits[-1].softmax(0)
                further = torch.cat((fed, carried[-1:]))
                for column in probs.topk(shape.topk).indices.tolist():
                    level.append(((*path, ids[column]), score * float(probs[column]), further))
            found.update((path, score) for path, score, _ in level)
            beam = sorted(level, key=lambda node: -node[1])[: shape.topk]
        return found


@contextmanager
def compared_drafters() -> Iterator[None]:
    """Names the drafters of this module in this block."""
    kinds: dict[str, type[Compared]] = {
        COMPARED: ComparedDrafter,
        COMPARED_TREES: ComparedTrees,
        COMPARED_BLOCKS: ComparedBlocks,
    }
    places = {name: f"{__name__}:{kind.__name__}" for name, kind in kinds.items()}
    with mock.patch.dict(DRAFTERS.entries, places):
        yield


def write_noisy_models(folder: Path) -> dict[str, Path]:
    """A target and heads of more noise than in other tests: they look at all that they follow."""
    target = write_target(folder / "target")
    eagle3 = write_eagle3_head(folder / EAGLE3, target, noise=0.2)
    heads = {EAGLE: write_eagle_head(folder / EAGLE, noise=0.2), EAGLE3: eagle3}
    masks = write_p_eagle_head(folder / P_EAGLE, target, noise=0.2)
    blocks = write_block_head(folder / DFLASH, target)
    return {"target": target, **heads, P_EAGLE: masks, DFLASH: blocks}


def compared(
    paths: dict[str, Path],
    kind: str,
    setup: Setup,
    policy: str = "fixed",
    tree: TreeShape | None = None,
    has_ngrams: bool = False,
    prices: Path | None = None,
) -> tuple[Drafted, Compared]:
    """A scheduler over a target with a head, and n-grams beside it or not, and the drafter of the
    head, whose drafts are compared. `prices`: steps may be cut, and prices lie in that folder."""
    target, head = paths["target"], paths[kind]
    num_steps, name = (NUM_STEPS, COMPARED) if tree is None else (tree.depth, COMPARED_TREES)
    if kind == DFLASH:
        name = COMPARED_BLOCKS
    options = {"tier_policy": policy, "tree": tree, "tile_spec_cache": prices}
    drafter = replace(eagle_config_for(target, head, kind, num_steps, **options), name=name)
    if has_ngrams:
        pair = PairConfig(drafter=drafter, ngrams=ngram_config(num_steps).options)
        drafter = DrafterConfig("pair", pair)
    needs = drafter_needs(drafter)
    execution = make_execution(
        target, setup, CONTEXT, needs.max_rows, row_width=setup.row_width, capture=needs.capture
    )
    runners = make_runners(execution, *drafter_models(drafter, execution))
    harness = Drafted(runners, drafter, setup, prices=None if prices is None else DEAR_ROWS)
    made: Compared = harness.drafter._model if has_ngrams else harness.drafter
    weights = load_file(target / "model.safetensors")
    made.reference = load_reference(target)
    oracle = BlockOracle if kind == DFLASH else Oracle
    made.oracle = oracle(head, weights[EMBEDDING], weights[OUTPUT_HEAD])
    made.oracle.num_tokens = len(made.oracle.tensors.get("lm_head.weight", weights[OUTPUT_HEAD]))
    return harness, made
