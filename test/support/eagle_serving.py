"""A scheduler over a target of `eagle_models.py` with a head or a draft model, or alone; and what
tests of all of them do with one."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draft_heads import BLOCK_SIZE
from drafted_serving import Drafted, params_of, prompts
from drafter_checks import DraftCounter, asking_requests, assert_same
from eagle_models import CONTEXT, VOCAB, eagle_config_for
from sglang.srt.messages.control import ContinueGenerationReq, MemoryOccupationReq
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import PriceTable
from thread_ranks import NUM_RANKS, runners_of
from utils import Setup, make_execution


def setup_for(num_steps: int, page_size: int = 1, num_tokens: int = 1024, **changes: Any) -> Setup:
    """Room for `num_steps` drafts per step, none of them free (`RoundOptions.num_free`)."""
    most = 1 + num_steps + max(num_steps, BLOCK_SIZE)
    values = {"context_len": CONTEXT, "max_decode_rows": most, **changes}
    return Setup(num_pages=num_tokens // page_size, page_size=page_size, **values)


def tree_setup(shape: TreeShape, page_size: int = 1, **changes: Any) -> Setup:
    """Room for trees of this shape."""
    slots = max(1 + shape.num_drafts, 1 + shape.max_confirmed + shape.num_slots)
    return setup_for(shape.depth, page_size, **{"max_decode_rows": slots, **changes})


def executions_for(
    target: Path, drafter: DrafterConfig | None, setup: Setup
) -> tuple[ExecutionConfig, ...]:
    """Returns the configurations of the target and of the drafter's models."""
    needs = drafter_needs(drafter)
    assert needs.max_slots <= setup.max_decode_rows
    execution = make_execution(
        target,
        setup,
        setup.context_len,
        needs.max_rows,
        row_width=setup.row_width,
        capture=needs.capture,
        captures_trees=needs.has_trees,
    )
    return execution, *drafter_models(drafter, execution)


def group_for(
    target: Path, drafter: DrafterConfig | None, setup: Setup, num_ranks: int = NUM_RANKS
) -> RunnerGroup:
    return runners_of(*executions_for(target, drafter, setup), num_ranks=num_ranks)


class Served(Drafted):
    """A target with a head, or alone; counts are in `seen`, and steps by their tier in `tiers`.
    `listeners` are told of each step. `may_lack`: requests may take fewer drafts than the tier
    says."""

    def __init__(
        self,
        paths: dict[str, Path],
        kind: str | None,
        num_steps: int,
        setup: Setup,
        checks_kv: bool = True,
        prices: PriceTable | None = None,
        **options: Any,
    ) -> None:
        drafter = None
        if kind is not None:
            drafter = eagle_config_for(paths["target"], paths[kind], kind, num_steps, **options)
        self.group = group_for(paths["target"], drafter, setup)
        counter = DraftCounter()
        self.seen: Counter[str] = counter.seen
        self.tiers = Counter[int]()
        self.may_lack = False
        self.listeners: list[Callable[[ComputedStep], None]] = []

        def on_step(step: ComputedStep) -> None:
            counter(step)
            self._note_tier(step)
            for listener in self.listeners:
                listener(step)

        more = {"checks_kv": checks_kv, "on_step": on_step, "prices": prices}
        super().__init__(self.group, drafter, setup, **more)

    def _note_tier(self, step: ComputedStep) -> None:
        """The tier of a step with decodes is the most drafts that any of them verifies, if none
        are cut off."""
        num_drafts = step.accepted.num_drafts
        most = 0 if num_drafts is None else int(num_drafts.max())
        has_decodes = 0 in step.batch.num_prompt_tokens
        tier, is_cut = (
            step.plan.draft_length if has_decodes else 0,
            step.plan.counts.packed is not None,
        )
        if step.state.trees is None:
            assert most == tier or ((is_cut or self.may_lack) and most < tier)
        self.tiers[tier] += has_decodes
        self.seen["cut steps"] += is_cut
        self.seen["plain decodes"] += has_decodes and step.plan.counts.is_plain

    def assert_many_of_each(self, least: int = 30) -> None:
        """Drafts were often right and often wrong."""
        assert self.seen["confirmed"] > least, self.seen
        assert self.seen["fed"] - self.seen["confirmed"] > least, self.seen


@functools.cache
def right_tokens(target: Path) -> list[list[int]]:
    """Without a drafter, one after the other."""
    setup = setup_for(0, use_radix_cache=False, enable_overlap=False)
    harness = Served({"target": target}, None, 0, setup)
    return [harness.generate([prompt], **params_of(i))[0] for i, prompt in enumerate(prompts())]


def check_requests_that_end_at_the_context(harness: Served, target: Path) -> None:
    """Some begin a token before it, some at its very end."""
    plain = Served({"target": target}, None, 0, setup_for(0, harness.setup.page_size))
    text = [index % VOCAB for index in range(100)]
    [right] = plain.generate([text], temperature=0.0, max_new_tokens=CONTEXT - 100)
    text += right
    ids = {}
    for left in range(7):
        for num_new in (1, 2, 9, 28):
            start, end = max(100, CONTEXT - left - num_new), CONTEXT - left
            params = {"temperature": 0.0, "max_new_tokens": end - start}
            ids[harness.submit(text[:start], **params)] = text[start:end]
    harness.run()
    harness.check()
    for req_id, tokens in ids.items():
        assert harness.outputs[req_id].token_ids == tokens
    harness.assert_many_of_each()


def check_memory_that_is_released(harness: Served, right: list[list[int]]) -> None:
    """While requests run, which then begin anew."""
    ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
    for _ in range(4):
        harness.step()
    harness.pause("retract")
    harness.send(MemoryOccupationReq, action="release")
    assert not any(runner.is_whole for runner in harness.group.runners)
    harness.send(MemoryOccupationReq, action="resume")
    assert all(runner.is_whole for runner in harness.group.runners)
    harness.send(ContinueGenerationReq)
    harness.run()
    assert [harness.outputs[req_id].token_ids for req_id in ids] == right
    harness.check()


def check_all_that_requests_ask_for(harness: Served, target: Path) -> None:
    """Penalties, biases, filters, log-probabilities, hidden states: as without a drafter."""
    requests = asking_requests(VOCAB)
    plain = Served({"target": target}, None, 0, harness.setup)
    outcomes = []
    for each in (plain, harness):
        ids = [request.submit(each) for request in requests]
        each.run()
        outcomes.append([each.outputs[req_id] for req_id in ids])
    harness.check()
    assert_same(outcomes[1], outcomes[0])
