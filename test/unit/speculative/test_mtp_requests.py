"""Tests what a request may ask for beside tokens: stops inside an accepted run, aborts, sampling,
penalties, biases, logprobs and hidden states. Over the small model, against plain requests or the
reference decodes."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mtp_oracle import STATIC, load_reference, predict, unverified_decode
from policy_steps import mask_parts
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.lookahead.contract import Budget
from sglang.srt.lookahead.length_policy import FixedLength
from sglang.srt.lookahead.upcoming_step import UpcomingStep
from sglang.srt.messages.control import AbortReq
from sglang.srt.messages.requests import TOO_MANY_KEPT, LogprobOptions
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.step.worker import GenerationBatchResult, ScheduleBatch
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import (
    MTP_MAX_ROWS,
    Collected,
    SchedulerHarness,
    Setup,
    make_mtp_worker,
    make_runner,
)

MASK = 5
PROMPT = [3, 1, 4, 1, 2, 0, 2]
SETUP = Setup(num_pages=600)
STATIC_4 = {"mtp_enabled": True, "mtp_k": 4, "temperature": 0.0}
ADAPTIVE_4 = {**STATIC_4, "mtp_strategy": ["conf_adapt", 0.6]}
VERIFIED_4 = {"mtp_enabled": True, "mtp_k": 4, "mtp_verify": True}


@pytest.fixture(scope="module")
def runner(small_model: Path) -> ModelRunner:
    return make_runner(small_model, SETUP, 128, MTP_MAX_ROWS)


def run(
    runner: ModelRunner, setup: Setup = SETUP, prompt: list[int] = PROMPT, **params: Any
) -> Collected:
    harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK))
    req_id = harness.submit(prompt, **params)
    harness.run()
    return harness.outputs[req_id]


def run_all(runner: ModelRunner, many: list[dict[str, Any]]) -> list[Collected]:
    """Requests of one batch."""
    harness = SchedulerHarness(SETUP, make_mtp_worker(runner, MASK))
    ids = [harness.submit(PROMPT, **params) for params in many]
    harness.run()
    return [harness.outputs[req_id] for req_id in ids]


# ---------------------------------------------------------------- ends


@pytest.mark.parametrize("mode", [STATIC_4, ADAPTIVE_4, {**VERIFIED_4, "temperature": 0.0}])
def test_every_length_limit_clips_the_run(runner: ModelRunner, mode: dict[str, Any]) -> None:
    whole = run(runner, max_new_tokens=20, **mode)
    limits = list(range(1, 20))
    clipped = run_all(runner, [{"max_new_tokens": limit, **mode} for limit in limits])
    for limit, outcome in zip(limits, clipped, strict=True):
        assert outcome.token_ids == whole.token_ids[:limit]
        assert sum(outcome.step_lens) == limit
        assert outcome.finish_reason is not None
        assert outcome.finish_reason.type == "length"


@pytest.mark.long_matrix
@pytest.mark.parametrize("as_eos", [True, False], ids=["EOS", "stop id"])
@pytest.mark.parametrize("mode", [STATIC_4, ADAPTIVE_4, {**VERIFIED_4, "temperature": 0.0}])
def test_a_stop_token_inside_a_run_ends_it_there(
    runner: ModelRunner, mode: dict[str, Any], as_eos: bool
) -> None:
    places_in_run = set()
    for start in range(len(PROMPT)):
        prompt = PROMPT[start:]
        whole = run(runner, prompt=prompt, max_new_tokens=20, **mode)
        for token in sorted(set(whole.token_ids)):
            setup, params = SETUP, {"stop_token_ids": [token]}
            if as_eos:
                setup, params = Setup(num_pages=600, eos_token_ids=frozenset({token})), {}
            outcome = run(runner, setup, prompt, max_new_tokens=20, **params, **mode)
            end = whole.token_ids.index(token) + 1
            assert outcome.token_ids == whole.token_ids[:end]
            assert sum(outcome.step_lens) == end
            assert outcome.finish_reason is not None
            assert outcome.finish_reason.matched == token
            places_in_run.add(outcome.step_lens[-1])
    assert len(places_in_run) > 1, "All stops were at the same place of their run."


@pytest.mark.long_matrix
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("mode", [STATIC_4, ADAPTIVE_4, {**VERIFIED_4, "temperature": 0.0}])
def test_an_abort_at_any_step_answers_with_a_prefix(
    runner: ModelRunner, mode: dict[str, Any], overlap: bool
) -> None:
    setup = Setup(num_pages=600, enable_overlap=overlap, chunked_prefill_size=3)
    whole = run(runner, setup, max_new_tokens=20, **mode)
    bystander = run(runner, setup, max_new_tokens=20, temperature=0.0)
    for num_steps in range(12):
        harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK))
        other = harness.submit(PROMPT, max_new_tokens=20, temperature=0.0)
        victim = harness.submit(PROMPT, max_new_tokens=20, **mode)
        for _ in range(num_steps):
            harness.step()
        harness.inbox.messages.append(AbortReq(req_ids=[victim]))
        harness.run()
        outcome = harness.outputs[victim]
        assert outcome.num_ends == 1
        assert outcome.token_ids == whole.token_ids[: len(outcome.token_ids)]
        assert sum(outcome.step_lens) == len(outcome.token_ids)
        assert harness.outputs[other].token_ids == bystander.token_ids
        used = harness.ledger.num_free_tokens + harness.ledger.num_tree_tokens
        assert used == harness.ledger.num_pool_tokens


def test_results_keep_the_contract_while_others_are_in_their_prompt(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is accepted before the end of a prompt, and nothing is kept beyond what may be."""
    launch, kinds = TpModelWorker.forward_batch_generation, set()

    def checked(worker: TpModelWorker, batch: ScheduleBatch) -> GenerationBatchResult:
        result = launch(worker, batch)
        read = result.read()
        for i, emits in enumerate(batch.emits):
            num_prompt = batch.num_prompt_tokens[i]
            assert emits == (read.accept_lens[i] > 0)
            assert 1 <= read.kept_lens[i] <= batch.max_q_lens[i]
            assert not num_prompt or read.kept_lens[i] == num_prompt
        kinds.add((any(batch.emits), all(batch.emits)))
        return result

    monkeypatch.setattr(TpModelWorker, "forward_batch_generation", checked)
    harness = SchedulerHarness(
        Setup(num_pages=600, chunked_prefill_size=3), make_mtp_worker(runner, MASK)
    )
    modes = (STATIC_4, ADAPTIVE_4, {**VERIFIED_4, "temperature": 0.0}, {"temperature": 0.0})
    for i, mode in enumerate(modes):
        harness.submit([i, *PROMPT], max_new_tokens=12, **mode)
        for _ in range(2):
            harness.step()
    harness.run()
    assert kinds == {(False, False), (True, False), (True, True)}


