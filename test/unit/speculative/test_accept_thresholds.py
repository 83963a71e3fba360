"""Accept thresholds below 1: what sampled requests are given, and that greedy ones see nothing."""

from __future__ import annotations

import functools
import operator
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import threshold_oracle
from draft_heads import EAGLE, EAGLE3
from drafted_serving import Disturb, Drafted, nothing, params_of, pause, prompts
from drafter_checks import DraftCounter, make_drafter_runners
from eagle_models import CONTEXT, VOCAB, eagle_config_for, write_models
from model_harness import Model
from ngram_serving import ngram_config
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_options import AcceptThresholds, DrafterConfig
from sglang.srt.speculative.spec_info import NGRAM
from sglang.srt.step.draft_shapes import TreeShape
from sglang.srt.step.step_ops import NUM_PROMPT, ROW
from threshold_oracle import LogitsBehind, Round
from utils import Collected, Setup

torch.set_num_threads(1)
BOTH = pytest.mark.parametrize("kind", [EAGLE, EAGLE3])
NUM_NEW = 24
ALL = AcceptThresholds(single=0.0, acc=0.0)
BREADTH = 4  # of trees of n-grams


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


def config_for(
    paths: dict[str, Path],
    kind: str,
    thresholds: AcceptThresholds,
    num_steps: int = 3,
    tree: TreeShape | None = None,
) -> DrafterConfig:
    if kind == NGRAM:
        return replace(ngram_config(num_steps, BREADTH), thresholds=thresholds)
    num_steps = num_steps if tree is None else tree.depth
    config = eagle_config_for(paths["target"], paths[kind], kind, num_steps, tree=tree)
    return replace(config, thresholds=thresholds)


class Served(Drafted):
    """A target with a head, or alone. Counts are in `seen`, the steps of requests with drafts in
    `rounds`, by the first token of the prompt."""

    def __init__(
        self, paths: dict[str, Path], drafter: DrafterConfig | None, **changes: Any
    ) -> None:
        setup = Setup(**{"num_pages": 1024, "context_len": CONTEXT, **changes})
        group, setup = make_drafter_runners(paths["target"], setup, drafter)
        counter = DraftCounter()
        self.seen: Counter[str] = counter.seen
        self.rounds: dict[int, list[Round]] = {}

        def on_step(step: ComputedStep) -> None:
            counter(step)
            self._note(step)

        super().__init__(group, drafter, setup, checks_kv=True, on_step=on_step)

    def _note(self, step: ComputedStep) -> None:
        layout, accepted = step.chosen.layout, step.accepted
        if layout.lookahead is None:
            return
        rows, num_prompt = layout.per_request[ROW].tolist(), layout.per_request[NUM_PROMPT].tolist()
        starts = layout.lookahead.q_starts.tolist()
        for index, row in enumerate(rows):
            num_pending = int(layout.lookahead.num_pending[index])
            if num_prompt[index] or num_pending == 1:
                continue
            first = starts[index]
            tokens = step.state.tokens[row, : int(layout.positions[first]) + 1].tolist()
            drafts = layout.input_ids[first + 1 : first + num_pending].tolist()
            emitted = accepted.next_token_ids[index, : int(accepted.accept_lens[index])].tolist()
            parents = layout.lookahead.parents
            above = None if parents is None else parents[first + 1 : first + num_pending].tolist()
            found = Round(tokens, [], drafts, emitted, above)
            self.rounds.setdefault(tokens[0], []).append(found)


ASKED: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 3, "min_p": 0.05},
    {"temperature": 1.2, "min_p": 0.2},
    {"temperature": 1.0, "frequency_penalty": 0.7},
    {"temperature": 0.9, "presence_penalty": 1.5, "top_k": 5},
    {"temperature": 0.8, "repetition_penalty": 1.6},
    {"temperature": 1.0, "logit_bias": {"1": 2.5, "2": -4.0}},
    {"temperature": 1.0, "stop_token_ids": [2]},
    {"temperature": 0.0},
]


