"""Log-probabilities, hidden states and penalties of the bundled model against transformers."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import sglang
from double_step_worker import DoubleStepWorker
from sglang.srt.layers.logprobs import LogprobQueries, query_prompt_logprobs
from sglang.srt.messages.requests import LogprobOptions, PositionLogprobs
from sglang.srt.model_config import resolve_model_path
from utils import Collected, RandomBudget, SchedulerHarness, Setup, make_model_worker

pytestmark = pytest.mark.long_matrix

TOLERANCE = 1e-4
CHOSEN = [5, 300, 4000]
BASE = Setup(num_pages=4096, max_running_requests=8)
VARIANTS: dict[str, dict[str, Any]] = {
    "overlap": {},
    "normal": {"enable_overlap": False},
    "chunks of 4": {"chunked_prefill_size": 4},
    "other chunks in every step": {"make_budget": partial(RandomBudget, 20)},
    "page size 16": {"page_size": 16, "num_pages": 256},
    "retraction every 3 steps": {"retract_interval": 3},
    "small pool": {"num_pages": 260},
}
PROMPTS = [[0, *(37 * (n + i) % 4093 + 3 for i in range(20 + 7 * n))] for n in range(8)]


@pytest.fixture(scope="module")
def path() -> Path:
    torch.set_num_threads(1)
    return resolve_model_path("demo")


@pytest.fixture(scope="module")
def oracle(path: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def harness_of(path: Path, **changes: Any) -> SchedulerHarness:
    setup = dataclasses.replace(BASE, **changes)
    return SchedulerHarness(setup, make_model_worker(path, setup))


def check(model: Any, prompt: list[int], result: Collected, start: int, scale: float) -> None:
    """Every returned logprob equals transformers' log-softmax over prompt and output."""
    tokens = prompt + result.token_ids
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    assert len(result.input_logprobs) == len(prompt) - 1 - start
    assert len(result.output_logprobs) == len(result.token_ids)
    logits[:, 2] = float("-inf")  # the mask token is never drawn
    for index, position in enumerate(result.input_logprobs):
        compare(position, torch.log_softmax(logits[start + index], -1), tokens[start + index + 1])
    for index, position in enumerate(result.output_logprobs):
        row = len(prompt) - 1 + index
        compare(position, torch.log_softmax(logits[row] / scale, -1), tokens[row + 1])


def compare(position: PositionLogprobs, expected: torch.Tensor, token: int) -> None:
    assert position.token_id == token
    assert position.logprob == pytest.approx(float(expected[token]), abs=TOLERANCE)
    best = expected.topk(3)
    assert position.top_logprobs == pytest.approx(best.values.tolist(), abs=TOLERANCE)
    assert expected[position.top_ids].tolist() == pytest.approx(best.values.tolist(), abs=TOLERANCE)
    chosen = expected[CHOSEN].tolist()
    assert position.chosen == pytest.approx(chosen, abs=TOLERANCE)


@pytest.mark.parametrize(
    ("temperature", "variant"),
    [*((0.0, variant) for variant in VARIANTS), (0.7, "overlap"), (0.7, "small pool")],
)
def test_logprobs_equal_transformers(
    path: Path, oracle: Any, variant: str, temperature: float
) -> None:
    """Requests with other starts, and one without logprobs, share the batch; run twice, so that
    the second time much of each prompt is cached."""
    harness = harness_of(path, **VARIANTS[variant])
    starts = [0, 3, 7, None, 0, 1, 19, 0]
    for _ in range(2):
        ids = []
        for prompt, start in zip(PROMPTS, starts, strict=True):
            options = None if start is None else LogprobOptions(start, 3, CHOSEN)
            ids.append(
                harness.submit(
                    prompt,
                    logprobs=options,
                    max_new_tokens=9,
                    temperature=temperature,
                    sampling_seed=5,
                )
            )
        harness.run()
        for req_id, prompt, start in zip(ids, PROMPTS, starts, strict=True):
            result = harness.outputs[req_id]
            if start is None:
                assert result.input_logprobs == result.output_logprobs == []
            else:
                check(oracle, prompt, result, start, temperature or 1.0)


@pytest.mark.parametrize("variant", VARIANTS)
def test_hidden_states_equal_transformers(path: Path, oracle: Any, variant: str) -> None:
    harness = harness_of(path, **VARIANTS[variant])
    for _ in range(2):
        ids = [
            harness.submit(
                prompt,
                hidden_states="last" if index % 3 == 0 else "all",
                max_new_tokens=6,
                temperature=0.0,
            )
            for index, prompt in enumerate(PROMPTS)
        ]
        harness.run()
        for index, (req_id, prompt) in enumerate(zip(ids, PROMPTS, strict=True)):
            result = harness.outputs[req_id]
            fed = torch.tensor([prompt + result.token_ids[:-1]])
            with torch.no_grad():
                expected = oracle.model(fed).last_hidden_state[0]
            if index % 3 == 0:
                expected = expected[len(prompt) - 1 :]
            torch.testing.assert_close(
                torch.tensor(result.hidden_states), expected, rtol=1e-3, atol=1e-3
            )


@pytest.mark.parametrize("variant", VARIANTS)
def test_penalties_survive_several_accepted_tokens_per_step(
    path: Path, penalized: list[list[int]], variant: str
) -> None:
    """A step accepts two tokens; the run is clipped at stops and at max_new_tokens (odd here)."""
    changes = VARIANTS[variant]
    setup = dataclasses.replace(BASE, eos_token_ids=frozenset({1}), **changes)
    worker = DoubleStepWorker(make_model_worker(path, setup))
    harness = SchedulerHarness(setup, worker)
    outputs = harness.generate(PROMPTS, max_new_tokens=15, temperature=0.0, **PENALTIES)
    assert outputs == [tokens[:15] for tokens in penalized]
    assert harness.num_steps < 15 * len(PROMPTS)


