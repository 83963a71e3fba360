"""Heads, draft models and n-grams over two ranks, each of which makes all drafts itself: tokens are
those without a drafter, and the ranks' rows and drafts are equal after every step.

Of any number of ranks, all tests of a drafter: `TEST_RANKS=2 pytest test/unit/speculative`."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file

from draft_heads import DFLASH, EAGLE, EAGLE3, FILE, P_EAGLE
from drafted_serving import VOCAB, Drafted, nothing, params_of, pause, prompts, serve
from drafter_checks import DraftCounter, asking_requests, assert_same
from eagle_models import (
    EMBEDDING,
    OUTPUT_HEAD,
    STANDALONE,
    eagle_config_for,
    write_eagle_head,
    write_models,
    write_target,
)
from eagle_serving import check_memory_that_is_released, group_for, setup_for
from jumping_tier import JUMPING, RESTING, JumpingTier, jumping_tiers
from ngram_serving import ngram_config
from oracle import Reference, assert_equal_up_to_near_ties, first_divergence
from pairwise import name_of, pairwise_cases
from request_choices import choose_in_turn
from sglang.srt.control.memory_control import WEIGHTS_TAG
from sglang.srt.messages.control import (
    CheckWeightsReq,
    ControlReply,
    FromBytes,
    FromDirectory,
    GetWeightsByNameReq,
    UpdateWeightsReq,
)
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.models.draft_head import DraftHead
from sglang.srt.processes.runtime_config import drafter_needs
from sglang.srt.sent_tensors import WeightSelector
from sglang.srt.speculative.drafter_configs import PairConfig
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.price_table import PriceTable
from thread_ranks import RunnersOfRanks, end_all_ranks
from tile_spec_rounds import DEAR_ROWS, RandomBudgets
from utils import Setup

torch.set_num_threads(1)
NUM_RANKS, NUM_STEPS = 2, 3
TREE = TreeShape(topk=2, depth=NUM_STEPS, num_drafts=6)
Paths = dict[str, Path]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> Paths:
    """The head of EAGLE has the target's embedding, and all but one of its tokens."""
    folder = tmp_path_factory.mktemp("ranked")
    found = write_models(folder, NUM_RANKS)
    borrow_embedding(found[EAGLE], found["target"])
    tokens = [token for token in range(VOCAB) if token != 4]
    (folder / "map.json").write_text(json.dumps(tokens))
    later = write_target(folder / "later", 7, num_ranks=NUM_RANKS)
    other = borrow_embedding(write_eagle_head(folder / "other", 5), later)
    return found | {"map": folder / "map.json", "later": later, "other": other}


def borrow_embedding(head: Path, target: Path) -> Path:
    embedding = load_file(next(target.glob("*.safetensors")))[EMBEDDING]
    save_file({**load_file(head / FILE), EMBEDDING: embedding.clone()}, head / FILE)
    return head


class Ranked(Drafted):
    """Two ranks with a drafter, or without one; what becomes of drafts is in `seen`."""

    def __init__(
        self,
        target: Path,
        drafter: DrafterConfig | None,
        setup: Setup,
        prices: PriceTable | None = None,
        num_ranks: int = NUM_RANKS,
    ) -> None:
        self.group = group_for(target, drafter, setup, num_ranks)
        counter = DraftCounter()
        self.seen = counter.seen
        options: dict[str, Any] = {"prices": prices, "on_step": counter}
        super().__init__(self.group, drafter, setup, checks_kv=True, **options)

    def ask(self, kind: type, **fields: Any) -> ControlReply:
        return self.call(kind(call_id=random.randrange(10**9), **fields), max_steps=10_000)

    def value(self, name: str) -> Any:
        return self.ask(GetWeightsByNameReq, name=name, truncate_size=99).fields.get("parameter")


