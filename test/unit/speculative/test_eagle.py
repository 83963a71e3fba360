"""EAGLE, EAGLE-3 and DFlash: whatever the head drafts, tokens are those of a server without it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import drafter_checks
from draft_heads import DFLASH, EAGLE, EAGLE3, P_EAGLE
from drafted_serving import Drafted, abort, nothing, params_of, pause, prompts, serve
from drafter_checks import asking_requests
from eagle_models import VOCAB, eagle_config_for, write_models, write_target
from eagle_serving import (
    Served,
    check_memory_that_is_released,
    check_requests_that_end_at_the_context,
    group_for,
    right_tokens,
    setup_for,
)
from jumping_tier import JUMPING, RESTING, jumping_tiers
from pairwise import name_of, pairwise_cases
from sglang.srt.messages.control import (
    FromDirectory,
    UpdateWeightsReq,
)
from sglang.srt.models.draft_head import DraftHead

torch.set_num_threads(1)
KINDS = (EAGLE, EAGLE3, P_EAGLE, DFLASH)
BOTH = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


CHOICES: dict[str, tuple[Any, ...]] = {
    "kind": KINDS,
    "num_steps": (1, 3, 5),
    "tier_policy": ("fixed", JUMPING, RESTING),
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
    """Greedy and seeded requests; the ledger is exact and the KV canary silent in each step."""
    changes = dict(case)
    kind, num_steps, policy, memory, disturb = (
        changes.pop(key) for key in ("kind", "num_steps", "tier_policy", "memory", "disturb")
    )
    setup = setup_for(
        num_steps,
        num_tokens=128 if memory == "tight" else 1024,
        retract_interval=3 if memory == "retracts" else 0,
        **changes,
    )
    harness = Served(paths, kind, num_steps, setup, tier_policy=policy)
    ids = serve(harness, right_tokens(paths["target"]), disturb, seed=CASES.index(case))
    outcomes = [harness.outputs[req_id] for req_id in ids]
    if memory == "retracts":
        assert any(outcome.num_retractions for outcome in outcomes)
    if case["use_radix_cache"] and disturb is nothing:
        assert any(outcome.cached_tokens for outcome in outcomes)
    if policy != "fixed":
        assert harness.seen["plain decodes"] > 10
    harness.assert_many_of_each(least=10)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "page_size", "overlap", "chunk", "policy"),
    [(EAGLE, 1, True, 5, JUMPING), (EAGLE3, 16, False, 2048, "fixed")],
)
def test_all_that_requests_ask_for_is_what_they_get_without_a_head(
    paths: dict[str, Path], kind: str, page_size: int, overlap: bool, chunk: int, policy: str
) -> None:
    """Penalties, biases, filters, log-probabilities, hidden states."""
    drafter = eagle_config_for(paths["target"], paths[kind], kind, 3, policy)
    setup = setup_for(3, page_size, enable_overlap=overlap, chunked_prefill_size=chunk)
    requests = asking_requests(VOCAB)
    plain = drafter_checks.serve(paths["target"], setup, None, requests)
    served = drafter_checks.serve(paths["target"], setup, drafter, requests)
    drafter_checks.assert_same(served.outcomes, plain.outcomes)
    assert served.seen["confirmed"] > 20, served.seen
    assert served.seen["fed"] - served.seen["confirmed"] > 20, served.seen


@pytest.mark.long_matrix
@BOTH
def test_a_stop_within_an_accepted_run_clips_it(paths: dict[str, Path], kind: str) -> None:
    right, harness = right_tokens(paths["target"]), Served(paths, kind, 3, setup_for(3))
    ids: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts()):
        for stop in set(right[index]):
            req_id = harness.submit(prompt, **{**params_of(index), "stop_token_ids": [stop]})
            ids[req_id] = right[index][: right[index].index(stop) + 1]
    harness.run()
    harness.check()
    num_clipped = 0
    for req_id, tokens in ids.items():
        outcome = harness.outputs[req_id]
        assert outcome.token_ids == tokens
        assert outcome.finish_reason is not None
        assert outcome.finish_reason.type == "stop"
        num_given = sum((1 + n) * each for n, each in enumerate(outcome.accept_histogram))
        num_clipped += 1 + num_given > len(tokens)
    assert num_clipped > 5


@pytest.mark.long_matrix
@pytest.mark.parametrize(("kind", "page_size"), [(EAGLE, 16), (EAGLE3, 1)])
def test_requests_that_end_at_the_context(
    paths: dict[str, Path], kind: str, page_size: int
) -> None:
    """Drafts go past it, within the row of the page table; positions of the head reach as far,
    though its config has fewer."""
    setup = setup_for(5, page_size)
    harness = Served(paths, kind, 5, setup)
    head = harness.group.runners[1].model
    assert isinstance(head, DraftHead)
    assert head.rotary.table.shape[0] >= setup.row_width
    check_requests_that_end_at_the_context(harness, paths["target"])


@pytest.mark.long_matrix
@BOTH
def test_memory_is_released_and_taken_again(paths: dict[str, Path], kind: str) -> None:
    right = right_tokens(paths["target"])
    harness = Served(paths, kind, 3, setup_for(3, chunked_prefill_size=16))
    serve(harness, right)
    check_memory_that_is_released(harness, right)
    harness.assert_many_of_each()


@pytest.mark.long_matrix
@BOTH
def test_an_update_of_the_target_reaches_the_head(
    paths: dict[str, Path], tmp_path: Path, kind: str
) -> None:
    """Embedding and output head are the target's, also as rows of a token map."""
    later = write_target(tmp_path / "later", 7)
    (tmp_path / "map.json").write_text(str([token for token in range(VOCAB) if token != 4]))
    options = {"token_map": str(tmp_path / "map.json")} if kind == EAGLE else {}
    harness = Served(paths, kind, 3, setup_for(3), **options)
    serve(harness, right_tokens(paths["target"]))
    harness.send(UpdateWeightsReq, source=FromDirectory(path=str(later)))
    harness.seen.clear()
    serve(harness, right_tokens(later))
    if kind == EAGLE:  # that of EAGLE-3 has the output head of the old target
        harness.assert_many_of_each()


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "mean"), [(EAGLE, 1.0), (EAGLE3, 2.5), (EAGLE, 3.0), (EAGLE3, 4.0)]
)
def test_acceptance_can_be_simulated(paths: dict[str, Path], kind: str, mean: float) -> None:
    """So many tokens per step on average, also where drafts are wrong; KV is that of the tokens
    that clients get."""
    setup = setup_for(3, eos_token_ids=frozenset())
    drafter = eagle_config_for(paths["target"], paths[kind], kind, 3)
    harness = Drafted(
        group_for(paths["target"], drafter, setup),
        drafter,
        setup,
        checks_kv=True,
        simulated_accept_len=mean,
    )
    ids = [harness.submit(prompt, temperature=0.0, max_new_tokens=61) for prompt in prompts()]
    harness.run()
    harness.check()
    assert all(len(harness.outputs[req_id].token_ids) == 61 for req_id in ids)
    state = harness.scheduler.control.internal_state()
    assert state["avg_spec_accept_length"] == pytest.approx(mean, abs=0.01)
    assert state["avg_spec_accept_rate"] == pytest.approx((mean - 1) / 3, abs=0.01)
    for req_id in ids:
        histogram = harness.outputs[req_id].accept_histogram
        found = {count for count, num_steps in enumerate(histogram) if num_steps}
        assert found == {math.floor(mean - 1), math.ceil(mean - 1)}


