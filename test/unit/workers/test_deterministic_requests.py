"""Deterministic requests among others, with both orders of sums as a CPU can have them
(`support/fixed_orders.py`): a step that has one is computed in fixed orders, all others as on a
server without such requests, and no KV of the others gets into its tokens."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from draft_heads import EAGLE3
from drafted_serving import Disturb, Drafted, abort, nothing, params_of, pause, prompts
from eagle_models import STANDALONE, eagle_config_for, write_models
from fixed_orders import both_orders_on_a_cpu
from jumping_tier import JUMPING, jumping_tiers
from random_steps import random_step
from round_serving import NUM_STEPS, ON_CPU, On, copied, runners, setup_of, zero
from sglang.srt.layers import logprobs
from sglang.srt.layers.forward_batch import MIXED, ForwardBatch, GraphKey
from sglang.srt.layers.sampler import Sampler
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.graph_keys import kind_of
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.processes.worker_factory import drafter_models
from sglang.srt.registry import ROW_INDEPENDENT
from sglang.srt.speculative.drafter_options import DrafterConfig
from sglang.srt.step.worker import ScheduleBatch
from sglang.srt.workers.round_graphs import VerifiedStep, _CapturedStep
from utils import Setup, make_random_model, make_runner

CONTEXT, WIDTH, MAX_ROWS = 60, 5, 32
ALL_FIXED = On("cpu", ROW_INDEPENDENT)
Outcome = list[list[int]]

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def on_a_cpu() -> Iterator[None]:
    with both_orders_on_a_cpu(), jumping_tiers():
        yield


# ---------------------------------------------------------------- a model's steps


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "model"
    return make_random_model("llama", folder, num_hidden_layers=2)


def runner_of(
    path: Path, backend: str = "ragged", ops: str = "torch", **changes: Any
) -> ModelRunner:
    """A runner with graphs, over KV that is random, of which every request has some."""
    runner = make_runner(
        path,
        Setup(num_pages=400, max_running_requests=4),
        CONTEXT,
        WIDTH,
        device="cpu",
        attention_backend=backend,
        ops=ops,
        dtype="float32",
        max_graph_width=WIDTH,
        max_graph_rows=MAX_ROWS,
        **changes,
    )
    table = runner.req_to_token_pool.req_to_token
    table.copy_(1 + torch.arange(table.numel()).view_as(table))
    return runner


def step(runner: ModelRunner, q_lens: list[int], seed: int) -> ForwardBatch:
    return random_step(runner, q_lens, seed, CONTEXT, 4)


def computed(runner: ModelRunner, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Hidden states and logits of a step behind the same KV, and whether it was a graph."""
    for kv in runner.kv_pool.kv:
        kv.normal_(generator=torch.Generator().manual_seed(0))
    result = runner.forward(batch)
    return result.hidden.clone(), runner.compute_logits(result.hidden), result.used_graph


def test_a_step_has_the_bits_of_a_model_that_has_its_orders_alone(small: Path) -> None:
    both = runner_of(small, has_both_orders=True)
    alone = {False: runner_of(small), True: runner_of(small, ROW_INDEPENDENT, ROW_INDEPENDENT)}
    shapes = [[1], [1, 1, 1], [3, 1], [5, 5, 5, 5], [20, 1, 2], [30], [33, 2], [55, 40]]
    graphs = set()
    for seed, shape in enumerate(shapes):
        found = []
        for fixed_orders in (False, True, False):
            batch = replace(step(both, shape, seed), fixed_orders=fixed_orders)
            hidden, logits, used_graph = computed(both, batch)
            right = computed(alone[fixed_orders], batch)
            assert torch.equal(hidden, right[0]), (shape, fixed_orders)
            assert torch.equal(logits, right[1])
            assert used_graph == right[2] == (sum(shape) <= MAX_ROWS)
            found.append(hidden)
            graphs.add(used_graph)
        assert torch.equal(found[0], found[2])
        assert not torch.allclose(found[0], found[1], atol=0.1), "There is nothing to tell apart."
    assert graphs == {True, False}


