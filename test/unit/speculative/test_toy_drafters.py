"""Drafters that only tests know, over the contract of `speculative/drafter.py`: chains and trees of
drafts change no token, whatever happens to the requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import ngram_drafter
import toy_attention
from drafter_checks import (
    Request,
    are_close,
    asking_requests,
    assert_many_of_each,
    assert_same,
    drafter_harness,
    serve,
)
from mtp_oracle import greedy_over_kv_of, load_reference
from ngram_drafter import NgramOptions
from sgl_kernel import ConfirmedDrafts, reference
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.layers.logit_adjustments import ExtraTokens
from sglang.srt.messages.control import (
    AbortReq,
    ContinueGenerationReq,
    FromDirectory,
    PauseGenerationReq,
    PauseMode,
    UpdateWeightsReq,
)
from sglang.srt.model_executor.model_runner import ForwardResult, ModelRunner
from sglang.srt.registry import ATTENTION_BACKENDS, DRAFTERS
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step import torch_step_ops
from sglang.srt.step.draft_trees import DraftTrees
from sglang.srt.step.step_ops import AcceptedTokens, LookaheadLayout, RowLayout
from sglang.srt.step.step_outputs import RunRows
from sglang.srt.step.worker import LogprobPlan, ScheduleBatch
from sglang.srt.workers import tp_worker
from sglang.srt.workers.tp_worker import TpModelWorker
from target import TARGET
from unit.conftest import SMALL
from utils import Collected, SchedulerHarness, Setup, make_random_llama, make_random_model

VOCAB = 6
CONTEXT = 128
DRAFTERS_OF_TESTS = {
    "chain": NgramOptions(max_drafts=5),
    "tree": NgramOptions(max_drafts=16, max_depth=6),
}
ON_TOY = {"device": "cpu", "dtype": "float32", "attention_backend": "toy"}
BASE = Setup(num_pages=800, context_len=CONTEXT)
# overlap, radix, page size, prompt tokens of a step, retract interval: each pair of values occurs.
WAYS = [
    (True, True, 1, 3, 2),
    (False, True, 16, 3, 0),
    (True, False, 16, 2048, 2),
    (False, False, 1, 2048, 0),
    (True, False, 1, 3, 0),
    (False, True, 16, 2048, 2),
]
# A chain is a tree without siblings, and what EAGLE's heads draft in `test_eagle.py`.
KINDS_AND_WAYS = [*(("tree", way) for way in WAYS), *(("chain", way) for way in WAYS[2:4])]
CROSSED = [("tree", WAYS[1]), ("chain", WAYS[2])]


@pytest.fixture(autouse=True)
def toy_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DRAFTERS.entries, "ngram", ngram_drafter.PLACE)


def toy(kind: str, **changes: Any) -> DrafterConfig:
    return DrafterConfig("ngram", replace(DRAFTERS_OF_TESTS[kind], **changes))


def setup_of(way: tuple[bool, bool, int, int, int], **changes: Any) -> Setup:
    overlap, radix, page_size, chunk, interval = way
    return replace(
        BASE,
        enable_overlap=overlap,
        use_radix_cache=radix,
        page_size=page_size,
        num_pages=800 // page_size,
        chunked_prefill_size=chunk,
        retract_interval=interval,
        **changes,
    )


def some_requests(seed: int, num_new: int = 30) -> list[Request]:
    """Greedy and sampled, of which some share a beginning."""
    chooser = random.Random(seed)
    shared = [chooser.randrange(VOCAB) for _ in range(20)]
    requests = []
    for number in range(8):
        prompt = shared[: chooser.choice([0, 7, 20])]
        prompt = prompt + [chooser.randrange(VOCAB) for _ in range(chooser.choice([1, 2, 16]))]
        params: dict[str, Any] = {"max_new_tokens": num_new, "temperature": 0.0}
        if number % 3 == 1:
            params |= {"temperature": 0.6, "sampling_seed": number}
        requests.append(Request(prompt, params))
    return requests


_served_plainly: dict[str, list[Collected]] = {}


def plain(path: Path, setup: Setup, requests: list[Request], **changes: Any) -> list[Collected]:
    """Returns what a server without drafts answers."""
    key = repr((path, setup, requests, changes))
    if key not in _served_plainly:
        _served_plainly[key] = serve(path, setup, None, requests, **changes).outcomes
    return _served_plainly[key]


@pytest.mark.long_matrix
@pytest.mark.parametrize(("kind", "way"), KINDS_AND_WAYS, ids=str)
def test_drafts_change_no_token(
    small_model: Path, kind: str, way: tuple[bool, bool, int, int, int]
) -> None:
    requests = some_requests(WAYS.index(way))
    setup = setup_of(way)
    served = serve(small_model, setup, toy(kind), requests)
    assert_same(served.outcomes, plain(small_model, setup, requests))
    assert_many_of_each(served.seen, kind == "tree")


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", DRAFTERS_OF_TESTS)
@pytest.mark.parametrize(
    "changes",
    [
        {"max_rows": 20},
        {"is_fickle": True},
        {"packs": True},
        {"is_fickle": True, "packs": True, "max_rows": 20},
    ],
    ids=str,
)
def test_steps_may_feed_more_rows_than_drafts_or_fewer(
    small_model: Path, kind: str, changes: dict[str, Any]
) -> None:
    """Rows behind the drafts are padding; drafts that are not fed are forgotten; and where there
    may be trees some drafts are chains."""
    requests, setup = some_requests(20, num_new=24), setup_of(WAYS[1])
    served = serve(small_model, setup, toy(kind, **changes), requests)
    assert_same(served.outcomes, plain(small_model, setup, requests))
    assert_many_of_each(served.seen, kind == "tree", least=8)


# ---------------------------------------------------------------- what requests may ask for


@pytest.mark.long_matrix
@pytest.mark.parametrize(("kind", "way"), CROSSED, ids=str)
def test_all_that_requests_ask_for_is_what_they_get_without_drafts(
    small_model: Path, kind: str, way: tuple[bool, bool, int, int, int]
) -> None:
    requests, setup = asking_requests(VOCAB), setup_of(way)
    served = serve(small_model, setup, toy(kind), requests)
    assert_same(served.outcomes, plain(small_model, setup, requests))
    assert_many_of_each(served.seen, kind == "tree")
    assert served.seen["stop"] > 3
    assert served.seen["clipped"] > 1, "No stop was inside an accepted run."


@pytest.mark.parametrize("kind", DRAFTERS_OF_TESTS)
def test_the_last_hidden_states_are_of_the_rows_that_tokens_were_drawn_from(
    small_model: Path, kind: str
) -> None:
    """One per token, also where a stop cuts off what a step has confirmed."""
    requests = [
        Request([1, 2, 3], {"max_new_tokens": 25 - cut, "temperature": 0.0}, None, states)
        for states in ("last", "all")
        for cut in range(4)
    ]
    served = serve(small_model, BASE, toy(kind), requests)
    assert_same(served.outcomes, plain(small_model, BASE, requests))
    assert served.seen["confirmed"] > 10
    for last, every in zip(served.outcomes[:4], served.outcomes[4:], strict=True):
        assert len(last.hidden_states) == len(last.token_ids)
        pairs = zip(last.hidden_states, every.hidden_states[2:], strict=True)
        assert all(are_close(left, right) for left, right in pairs)


# ---------------------------------------------------------------- ends, aborts, pauses, weights


@pytest.mark.long_matrix
@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("kind", DRAFTERS_OF_TESTS)
def test_requests_end_at_the_last_token_of_the_context(
    small_model: Path, kind: str, page_size: int
) -> None:
    context, chooser = 48, random.Random(page_size)
    requests = []
    for left in (0, 0, 0, 1, 2, 3, 5, 8):
        num_new = chooser.randint(2, 30)
        prompt = [chooser.randrange(VOCAB) for _ in range(context - left - num_new)]
        requests.append(Request(prompt, {"max_new_tokens": num_new, "temperature": 0.0}))
    pages = -(-3 * (context + 20) // page_size)  # for three requests
    setup = replace(BASE, context_len=context, page_size=page_size, num_pages=pages)
    served = serve(small_model, setup, toy(kind), requests)
    assert_same(served.outcomes, plain(small_model, setup, requests))
    assert served.seen["context's end"] > 5
    assert served.seen["confirmed"] > 10


@pytest.mark.parametrize(("kind", "way"), CROSSED, ids=str)
def test_aborts_at_any_step_give_a_prefix_and_disturb_nobody(
    small_model: Path, kind: str, way: tuple[bool, bool, int, int, int]
) -> None:
    requests, setup, chooser = some_requests(11), setup_of(way), random.Random(1)
    victims = {chooser.randint(3, 12): req_id for req_id in (1, 4, 5, 8)}

    def abort(harness: SchedulerHarness, step: int) -> None:
        if step in victims:
            harness.inbox.messages.append(AbortReq(req_ids=[victims[step]]))

    served = serve(small_model, setup, toy(kind), requests, abort)
    pairs = list(zip(served.outcomes, plain(small_model, setup, requests), strict=True))
    for outcome, right in pairs:
        assert outcome.num_ends == 1
        assert outcome.token_ids == right.token_ids[: len(outcome.token_ids)]
    is_aborted = [outcome.finish_reason != right.finish_reason for outcome, right in pairs]
    assert {number + 1 for number, flag in enumerate(is_aborted) if flag} == set(victims.values())


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "mode", "overlap"),
    [
        ("chain", "in_place", True),
        ("tree", "in_place", False),
        ("chain", "retract", False),
        ("tree", "retract", True),
    ],
)
def test_tokens_after_pauses_are_those_without(
    small_model: Path, kind: str, mode: PauseMode, overlap: bool
) -> None:
    requests, chooser = some_requests(12), random.Random(2)
    setup = replace(BASE, page_size=16, num_pages=50, enable_overlap=overlap)

    def pause(harness: SchedulerHarness, step: int) -> None:
        if chooser.random() < 0.15:
            harness.call(PauseGenerationReq(call_id=2 * step, mode=mode))
            harness.call(ContinueGenerationReq(call_id=2 * step + 1))

    served = serve(small_model, setup, toy(kind), requests, pause)
    assert_same(served.outcomes, plain(small_model, setup, requests))
    assert_many_of_each(served.seen, kind == "tree", least=12)


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("other"), seed=8, **SMALL)


@pytest.mark.long_matrix
@pytest.mark.parametrize("mode", ["in_place", "retract"])
@pytest.mark.parametrize("kind", DRAFTERS_OF_TESTS)
def test_new_weights_confirm_what_they_would_say_themselves(
    small_model: Path, other_model: Path, kind: str, mode: PauseMode
) -> None:
    """Drafts of the time before the update are judged by the new weights, over the KV of the old
    ones (in_place) or over their own."""
    harness, seen = drafter_harness(small_model, BASE, toy(kind))
    prompts = [[1, 2, 3, 1, 2], [4, 0, 4], [2, 5, 5, 1]]
    params = {"max_new_tokens": 40, "temperature": 0.0}
    ids = [harness.submit(prompt, **params) for prompt in prompts]
    for _ in range(6):
        harness.step()
    harness.call(PauseGenerationReq(call_id=1, mode=mode))
    heads = [list(harness.outputs[req_id].token_ids) for req_id in ids]
    update = UpdateWeightsReq(call_id=2, source=FromDirectory(path=str(other_model)))
    assert harness.call(update, max_steps=100_000).success
    harness.call(ContinueGenerationReq(call_id=3))
    harness.run()
    old, new = load_reference(small_model), load_reference(other_model)
    for prompt, head, req_id in zip(prompts, heads, ids, strict=True):
        reads_head = old if mode == "in_place" else new
        tail = greedy_over_kv_of(reads_head, new, prompt + head, 40 - len(head))
        assert harness.outputs[req_id].token_ids == head + tail
    assert seen["confirmed"] > 20


# ---------------------------------------------------------------- attention


@pytest.fixture
def toy_attention_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ATTENTION_BACKENDS.entries, "toy", toy_attention.PLACE)


@pytest.mark.usefixtures("toy_attention_is_registered")
@pytest.mark.parametrize("kind", [None, *DRAFTERS_OF_TESTS])
def test_a_backend_of_a_name_in_the_registry_serves_the_same_tokens(
    small_model: Path, kind: str | None
) -> None:
    """It is written row by row, so it is the oracle of what rows of a tree see, too."""
    requests, setup = some_requests(13, num_new=16), setup_of(WAYS[1])
    served = serve(small_model, setup, kind and toy(kind), requests, **ON_TOY)
    right = plain(small_model, setup, requests, **ON_TOY | {"attention_backend": "torch_native"})
    assert_same(served.outcomes, right)
    if kind:
        assert_many_of_each(served.seen, kind == "tree", least=10)


@pytest.fixture(scope="module")
def windowed_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its layers see five tokens, fewer than a tree has nodes and levels."""
    path = tmp_path_factory.mktemp("windowed")
    return make_random_model("mistral", path, seed=3, sliding_window=5, **SMALL)


