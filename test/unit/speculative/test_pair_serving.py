"""A drafter with a model and n-grams on one server: tokens are those without drafts, requests that
name a drafter get its drafts, and the others the better ones."""

from __future__ import annotations

import code
import copy
import itertools
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_heads import DFLASH, EAGLE, EAGLE3
from drafted_serving import Drafted, abort, nothing, pause, serve
from drafter_checks import drafter_harness
from eagle_models import STANDALONE, eagle_config_for, write_models
from eagle_serving import group_for, right_tokens, setup_for
from fake_flashinfer import serve_with_fake
from jumping_tier import JUMPING, jumping_tiers
from ngram_serving import Served, ngram_config
from oracle import code_snippets
from recorded_graphs import recorded_graphs, replayable_backends
from request_choices import NGRAMS, OFF, choose_in_turn, launches_of_decodes
from round_serving import Served as ServedGraphs
from round_serving import right_tokens as right_of_graphs
from round_serving import runners, setup_of, zero
from sglang.srt.environ import Environ
from sglang.srt.layers.forward_batch import ForwardBatch
from sglang.srt.model_config import load_model_config, resolve_model_path
from sglang.srt.processes.round_flags import Asked
from sglang.srt.processes.speculation_flags import drafter_from_flags
from sglang.srt.sampling.sampling_params import Speculative
from sglang.srt.server_args import ServerArgs
from sglang.srt.speculative.drafter import ComputedStep
from sglang.srt.speculative.drafter_configs import PairConfig
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.step_ops import AcceptedTokens
from sglang.srt.step.worker import NewRow
from sglang.srt.tokenizer import load_tokenizer
from tile_spec_rounds import DEAR_ROWS, RandomBudgets
from utils import Setup

torch.set_num_threads(1)
NUM_STEPS = 3


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("pair"))


@pytest.fixture(autouse=True)
def policies() -> Iterator[None]:
    with jumping_tiers():
        yield


@pytest.fixture(scope="module")
def right_of_rounds(paths: dict[str, Path]) -> list[list[int]]:
    with recorded_graphs(), replayable_backends():
        return right_of_graphs(paths)


def pair_of(
    paths: dict[str, Path], kind: str, corpus: list[list[int]] | None = None, **options: Any
) -> DrafterConfig:
    model = eagle_config_for(paths["target"], paths[kind], kind, NUM_STEPS, **options)
    budget = None if corpus is None else 2
    ngrams = ngram_config(NUM_STEPS, corpus=corpus, corpus_budget=budget).options
    return DrafterConfig("pair", PairConfig(drafter=model, ngrams=ngrams))


class WishChecks:
    """Looks whose drafts each request is given; for `on_step` of a worker."""

    def __init__(self, harness: Any) -> None:
        self.seen = Counter[str]()
        self._drafter, self._names = harness.drafter, dict[int, str | None]()
        self._admit = harness.planner.admit
        vars(harness.planner)["admit"] = self._admitted

    def _admitted(self, new_rows: list[NewRow]) -> None:
        self._names.update((new.row, new.params.speculative.drafter) for new in new_rows)
        self._admit(new_rows)

    def __call__(self, step: ComputedStep) -> None:
        drafter, state = self._drafter, step.state
        for row, planned in zip(step.batch.rows, step.plan.next_drafts, strict=True):
            if not planned:
                continue
            first, name = int(state.committed[row]) + 1, self._names[row]
            pending = state.tokens[row, first : first + planned].tolist()
            given = pending[: int(state.pending_lens[row]) - 1]
            chains = (drafter._of_model, drafter._of_match)
            model, match = (each.tokens[row, : len(given)].tolist() for each in chains)
            if name == "ngram":
                assert given == match
            elif name is not None:
                assert given == model
            else:
                assert given in (model, match)
            made_by = int(drafter.makers(torch.tensor([row])).of_request)
            assert given == (model, match)[made_by]
            if model != match:
                self.seen[f"{name}: {'match' if given == match else 'model'}"] += 1


