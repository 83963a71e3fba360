"""Deterministic requests on a CUDA GPU, on servers where all are (--enable-deterministic-inference)
and where some are (--enable-deterministic-requests): their tokens are the same in any company, and
their log-probabilities those of a second forward pass, bit for bit. Steps without one are those of
a server that has none."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

import sglang
from benchmark.engine_load import random_prompts
from random_steps import random_step
from sglang.srt.layers.forward_batch import ForwardBatch, GraphKey
from sglang.srt.model_config import resolve_model_path
from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.processes.runtime_config import MAX_GRAPH_ROWS
from sglang.srt.registry import ROW_INDEPENDENT
from utils import Setup, make_runner

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

pytestmark = pytest.mark.timeout(600)

ALL, SOME = "all requests", "some requests"
MODES: dict[str, dict[str, Any]] = {
    ALL: {"enable_deterministic_inference": True},
    SOME: {"enable_deterministic_requests": True},
}
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "EAGLE3": {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "demo-eagle3",
        "speculative_num_steps": 3,
        "speculative_load_aware": "off",
    },
}
SHARED: dict[str, Any] = {
    "model_path": "demo",
    "device": "cuda",
    "dtype": "bfloat16",
    "mem_fraction_static": 0.5,
    "max_total_tokens": 60_000,
    "max_running_requests": 32,
    "log_level": "error",
}
VERIFIED = {"mtp_enabled": True, "mtp_verify": True, "mtp_k": 8}
NUM_REQUESTS, LONGEST, NUM_TOP = 64, 300, 3

# ---------------------------------------------------------------- servers


class Served(NamedTuple):
    """A server. `asks`: its requests have to ask to be deterministic."""

    engine: sglang.Engine
    drafter: str
    asks: bool

    def send(
        self, requests: Sequence[dict[str, Any]], are_fixed: Sequence[bool], **more: Any
    ) -> list[Any]:
        """Answers of requests that are sent at once."""
        asked = [{"deterministic": True} if it and self.asks else {} for it in are_fixed]
        answers: list[Any] = self.engine.generate(
            input_ids=[each["input_ids"] for each in requests],
            sampling_params=[
                each["sampling_params"] | fields
                for each, fields in zip(requests, asked, strict=True)
            ],
            **more,
        )
        return answers


def best_of(positions: Sequence[Any]) -> list[list[float]]:
    """The best log-probabilities at each position. Which of equal ones comes first is not said."""
    return [[entry[0] for entry in top] for top in positions]


@pytest.fixture(
    scope="module",
    params=[(mode, drafter) for mode in MODES for drafter in DRAFTERS],
    ids=lambda pair: ", ".join(pair),
)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    mode, drafter = request.param
    with sglang.Engine(**SHARED, **MODES[mode], **DRAFTERS[drafter]) as engine:
        yield Served(engine, drafter, mode == SOME)


@pytest.fixture(scope="module")
def requests() -> list[dict[str, Any]]:
    """Some share prefixes; half are greedy, the others are drawn at temperature 1."""
    chooser = random.Random(3)
    prefix = random_prompts(1, LONGEST // 2, 4000, 1)[0]
    found = list[dict[str, Any]]()
    for index, own in enumerate(random_prompts(NUM_REQUESTS, LONGEST, 4000, 2)):
        prompt = own[: chooser.choice((1, 16, 40, 130, LONGEST))]
        if index % 3 == 0:
            prompt = prefix[: chooser.randint(1, len(prefix))] + prompt
        params: dict[str, Any] = {"max_new_tokens": chooser.choice((9, 40)), "ignore_eos": True}
        drawn = {"temperature": 1.0, "top_p": 0.95, "sampling_seed": index}
        params |= drawn if index % 2 else {"temperature": 0.0}
        found.append({"input_ids": prompt, "sampling_params": params})
    return found


@pytest.fixture(scope="module")
def right() -> dict[str, list[list[int]]]:
    """Tokens of the first server that was asked; all others must give the same."""
    return {}


def test_tokens_are_the_same_in_any_company_and_on_both_kinds_of_servers(
    served: Served, requests: list[dict[str, Any]], right: dict[str, list[list[int]]]
) -> None:
    """A random half asks, then another one beside cached prefixes of both kinds; then a few of
    each are alone."""
    chooser = random.Random(served.drafter)
    found: list[list[int] | None] = [None] * len(requests)
    for _ in range(3):
        are_fixed = [chooser.random() < 0.5 for _ in requests]
        for place, answer in enumerate(served.send(requests, are_fixed)):
            if are_fixed[place] or not served.asks:
                tokens = answer["output_ids"]
                assert found[place] in (None, tokens), place
                found[place] = tokens
    for place in range(0, len(requests), 7):
        alone = served.send(requests[place : place + 1], [True])[0]["output_ids"]
        assert found[place] in (None, alone), place
    if served.drafter == "plain":
        masked = [
            {**each, "sampling_params": each["sampling_params"] | VERIFIED} for each in requests
        ]
        for place, answer in enumerate(served.send(masked, [True] * len(masked))):
            assert found[place] in (None, answer["output_ids"]), place
    expected = right.setdefault("tokens", [tokens or [] for tokens in found])
    known = [place for place, tokens in enumerate(found) if tokens and expected[place]]
    assert len(known) > NUM_REQUESTS // 2
    assert [place for place in known if found[place] != expected[place]] == []


@pytest.mark.parametrize("ahead", [{}, VERIFIED], ids=["as they are", "ahead by masks"])
def test_logprobs_are_those_of_a_second_forward_pass_bit_for_bit(
    served: Served, requests: list[dict[str, Any]], ahead: dict[str, Any]
) -> None:
    """Compares the tokens' and the best ones'; where requests have to ask, half of those beside are
    not deterministic."""
    if ahead and served.drafter != "plain":
        pytest.skip("A server with a drafter predicts from no masks.")
    are_fixed = [index % 4 < 2 for index in range(len(requests))]
    scores = {"return_logprob": True, "top_logprobs_num": NUM_TOP}
    sent = [{**each, "sampling_params": each["sampling_params"] | ahead} for each in requests]
    answers = served.send(sent, are_fixed, **scores)
    chosen = [place for place in range(len(requests)) if are_fixed[place] or not served.asks]
    once_more = [
        {
            "input_ids": requests[place]["input_ids"] + answers[place]["output_ids"],
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        }
        for place in chosen
    ]
    starts = [len(requests[place]["input_ids"]) - 1 for place in chosen]
    passes = served.send(once_more, [True] * len(chosen), logprob_start_len=starts, **scores)
    num_compared = 0
    for place, second in zip(chosen, passes, strict=True):
        first, again = answers[place]["meta_info"], second["meta_info"]
        assert again["input_token_logprobs"][1:] == first["output_token_logprobs"], place
        best = best_of(first["output_top_logprobs"])
        assert best_of(again["input_top_logprobs"][1:]) == best, place
        num_compared += len(first["output_token_logprobs"])
    assert num_compared > 500


def test_logprobs_do_not_depend_on_the_company(
    served: Served, requests: list[dict[str, Any]]
) -> None:
    """A greedy request's come from another kernel beside drawn tokens."""
    scores = {"return_logprob": True, "top_logprobs_num": NUM_TOP}
    together = served.send(requests, [True] * len(requests), **scores)
    for place in range(0, len(requests), 9):
        alone = served.send(requests[place : place + 1], [True], **scores)[0]
        one, other = alone["meta_info"], together[place]["meta_info"]
        assert one["output_token_logprobs"] == other["output_token_logprobs"], place
        assert best_of(one["output_top_logprobs"]) == best_of(other["output_top_logprobs"]), place