def sampled() -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts, each with a first token of its own, and parameters."""
    chooser = random.Random(3)
    requests = []
    for number in range(2 * len(ASKED)):
        length = chooser.choice([2, 5, 16])
        prompt = [number] + [chooser.randrange(VOCAB) for _ in range(length)]
        params = {
            "sampling_seed": 100 + number,
            "max_new_tokens": NUM_NEW,
            **ASKED[number % len(ASKED)],
        }
        requests.append((prompt, params))
    return requests


def outcomes(harness: Served, **options: Any) -> list[Collected]:
    """Returns what becomes of `sampled`, which arrive in turn."""
    ids = []
    for number, (prompt, params) in enumerate(sampled()):
        ids.append(harness.submit(prompt, **options, **params))
        if number % 4 == 3:
            harness.step()
    harness.run()
    harness.check()
    return [harness.outputs[req_id] for req_id in ids]


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "single", "acc", "drafts"),
    [
        (EAGLE, 1.0, 0.5, 3),
        (EAGLE3, 0.3, 1.0, 3),
        (EAGLE, 0.4, 0.8, 5),
        (EAGLE3, 0.0, 1.0, 1),
        (EAGLE, 1.0, 0.6, TreeShape(topk=4, depth=3, num_drafts=12)),
        (EAGLE3, 0.3, 0.9, TreeShape(topk=3, depth=4, num_drafts=9)),
        (NGRAM, 1.0, 0.5, 9),
        (NGRAM, 0.3, 0.9, 7),
    ],
)
def test_each_step_is_that_of_the_rule(
    paths: dict[str, Path], kind: str, single: float, acc: float, drafts: int | TreeShape
) -> None:
    """Tokens and log-probabilities, with filters, penalties and biases; of chains and trees."""
    thresholds, target = AcceptThresholds(single, acc), Model(paths["target"])
    shape = {"num_steps": drafts} if isinstance(drafts, int) else {"tree": drafts}
    harness = Served(paths, config_for(paths, kind, thresholds, **shape))
    given = outcomes(harness, logprobs=LogprobOptions(start_len=200))

    seen: Counter[str] = Counter()
    for (prompt, params), outcome in zip(sampled(), given, strict=True):
        rounds, output = harness.rounds[prompt[0]], outcome.token_ids[:1]
        whole = prompt + output + [token for each in rounds for token in each.emitted]
        logits = target.expected(whole).tolist()

        def behind(
            tokens: list[int], whole: list[int] = whole, logits: list[list[float]] = logits
        ) -> list[float]:
            assert tokens == whole[: len(tokens)]
            return logits[len(tokens) - 1]

        for each in rounds:
            assert each.prompt == prompt + output
            served, emitted = replace(each, prompt=prompt, output=output), each.emitted
            output = output + emitted
            if params["temperature"] == 0:
                continue
            right = threshold_oracle.expected(served, params, thresholds, behind)
            seen["accepted"] += len(emitted) - 1
            seen["refused"] += len(each.drafts) - len(emitted) + 1
            seen["rounds"] += 1
            seen["unsure"] += right is None
            assert right in (None, emitted), (params, served)
        stop = params.get("stop_token_ids", [VOCAB])[0]
        if stop in output:
            output = output[: output.index(stop) + 1]
        assert outcome.token_ids == output[:NUM_NEW]
        assert_logprobs(prompt, params, outcome, behind)
    assert seen["unsure"] < seen["rounds"] / 50
    assert seen["accepted"] > 80, seen
    assert seen["refused"] > 15, seen
    if kind == NGRAM:
        assert harness.seen["moved"] > 5, "Later branches were never right."


def assert_logprobs(
    prompt: list[int], params: dict[str, Any], outcome: Collected, behind: LogitsBehind
) -> None:
    """Those of the emitted tokens, at the request's temperature and before filters."""
    unfiltered = {key: params[key] for key in params if key not in ("top_k", "top_p", "min_p")}
    unfiltered["temperature"] = params["temperature"] or 1.0
    assert len(outcome.output_logprobs) == len(outcome.token_ids)
    for index, (token, entry) in enumerate(
        zip(outcome.token_ids, outcome.output_logprobs, strict=True)
    ):
        output = outcome.token_ids[:index]
        probs, _ = threshold_oracle.distribution(behind(prompt + output), unfiltered, output)
        assert entry.token_id == token
        assert entry.logprob is not None
        assert torch.tensor(entry.logprob).exp() == pytest.approx(probs[token], abs=1e-4)