@pytest.mark.usefixtures("toy_attention_is_registered")
@pytest.mark.parametrize("changes", [ON_TOY, {}], ids=["toy", "backend"])
@pytest.mark.parametrize("kind", DRAFTERS_OF_TESTS)
def test_a_sliding_window_counts_the_tokens_of_a_path(
    windowed_model: Path, kind: str, changes: dict[str, Any]
) -> None:
    requests = some_requests(14, num_new=16)
    served = serve(windowed_model, BASE, toy(kind), requests, **changes)
    assert_same(served.outcomes, plain(windowed_model, BASE, requests, **changes))
    assert_many_of_each(served.seen, kind == "tree", least=10)


# ---------------------------------------------------------------- what these tests must find


def stands_side_by_side(patch: pytest.MonkeyPatch) -> None:
    right = torch_step_ops._with_trees

    def with_trees(
        chains: LookaheadLayout,
        trees: DraftTrees,
        rows: torch.Tensor,
        offsets: torch.Tensor,
        *a: Any,
    ) -> tuple[LookaheadLayout, torch.Tensor]:
        return right(chains, trees, rows, offsets, *a)[0], offsets

    patch.setattr(torch_step_ops, "_with_trees", with_trees)


def sees_other_branches(patch: pytest.MonkeyPatch) -> None:
    right = ModelRunner.forward

    def forward(self: ModelRunner, batch: ForwardBatch) -> ForwardResult:
        return right(self, replace(batch, ancestors=None))

    patch.setattr(ModelRunner, "forward", forward)


