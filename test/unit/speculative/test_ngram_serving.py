"""Requests with drafts of n-grams: tokens are those without, and what is kept of requests that have
ended is their text, for those of the same cache key alone."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import eagle_serving
from drafted_serving import abort, nothing, pause, prompts, serve
from eagle_models import CONTEXT, VOCAB, write_models
from eagle_serving import right_tokens, setup_for
from jumping_tier import JUMPING, jumping_tiers
from ngram_serving import Served, learnt, ngram_config
from pairwise import name_of, pairwise_cases
from sglang.srt.lookahead.contract import StepPlan
from sglang.srt.lookahead.matched_drafts import class_of, right_places
from sglang.srt.lookahead.upcoming_step import StepOutcome
from sglang.srt.messages.control import AbortReq
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.ngram_ops import Continuation
from sglang.srt.speculative.ngram_worker import NgramDrafter
from sglang.srt.step.worker import ScheduleBatch
from tile_spec_rounds import DEAR_ROWS, FREE_ROWS, RandomBudgets, prices_of

torch.set_num_threads(1)
SLOW_ROWS = prices_of((1, 1024), (1.0, 40.0))
ROWS_COST_TIME = prices_of(range(1, 513), [20.0 + rows for rows in range(1, 513)])
ROWS_COST_LESS = prices_of(range(1, 513), [60.0 + rows for rows in range(1, 513)])


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_models(tmp_path_factory.mktemp("ngram"))["target"]


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


CHOICES: dict[str, tuple[Any, ...]] = {
    # Drafts, branches at most and at least, and how many drafts there are.
    "shape": (
        (1, 1, 1, "fixed"),
        (5, 1, 1, JUMPING),
        (5, 1, 1, "fixed"),
        (5, 1, 1, "matched"),
        (9, 3, 3, "fixed"),
        (9, 3, 1, JUMPING),
        (9, 3, 2, "matched"),
        (9, 9, 1, "fixed"),
    ),
    "tile_spec": (False, True),
    "by_frequency": (False, True),
    "corpus_budget": (None, 3, 0),  # 0: there is no corpus
    "page_size": (1, 16),
    "enable_overlap": (True, False),
    "use_radix_cache": (True, False),
    "chunked_prefill_size": (6, 2048),
    "retract_interval": (0, 3),
    "disturb": (nothing, pause, abort),
}
CASES = pairwise_cases(CHOICES)


@pytest.mark.long_matrix
@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_tokens_are_those_without_drafts_and_texts_are_kept(
    target: Path, tmp_path: Path, case: dict[str, Any]
) -> None:
    """Greedy and seeded requests, whichever drafts TileSpec leaves out; the ledger is exact and the
    KV canary silent in each step. What is kept is what clients were told, whatever was retracted,
    paused or aborted."""
    changes = dict(case)
    num_drafts, breadth, min_breadth, policy = changes.pop("shape")
    disturb, budget = changes.pop("disturb"), changes.pop("corpus_budget")
    has_tile_spec = changes.pop("tile_spec")
    right = right_tokens(target)
    drafter = ngram_config(
        num_drafts,
        breadth,
        by_frequency=changes.pop("by_frequency"),
        min_breadth=min_breadth,
        corpus=None if budget == 0 else right[::2],
        corpus_budget=budget or None,
        tier_policy=policy,
        tile_spec_cache=tmp_path if has_tile_spec else None,
    )
    prices = FREE_ROWS if policy == "matched" else DEAR_ROWS
    if policy == "matched" and has_tile_spec:
        prices = ROWS_COST_LESS
    budgets, num_cut = RandomBudgets(1), 0

    def note(step: ComputedStep) -> None:
        nonlocal num_cut
        num_cut += step.plan.counts.packed is not None

    with budgets.chosen():
        harness = Served(target, drafter, setup_for(num_drafts, **changes), prices)
        harness.listeners.append(note)
        if has_tile_spec:
            harness.scramblers.append(budgets.scramble)
        if policy == JUMPING:
            harness.planner.policy.may_lack = bool(budget)
        serve(harness, right, disturb, seed=CASES.index(case))
    assert harness.seen["confirmed"] > 20, harness.seen
    num_wrong = harness.seen["fed"] - harness.seen["confirmed"]
    assert num_wrong > (2 if has_tile_spec else 10), harness.seen
    assert num_cut > 5 if has_tile_spec else num_cut == 0, num_cut
    if breadth > 1 and not has_tile_spec:  # which leaves out unlikely branches
        assert harness.seen["moved"] > 0, "The right branch was always the first one."
    harness.flush()
    assert harness.texts_kept() == harness.texts_told()


def test_a_client_is_told_of_real_drafts_and_of_those_that_were_right(target: Path) -> None:
    harness = Served(target, ngram_config(4))
    req_id = harness.submit(prompts()[-1], temperature=0.0, max_new_tokens=30)
    harness.run()
    told = harness.outputs[req_id]
    steps = sum(told.accept_histogram)
    assert told.num_proposed_drafts == 4 * steps
    right = sum(count * number for count, number in enumerate(told.accept_histogram))
    assert 0 < right <= harness.seen["confirmed"], "A step after the end counts for nobody."
    assert steps + right in (29, 30, 31, 32, 33), "The last run may be clipped."


GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": 40}


def confirmed_by(harness: Served, prompt: list[int], **params: Any) -> int:
    before = harness.seen["confirmed"]
    harness.submit(prompt, **{**GREEDY, **params})
    harness.run()
    return harness.seen["confirmed"] - before


def test_ended_texts_help_those_of_the_same_key_and_nobody_else(target: Path) -> None:
    """The second request of a key is the first one again: all its drafts are known."""
    harness = Served(target, ngram_config(5, longest=12), setup_for(5, use_radix_cache=False))
    prompt = prompts()[4]
    first = confirmed_by(harness, prompt, cache_key=("a", ""))
    other = confirmed_by(harness, prompt, cache_key=("", "a"))
    again = confirmed_by(harness, prompt, cache_key=("a", ""))
    assert other == first, "Text of another key was drafted from."
    assert again > first
    assert again >= 40 * 5 // 6 - 5


@pytest.mark.long_matrix
@pytest.mark.parametrize("breadth", [1, 3])
@pytest.mark.parametrize("by_frequency", [False, True])
def test_a_corpus_with_the_answer_gives_right_drafts_from_the_first_request_on(
    target: Path, breadth: int, by_frequency: bool
) -> None:
    """Whatever its key is, and again when the memory of ended texts has been overwritten."""
    prompt = prompts()[4]
    plain = eagle_serving.Served({"target": target}, None, 0, setup_for(0))
    [answer] = plain.generate([prompt], **GREEDY)
    options: dict[str, Any] = {"longest": 12, "capacity": 30, "by_frequency": by_frequency}
    setup = setup_for(5, use_radix_cache=False)
    without = confirmed_by(Served(target, ngram_config(5, breadth, **options), setup), prompt)
    drafter = ngram_config(5, breadth, corpus=[[1, 2], prompt + answer, [3]], **options)
    harness = Served(target, drafter, setup)
    for key in (("a", ""), ("", "a"), ("b", "")):
        confirmed = confirmed_by(harness, prompt, cache_key=key)
        assert confirmed >= 40 * 5 // 6 - 5
        assert confirmed > without
        assert harness.outputs[max(harness.outputs)].token_ids == answer


def test_where_a_chain_is_right_a_tree_is_as_fast(target: Path) -> None:
    """But for the first steps, in which nobody knows that."""
    prompt, num_steps = prompts()[4], dict[int, int]()
    plain = eagle_serving.Served({"target": target}, None, 0, setup_for(0))
    asked = {**GREEDY, "max_new_tokens": 80}
    [answer] = plain.generate([prompt], **asked)
    for breadth in (1, 4):
        drafter = ngram_config(7, breadth, longest=12, corpus=[prompt + answer])
        harness = Served(target, drafter, setup_for(7))
        ids = [harness.submit(prompt, **asked) for _ in range(3)]
        harness.run()
        told = [harness.outputs[req_id] for req_id in ids]
        assert [each.token_ids for each in told] == [answer] * 3
        num_steps[breadth] = sum(sum(each.accept_histogram) for each in told)
    assert num_steps[4] <= 1.1 * num_steps[1], num_steps


@pytest.mark.parametrize("breadth", [1, 4])
def test_as_many_drafts_of_the_corpus_as_its_budget(target: Path, breadth: int) -> None:
    """The first ones of a chain; the likeliest nodes of a tree, whose other nodes are of others."""
    budget, num_drafts = 2, 9
    right = right_tokens(target)
    corpus = [prompt + answer for prompt, answer in zip(prompts(), right, strict=True)]
    drafter = ngram_config(
        num_drafts, breadth, min_breadth=breadth, corpus=corpus[::2], corpus_budget=budget
    )
    harness = Served(target, drafter)
    state, ops = harness.drafter._state, harness.drafter._ops
    find, write, found = ops.find, state.write_drafts, list[Continuation]()
    seen = Counter[str]()

    def noted(*args: Any) -> Continuation:
        found.append(find(*args))
        return found[-1]

    def checked(
        rows: torch.Tensor,
        tokens: torch.Tensor,
        counts: torch.Tensor,
        parents: torch.Tensor | None = None,
        confidence: torch.Tensor | None = None,
    ) -> None:
        for index, count in enumerate(counts.tolist()):
            in_corpus = {
                int(each.tokens[index, 0]): int(each.in_corpus[index])
                for each in reversed(found)
                if each is found[0] or each.match_lens[index]
            }
            before = list(range(num_drafts)) if parents is None else parents[index].tolist()
            firsts = first_tokens(tokens[index].tolist(), before)
            if count:
                has_others = 0 in in_corpus.values()
                assert count == (num_drafts if has_others else budget)
                num_given = sum(in_corpus[first] for first in firsts[:count])
                assert num_given <= budget
                seen["whole" if has_others else "cut"] += 1
                seen["mixed"] += has_others and num_given > 0
        found.clear()
        write(rows, tokens, counts, parents, confidence)

    ops.find, state.write_drafts = noted, checked
    serve(harness, right)
    assert seen["cut"] > 10
    assert seen["whole"] > 10
    assert (seen["mixed"] > 10) == (breadth > 1)


def first_tokens(tokens: list[int], parents: list[int]) -> list[int]:
    """Returns for each node of a tree the first token of the branch that it is in."""
    found = list[int]()
    for token, parent in zip(tokens, parents, strict=True):
        found.append(found[parent - 1] if parent else token)
    return found


def test_how_many_are_drafted_by_load_is_learnt_of_drafts_that_a_budget_leaves(
    target: Path,
) -> None:
    right = right_tokens(target)
    drafter = ngram_config(5, tier_policy="matched", corpus=right, corpus_budget=2)
    harness = Served(target, drafter, setup_for(5), FREE_ROWS)
    with heard_drafts(harness) as heard:
        serve(harness, right)
    told = Counter(count for _, count, _ in heard)
    assert told[2] > 20, told
    assert sum(told[count] for count in (3, 4, 5)) > 20, told


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("breadth", [1, 2])
def test_requests_that_end_at_the_context(target: Path, page_size: int, breadth: int) -> None:
    """Right drafts of two steps under way, and those for a third one, go past it, within rows of
    the page table that are no wider than a server makes them."""
    text = [index % VOCAB for index in range(100)]
    plain = eagle_serving.Served({"target": target}, None, 0, setup_for(0, page_size))
    [right] = plain.generate([text], temperature=0.0, max_new_tokens=CONTEXT - 100)
    text += right
    drafter = ngram_config(9, breadth)
    slots = NgramDrafter.needs(drafter.options).max_slots
    harness = Served(target, drafter, setup_for(9, page_size, max_decode_rows=slots))
    ids = {}
    for left in range(4):
        for num_new in (2, 3, 4, 12, 13, 20):
            end = CONTEXT - left
            prompt = text[: end - num_new]
            ids[harness.submit(prompt, temperature=0.0, max_new_tokens=num_new)] = text[
                end - num_new : end
            ]
    harness.run()
    for req_id, tokens in ids.items():
        assert harness.outputs[req_id].token_ids == tokens


def test_an_aborted_request_leaves_nothing(target: Path) -> None:
    harness = Served(target, ngram_config(5))
    req_id = harness.submit(prompts()[4], **GREEDY)
    for _ in range(4):
        harness.step()
    harness.inbox.messages.append(AbortReq(req_ids=[req_id]))
    harness.run()
    assert harness.outputs[req_id].token_ids
    harness.flush()
    assert harness.texts_kept() == {}


def test_a_small_memory_has_the_end_of_the_last_texts(target: Path) -> None:
    harness = Served(target, ngram_config(3, capacity=25))
    for prompt in prompts():
        confirmed_by(harness, prompt, max_new_tokens=8)
    told = [text for texts in harness.texts_told().values() for text in texts]
    harness.flush()
    kept = [text for texts in harness.texts_kept().values() for text in texts]
    assert kept
    assert sum(map(len, kept)) < 25
    assert all(any(_has(text, part) for text in told) for part in kept)


def _has(text: tuple[int, ...], part: tuple[int, ...]) -> bool:
    places = range(len(text) - len(part) + 1)
    return any(text[place : place + len(part)] == part for place in places)


@pytest.mark.long_matrix
@pytest.mark.parametrize("corpus_budget", [None, 2])
@pytest.mark.parametrize("breadth", [1, 3])
def test_where_rows_cost_nothing_steps_are_those_without_tile_spec(
    target: Path, tmp_path: Path, breadth: int, corpus_budget: int | None
) -> None:
    plans, right = [], right_tokens(target)

    def note(step: ComputedStep) -> None:
        plans[-1].append((step.plan, step.inputs.input_ids.tolist()))

    for folder in (None, tmp_path):
        options: dict[str, Any] = {"corpus": right[::2], "corpus_budget": corpus_budget}
        drafter = ngram_config(7, breadth, tile_spec_cache=folder, **options)
        harness = Served(target, drafter, setup_for(7), prices=FREE_ROWS)
        plans.append([])
        harness.listeners.append(note)
        serve(harness, right)
    assert plans[0] == plans[1]
    assert not any(plan.wants_paths for plan, _ in plans[1])


@pytest.mark.long_matrix
@pytest.mark.parametrize("breadth", [1, 3])
def test_where_rows_are_dear_only_likely_drafts_are_verified(
    target: Path, tmp_path: Path, breadth: int
) -> None:
    """Goes by prices alone: nothing is forced. More of what is verified is right."""
    shares = []
    for folder in (None, tmp_path):
        drafter = ngram_config(7, breadth, tile_spec_cache=folder)
        harness = Served(target, drafter, setup_for(7), prices=ROWS_COST_TIME)
        for seed in range(3):
            serve(harness, right_tokens(target), seed=seed)
        shares.append(harness.seen["confirmed"] / harness.seen["fed"])
    assert shares[1] > 1.2 * shares[0]


def test_long_matches_are_trusted_more_than_none(target: Path) -> None:
    drafter = ngram_config(7, tile_spec_cache=Path("unused"))
    harness = Served(target, drafter, prices=FREE_ROWS)
    for seed in range(2):
        serve(harness, right_tokens(target), seed=seed)
    trials = learnt(harness)
    tried, right = trials.tried, trials.right
    share = (right / tried.clamp(min=1))[:, 0]
    assert tried[:, 0].sum() > 100
    assert share[4] > 2 * share[:2].max(), share
    written = harness.drafter._state.confidence.drafts
    assert written.unique().numel() > 10


@contextmanager
def heard_drafts(harness: Served) -> Iterator[list[tuple[int, int, Collection[int]]]]:
    """Notes what the policy hears of each request while this lasts: the class of its match, how
    many drafts it fed, and the places of the right ones."""
    policy, heard = harness.planner.policy, list[tuple[int, int, Collection[int]]]()
    observe = policy.observe

    def noted(outcome: StepOutcome) -> None:
        observe(outcome)
        for index, num_fed in enumerate(outcome.result.num_drafts):
            if num_fed:
                heard.append((outcome.kinds[index].match, num_fed, right_places(outcome, index)))

    with mock.patch.object(policy, "observe", noted):
        yield heard


@pytest.mark.long_matrix
@pytest.mark.parametrize("breadth", [1, 3])
@pytest.mark.parametrize("overlap", [True, False])
def test_how_much_is_drafted_follows_prices_and_matches(
    target: Path, breadth: int, overlap: bool
) -> None:
    fed = []
    for prices in (FREE_ROWS, SLOW_ROWS, DEAR_ROWS):
        drafter = ngram_config(5, breadth, tier_policy="matched")
        harness = Served(target, drafter, setup_for(5, enable_overlap=overlap), prices)
        with heard_drafts(harness) as heard:
            serve(harness, right_tokens(target), seed=1)
        fed.append(harness.seen["fed"])
        if prices is FREE_ROWS:
            tried = Counter(match for match, _, _ in heard)
            right = Counter(match for match, _, places in heard if 0 in places)
            shares = [right[match] / max(1, tried[match]) for match in range(5)]
            assert shares[4] > 2 * max(shares[:2]), shares
    assert fed[0] > fed[1] > 4 * fed[2], fed


@pytest.mark.parametrize("overlap", [True, False])
def test_the_host_counts_the_nodes_that_were_right(target: Path, overlap: bool) -> None:
    """As many as were confirmed, and by place in the order of likelihood as paths have."""
    drafter = ngram_config(7, 3, tier_policy="matched")
    harness = Served(target, drafter, setup_for(7, enable_overlap=overlap), FREE_ROWS)
    right, fed = Counter[int](), Counter[int]()

    def note(step: ComputedStep) -> None:
        accepted = step.accepted
        if accepted.num_drafts is not None:
            for length, path, count in zip(
                accepted.accept_lens.tolist(),
                accepted.path.tolist(),
                accepted.num_drafts.tolist(),
                strict=True,
            ):
                right.update(path[1:length])
                fed.update(range(1, 1 + count))

    harness.listeners.append(note)
    with heard_drafts(harness) as heard:
        serve(harness, right_tokens(target))
    assert Counter(1 + place for _, count, _ in heard for place in range(count)) == fed
    assert Counter(1 + place for _, _, places in heard for place in places) == right
    assert right.total() == harness.seen["confirmed"]
    assert harness.seen["moved"] > 3, harness.seen


@pytest.mark.parametrize("breadth", [1, 2])
def test_the_host_knows_the_matches_that_drafts_followed(target: Path, breadth: int) -> None:
    """Checks in each step that is heard that the matches are those with which the drafts fed in it
    were found; of trees, those of their first branches."""
    harness = Served(target, ngram_config(3, breadth, tier_policy="matched"), prices=FREE_ROWS)
    ops, found, told = harness.drafter._ops, deque[dict[int, int]]([{}]), 0
    find, observe = ops.find, harness.planner.policy.observe

    def noted(rows: torch.Tensor, count: int, taken: torch.Tensor | None = None) -> Any:
        result = find(rows, count, taken)
        if taken is not None:
            return result
        lens = dict(zip(rows.tolist(), result.match_lens.tolist(), strict=True))
        found.append(found[-1] | lens)
        return result

    def checked(heard: StepOutcome) -> None:
        nonlocal told
        observe(heard)
        before = {} if heard.record.plan.num_drafted_for is None else steps.popleft()
        fed = heard.record.rows, heard.result.num_drafts, heard.kinds
        for row, count, kind in zip(*fed, strict=False):
            if before and count:
                assert kind is not None
                assert kind.match == class_of(before[row])
                told += 1

    plan, steps = harness.planner.plan, deque[dict[int, int]]()

    def planned(batch: ScheduleBatch, lens: Any) -> StepPlan:
        if 0 in batch.num_prompt_tokens:
            steps.append(found[-1])
        made: StepPlan = plan(batch, lens)
        return made

    ops.find = noted
    harness.planner.plan, harness.planner.policy.observe = planned, checked
    serve(harness, right_tokens(target))
    assert told > 100


def test_sequences_of_random_tokens_have_drafts_of_no_place(target: Path) -> None:
    """A prompt of tokens that are all different: there is nothing to draft from at first, and the
    last token is repeated."""
    drafted: list[list[int]] = []
    harness = Served(target, ngram_config(3))
    state = harness.drafter._state
    write = state.write_drafts

    def noted(rows: torch.Tensor, tokens: torch.Tensor, *args: Any, **more: Any) -> None:
        drafted.append([int(state.tokens[rows[0], state.committed[rows[0]]]), *tokens[0].tolist()])
        write(rows, tokens, *args, **more)

    state.write_drafts = noted
    prompt = random.Random(0).sample(range(24), 12)
    req_id = harness.submit(prompt, **GREEDY)
    harness.run()
    first = harness.outputs[req_id].token_ids[0]
    if first in prompt:
        behind = [*prompt, first][prompt.index(first) + 1 :]
        assert drafted[0][1:] == [behind[j % len(behind)] for j in range(3)]
    else:
        assert drafted[0] == [first] * 4