def penalized_greedy(model: Any, prompt: list[int], num_tokens: int) -> list[int]:
    """Plain recomputation with the penalties of `PENALTIES`."""
    generated: list[int] = []
    for _ in range(num_tokens):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + generated])).logits[0, -1]
        logits[2] = float("-inf")
        for token in set(generated):
            value = logits[token]
            value = value / 1.2 if value > 0 else value * 1.2
            logits[token] = value - 0.4 * generated.count(token) - 0.3
        logits[7] += 2.5
        if len(generated) < 4:
            logits[[1, 11]] = float("-inf")
        generated.append(int(logits.argmax()))
        if generated[-1] == 11:
            break
    return generated


PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.2,
    "frequency_penalty": 0.4,
    "presence_penalty": 0.3,
    "logit_bias": {"7": 2.5},
    "min_new_tokens": 4,
    "stop_token_ids": [11],
}


@pytest.fixture(scope="module")
def penalized(oracle: Any) -> list[list[int]]:
    return [penalized_greedy(oracle, prompt, 16) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def unpenalized(path: Path) -> list[list[int]]:
    harness = harness_of(path)
    return harness.generate(PROMPTS, max_new_tokens=16, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize("variant", VARIANTS)
def test_penalties_survive_every_schedule(
    path: Path, penalized: list[list[int]], unpenalized: list[list[int]], variant: str
) -> None:
    """Equal to a plain recomputation; requests without penalties share the batch unchanged."""
    harness = harness_of(path, eos_token_ids=frozenset({1}), **VARIANTS[variant])
    ids, plain = [], []
    for prompt in PROMPTS:
        plain.append(harness.submit(prompt, max_new_tokens=16, temperature=0.0, ignore_eos=True))
        ids.append(harness.submit(prompt, max_new_tokens=16, temperature=0.0, **PENALTIES))
    harness.run()
    assert [harness.outputs[req_id].token_ids for req_id in ids] == penalized
    assert [harness.outputs[req_id].token_ids for req_id in plain] == unpenalized
    assert unpenalized != penalized


def test_the_engine_takes_every_field_of_generate(tmp_path: Path) -> None:
    log = tmp_path / "log.jsonl"
    with sglang.Engine(
        model_path="demo",
        enable_return_hidden_states=True,
        hidden_states_folder=str(tmp_path),
        log_requests=True,
        log_requests_target=str(log),
    ) as engine:
        params = {"max_new_tokens": 3, "temperature": 0}
        answer = engine.generate(
            "import os",
            params,
            return_logprob=True,
            logprob_start_len=0,
            top_logprobs_num=2,
            return_text_in_logprobs=True,
            return_hidden_states=True,
        )
        meta = answer["meta_info"]
        num_prompt = meta["prompt_tokens"]
        assert [entry[1] for entry in meta["output_token_logprobs"]] == answer["output_ids"]
        assert len(meta["input_token_logprobs"]) == num_prompt
        assert meta["input_token_logprobs"][0][0] is None
        assert [len(top) for top in meta["output_top_logprobs"]] == [2, 2, 2]
        assert "".join(entry[2] for entry in meta["output_token_logprobs"]) == answer["text"]
        prompt_rows, *output_rows = meta["hidden_states"]
        assert (len(prompt_rows), len(output_rows)) == (num_prompt, 2)
        assert {len(row) for row in (*prompt_rows, *output_rows)} == {256}
        meta = engine.generate("import os", params, return_hidden_states="file")["meta_info"]
        path = Path(meta["hidden_states_file"])
        rows = load_file(path)["hidden_states"]
        assert rows.shape == (num_prompt + 2, 3, 256)
        listed = torch.tensor([*prompt_rows, *output_rows])
        torch.testing.assert_close(rows[:, -1], listed, rtol=1e-4, atol=1e-4)
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(ValueError, match="retrun_logprob"):
            engine.generate("a", params, retrun_logprob=True)
    assert log.read_text().count('"finish_reason":"length"') == 2
    assert list(tmp_path.iterdir()) == [log]


def test_a_long_prompts_logits_are_computed_a_few_rows_at_a_time() -> None:
    widths: list[int] = []

    def compute_logits(hidden: torch.Tensor) -> torch.Tensor:
        widths.append(len(hidden))
        return hidden

    hidden = torch.randn(1000, 11)
    targets = [i % 11 for i in range(1000)]
    queries = LogprobQueries(2, [[1]] * 1000)
    rows = torch.arange(1000)
    result = query_prompt_logprobs(hidden, rows, compute_logits, targets, queries)
    assert sum(widths) == 1000
    assert max(widths) <= 256
    expected = torch.log_softmax(hidden, -1)
    torch.testing.assert_close(result.target, expected[range(1000), targets])
    torch.testing.assert_close(result.top_values, expected.topk(2).values)
    torch.testing.assert_close(result.chosen[:, 0], expected[:, 1])


def test_each_position_has_the_ids_of_its_request_alone() -> None:
    """Positions of a request share a list; others have none, longer ones or an equal one."""
    of_requests = [[3, 1], [], [7], [3, 1], [10, 2, 5]]
    token_ids = [ids for ids in of_requests for _ in range(120)]
    hidden = torch.randn(600, 11)
    queries = LogprobQueries(0, token_ids)
    rows, targets = torch.arange(600), [0] * 600
    result = query_prompt_logprobs(hidden, rows, lambda part: part, targets, queries)
    expected = torch.log_softmax(hidden, -1)
    assert result.chosen.shape == (600, 3)
    for found, right, ids in zip(result.chosen, expected, token_ids, strict=True):
        torch.testing.assert_close(found[: len(ids)], right[ids])