class FedRows:
    """Counts the rows that the model of a pair's drafter is fed, by what their requests name."""

    def __init__(self, harness: Any) -> None:
        self.seen = Counter[str]()
        self._table = harness.group.memory.table.req_to_token
        self._wishes = harness.drafter._wish_of_row
        harness.group.runners[1].checks.append(self._fed)
        harness.listeners.append(self._note)

    def _fed(self, batch: ForwardBatch) -> None:
        """Rows of padding have the dummy slot."""
        slots = batch.slots[batch.slots > 0]
        owners = (self._table[batch.rows][:, None] == slots[:, None]).any(2)
        named = (owners & (self._wishes[batch.rows, None] == 2)).any(0)
        self.seen["of n-grams"] += int(named.sum())
        self.seen["of others"] += int((~named).sum())

    def _note(self, step: ComputedStep) -> None:
        is_packed = step.plan.counts.packed is not None
        self.seen["packed beside n-grams"] += is_packed and bool(step.plan.without_model)


def check_counts(harness: Any, ids: list[int], names: Sequence[str | None]) -> Counter[str]:
    """Looks whether the counts of each drafter add up to those of all, of requests that named
    `names` in turn and of the server. Gives the drafts verified, by drafter."""
    seen, totals = Counter[str](), Counter[tuple[str, str]]()
    for req_id, name in zip(ids, itertools.cycle(names), strict=False):
        told = harness.outputs[req_id]
        confirmed = sum(count * each for count, each in enumerate(told.accept_histogram))
        counts = [*told.drafts_by.values()]
        assert sum(proposed for proposed, _ in counts) == told.num_proposed_drafts
        assert sum(correct for _, correct in counts) == confirmed
        assert name is None or {*told.drafts_by} <= {name}
        for maker, (proposed, correct) in told.drafts_by.items():
            seen[maker] += proposed
            totals += {(maker, "num_spec_drafts"): proposed}
            totals += {(maker, "num_spec_confirmed_drafts"): correct}
    stats = harness.scheduler.control.internal_state()
    by_drafter = stats["spec_by_drafter"]
    for name in ("num_spec_verifications", "num_spec_drafts", "num_spec_confirmed_drafts"):
        assert sum(each[name] for each in by_drafter.values()) == stats[name]
    for (maker, name), count in totals.items():
        assert by_drafter[maker][name] == count
    return seen


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "a head": (EAGLE, {}, {"chunked_prefill_size": 6}),
    "numbers of drafts that change": (
        EAGLE3,
        {"tier_policy": JUMPING},
        {"page_size": 16, "retract_interval": 3},
    ),
    "a draft model": (STANDALONE, {}, {"disturb": pause}),
    "blocks": (DFLASH, {"tier_policy": JUMPING}, {"page_size": 16}),
    "no overlap": (EAGLE, {"tier_policy": JUMPING}, {"enable_overlap": False, "disturb": abort}),
}


@pytest.mark.parametrize("name", CASES)
def test_each_request_gets_the_drafts_that_it_named_and_the_right_tokens(
    paths: dict[str, Path], name: str
) -> None:
    """Greedy and seeded requests of all choices share batches; the ledger and the KV canary are
    silent in each step, and what is kept of texts is what clients were told."""
    kind, options, changes = CASES[name]
    changes, right = dict(changes), right_tokens(paths["target"])
    disturb = changes.pop("disturb", nothing)
    corpus = right[::2] if kind == EAGLE3 else None
    harness = Served(
        paths["target"], pair_of(paths, kind, corpus, **options), setup_for(NUM_STEPS, **changes)
    )
    if options:
        harness.planner.policy.may_lack = True
    checks = WishChecks(harness)
    harness.listeners.append(checks)
    model = {STANDALONE: "standalone", DFLASH: "dflash"}.get(kind, "eagle")
    choices = (Speculative(), NGRAMS, Speculative(drafter=model), OFF, Speculative(max_drafts=1))
    choose_in_turn(harness, choices)
    ids = serve(harness, right, disturb)
    verified = check_counts(harness, ids, [choice.drafter for choice in choices])
    assert min(verified[model], verified["ngram"]) > 5, verified
    seen = checks.seen
    assert seen["ngram: match"] > 5, seen
    assert seen[f"{model}: model"] > 5, seen
    assert seen["None: model"] + seen["None: match"] > 5, seen
    assert harness.seen["confirmed"] > 20, harness.seen
    assert harness.seen["fed"] - harness.seen["confirmed"] > 20, harness.seen
    vars(harness).pop("submit")
    harness.flush()
    assert harness.texts_kept() == harness.texts_told()