@pytest.mark.long_matrix
@pytest.mark.parametrize(("kind", "which"), [(EAGLE, "single"), (EAGLE3, "acc")])
def test_the_lower_a_threshold_the_more_is_accepted(
    paths: dict[str, Path], kind: str, which: str
) -> None:
    rates = []
    for value in (1.0, 0.4, 0.0):
        thresholds = AcceptThresholds(**{which: value})
        harness = Served(paths, config_for(paths, kind, thresholds))
        texts = [[token, 3] for token in range(16)]
        harness.generate(texts, temperature=1.5, max_new_tokens=NUM_NEW)
        rates.append(harness.seen["confirmed"] / harness.seen["fed"])
    assert rates == sorted(rates)
    assert len(set(rates)) == len(rates)
    assert rates[0] < 0.8
    assert rates[-1] == 1.0


@pytest.mark.long_matrix
@BOTH
def test_a_draft_that_the_target_cannot_give_is_never_accepted(
    paths: dict[str, Path], kind: str
) -> None:
    """Though the thresholds are 0."""
    harness = Served(paths, config_for(paths, kind, ALL))
    params = {"temperature": 1.0, "max_new_tokens": NUM_NEW}
    banned = {str(token): -1e9 for token in range(0, VOCAB, 3)}
    given = harness.generate([[token, 3] for token in range(16)], logit_bias=banned, **params)
    assert all(token % 3 for tokens in given for token in tokens)
    assert 0 < harness.seen["confirmed"] < harness.seen["fed"]


def served_tokens(harness: Served, disturb: Disturb = nothing) -> dict[int, list[int]]:
    """Greedy requests beside sampled ones; the greedy ones' tokens, by index of the prompt."""
    chooser, ids = random.Random(1), {}
    for index, prompt in enumerate(prompts()):
        ids[index] = harness.submit(prompt, **{**params_of(index), "temperature": 0.0})
        harness.submit(prompt, temperature=1.2, sampling_seed=index, max_new_tokens=20)
        harness.step()
        disturb(harness, chooser)
    while not harness.is_idle:
        harness.step()
        disturb(harness, chooser)
    harness.check()
    return {index: harness.outputs[req_id].token_ids for index, req_id in ids.items()}


@functools.cache
def tokens_without_a_head(target: Path) -> dict[int, list[int]]:
    return served_tokens(Served({"target": target}, None))


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "thresholds", "changes", "disturb"),
    [
        (EAGLE, ALL, {}, nothing),
        (EAGLE3, AcceptThresholds(0.3, 0.6), {"page_size": 16, "chunked_prefill_size": 6}, pause),
        (EAGLE3, ALL, {"enable_overlap": False, "chunked_prefill_size": 6}, nothing),
        (EAGLE, AcceptThresholds(0.3, 0.6), {"retract_interval": 3}, pause),
        (NGRAM, AcceptThresholds(0.3, 0.6), {"retract_interval": 3, "page_size": 16}, pause),
    ],
)
def test_greedy_requests_see_nothing_of_thresholds(
    paths: dict[str, Path],
    kind: str,
    thresholds: AcceptThresholds,
    changes: dict[str, Any],
    disturb: Disturb,
) -> None:
    """The ledger is exact and the KV canary silent in each step."""
    harness = Served(paths, config_for(paths, kind, thresholds), **changes)
    assert served_tokens(harness, disturb) == tokens_without_a_head(paths["target"])
    assert harness.seen["confirmed"] > 20


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "thresholds"),
    [(EAGLE, AcceptThresholds(0.5, 0.7)), (EAGLE3, AcceptThresholds(0.2, 1.0))],
)
def test_seeded_requests_repeat_whatever_runs_beside_them(
    paths: dict[str, Path], kind: str, thresholds: AcceptThresholds
) -> None:
    drafter = config_for(paths, kind, thresholds)
    together = [given.token_ids for given in outcomes(Served(paths, drafter))]
    changed = Served(
        paths, drafter, enable_overlap=False, use_radix_cache=False, chunked_prefill_size=7
    )
    assert [given.token_ids for given in outcomes(changed)] == together
    alone = Served(paths, drafter)
    for (prompt, params), tokens in list(zip(sampled(), together, strict=True))[::4]:
        assert alone.generate([prompt], **params) == [tokens]
    exact = [given.token_ids for given in outcomes(Served(paths, None))]
    num_same = sum(map(operator.eq, exact, together))
    assert 2 <= num_same < len(together) / 2  # the greedy ones, and few others