def test_each_graph_is_captured_for_both_orders_and_replayed_by_its_own(small: Path) -> None:
    both, fast = runner_of(small, has_both_orders=True), runner_of(small)
    assert both.graph_keys is not None
    assert fast.graph_keys is not None
    keys = both.graph_keys.all
    assert [key for key in keys if not key.fixed_orders] == fast.graph_keys.all
    assert [replace(key, fixed_orders=False) for key in keys if key.fixed_orders] == (
        fast.graph_keys.all
    )
    assert both.num_graphs == 2 * fast.num_graphs
    for key in keys:
        assert kind_of(key).endswith(", fixed orders") == key.fixed_orders
        found = both.graph_keys.find_shape(
            key.num_reqs,
            key.width + 20 * (key.tag == MIXED),
            key.num_tokens,
            fixed_orders=key.fixed_orders,
        )
        assert found is not None
        assert found.fixed_orders == key.fixed_orders
    both.drop_graphs()
    both.capture_graphs()
    assert both.num_graphs == 2 * fast.num_graphs


def test_a_model_with_one_order_computes_all_steps_in_it(small: Path) -> None:
    """A drafter's model, say, and all models of a server whose requests are all deterministic."""
    runner = runner_of(small)
    batch = step(runner, [3, 1], 0)
    plain, asked = computed(runner, batch), computed(runner, replace(batch, fixed_orders=True))
    assert torch.equal(plain[0], asked[0])
    assert plain[2]
    assert asked[2]


# ---------------------------------------------------------------- requests


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("eagle"))


@pytest.fixture(scope="module")
def right(paths: dict[str, Path]) -> dict[bool, Outcome]:
    """Tokens of each prompt alone, on servers with one order of sums: the usual one, the fixed."""
    with both_orders_on_a_cpu():
        found = {}
        for is_fixed in (False, True):
            setup = setup_of(use_radix_cache=False, enable_overlap=False)
            on = ALL_FIXED if is_fixed else ON_CPU
            ops = ROW_INDEPENDENT if is_fixed else "torch"
            group = runners(paths, None, setup, on, ops=ops)
            plain = Drafted(group, None, setup)
            zero(group)
            found[is_fixed] = [
                plain.generate([each], **params_of(i))[0] for i, each in enumerate(prompts())
            ]
    different = [one != other for one, other in zip(found[False], found[True], strict=True)]
    assert sum(different) > len(different) // 2, "There is nothing to tell apart."
    return found


class Mixed:
    """A server on which requests ask to be deterministic, and what its steps were.

    Args:
        of_all: all its steps are in fixed orders.

    Attributes:
        steps: of each step whether it had a deterministic request, and whether any request is not.
        graphs: of each replay of a graph of the target's whether it was of fixed orders, beside
            whether the step was.
    """

    def __init__(
        self,
        paths: dict[str, Path],
        kind: str | None,
        setup: Setup,
        policy: str,
        of_all: bool = False,
    ) -> None:
        drafter: DrafterConfig | None = None
        if kind is not None:
            drafter = eagle_config_for(paths["target"], paths[kind], kind, NUM_STEPS, policy)
        on = ALL_FIXED if of_all else ON_CPU
        group = runners(paths, drafter, setup, on, has_both_orders=not of_all)
        self.harness = Drafted(group, drafter, setup)
        zero(group)
        self._is_fixed: dict[int, bool] = {}  # by row
        self.steps: list[tuple[bool, bool]] = []
        self.graphs: list[tuple[bool, bool]] = []
        self._worker: Any = self.harness.scheduler._worker
        self._launch = self._worker.forward_batch_generation
        self._worker.forward_batch_generation = self._watched
        if (rounds := self._worker._rounds) is not None:
            verify = rounds.verify

            def verify_and_copy(*step: Any) -> VerifiedStep | None:
                found: VerifiedStep | None = verify(*step)
                return None if found is None else copied(found)

            rounds.verify = verify_and_copy

    def _watched(self, batch: ScheduleBatch) -> Any:
        for new in batch.new_rows:
            self._is_fixed[new.row] = new.params.deterministic
        kinds = {self._is_fixed[row] for row in batch.rows}
        assert batch.fixed_orders == (True in kinds)
        self.steps.append((batch.fixed_orders, False in kinds))
        return self._launch(batch)

    def serve(self, right: dict[bool, Outcome], share: float, disturb: Disturb, seed: int) -> None:
        """Sends all prompts three times, of which a share is deterministic, and compares the
        answers of those, or of all if all are alike."""
        harness, chooser = self.harness, random.Random(seed)
        asked = {}
        for turn in range(3):
            for index, prompt in enumerate(prompts()):
                is_fixed = chooser.random() < share
                salt = {"cache_key": ("", "x")} if turn == 2 and index % 4 == 3 else {}
                number = harness.submit(prompt, **salt, deterministic=is_fixed, **params_of(index))
                asked[number] = index, is_fixed
                if chooser.random() < 0.4:
                    harness.step()
                    disturb(harness, chooser)
            while not harness.is_idle:
                harness.step()
                disturb(harness, chooser)
        harness.check()
        for number, (index, is_fixed) in asked.items():
            outcome, tokens = harness.outputs[number], right[is_fixed][index]
            if outcome.finish_reason is not None and outcome.finish_reason.type == "abort":
                tokens = tokens[: len(outcome.token_ids)]
            if is_fixed or share == 0:
                assert outcome.token_ids == tokens, (number, index, is_fixed)


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "disturb", "changes"),
    [
        (None, nothing, {}),
        (None, pause, {"page_size": 16}),
        (None, abort, {"retract_interval": 3}),
        (None, nothing, {"chunked_prefill_size": 5, "enable_overlap": False}),
        (EAGLE3, nothing, {}),
        (EAGLE3, pause, {"retract_interval": 5}),
        (EAGLE3, abort, {"page_size": 16, "chunked_prefill_size": 7}),
        (STANDALONE, pause, {}),
    ],
)
def test_deterministic_requests_get_their_own_tokens_in_any_company(
    paths: dict[str, Path],
    right: dict[bool, Outcome],
    kind: str | None,
    disturb: Disturb,
    changes: dict[str, Any],
) -> None:
    policy = JUMPING if disturb is nothing else "fixed"
    mixed = Mixed(paths, kind, setup_of(**changes), policy)
    mixed.serve(right, 0.5, disturb, 0)
    kinds = set(mixed.steps)
    assert (True, True) in kinds, "Some steps have requests of both kinds."
    assert (False, True) in kinds, "Some have none that is deterministic."


