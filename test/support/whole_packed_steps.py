"""Packed steps that feed all rows, beside the uniform steps of the same rows: two servers of one
head without graphs, the device dividing the rows of one, the host those of the other."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from drafted_serving import Drafted, params_of, prompts
from eagle_models import eagle_config_for
from round_serving import On
from sglang.srt.lookahead.cut import TileSpec
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.step_ops import Q_LEN, PackedSize, StepCounts
from sglang.srt.step.step_outputs import hidden_of_reads
from tile_spec_rounds import FREE_ROWS, free_drafts
from utils import Setup, make_execution

NUM_STEPS = 3


@dataclass(frozen=True)
class SeenStep:
    """Holds the results of a step.

    Attributes:
        q_lens: rows that each request fed.
        hidden: [T, hidden_size].
        logits: [S, V] of the rows read.
        tokens: [S] int64, the target's own.
    """

    is_packed: bool
    has_prompts: bool
    q_lens: list[int]
    hidden: torch.Tensor
    logits: torch.Tensor
    tokens: torch.Tensor


@contextmanager
def all_rows_packed() -> Iterator[None]:
    """While this lasts every step of drafts is packed, with room for all of them."""
    cut = TileSpec.cut

    def packed(tile_spec: TileSpec, *step: Any, **more: Any) -> tuple[StepCounts, bool]:
        counts, wants_scores = cut(tile_spec, *step, **more)
        assert counts.packed is None, "Rows cost nothing, so none is cut."
        size = PackedSize(counts.num_rows, counts.num_reads)
        return replace(counts, packed=size), wants_scores

    with mock.patch.object(TileSpec, "cut", packed):
        yield


def seen_steps(
    paths: dict[str, Path], kind: str, on: On, page_size: int, folder: Path, is_packed: bool
) -> list[SeenStep]:
    """All steps of a server that is given all prompts at once."""
    setup = Setup(
        num_pages=1024 // page_size,
        page_size=page_size,
        context_len=128,
        max_decode_rows=1 + 2 * NUM_STEPS,
        chunked_prefill_size=40,
    )
    config = eagle_config_for(paths["target"], paths[kind], kind, NUM_STEPS, tile_spec_cache=folder)
    group = _group(paths, config, setup, on)
    seen: list[SeenStep] = []

    def note(step: ComputedStep) -> None:
        assert not step.forward.used_graph
        layout, hidden = step.chosen.layout, step.forward.hidden
        logits = group.target.compute_logits(hidden_of_reads(hidden, step.inputs, layout.reads))
        seen.append(
            SeenStep(
                step.inputs.q_starts is not None,
                any(step.batch.num_prompt_tokens),
                layout.per_request[Q_LEN].tolist(),
                hidden.clone(),
                logits.clone(),
                step.chosen.targets.clone(),
            )
        )

    with free_drafts(), all_rows_packed() if is_packed else nullcontext():
        harness = Drafted(group, config, setup, prices=FREE_ROWS, on_step=note)
        for index, prompt in enumerate(prompts()):
            harness.submit(prompt, **params_of(index))
        harness.run()
    harness.check()
    return seen


def _group(paths: dict[str, Path], config: DrafterConfig, setup: Setup, on: On) -> RunnerGroup:
    needs = drafter_needs(config)
    execution = make_execution(
        paths["target"],
        setup,
        setup.context_len,
        needs.max_rows,
        device=on.device,
        attention_backend=on.backend,
        max_graph_width=0,
        row_width=setup.row_width,
        capture=needs.capture,
    )
    return make_runners(execution, *drafter_models(config, execution))


def assert_no_bit_differs(packed: list[SeenStep], uniform: list[SeenStep]) -> None:
    """Step by step: rows, hidden states, logits and tokens."""
    assert len(packed) == len(uniform)
    for mine, right in zip(packed, uniform, strict=True):
        assert not right.is_packed
        assert mine.q_lens == right.q_lens
        for name in ("hidden", "logits", "tokens"):
            assert torch.equal(getattr(mine, name), getattr(right, name)), (name, mine.q_lens)
    kinds = {(step.is_packed, step.has_prompts) for step in packed}
    assert {(True, True), (True, False), (False, True)} <= kinds, "Steps of each kind were seen."
    assert any({1, 1 + NUM_STEPS} <= {*step.q_lens} for step in packed if step.is_packed)