@functools.cache
def right_tokens(target: Path) -> list[list[int]]:
    """Returns the tokens of two ranks without a drafter, in whole prompts and one batch: those of
    one request after the other, as `test_thread_ranks.py` shows."""
    setup = setup_for(0, use_radix_cache=False, enable_overlap=False)
    plain = Ranked(target, None, setup)
    ids = [plain.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
    plain.run()
    return [plain.outputs[req_id].token_ids for req_id in ids]


def model_of(paths: Paths, kind: str, policy: str = "fixed", **options: Any) -> DrafterConfig:
    if kind == EAGLE:
        options["token_map"] = str(paths["map"])
    return eagle_config_for(paths["target"], paths[kind], kind, NUM_STEPS, policy, **options)


def pair_of(paths: Paths, kind: str) -> DrafterConfig:
    ngrams = ngram_config(NUM_STEPS, corpus=right_tokens(paths["target"])[::2], corpus_budget=2)
    drafter = model_of(paths, kind)
    return DrafterConfig("pair", PairConfig(drafter=drafter, ngrams=ngrams.options))


Made = Callable[[Paths, Path], DrafterConfig]
DRAFTERS: dict[str, Made] = {
    "EAGLE": lambda paths, _: model_of(paths, EAGLE),
    "EAGLE3 that rests": lambda paths, _: model_of(paths, EAGLE3, RESTING),
    "P-EAGLE, any tier": lambda paths, _: model_of(paths, P_EAGLE, JUMPING),
    "blocks, any tier": lambda paths, _: model_of(paths, DFLASH, JUMPING),
    "a draft model, any tier": lambda paths, _: model_of(paths, STANDALONE, JUMPING),
    "trees of EAGLE": lambda paths, _: model_of(paths, EAGLE, tree=TREE),
    "trees of EAGLE3": lambda paths, _: model_of(paths, EAGLE3, tree=TREE),
    "trees of n-grams": lambda *_: ngram_config(7, 3),
    "EAGLE3 and n-grams": lambda paths, _: pair_of(paths, EAGLE3),
    "a draft model and n-grams": lambda paths, _: pair_of(paths, STANDALONE),
    "cut EAGLE": lambda paths, folder: model_of(paths, EAGLE, JUMPING, tile_spec_cache=folder),
    "cut trees of n-grams": lambda _, folder: ngram_config(7, 3, tile_spec_cache=folder),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "drafter": (*DRAFTERS,),
    "enable_overlap": (True, False),
    "use_radix_cache": (True, False),
    "chunked_prefill_size": (6, 2048),
    "page_size": (1, 16),
    "chooses": (False, True),
    "disturb": (nothing, pause),
}
CASES = pairwise_cases(CHOICES)


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield
    end_all_ranks()


def setup_of(drafter: DrafterConfig, **changes: Any) -> Setup:
    return setup_for(0, **{"max_decode_rows": drafter_needs(drafter).max_slots, **changes})


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_a_drafter(
    paths: Paths, tmp_path: Path, case: dict[str, Any]
) -> None:
    """Checks that tokens are exactly those, whatever shares a step; the ledger is exact and each
    rank's KV canary silent. With `chooses` requests want other numbers of drafts."""
    changes, seed = dict(case), CASES.index(case)
    name, chooses, disturb = (changes.pop(key) for key in ("drafter", "chooses", "disturb"))
    drafter, right = DRAFTERS[name](paths, tmp_path), right_tokens(paths["target"])
    prices = DEAR_ROWS if name.startswith("cut") else None
    budgets = RandomBudgets(seed)
    with budgets.chosen():
        served = Ranked(paths["target"], drafter, setup_of(drafter, **changes), prices)
        if prices is not None:
            served.scramblers.append(budgets.scramble)
        if chooses:
            choose_in_turn(served)
        if isinstance(served.planner.policy, JumpingTier):
            served.planner.policy.may_lack = True
        serve(served, right, disturb, seed, num_turns=1)
    assert served.seen["fed"] > served.seen["confirmed"] > 0, served.seen


def test_tokens_are_those_of_one_rank_up_to_near_ties(paths: Paths) -> None:
    """Sums of ranks are rounded otherwise; the best log-probabilities are as near."""
    chooser = random.Random(1)
    asked = [[chooser.randrange(VOCAB) for _ in range(2 + 2 * n)] for n in range(16)]
    gaps = LogprobOptions(start_len=-1, top_num=2)
    greedy: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 12}
    told = []
    for num_ranks in (1, NUM_RANKS):
        served = Ranked(paths["target"], None, setup_for(0), num_ranks=num_ranks)
        ids = [served.submit(prompt, logprobs=gaps, **greedy) for prompt in asked]
        served.run()
        served.check()
        told.append([served.outputs[req_id] for req_id in ids])
    references = [
        Reference(prompt, one.token_ids, [tops[0] - tops[1] for tops in top_logprobs(one)])
        for prompt, one in zip(asked, told[0], strict=True)
    ]
    assert_equal_up_to_near_ties([each.token_ids for each in told[1]], references, "two ranks")
    for one, two in zip(*told, strict=True):
        same = first_divergence(one.token_ids, two.token_ids)
        expected, found = (torch.tensor(top_logprobs(each)[: same + 1]) for each in (one, two))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def top_logprobs(outcome: Any) -> list[list[float]]:
    return [sorted(each.top_logprobs, reverse=True) for each in outcome.output_logprobs]


