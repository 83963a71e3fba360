"""Replay drafts the known answer: tokens are those of plain decoding, and the rounds are those that
the spoilt drafts leave, one by one and on average."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from benchmark.replay import ERROR_RATE, ReplayDrafter, spoilt
from drafted_serving import Drafted, serve
from drafter_checks import Request, drafter_harness
from eagle_models import VOCAB, write_target
from eagle_serving import setup_for
from ngram_serving import ngram_config
from recorded_graphs import recorded_graphs, replayable_backends
from round_serving import NUM_STEPS, Served, right_tokens, runners, setup_of, zero
from sglang.srt.speculative import ngram_worker
from utils import Collected, SchedulerHarness

NUM_DRAFTS, NUM_NEW = 3, 40
CHI_SQUARE_99_9 = 16.27  # 3 degrees of freedom


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("replay") / "target")


@pytest.fixture(autouse=True)
def replays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ngram_worker, "NgramDrafter", ReplayDrafter)


def requests() -> list[Request]:
    """Greedy and seeded ones of several lengths, no two with the same prompt."""
    chooser = random.Random(1)
    found = []
    for number in range(6):
        prompt = [number, *(chooser.randrange(VOCAB) for _ in range(number))]
        params = {"max_new_tokens": NUM_NEW - number, "temperature": 0.0, "ignore_eos": True}
        if number % 3 == 1:
            params |= {"temperature": 0.7, "sampling_seed": number}
        found.append(Request(prompt, params))
    return found


def answers(harness: SchedulerHarness) -> list[Collected]:
    ids = [request.submit(harness) for request in requests()]
    harness.run()
    return [harness.outputs[req_id] for req_id in ids]


def right_drafts(errors: list[bool]) -> list[int]:
    """Right drafts of each round of an answer, of whose tokens these drafts are wrong: the prompt
    gives the first token, and each round the right drafts before the first wrong one, and one more
    token. Nothing is known behind the last token, which is a round's without drafts if it is
    alone."""
    found, num_tokens = [], 1
    while drafts := errors[num_tokens : num_tokens + NUM_DRAFTS]:
        found.append(drafts.index(True) if True in drafts else len(drafts))
        num_tokens += found[-1] + 1
    return found


@pytest.mark.parametrize("error_rate", [0.0, 0.3, 1.0])
def test_each_round_accepts_the_drafts_before_the_first_spoilt_one(
    target: Path, monkeypatch: pytest.MonkeyPatch, error_rate: float
) -> None:
    monkeypatch.setenv(ERROR_RATE, str(error_rate))
    setup = setup_for(NUM_DRAFTS)
    plain = answers(drafter_harness(target, setup, None)[0])
    harness, seen = drafter_harness(target, setup, ngram_config(NUM_DRAFTS))
    first = answers(harness)
    assert seen["fed"] == 0, "nothing is known"
    again = answers(harness)
    assert [each.token_ids for each in first + again] == [each.token_ids for each in plain * 2]
    for request, told in zip(requests(), again, strict=True):
        start, count = len(request.prompt), len(told.token_ids)
        errors = spoilt(np.array(request.prompt), start + count, error_rate)[start:]
        rounds = np.bincount(right_drafts(errors.tolist()))
        assert told.accept_histogram == rounds.tolist()
    assert (seen["confirmed"] == seen["fed"]) == (error_rate == 0)
    assert (seen["confirmed"] > 0) == (error_rate < 1)


def test_tokens_of_a_round_are_geometric_up_to_the_number_of_drafts() -> None:
    error_rate, num_tokens = 0.16, 500
    counts = np.zeros(NUM_DRAFTS + 1)
    for prompt in range(40):
        errors = spoilt(np.array([prompt, 7]), num_tokens, error_rate)
        counts += np.bincount(right_drafts(errors.tolist())[:-1], minlength=NUM_DRAFTS + 1)
    right = 1 - error_rate
    chances = [right**j * error_rate for j in range(NUM_DRAFTS)] + [right**NUM_DRAFTS]
    expected = np.array(chances) * counts.sum()
    assert ((counts - expected) ** 2 / expected).sum() < CHI_SQUARE_99_9
    mean = (counts * np.arange(1, NUM_DRAFTS + 2)).sum() / counts.sum()
    assert mean == pytest.approx(sum(right**j for j in range(NUM_DRAFTS + 1)), abs=0.03)


def test_the_longest_answer_is_known_to_all(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_RATE, "0")
    harness, _ = drafter_harness(target, setup_for(NUM_DRAFTS), ngram_config(NUM_DRAFTS))
    prompt, params = [3, 1, 4], {"temperature": 0.0, "ignore_eos": True}
    for num_new, key in ((9, "a"), (21, "b"), (5, "a"), (24, "c")):
        req_id = harness.submit(prompt, max_new_tokens=num_new, cache_key=(key, ""), **params)
        harness.run()
    # Of 21 known tokens the prompt's step gives one, and 5 rounds 4 each.
    assert harness.outputs[req_id].accept_histogram == [0, 0, 0, 5]


def test_graphs_of_rounds_replay_too(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ERROR_RATE, "0.3")
    drafter, setup = ngram_config(NUM_STEPS, tier_policy="fixed"), setup_of()
    with recorded_graphs(), replayable_backends():
        right = right_tokens({"target": target})
        group = runners({"target": target}, drafter, setup)
        served = Served(Drafted(group, drafter, setup), group)
        served.may_lack = True
        zero(group)
        served.watch()
        serve(served.harness, right)
    assert min(served.seen["right"], served.seen["wrong"]) > 10