@pytest.mark.parametrize(
    ("params", "num_prompt_rows", "num_decode_rows"),
    [
        ({"temperature": 0.0}, 1, 1),
        (STATIC_4, 4, 4),
        (ADAPTIVE_4, 4, 4),
        ({**VERIFIED_4, "temperature": 0.0}, 4, 7),
    ],
    ids=["plain", "static", "conf_adapt", "verified"],
)
def test_logits_are_computed_for_the_rows_that_are_read_alone(
    runner: ModelRunner,
    monkeypatch: pytest.MonkeyPatch,
    params: dict[str, Any],
    num_prompt_rows: int,
    num_decode_rows: int,
) -> None:
    """k per request; a verified one's pending rows too."""
    compute, computed = runner.compute_logits, []

    def counted(hidden: torch.Tensor) -> torch.Tensor:
        computed.append(len(hidden))
        return compute(hidden)

    monkeypatch.setattr(runner, "compute_logits", counted)
    run_all(runner, [{"max_new_tokens": 24, **params}] * 5)
    assert computed[0] == 5 * num_prompt_rows
    assert set(computed[1:-3]) == {5 * num_decode_rows}


# ---------------------------------------------------------------- lossless


SAMPLED = [
    {"temperature": temperature, "sampling_seed": seed, **more}
    for temperature in (0.5, 1.0, 1.7)
    for seed in (1, 2, 3)
    for more in ({}, {"top_p": 0.8}, {"top_k": 3, "min_p": 0.05})
]
PENALIZED = [
    {"frequency_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6, "frequency_penalty": -0.4},
    {"logit_bias": {"1": 2.5, "2": -4.0}},
    {"min_new_tokens": 9, "stop_token_ids": [0, 1, 2]},
    {"frequency_penalty": 1.9, "min_new_tokens": 5, "stop_token_ids": [3], "logit_bias": {"3": 3}},
]


def assert_lossless(runner: ModelRunner, many: list[dict[str, Any]]) -> None:
    """With `mtp_verify` the same tokens come, in fewer steps."""
    plain = run_all(runner, [{"max_new_tokens": 24, **params} for params in many])
    verified = run_all(runner, [{"max_new_tokens": 24, **params, **VERIFIED_4} for params in many])
    assert [outcome.token_ids for outcome in verified] == [outcome.token_ids for outcome in plain]
    assert [o.finish_reason for o in verified] == [o.finish_reason for o in plain]
    assert sum(len(outcome.step_lens) for outcome in verified) < 0.9 * sum(
        len(outcome.token_ids) for outcome in plain
    )
    assert len({tuple(outcome.token_ids) for outcome in plain}) > len(many) // 2


def test_seeded_output_with_verification_is_the_seeded_plain_output(runner: ModelRunner) -> None:
    assert_lossless(runner, SAMPLED)


def test_penalties_and_biases_hold_inside_a_verified_run(runner: ModelRunner) -> None:
    assert_lossless(runner, [{"temperature": 0.0, **params} for params in PENALIZED])


def test_penalties_and_sampling_together(runner: ModelRunner) -> None:
    seeded = {"temperature": 1.0, "sampling_seed": 4}
    assert_lossless(runner, [{**seeded, **params} for params in PENALIZED])


@pytest.mark.parametrize("retract_interval", [1, 2])
def test_seeded_verified_output_survives_retraction(
    runner: ModelRunner, retract_interval: int
) -> None:
    params = {"temperature": 1.0, "sampling_seed": 4, "max_new_tokens": 24, **VERIFIED_4}
    params["frequency_penalty"] = 0.7
    whole = run(runner, **params)
    setup = Setup(num_pages=600, retract_interval=retract_interval)
    outcome = run(runner, setup, **params)
    assert outcome.num_retractions > 3
    assert outcome.token_ids == whole.token_ids


def test_biases_and_min_new_tokens_reach_every_row_of_an_unverified_request(
    runner: ModelRunner,
) -> None:
    banned = {"logit_bias": {"0": -100.0, "3": -100.0}}
    minimum = {"min_new_tokens": 13, "stop_token_ids": [1, 2]}
    for mode in (STATIC_4, ADAPTIVE_4):
        whole = run(runner, max_new_tokens=16, **mode)
        assert {0, 1, 2, 3} & set(whole.token_ids)
        biased = run(runner, max_new_tokens=16, **mode, **banned)
        assert not {0, 3} & set(biased.token_ids)
        late = run(runner, max_new_tokens=16, **mode, **minimum)
        assert len(late.token_ids) >= 13
        assert not {1, 2} & set(late.token_ids[:13])


# ---------------------------------------------------------------- returns


def options(start_len: int) -> LogprobOptions:
    return LogprobOptions(start_len=start_len, top_num=2, token_ids=[4, 0])


def assert_same_logprobs(left: list[Any], right: list[Any]) -> None:
    assert [entry.token_id for entry in left] == [entry.token_id for entry in right]
    for a, b in zip(left, right, strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert a.chosen == pytest.approx(b.chosen, abs=1e-4)
        assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)


@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"temperature": 0.8, "sampling_seed": 5}])
def test_logprobs_of_a_verified_request_are_the_plain_ones(
    runner: ModelRunner, mode: dict[str, Any]
) -> None:
    plain = run(runner, max_new_tokens=15, logprobs=options(2), **mode)
    harness = SchedulerHarness(SETUP, make_mtp_worker(runner, MASK))
    others = [harness.submit(PROMPT, max_new_tokens=9, **m) for m in (STATIC_4, mode)]
    first = harness.submit(PROMPT, max_new_tokens=15, logprobs=options(2), **(VERIFIED_4 | mode))
    req_id = harness.submit(PROMPT, max_new_tokens=15, logprobs=options(2), **(VERIFIED_4 | mode))
    harness.run()
    for outcome in (harness.outputs[first], harness.outputs[req_id]):
        assert_same_logprobs(outcome.output_logprobs, plain.output_logprobs)
        assert_same_logprobs(outcome.input_logprobs, plain.input_logprobs)
        assert len(outcome.step_lens) < 15
    assert all(not harness.outputs[other].output_logprobs for other in others)