# ---------------------------------------------------------------- a model's steps

DEMO = Path(resolve_model_path("demo"))
CONTEXT, WIDTH, NUM_ROWS = 400, 4, 16
MAX_ERROR = 0.02  # of the norm, in bfloat16
STEPS = ([1], [1] * 9, [4, 1, 3], [4] * 16, [200, 1, 1], [300, 4, 2, 1], [350] * 4, [350] * 7)


def runner_of(backend: str = "triton", ops: str = "triton", **changes: Any) -> ModelRunner:
    """A runner with graphs whose requests have KV that is random, the same of all runners."""
    runner = make_runner(
        DEMO,
        Setup(num_pages=8000, max_running_requests=NUM_ROWS),
        CONTEXT,
        WIDTH,
        device="cuda",
        attention_backend=backend,
        ops=ops,
        dtype="bfloat16",
        max_graph_width=WIDTH,
        **changes,
    )
    table = runner.req_to_token_pool.req_to_token
    slots = 1 + torch.arange(table.numel(), device="cuda", dtype=torch.int32)
    table.copy_(slots.view_as(table))
    return runner


def step(runner: ModelRunner, q_lens: list[int], seed: int) -> ForwardBatch:
    return random_step(runner, q_lens, seed, CONTEXT, NUM_ROWS)


def computed(runner: ModelRunner, batch: ForwardBatch) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of a step behind the same KV."""
    generator = torch.Generator("cuda").manual_seed(0)
    for kv in runner.kv_pool.kv:
        kv.normal_(generator=generator)
    hidden = runner.forward(batch).hidden.clone()
    return hidden, runner.compute_logits(hidden[-64:])


def test_a_step_has_the_bits_and_the_graphs_of_a_server_of_its_kind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps without a deterministic request replay the graphs that they replay without the flag."""
    both = runner_of(has_both_orders=True)
    alone = {False: runner_of(), True: runner_of(ROW_INDEPENDENT, ROW_INDEPENDENT)}
    replayed, run = list[GraphKey](), CudaGraphRunner.run

    def noted(self: Any, key: GraphKey, batch: ForwardBatch) -> Any:
        replayed.append(key)
        return run(self, key, batch)

    monkeypatch.setattr(CudaGraphRunner, "run", noted)
    for seed, q_lens in enumerate(STEPS):
        for fixed_orders in (False, True, False):
            batch = replace(step(both, q_lens, seed), fixed_orders=fixed_orders)
            replayed.clear()
            found, right = computed(both, batch), computed(alone[fixed_orders], batch)
            for values, expected in zip(found, right, strict=True):
                if fixed_orders:
                    assert torch.equal(values, expected), q_lens
                else:  # torch's library may choose by where a runner's memory lies
                    error = (values.float() - expected.float()).norm()
                    assert error <= MAX_ERROR * expected.float().norm(), (q_lens, error)
            assert [key.fixed_orders for key in replayed] in ([], [fixed_orders, False])
            assert {replace(key, fixed_orders=False) for key in replayed} == {*replayed[-1:]}
        assert bool(replayed) == (sum(q_lens) <= MAX_GRAPH_ROWS)