@pytest.mark.long_matrix
@pytest.mark.parametrize("name", ["EAGLE", "trees of EAGLE3", "trees of n-grams"])
def test_all_that_requests_ask_for_is_what_one_rank_gives(
    paths: Paths, tmp_path: Path, name: str
) -> None:
    """Penalties, biases, filters, log-probabilities, hidden states."""
    drafter, outcomes = DRAFTERS[name](paths, tmp_path), []
    setup = setup_of(drafter, chunked_prefill_size=6)
    ranked = Ranked(paths["target"], drafter, setup)
    for served in (Ranked(paths["target"], None, setup, num_ranks=1), ranked):
        ids = [request.submit(served) for request in asking_requests(VOCAB)]
        served.run()
        served.check()
        outcomes.append([served.outputs[req_id] for req_id in ids])
    assert_same(outcomes[1], outcomes[0])
    assert ranked.seen["confirmed"] > 20, ranked.seen


# --- weights and memory --------------------------------------------------------------------------


def heads_of(served: Ranked) -> list[DraftHead]:
    assert isinstance(served.group, RunnersOfRanks)
    heads = [runners.runners[1].model for runners in served.group.ranks.runners]
    assert all(isinstance(head, DraftHead) for head in heads)
    return heads  # type: ignore[return-value]


def update(served: Ranked, folder: Path, selector: WeightSelector, beginning: str = "") -> str:
    tensors = load_file(next(folder.glob("*.safetensors")))
    source = FromBytes(data=save({beginning + name: each for name, each in tensors.items()}))
    reply = served.ask(UpdateWeightsReq, source=source, selector=selector)
    return "" if reply.success else reply.message


def test_updates_of_the_target_and_of_its_head_reach_all_ranks(paths: Paths) -> None:
    """The rows of the target's output head that the head drafts with are on several ranks, as the
    embedding is that it borrows."""
    drafter = model_of(paths, EAGLE)
    served = Ranked(paths["target"], drafter, setup_of(drafter))
    serve(served, right_tokens(paths["target"]), num_turns=1)
    target, later, head, other = (
        load_file(next(paths[name].glob("*.safetensors")))
        for name in ("target", "later", EAGLE, "other")
    )
    ids = torch.tensor(drafter.options.head.hot_token_ids)
    assert all(each.hot_head.weight.equal(target[OUTPUT_HEAD][ids]) for each in heads_of(served))
    assert served.value(EMBEDDING) == target[EMBEDDING].tolist()
    assert served.value("draft.fc.weight") == head["fc.weight"].tolist()
    assert served.value(f"draft.{EMBEDDING}") is None, "it is the target's"
    assert served.ask(CheckWeightsReq, action="snapshot", selector="all").success

    assert "embed_tokens.weight of the draft model" in update(served, paths["other"], "draft")
    assert served.ask(CheckWeightsReq, action="compare", selector="all").success
    assert not update(served, paths[EAGLE], "draft")
    both = FromDirectory(path=str(paths["later"]), draft_path=str(paths["other"]))
    assert served.ask(UpdateWeightsReq, source=both).success
    assert not served.ask(CheckWeightsReq, action="compare", selector="draft").success
    served.seen.clear()
    serve(served, right_tokens(paths["later"]), num_turns=1)
    assert served.seen["confirmed"] > 20, served.seen
    for each in heads_of(served):
        assert each.hot_head.weight.equal(later[OUTPUT_HEAD][ids])
        assert each.fc.weight.equal(other["fc.weight"])  # type: ignore[union-attr]

    assert not update(served, paths["target"], "target")
    assert not update(served, paths[EAGLE], "all", "draft.")
    assert served.ask(CheckWeightsReq, action="compare", selector="all").success
    serve(served, right_tokens(paths["target"]), num_turns=1)


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE, EAGLE3, STANDALONE])
def test_memory_is_released_and_taken_again_by_all_ranks(paths: Paths, kind: str) -> None:
    drafter = model_of(paths, kind)
    served = Ranked(paths["target"], drafter, setup_of(drafter))
    right = right_tokens(paths["target"])
    check_memory_that_is_released(served, right)  # type: ignore[arg-type]
    assert isinstance(served.group, RunnersOfRanks)
    second = served.group.ranks.runners[1]
    served.resources.memory[WEIGHTS_TAG].release()
    assert all(runner.weights.is_released for runner in second.runners)
    served.resources.memory[WEIGHTS_TAG].restore()
    serve(served, right, num_turns=1)