@pytest.mark.parametrize("mean", [0.5, 4.5])
def test_acceptance_that_no_step_can_have_is_refused(paths: dict[str, Path], mean: float) -> None:
    setup = setup_for(3)
    drafter = eagle_config_for(paths["target"], paths[EAGLE], EAGLE, 3)
    with pytest.raises(ValueError, match=r"SGLANG_SIMULATE_ACC_LEN=.*between 1 and the 4 tokens"):
        Drafted(
            group_for(paths["target"], drafter, setup), drafter, setup, simulated_accept_len=mean
        )


@BOTH
def test_figures_are_of_steps_that_verified_drafts(paths: dict[str, Path], kind: str) -> None:
    """Checks the figures of each request, and of all."""
    harness = Served(paths, kind, 3, setup_for(3, chunked_prefill_size=6))
    ids = [harness.submit(prompt, **params_of(i)) for i, prompt in enumerate(prompts())]
    harness.run()
    outcomes = [harness.outputs[req_id] for req_id in ids]
    for outcome in outcomes:
        histogram = outcome.accept_histogram
        assert outcome.num_proposed_drafts == 3 * sum(histogram)
        num_tokens = 1 + sum((1 + count) * each for count, each in enumerate(histogram))
        clipped = num_tokens - len(outcome.token_ids)
        assert 0 <= clipped <= 3
    state = harness.scheduler.control.internal_state()
    confirmed = sum(
        count * each for outcome in outcomes for count, each in enumerate(outcome.accept_histogram)
    )
    fed = sum(outcome.num_proposed_drafts for outcome in outcomes)
    assert state["avg_spec_accept_rate"] == confirmed / fed
    assert state["avg_spec_accept_length"] == pytest.approx(1 + 3 * state["avg_spec_accept_rate"])