def test_too_many_kept_tokens_end_their_request_alone(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sglang.srt.layers.sampler.MAX_KEPT", 3)
    harness = SchedulerHarness(SETUP, make_mtp_worker(runner, MASK))
    wanted = LogprobOptions(len(PROMPT) - 1, kept=True)
    mode = {"max_new_tokens": 9, "temperature": 1.0, "sampling_seed": 5, "logprobs": wanted}
    few, many = (harness.submit(PROMPT, top_k=k, **mode) for k in (3, 4))
    harness.run()
    assert len(harness.outputs[few].token_ids) == 9
    assert all(len(entry.kept or b"") == 12 for entry in harness.outputs[few].output_logprobs)
    assert harness.outputs[many].finish_reason == TOO_MANY_KEPT
    assert harness.outputs[many].token_ids == []


@pytest.mark.parametrize("tau", [STATIC, 0.6])
def test_a_logprob_of_an_unverified_token_is_that_of_the_row_that_emitted_it(
    runner: ModelRunner, small_model: Path, tau: float
) -> None:
    mode = STATIC_4 if tau == STATIC else ADAPTIVE_4
    outcome = run(runner, max_new_tokens=15, logprobs=options(len(PROMPT) - 1), **mode)
    model = load_reference(small_model)
    right = unverified_decode(model, PROMPT, 15, 4, tau, MASK)
    assert outcome.token_ids == right.tokens
    expected: list[float] = []
    for count in right.step_lens:
        before = PROMPT + right.tokens[: len(expected)]
        _, confidences, _ = predict(model, before, [], 4, MASK)
        expected += [math.log(confidence) for confidence in confidences[:count]]
    got = [entry.logprob for entry in outcome.output_logprobs]
    assert got == pytest.approx(expected, abs=1e-4)


def test_a_prompt_is_scored_in_chunks_while_another_request_has_a_threshold(
    runner: ModelRunner,
) -> None:
    """The steps choose by confidence, and nobody in them wants log-probabilities of new tokens."""
    harness = SchedulerHarness(
        replace(SETUP, chunked_prefill_size=4), make_mtp_worker(runner, MASK)
    )
    decoding = harness.submit(PROMPT, max_new_tokens=30, ignore_eos=True, **ADAPTIVE_4)
    for _ in range(4):
        harness.step()
    wanted = LogprobOptions(start_len=0)
    scored = harness.submit(PROMPT * 3, max_new_tokens=2, temperature=0.0, logprobs=wanted)
    harness.run()
    alone = run(runner, max_new_tokens=30, ignore_eos=True, **ADAPTIVE_4)
    assert harness.outputs[decoding].token_ids == alone.token_ids
    found = harness.outputs[scored].input_logprobs
    assert [item.token_id for item in found] == (PROMPT * 3)[1:]


def test_hidden_states_of_a_verified_request_are_the_plain_ones(runner: ModelRunner) -> None:
    plain = run(runner, max_new_tokens=15, temperature=0.0, hidden_states="all")
    assert len(plain.hidden_states) == len(PROMPT) + 14
    for setup in (SETUP, Setup(num_pages=600, retract_interval=2, chunked_prefill_size=3)):
        outcome = run(
            runner, setup, max_new_tokens=15, hidden_states="all", temperature=0.0, **VERIFIED_4
        )
        assert len(outcome.hidden_states) == len(plain.hidden_states)
        for left, right in zip(outcome.hidden_states, plain.hidden_states, strict=True):
            assert left == pytest.approx(right, abs=1e-3)


def test_no_hidden_state_is_of_a_token_past_the_end(runner: ModelRunner) -> None:
    """A step may keep rows of drafts that are cut off by the length limit."""
    params = [{"max_new_tokens": n, "hidden_states": "all", **VERIFIED_4} for n in range(1, 16)]
    for outcome in run_all(runner, [{**p, "temperature": 0.0} for p in params]):
        assert len(outcome.hidden_states) == len(PROMPT) + len(outcome.token_ids) - 1


def test_the_last_hidden_state_comes_once_per_token_that_is_verified(runner: ModelRunner) -> None:
    for count in range(1, 16):
        params = {"max_new_tokens": count, "hidden_states": "last", "temperature": 0.0}
        plain, outcome = run(runner, **params), run(runner, **params, **VERIFIED_4)
        assert len(outcome.hidden_states) == len(outcome.token_ids) == count
        for left, right in zip(outcome.hidden_states, plain.hidden_states, strict=True):
            assert left == pytest.approx(right, abs=1e-3)


def test_the_last_hidden_state_comes_once_per_unverified_step(runner: ModelRunner) -> None:
    outcome = run(runner, max_new_tokens=15, hidden_states="last", **STATIC_4)
    assert len(outcome.hidden_states) == len(outcome.step_lens)


# ---------------------------------------------------------------- load


class Expensive(FixedLength):
    """Beyond 16 rows of requests that look ahead as far as they wish, nobody does."""

    def choose(self, upcoming: UpcomingStep) -> Budget:
        is_cheap = upcoming.current_shape(upcoming.longest).num_rows <= 16
        return Budget(upcoming.longest if is_cheap else 1)


def test_under_load_verified_requests_predict_less_and_keep_their_tokens(
    runner: ModelRunner,
) -> None:
    plain = run(runner, max_new_tokens=24, temperature=0.0).token_ids
    num_steps = {}
    for num_requests in (1, 8):
        harness = SchedulerHarness(SETUP, make_mtp_worker(runner, MASK, Expensive(mask_parts(8))))
        params = {"max_new_tokens": 24, "temperature": 0.0, **VERIFIED_4, "mtp_k": 8}
        ids = [harness.submit(PROMPT, **params) for _ in range(num_requests)]
        harness.run()
        assert [harness.outputs[req_id].token_ids for req_id in ids] == [plain] * num_requests
        num_steps[num_requests] = len(harness.outputs[ids[0]].step_lens)
    assert num_steps[1] < num_steps[8] == 24


@pytest.mark.parametrize("limits_unverified", [False, True])
def test_unverified_requests_predict_less_only_if_the_server_is_told_to(
    runner: ModelRunner, limits_unverified: bool
) -> None:
    worker = make_mtp_worker(
        runner, MASK, Expensive(mask_parts(8)), limits_unverified=limits_unverified
    )
    harness = SchedulerHarness(SETUP, worker)
    params = {**STATIC_4, "mtp_k": 8, "max_new_tokens": 24}
    ids = [harness.submit(PROMPT, **params) for _ in range(8)]
    harness.run()
    expected = [1] * 24 if limits_unverified else [8] * 3
    assert all(harness.outputs[req_id].step_lens == expected for req_id in ids)


class Cycling(FixedLength):
    """A policy whose limit changes with every step."""

    LIMITS = (8, 1, 3, 1, 1, 8, 8, 1, 2)

    def __init__(self) -> None:
        super().__init__(mask_parts(8))
        self._limits = itertools.cycle(self.LIMITS)

    def choose(self, upcoming: UpcomingStep) -> Budget:
        return Budget(next(self._limits))


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("tau", [STATIC, 0.3])
def test_a_k_of_1_after_several_accepted_tokens_feeds_them_all(
    small_model: Path, runner: ModelRunner, tau: float, overlap: bool
) -> None:
    """Requests of one batch, with runs of different lengths, against a decode that knows the k of
    each step."""
    model = load_reference(small_model)
    setup = replace(SETUP, enable_overlap=overlap)
    worker = make_mtp_worker(runner, MASK, Cycling(), limits_unverified=True)
    harness = SchedulerHarness(setup, worker)
    strategy = {} if tau == STATIC else {"mtp_strategy": ["conf_adapt", tau]}
    params = {**STATIC_4, **strategy, "mtp_k": 8, "max_new_tokens": 40, "ignore_eos": True}
    prompts = [[*PROMPT, token] for token in range(6)]
    ids = [harness.submit(prompt, **params) for prompt in prompts]
    harness.run()
    step_lens = set()
    for req_id, prompt in zip(ids, prompts, strict=True):
        out: list[int] = []
        for k in itertools.cycle(Cycling.LIMITS):
            tokens, confidences, gaps = predict(model, prompt + out, [], k, MASK)
            count = 0
            while count < k and confidences[count] >= tau:
                count += 1
            near_tie = min(gaps[: count + 1]) < 1e-4
            near_tie |= tau != STATIC and min(abs(c - tau) for c in confidences) < 1e-4
            if near_tie or len(out) >= 40:
                break
            out += tokens[: max(count, 1)]
            step_lens.add(max(count, 1))
        assert len(out) >= 10
        assert harness.outputs[req_id].token_ids[: len(out)] == out[:40]
    assert len(step_lens) > 2


@pytest.mark.parametrize("overlap", [True, False])
def test_lengths_that_are_called_exact_are_exact(small_model: Path, overlap: bool) -> None:
    """Also where a step in flight may have kept fewer tokens than the host expects: backends that
    plan on the host take such bounds for lengths."""
    setup = Setup(max_running_requests=4, enable_overlap=overlap)
    runner = make_runner(small_model, setup, setup.context_len, MTP_MAX_ROWS)
    claims = []

    def check(batch: ForwardBatch) -> None:
        if batch.bounds_are_exact:
            assert batch.kv_lens.tolist() == batch.kv_len_upper_bounds
            claims.append(len(batch.q_lens))

    runner.checks.append(check)
    harness = SchedulerHarness(setup, make_mtp_worker(runner, MASK, Cycling()))
    params = {"max_new_tokens": 40, "temperature": 0.0}
    harness.generate([[1, 2], [3]], mtp_enabled=True, mtp_k=4, mtp_verify=True, **params)
    num_claims = len(claims)
    harness.generate([[1, 2], [3]], **params)
    assert len(claims) >= num_claims + 40