def test_steps_that_are_cut(paths: dict[str, Path], tmp_path: Path) -> None:
    """TileSpec leaves out the drafts that are unlikely, by whoever made them; the head is fed no
    row of who names n-grams, whichever of the rows the device gave to them."""
    budgets = RandomBudgets(0)
    with budgets.chosen():
        drafter = pair_of(paths, EAGLE3, tile_spec_cache=tmp_path)
        harness: Any = Served(paths["target"], drafter, setup_for(NUM_STEPS), DEAR_ROWS)
        harness.listeners.append(budgets.scramble)
        fed = FedRows(harness)
        choose_in_turn(harness, (Speculative(), NGRAMS))
        serve(harness, right_tokens(paths["target"]))
    assert harness.seen["confirmed"] > 20, harness.seen
    assert fed.seen["packed beside n-grams"] > 10, fed.seen
    assert fed.seen["of others"] > 100, fed.seen
    assert fed.seen["of n-grams"] == 0, fed.seen


def test_over_flashinfer_a_head_is_fed_no_row_of_who_names_n_grams(
    paths: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = right_tokens(paths["target"])
    serve_with_fake(monkeypatch)
    drafter = pair_of(paths, EAGLE3)
    harness = Served(paths["target"], drafter, setup_for(NUM_STEPS, page_size=16))
    fed = FedRows(harness)
    choose_in_turn(harness, (Speculative(), NGRAMS, OFF))
    serve(harness, right)
    assert harness.seen["confirmed"] > 20, harness.seen
    assert fed.seen["of others"] > 100, fed.seen
    assert fed.seen["of n-grams"] == 0, fed.seen


def test_chains_that_are_the_same_teach_nothing(paths: dict[str, Path]) -> None:
    """Whatever longer chains of earlier steps were."""
    drafter: Any = Served(paths["target"], pair_of(paths, EAGLE3), setup_for(NUM_STEPS)).drafter
    both = drafter._of_model, drafter._of_match
    rows, no_probs = torch.tensor([0, 1]), torch.tensor([0.5, 0.5])
    longer = torch.tensor([[4, 5, 6], [4, 5, 6]]), torch.tensor([[4, 5, 7], [4, 5, 7]])
    now = torch.tensor([[8, 9], [8, 9]]), torch.tensor([[8, 9], [8, 3]])
    for chains, before, tokens in zip(both, longer, now, strict=True):
        chains.judge(rows, before, torch.tensor([3, 3]), no_probs)
        chains.judge(rows, tokens, torch.tensor([2, 2]), no_probs)
    given = torch.tensor([[8, 9, 1], [8, 9, 1]])
    accepted = AcceptedTokens(torch.tensor([3, 3]), torch.tensor([3, 3]), given)
    drafter._learn(rows, accepted, torch.tensor([2, 2]))
    for chains, right in zip(both, (2, 1), strict=True):  # of row 1 alone
        trials = chains._confidence
        assert (float(trials.tried.sum()), float(trials.right.sum())) == (2, right)


def test_where_all_name_n_grams_a_head_drafts_nothing(
    paths: dict[str, Path],
) -> None:
    harness = Served(paths["target"], pair_of(paths, EAGLE3), setup_for(NUM_STEPS))
    model = harness.drafter._model
    calls = list[int]()
    draft = model.draft
    vars(model)["draft"] = lambda *given: calls.append(1) or draft(*given)
    choose_in_turn(harness, (NGRAMS,))
    serve(harness, right_tokens(paths["target"]))
    assert not calls
    assert harness.seen["confirmed"] > 20, harness.seen


def test_where_all_take_none_nothing_is_launched_for_either_drafter(
    paths: dict[str, Path],
) -> None:
    right, launched = right_tokens(paths["target"]), list[list[Counter[str]]]()
    for drafter in (None, pair_of(paths, EAGLE)):
        group = group_for(paths["target"], drafter, setup_for(NUM_STEPS))
        harness = Drafted(group, drafter, setup_for(NUM_STEPS))
        choose_in_turn(harness, (OFF,))
        launched.append(launches_of_decodes(harness))
        serve(harness, right)
    plain, pair = launched
    assert len(pair) > 20
    assert pair == plain


@pytest.mark.long_matrix
@pytest.mark.parametrize("kind", [EAGLE3, STANDALONE])
def test_rounds_are_graphs(
    paths: dict[str, Path], right_of_rounds: list[list[int]], kind: str
) -> None:
    with recorded_graphs(), replayable_backends():
        drafter, setup = pair_of(paths, kind, tier_policy=JUMPING), setup_of()
        group = runners(paths, drafter, setup)
        served = ServedGraphs(Drafted(group, drafter, setup), group)
        zero(group)
        served.watch()
        model = "eagle" if kind == EAGLE3 else "standalone"
        choose_in_turn(served.harness, (Speculative(), Speculative(drafter=model)))
        ids = serve(served.harness, right_of_rounds)
    check_counts(served.harness, ids, (None, model))
    assert len(served.rounds) > 20
    assert len(served.proposals) > 20
    assert served.seen["right"] > 20
    assert served.seen["wrong"] > 20
    judged = served.harness.drafter._of_match._confidence
    assert 0 < float(judged.right.sum()) < float(judged.tried.sum()), "Graphs learn."


def demo_drafter(algorithm: str) -> DrafterConfig:
    flags: dict[str, Any] = {"speculative_algorithm": algorithm, "speculative_load_aware": "off"}
    if algorithm == "NGRAM":
        flags["speculative_num_draft_tokens"] = 1 + NUM_STEPS
    else:
        flags["speculative_draft_model_path"] = "demo-eagle3"
    args = ServerArgs(model_path="demo", **flags)
    asked = Asked(
        args=args,
        model=load_model_config("demo"),
        suppressed_token_ids=(),
        environ=Environ(),
    )
    drafter = drafter_from_flags(asked)
    assert drafter is not None
    return drafter


def accept_lengths(algorithm: str, prompts: list[list[int]]) -> list[float]:
    """Tokens per step of the demo model, of all prompts, and then of the same once more: what
    n-grams have seen before, word for word."""
    setup = Setup(num_pages=2000, max_running_requests=16, context_len=256)
    drafter = demo_drafter(algorithm)
    harness, _ = drafter_harness(resolve_model_path("demo"), setup, drafter, checks_kv=False)
    lengths = []
    for _ in range(2):
        params = {"max_new_tokens": 40, "temperature": 0.0, "ignore_eos": True}
        ids = [harness.submit(prompt, **params) for prompt in prompts]
        harness.run()
        histograms = [harness.outputs[each].accept_histogram for each in ids]
        num_steps = sum(map(sum, histograms))
        tokens = sum((1 + right) * count for each in histograms for right, count in enumerate(each))
        lengths.append(tokens / num_steps)
    return lengths


def test_requests_get_the_better_drafts() -> None:
    """New code, where the head is better, and code that was said before, where n-grams are."""
    encode = load_tokenizer(resolve_model_path("demo")).encode
    texts = code_snippets([copy, reprlib, code], 12, [400])
    prompts = [encode(text)[:64] for text in texts]
    algorithms = ("EAGLE3", "NGRAM", "EAGLE3,NGRAM")
    head, ngrams, pair = (accept_lengths(each, prompts) for each in algorithms)
    assert head[0] > ngrams[0] + 0.2
    assert ngrams[1] > head[1] + 0.2
    for of_head, of_ngrams, of_pair in zip(head, ngrams, pair, strict=True):
        assert of_pair > 0.95 * max(of_head, of_ngrams)
    assert pair[0] > head[0] + 0.1