@pytest.mark.long_matrix
@pytest.mark.parametrize("share", [0, 1])
@pytest.mark.parametrize("kind", [None, EAGLE3])
def test_requests_of_one_kind_get_the_tokens_of_a_server_of_that_kind(
    paths: dict[str, Path], right: dict[bool, Outcome], kind: str | None, share: int
) -> None:
    mixed = Mixed(paths, kind, setup_of(), "fixed")
    mixed.serve(right, share, nothing, 1)
    assert {is_fixed for is_fixed, _ in mixed.steps} == {bool(share)}


def test_rounds_and_steps_replay_graphs_of_their_orders(
    paths: dict[str, Path], right: dict[bool, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    mixed = Mixed(paths, EAGLE3, setup_of(), "fixed")
    rounds: Any = mixed.harness.scheduler._worker._rounds
    names = {id(each): kind for kind, graphs in rounds._steps.items() for each in graphs.values()}
    replayed = list[tuple[bool, bool]]()
    replay, run = _CapturedStep.replay, CudaGraphRunner.run

    def of_round(self: Any, rows: list[int]) -> None:
        if id(self) in names:
            replayed.append((names[id(self)].fixed_orders, mixed.steps[-1][0]))
        replay(self, rows)

    def of_step(self: Any, key: GraphKey, batch: ForwardBatch) -> Any:
        if key.hidden_width == 0:  # the target's
            replayed.append((key.fixed_orders, mixed.steps[-1][0]))
        return run(self, key, batch)

    monkeypatch.setattr(_CapturedStep, "replay", of_round)
    monkeypatch.setattr(CudaGraphRunner, "run", of_step)
    mixed.serve(right, 0.4, nothing, 2)
    assert {(False, False), (True, True)} == set(replayed)
    assert len({kind.fixed_orders for kind in rounds._steps}) == 2


@pytest.mark.long_matrix
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        (None, {}),
        (None, {"chunked_prefill_size": 7, "page_size": 16, "enable_overlap": False}),
        (EAGLE3, {"retract_interval": 4}),
    ],
)
def test_logprobs_are_those_of_a_second_forward_pass_bit_for_bit(
    paths: dict[str, Path], kind: str | None, changes: dict[str, Any]
) -> None:
    """Compares greedy tokens and those drawn at temperature 1, beside requests of all kinds."""
    with both_orders_on_a_cpu(row_by_row=True):
        harness = Mixed(paths, kind, setup_of(**changes), "fixed").harness
    options, sent = LogprobOptions(0, 3, [1, 7]), {}
    for index, prompt in enumerate(prompts() * 2):
        params = params_of(index) | {"temperature": (0.0, 1.0, 0.7)[index % 3]}
        is_fixed = index % 3 < 2 and index % 5 < 3
        sent[harness.submit(prompt, logprobs=options, deterministic=is_fixed, **params)] = (
            prompt if is_fixed else None
        )
        if index % 4 == 0:
            harness.step()
    harness.run()
    seconds = {}
    for number, prompt in sent.items():
        if prompt is not None:
            tokens = prompt + harness.outputs[number].token_ids
            start = LogprobOptions(len(prompt) - 1, options.top_num, options.token_ids)
            again = {"logprobs": start, "deterministic": True, "max_new_tokens": 1}
            seconds[number] = harness.submit(tokens, **again)
    harness.run()
    harness.check()
    assert len(seconds) > 5
    for number, second in seconds.items():
        first, again = harness.outputs[number], harness.outputs[second]
        assert again.input_logprobs == first.output_logprobs, number