def leaves_kv_where_it_was(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(reference, "move_kept_kv", lambda *args: None)


def punishes_other_branches(patch: pytest.MonkeyPatch) -> None:
    right = TpModelWorker._drafts_before

    def drafts_before(self: TpModelWorker, layout: RowLayout) -> ExtraTokens:
        lookahead = layout.lookahead
        assert lookahead is not None
        return right(self, replace(layout, lookahead=replace(lookahead, ancestors=None)))

    patch.setattr(TpModelWorker, "_drafts_before", drafts_before)


def returns_states_of_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    right = tp_worker.hidden_states

    def hidden_states(batch: ScheduleBatch, run: RunRows, capture: Any) -> torch.Tensor | None:
        return right(batch, run._replace(accepted=replace(run.accepted, path=None)), capture)

    patch.setattr(tp_worker, "hidden_states", hidden_states)


def scores_the_first_rows(patch: pytest.MonkeyPatch) -> None:
    right = tp_worker.emitted_queries

    def queries(plan: LogprobPlan, layout: RowLayout, accepted: AcceptedTokens) -> Any:
        path = accepted.path
        if path is not None:
            accepted = replace(accepted, path=torch.arange(path.shape[1]).expand(path.shape))
        return right(plan, layout, accepted)

    patch.setattr(tp_worker, "emitted_queries", queries)


def takes_trees_for_chains(patch: pytest.MonkeyPatch) -> None:
    right = reference.confirm_drafts

    def confirm(tokens: Any, targets: Any, parents: Any, *args: Any) -> ConfirmedDrafts:
        return right(tokens, targets, None, *args)

    patch.setattr(reference, "confirm_drafts", confirm)


def forgets_a_level(patch: pytest.MonkeyPatch) -> None:
    right = DraftTrees.write

    def write(self: DraftTrees, rows: torch.Tensor, parents: torch.Tensor) -> None:
        right(self, rows, parents)
        self.depths[rows, 3:] -= (self.depths[rows, 3:] > 1).long()

    patch.setattr(DraftTrees, "write", write)


@pytest.mark.long_matrix
@pytest.mark.skipif(TARGET.device != "cpu", reason="The bugs are put into the operations of a CPU.")
@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (stands_side_by_side, "other tokens"),
        (sees_other_branches, "other (tokens|scores)"),
        (leaves_kv_where_it_was, "other tokens"),
        (punishes_other_branches, "other (tokens|scores)"),
        (returns_states_of_the_first_rows, "other states"),
        (scores_the_first_rows, "other scores"),
        (takes_trees_for_chains, "draft was|drafts were"),
        (forgets_a_level, "Another depth"),
    ],
)
def test_a_bug_in_trees_is_found(
    small_model: Path,
    monkeypatch: pytest.MonkeyPatch,
    bug: Callable[[pytest.MonkeyPatch], None],
    found: str,
) -> None:
    """Finds the bug by other answers or by the token table; the canary is left out, which would be
    first."""
    requests, setup = asking_requests(VOCAB), setup_of(WAYS[1])
    requests = requests[3:9] + requests[15:21]  # with penalties, biases and others
    right = plain(small_model, setup, requests)
    bug(monkeypatch)
    with pytest.raises(AssertionError, match=found):
        assert_same(
            serve(small_model, setup, toy("tree"), requests, checks_kv=False).outcomes, right
        )
