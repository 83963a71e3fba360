"""Drafts of a second model, with a KV pool of its own behind the target's page table.

Whatever it drafts, the tokens are those of a server without a drafter. How many drafts are right
says whether its pool holds the right KV: with the target's own weights a draft is what the target
will say if the draft model sees the same tokens, and a wrong or stale slot gives another draft.
Since none of those would be rejected, one draft of each proposal is spoiled on purpose: exactly the
drafts before it must be confirmed. So the KV is right behind confirmed and rejected drafts, chunks
of prompts, cached prefixes, retractions and pauses alike."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from drafted_serving import (
    VOCAB,
    Drafted,
    abort,
    nothing,
    params_of,
    pause,
    prompts,
    serve,
)
from pairwise import name_of, pairwise_cases
from second_model_drafter import NAME, SecondModel, SecondModelDrafter, registered
from sglang.srt.messages.control import (
    ContinueGenerationReq,
    FromDirectory,
    MemoryOccupationReq,
    UpdateWeightsReq,
)
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.speculative.drafter import ComputedStep, ExtendedStep
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.worker import NewRow
from utils import Setup, make_execution, make_random_model

NUM_DRAFTS = 3
MAX_ROWS = 1 + NUM_DRAFTS
MAX_SLOTS = MAX_ROWS + NUM_DRAFTS
CONTEXT = 128
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
OTHER_SIZES = {**SIZES, "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 3}


def write_perturbed(path: Path, source: Path) -> Path:
    """The model at `source` with a little noise on each weight."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * parameter.std() * torch.randn_like(parameter)
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """Models: the target, which also drafts for itself as "same", and others that draft."""
    folder = tmp_path_factory.mktemp("models")
    target = make_random_model("llama", folder / "target", 3, **SIZES)
    make_random_model("llama", folder / "later", 4, **SIZES)
    make_random_model("qwen3", folder / "random", 5, **OTHER_SIZES)
    write_perturbed(folder / "perturbed", target)
    names = ("target", "later", "random", "perturbed")
    with registered(SpoilingDrafter):
        yield {"same": target, **{name: folder / name for name in names}}


class SpoilingDrafter(SecondModelDrafter):
    """Spoils a draft of each proposal, another one each time, and at times none; then looks which
    drafts the target confirmed.

    Attributes:
        seen: of greedy requests how many proposals were "fed", and of these how many "as foreseen":
            the drafts before the spoiled one were confirmed and no others. Of all requests how many
            drafts were "confirmed".
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.seen: Counter[str] = Counter()
        self._is_greedy: dict[int, bool] = {}
        self._foreseen: dict[int, int] = {}
        self._numbers = itertools.count()

    def admit(self, new_rows: list[NewRow]) -> None:
        for new in new_rows:
            self._is_greedy[new.row] = new.params.is_greedy
            self._foreseen.pop(new.row, None)

    def extend(self, step: ComputedStep) -> None:
        batch, lens = step.batch, step.accepted.accept_lens.tolist()
        for row, num_prompt, num in zip(batch.rows, batch.num_prompt_tokens, lens, strict=True):
            if num_prompt:
                continue
            self.seen["confirmed"] += num - 1
            if self._is_greedy[row]:
                self.seen["fed"] += 1
                self.seen["as foreseen"] += num - 1 == self._foreseen[row]
                self.seen[f"{self._foreseen[row]} foreseen"] += 1
        super().extend(step)

    def propose(self, step: ExtendedStep) -> None:
        super().propose(step)
        for row, emits in zip(step.batch.rows, step.batch.emits, strict=True):
            if emits:
                self._spoil(row, next(self._numbers) % MAX_ROWS)

    def _spoil(self, row: int, index: int) -> None:
        self._foreseen[row] = index
        assert int(self._state.pending_lens[row]) == MAX_ROWS
        if index < NUM_DRAFTS:
            column = int(self._state.committed[row]) + 1 + index
            token = int(self._state.tokens[row, column])
            self._state.tokens[row, column] = (token + 1) % VOCAB


class Spoiled(Drafted):
    """Counts are in `seen`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        made = self.drafter
        self.seen = made.seen if isinstance(made, SpoilingDrafter) else Counter[str]()