LOGIT_READERS = ("sample", "sample_scored", "query")


@pytest.mark.parametrize("kind", [None, EAGLE3])
@pytest.mark.parametrize("of_all", [False, True])
def test_logits_of_fixed_orders_have_one_form_for_all_who_read_them(
    paths: dict[str, Path], kind: str | None, of_all: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Penalties of another request change them to float32 in any step."""
    forms, fixed = list[tuple[bool, torch.dtype]](), [of_all]

    def noting(function: Any, place: int) -> Any:
        def noted(*args: Any, **kwargs: Any) -> Any:
            forms.append((fixed[0], args[place].dtype))
            return function(*args, **kwargs)

        return noted

    def rounded(self: ModelRunner, hidden: torch.Tensor) -> torch.Tensor:
        return self.model.compute_logits(hidden, self._layers).bfloat16()

    monkeypatch.setattr(ModelRunner, "compute_logits", rounded)
    for name in LOGIT_READERS:
        monkeypatch.setattr(Sampler, name, noting(getattr(Sampler, name), 1))
    monkeypatch.setattr(logprobs, "query_logprobs", noting(logprobs.query_logprobs, 0))
    server = Mixed(paths, kind, setup_of(), "fixed", of_all)
    assert all(dtype == torch.float32 for is_fixed, dtype in forms if is_fixed), "in graphs"
    if not of_all:
        forms.clear()  # graphs of both kinds
    launch, rounds = server._launch, server._worker._rounds
    num_replayed, replay = [0], _CapturedStep.replay

    def launched(batch: ScheduleBatch) -> Any:
        fixed[0] = batch.fixed_orders
        return launch(batch)

    def replayed(self: Any, rows: list[int]) -> None:
        num_replayed[0] += 1
        replay(self, rows)

    server._launch = launched
    monkeypatch.setattr(_CapturedStep, "replay", replayed)
    for is_fixed in (True, of_all):
        for index, prompt in enumerate(prompts()):
            asked: dict[str, Any] = {"deterministic": of_all or (is_fixed and index % 3 == 0)}
            if is_fixed and index % 4 == 3:
                asked |= {"logit_bias": {"5": 1.0}, "frequency_penalty": 0.5}
            if index % 4 == 1:
                asked["logprobs"] = LogprobOptions(0, 2, [1])
            server.harness.submit(prompt, **asked, **params_of(index))
        server.harness.run()
    found = {dtype for is_fixed, dtype in forms if is_fixed}
    assert found == {torch.float32}
    assert of_all or (False, torch.bfloat16) in forms, "There is nothing to tell apart."
    assert (rounds is None) == (kind is None)
    assert (num_replayed[0] > 0) == (kind is not None)


def test_drafters_have_one_order(paths: dict[str, Path]) -> None:
    drafter = eagle_config_for(paths["target"], paths[EAGLE3], EAGLE3, NUM_STEPS, "fixed")
    group = runners(paths, drafter, setup_of(), ON_CPU, has_both_orders=True)
    target, head = (runner.config for runner in group.runners)
    assert target.orders == (False, True)
    assert head.orders == (False,)
    assert [each.orders for each in drafter_models(drafter, target)] == [(False,)]
    assert isinstance(target, ExecutionConfig)


def test_cached_prefixes_are_those_of_deterministic_requests_alone(paths: dict[str, Path]) -> None:
    mixed = Mixed(paths, None, setup_of(), "fixed")
    prompt = prompts()[-1]

    def cached(deterministic: bool) -> int:
        number = mixed.harness.submit(
            prompt, deterministic=deterministic, max_new_tokens=4, temperature=0.0
        )
        mixed.harness.run()
        return mixed.harness.outputs[number].cached_tokens

    assert [cached(False), cached(True)] == [0, 0]
    assert cached(True) == cached(False) == len(prompt) - 1