def setup_for(page_size: int = 1, num_tokens: int = 1024, **changes: Any) -> Setup:
    values = {"context_len": CONTEXT, "max_decode_rows": MAX_SLOTS, **changes}
    return Setup(num_pages=num_tokens // page_size, page_size=page_size, **values)


def drafter_of(path: Path | None) -> DrafterConfig | None:
    return None if path is None else DrafterConfig(NAME, SecondModel(path, NUM_DRAFTS))


@functools.cache
def group_for(target: Path, draft: Path | None, page_size: int, num_tokens: int) -> RunnerGroup:
    return make_runners_for(target, draft, setup_for(page_size, num_tokens))


def make_runners_for(target: Path, draft: Path | None, setup: Setup) -> RunnerGroup:
    config = make_execution(target, setup, CONTEXT, MAX_ROWS, row_width=setup.row_width)
    return make_runners(config, *drafter_models(drafter_of(draft), config))


def harness_for(target: Path, draft: Path | None, setup: Setup) -> Spoiled:
    num_tokens = setup.num_pages * setup.page_size
    return Spoiled(group_for(target, draft, setup.page_size, num_tokens), drafter_of(draft), setup)


@functools.cache
def right_tokens(target: Path) -> list[list[int]]:
    """Without a drafter, one after the other."""
    harness = harness_for(target, None, setup_for(use_radix_cache=False, enable_overlap=False))
    return [
        harness.generate([prompt], **params_of(index))[0] for index, prompt in enumerate(prompts())
    ]


def assert_as_foreseen(seen: Counter[str], least: int = 40) -> None:
    """The draft model saw the same tokens as the target, whatever was confirmed before."""
    assert seen["as foreseen"] == seen["fed"] >= least, seen
    assert all(seen[f"{count} foreseen"] > least // 8 for count in range(MAX_ROWS)), seen


CHOICES: dict[str, tuple[Any, ...]] = {
    "draft": ("same", "perturbed", "random"),
    "page_size": (1, 16),
    "enable_overlap": (True, False),
    "use_radix_cache": (True, False),
    "chunked_prefill_size": (6, 2048),
    "memory": ("ample", "tight", "retracts"),
    "disturb": (nothing, pause, abort),
}


CASES = pairwise_cases(CHOICES)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_a_drafter(paths: dict[str, Path], case: dict[str, Any]) -> None:
    changes = dict(case)
    draft, memory, disturb = (changes.pop(key) for key in ("draft", "memory", "disturb"))
    setup = setup_for(
        num_tokens=128 if memory == "tight" else 1024,
        retract_interval=3 if memory == "retracts" else 0,
        **changes,
    )
    harness = harness_for(paths["target"], paths[draft], setup)
    ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    outcomes = [harness.outputs[req_id] for req_id in ids]
    if memory == "retracts":
        assert any(outcome.num_retractions for outcome in outcomes)
    if case["use_radix_cache"] and disturb is nothing:
        assert any(outcome.cached_tokens for outcome in outcomes)
    if draft == "same":
        assert_as_foreseen(harness.seen)
    else:
        assert 0 < harness.seen["as foreseen"] < harness.seen["fed"]


def test_memory_is_released_and_taken_again(paths: dict[str, Path]) -> None:
    """In the middle of requests, and while none run."""
    target = paths["target"]
    harness = harness_for(target, paths["same"], setup_for(chunked_prefill_size=16))
    serve(harness, right_tokens(target))
    ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
    for _ in range(4):
        harness.step()
    harness.pause("retract")
    harness.send(MemoryOccupationReq, action="release")
    group = group_for(target, paths["same"], 1, 1024)
    assert all(pool.is_released for pool in group.memory.pools)
    assert all(runner.weights.is_released for runner in group.runners)
    harness.send(MemoryOccupationReq, action="resume")
    assert not any(kv[pool.page_size :].any() for pool in group.memory.pools for kv in pool.kv)
    harness.send(ContinueGenerationReq)
    harness.run()
    assert [harness.outputs[req_id].token_ids for req_id in ids] == right_tokens(target)
    harness.check()
    assert_as_foreseen(harness.seen)


@pytest.mark.long_matrix
@pytest.mark.parametrize("overlap", [True, False])
def test_an_update_of_the_target_changes_acceptance_and_no_token_of_the_new_weights(
    paths: dict[str, Path], overlap: bool
) -> None:
    """The draft model keeps its weights and its KV, which nobody takes for that of other weights:
    prefixes are keyed by the epoch. Requests that are retracted go on as the new weights would."""
    target, later = paths["target"], paths["later"]
    setup = setup_for(enable_overlap=overlap, chunked_prefill_size=16)
    group = make_runners_for(target, paths["same"], setup)
    harness = Spoiled(group, drafter_of(paths["same"]), setup, checks_kv=True)
    serve(harness, right_tokens(target))
    before = Counter(harness.seen)
    ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
    for _ in range(4):
        harness.step()
    harness.pause("retract")
    heads = [list(harness.outputs[req_id].token_ids) for req_id in ids]
    assert any(heads)
    epoch = harness.ledger.weight_epoch
    harness.send(UpdateWeightsReq, source=FromDirectory(path=str(later)))
    assert harness.ledger.weight_epoch > epoch
    harness.send(ContinueGenerationReq)
    harness.run()
    fresh = harness_for(later, None, setup_for())
    for index, (req_id, head) in enumerate(zip(ids, heads, strict=True)):
        params = params_of(index)
        params["max_new_tokens"] -= len(head)
        tail = []
        if params["max_new_tokens"]:
            [tail] = fresh.generate([prompts()[index] + head], **params)
        assert harness.outputs[req_id].token_ids == head + tail
    serve(harness, right_tokens(later))
    after = harness.seen - before
    assert before["as foreseen"] == before["fed"]
    assert after["as foreseen"] < after["fed"] / 2


def test_the_canary_finds_nothing_wrong_in_either_pool(paths: dict[str, Path]) -> None:
    setup = setup_for(16, chunked_prefill_size=16, retract_interval=3)
    group = make_runners_for(paths["target"], paths["random"], setup)
    harness = Spoiled(group, drafter_of(paths["random"]), setup, checks_kv=True)
    serve(harness, right_tokens(paths["target"]), pause)
    assert harness.seen["confirmed"] > 0


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (16, True)])
def test_requests_that_end_at_the_context(
    paths: dict[str, Path], page_size: int, overlap: bool
) -> None:
    """Up to `MAX_SLOTS` tokens before its end, or at its last token: draft steps go past it, within
    the row of the page table, over which they may not write."""
    target = paths["target"]
    setup = setup_for(page_size, enable_overlap=overlap, max_running_requests=8)
    chooser = random.Random(page_size)
    text = [chooser.randrange(VOCAB) for _ in range(CONTEXT)]
    plain = harness_for(target, None, setup)
    [right] = plain.generate([text[:100]], temperature=0.0, max_new_tokens=CONTEXT - 100)
    text = text[:100] + right
    harness = harness_for(target, paths["same"], setup)
    ids = {}
    for left in range(MAX_SLOTS + 1):
        for num_new in (1, 2, 9, 28):
            end = CONTEXT - left
            start = max(100, end - num_new)
            req_id = harness.submit(text[:start], temperature=0.0, max_new_tokens=end - start)
            ids[req_id] = text[start:end]
    harness.run()
    harness.check()
    for req_id, tokens in ids.items():
        assert harness.outputs[req_id].token_ids == tokens
    assert_as_foreseen(harness.seen)
