"""Prompts longer than a step, of tiny random models, against transformers: tokens under the
near-tie rule, log-probabilities and hidden states, in what can happen to such prompts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch

from oracle import MAX_SHARE
from sglang.srt.messages.control import AbortReq, ContinueGenerationReq, PauseGenerationReq
from sglang.srt.messages.requests import LogprobOptions, PositionLogprobs
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.step.worker import Worker
from target import MAX_GAPS
from utils import VOCAB_SIZE, Collected, SchedulerHarness, Setup, make_random_model, make_runner

WINDOW = 700  # ends in the middle of pages and chunks
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("llama", {}),
    "window in the first layer": (
        "qwen3",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}
TOP_NUM = 2
NUM_NEW = 4
NUM_DECODED = 60  # by requests that decode beside long prompts
MAX_HIDDEN_ERROR = {"float32": 1e-3, "float16": 5e-2}
SHORT = tuple((7 * index + 1, 5, index, 9 * index + 3) for index in range(3))


def long_model(path: Path, family: str, **changes: Any) -> Path:
    """Two layers, 4 query heads over 2 KV heads, a vocabulary of 320 and a long context."""
    model_type, options = FAMILIES[family]
    values = {"max_position_embeddings": 32_768, "rope_theta": 500_000.0, **options}
    return make_random_model(model_type, path, **{**values, **changes})


def tokens_of(length: int, seed: int = 0) -> list[int]:
    """Random tokens; those of one seed begin alike whatever their length."""
    chooser = random.Random(seed)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(length)]


class LongOracle:
    """transformers over a whole sequence at once, in float32 with weights rounded to `dtype`.

    Its attention is torch's own: the scores of 20,000 tokens would be 1.6 GB per head.
    """

    def __init__(self, path: Path, device: str, dtype: str) -> None:
        self._path, self._device, self.dtype = path, device, dtype
        self.tolerance = MAX_GAPS[dtype]
        self._known: dict[tuple[int, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    @cached_property
    def _model(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(
            self._path, dtype=getattr(torch, self.dtype), attn_implementation="sdpa"
        )
        return model.float().to(self._device).eval()

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probabilities [T, V] and hidden states [T, hidden_size] after each of T tokens."""
        key = tuple(tokens)
        if key not in self._known:
            ids = torch.tensor([key], device=self._device)
            hidden = self._model.model(ids).last_hidden_state[0]
            logprobs = torch.log_softmax(self._model.lm_head(hidden), -1)
            self._known[key] = logprobs.cpu(), hidden.cpu()
        return self._known[key]

    def check(
        self, prompt: list[int], result: Collected, options: LogprobOptions | None = None
    ) -> int:
        """Asserts that each output token is the best one, or as good up to rounding, and that all
        log-probabilities asked for are right; returns how many tokens were not the very best."""
        tokens = prompt + result.token_ids
        logprobs, _ = self.forward(tokens[:-1])
        of_output = logprobs[len(prompt) - 1 :]
        chosen = of_output.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        behind = of_output.max(dim=-1).values - chosen
        assert float(behind.max()) <= self.tolerance, f"{len(prompt)} tokens: {behind.tolist()}"
        if options is None:
            assert result.input_logprobs == result.output_logprobs == []
        else:
            start = options.start_len
            self._compare(result.input_logprobs, logprobs[start:], tokens[start + 1 : len(prompt)])
            self._compare(result.output_logprobs, of_output, result.token_ids)
        return int((behind > 0).sum())

    def _compare(
        self, found: list[PositionLogprobs], right: torch.Tensor, tokens: list[int]
    ) -> None:
        """`found` are those of `tokens`, each after one row of `right`, with the best TOP_NUM."""
        assert [position.token_id for position in found] == tokens
        if not found:
            return
        right = right[: len(tokens)]
        own = torch.tensor([position.logprob for position in found])
        self._assert_close(own, right.gather(1, torch.tensor(tokens)[:, None])[:, 0])
        best = torch.tensor([position.top_logprobs for position in found])
        self._assert_close(best, right.topk(TOP_NUM).values)
        best_ids = torch.tensor([position.top_ids for position in found])
        self._assert_close(best, right.gather(1, best_ids))

    def _assert_close(self, found: torch.Tensor, right: torch.Tensor) -> None:
        torch.testing.assert_close(found, right, rtol=0, atol=self.tolerance)


class Serving:
    """A model in both runtimes, and what its schedulers are made of.

    Args:
        num_slots: of the KV pool.
        max_graph_width: see `make_runner`.
    """

    def __init__(
        self,
        path: Path,
        *,
        context_len: int,
        num_slots: int,
        device: str = "cpu",
        attention_backend: str = "torch_native",
        dtype: str = "float32",
        max_graph_width: int = 0,
    ) -> None:
        self._path, self._context_len, self._num_slots = path, context_len, num_slots
        self._where = {"device": device, "attention_backend": attention_backend, "dtype": dtype}
        self._max_graph_width = max_graph_width
        self.oracle = LongOracle(path, device, dtype)
        self.runner = cache(self._make_runner)  # earlier tests' KV in the pool must not matter

    def _make_runner(self, page_size: int) -> ModelRunner:
        setup = Setup(page_size=page_size, num_pages=self._num_slots // page_size)
        width = self._max_graph_width
        return make_runner(
            self._path, setup, self._context_len, max_graph_width=width, **self._where
        )

    def harness(
        self, chunk: int, page_size: int = 1, worker: Worker | None = None, **changes: Any
    ) -> SchedulerHarness:
        setup = Setup(
            page_size=page_size,
            num_pages=self._num_slots // page_size,
            context_len=self._context_len,
            chunked_prefill_size=chunk,
            **changes,
        )
        return SchedulerHarness(
            setup, worker or make_worker(RunnerGroup([self.runner(page_size)]), None)
        )

    def check(
        self,
        harness: SchedulerHarness,
        prompts: dict[int, list[int]],
        options: dict[int, LogprobOptions] | None = None,
    ) -> None:
        """Answers of requests, by number, that have ended on their own."""
        num_near_ties = num_tokens = 0
        for req_id, prompt in prompts.items():
            result = harness.outputs[req_id]
            assert result.finish_reason is not None
            assert result.finish_reason.type == "length"
            num_near_ties += self.oracle.check(prompt, result, (options or {}).get(req_id))
            num_tokens += len(result.token_ids)
        assert num_near_ties <= max(1, MAX_SHARE * num_tokens), f"{num_near_ties} near-ties"

    def check_hidden_states(
        self, prompt: list[int], result: Collected, first_position: int
    ) -> None:
        """Those of all tokens with KV from a position on."""
        right = self.oracle.forward(prompt + result.token_ids[:-1])[1][first_position:]
        assert len(result.hidden_states) == len(right)
        if len(right):
            found = torch.tensor(result.hidden_states)
            error = MAX_HIDDEN_ERROR[self.oracle.dtype]
            torch.testing.assert_close(found, right, rtol=error, atol=error)


def submit(
    harness: SchedulerHarness, prompt: list[int], num_new: int = NUM_NEW, **wishes: Any
) -> int:
    return harness.submit(prompt, max_new_tokens=num_new, temperature=0.0, **wishes)


def start_decoding(harness: SchedulerHarness, priority: int = 0) -> dict[int, list[int]]:
    """Requests that decode beside what comes next: prompts by number."""
    decoding = {
        submit(harness, list(prompt), NUM_DECODED, priority=priority): list(prompt)
        for prompt in SHORT
    }
    for _ in range(4):
        harness.step()
    return decoding


def step_into_prompt(harness: SchedulerHarness, req_id: int) -> None:
    """Steps until a part of the request's prompt has KV, and not all of it is launched."""
    for _ in range(1000):
        harness.step()
        for req in harness.scheduler.lifecycle.running:
            if req.req_id == req_id and 0 < req.committed < len(req.input_ids):
                assert req.is_prefilling, "All of the prompt has been launched."
                return
    raise AssertionError("The request was never found within its prompt.")


def assert_only_the_cache_is_left(harness: SchedulerHarness) -> None:
    """After the last request: the ledger was never wrong nor repaired, and no slot is lost."""
    checker, ledger = harness.scheduler.checker, harness.ledger
    assert checker.num_violations == checker.num_repairs == 0
    assert checker.report().is_exact
    assert ledger.num_used_rows == 0
    assert ledger.num_free_tokens + ledger.num_tree_tokens == ledger.num_pool_tokens


# --- what can happen to prompts ------------------------------------------------------------------


def check_lengths(serving: Serving, lengths: Sequence[int], chunk: int) -> None:
    """All at once beside requests that decode, reading each prompt at its end alone; then one after
    the other with log-probabilities, which read all of it: the tokens are the same."""
    harness = serving.harness(chunk, use_radix_cache=False)
    prompts = [tokens_of(length, seed=length) for length in lengths]
    decoding = start_decoding(harness)
    together = {submit(harness, prompt): prompt for prompt in prompts}
    harness.run()
    serving.check(harness, decoding | together)
    alone, options = {}, LogprobOptions(start_len=0, top_num=TOP_NUM)
    for prompt in prompts:
        alone[submit(harness, prompt, logprobs=options)] = prompt
        harness.run()
    serving.check(harness, alone, dict.fromkeys(alone, options))
    if serving.oracle.dtype == "float32":  # else rounding may choose, as `check` allows
        outputs = [[harness.outputs[i].token_ids for i in ids] for ids in (together, alone)]
        assert outputs[0] == outputs[1]
    assert_only_the_cache_is_left(harness)


def check_cached_prefixes(
    serving: Serving, lengths: Sequence[int], chunk: int, page_size: int
) -> None:
    """Prompts that share their first tokens, so many each, with one that is cached."""
    harness = serving.harness(chunk, page_size)
    first = tokens_of(max(lengths) + 1)
    done = {submit(harness, first): first}
    harness.run()
    prompts, options, shared = {}, {}, {}
    for length in lengths:
        prompt = first[:length] + tokens_of(1100, seed=length)
        wanted = LogprobOptions(start_len=length + 3, top_num=TOP_NUM)
        req_id = submit(harness, prompt, logprobs=wanted)
        prompts[req_id], options[req_id], shared[req_id] = prompt, wanted, length
    harness.run()
    for req_id, length in shared.items():
        assert harness.outputs[req_id].cached_tokens == length // page_size * page_size
    serving.check(harness, done | prompts, options)
    assert_only_the_cache_is_left(harness)


def check_starts_within_chunks(serving: Serving, chunk: int) -> None:
    """Log-probabilities from the middle and the edges of chunks of 512, all hidden states, the last
    ones and none share steps; the second time what nobody wants is cached."""
    harness = serving.harness(chunk)
    for _ in range(2):
        decoding = start_decoding(harness)
        prompts, options, first_hidden = {}, {}, {}
        for index, start in enumerate((0, 511, 512, 513, 700, 1298, 1299, None)):
            prompt, kind = tokens_of(1300, seed=index), ("none", "all", "last")[index % 3]
            wanted = None if start is None else LogprobOptions(start, TOP_NUM)
            req_id = submit(harness, prompt, logprobs=wanted, hidden_states=kind)
            prompts[req_id] = prompt
            options |= {} if wanted is None else {req_id: wanted}
            num_fed = len(prompt) + NUM_NEW - 1
            first_hidden[req_id] = {"none": num_fed, "all": 0, "last": len(prompt) - 1}[kind]
        harness.run()
        serving.check(harness, decoding | prompts, options)
        for req_id, prompt in prompts.items():
            result = harness.outputs[req_id]
            serving.check_hidden_states(prompt, result, first_hidden[req_id])
    assert_only_the_cache_is_left(harness)


Retraction = Callable[[SchedulerHarness], dict[int, list[int]]]  # gives requests that it has added


def retract_by_pause(harness: SchedulerHarness) -> dict[int, list[int]]:
    assert harness.call(PauseGenerationReq(call_id=1, mode="retract")).success
    assert not harness.scheduler.lifecycle.running
    assert harness.ledger.num_used_rows == 0
    assert harness.call(ContinueGenerationReq(call_id=2)).success
    return {}


def retract_by_priority(harness: SchedulerHarness) -> dict[int, list[int]]:
    """The newcomer has no row unless the long prompt gives its own back."""
    prompt = tokens_of(600, seed=51)
    return {submit(harness, prompt, priority=9): prompt}


RETRACTIONS: dict[str, Retraction] = {"pause": retract_by_pause, "priority": retract_by_priority}


def check_retraction(serving: Serving, length: int, chunk: int, retraction: str) -> None:
    """In the middle of a prompt, which begins anew beside requests that decode. Log-probabilities
    and hidden states that were read are not read again."""
    harness = serving.harness(chunk, max_running_requests=4, preemption_threshold=5)
    decoding = start_decoding(harness, priority=9)
    prompt, options = tokens_of(length, seed=length), LogprobOptions(100, TOP_NUM)
    req_id = submit(harness, prompt, logprobs=options, hidden_states="all")
    step_into_prompt(harness, req_id)
    others = RETRACTIONS[retraction](harness)
    harness.run()
    assert harness.outputs[req_id].num_retractions == 1
    serving.check(harness, {req_id: prompt} | decoding | others, {req_id: options})
    serving.check_hidden_states(prompt, harness.outputs[req_id], 0)
    assert_only_the_cache_is_left(harness)


def check_abort(serving: Serving, length: int, chunk: int, overlap: bool = True) -> None:
    """In the middle of a prompt: nothing of it stays, and the rest of the step, requests that
    decode and the same prompt once more are right."""
    harness = serving.harness(chunk, enable_overlap=overlap)
    decoding = start_decoding(harness)
    prompt = tokens_of(length, seed=length)
    victim = submit(harness, prompt, logprobs=LogprobOptions(0, TOP_NUM), hidden_states="all")
    beside = {submit(harness, tokens_of(1300, seed=7)): tokens_of(1300, seed=7)}
    step_into_prompt(harness, victim)
    harness.inbox.messages.append(AbortReq(req_ids=[victim]))
    harness.step()
    result = harness.outputs[victim]
    assert result.finish_reason is not None
    assert (result.finish_reason.type, result.token_ids, result.num_ends) == ("abort", [], 1)
    harness.step()  # what was in flight has been read
    assert harness.ledger.num_used_rows == len(harness.scheduler.lifecycle.running)
    assert harness.ledger.cached_prefix(("", ""), prompt) == (0, 0)
    again = submit(harness, prompt)
    harness.run()
    assert harness.outputs[again].cached_tokens == 0
    serving.check(harness, {again: prompt} | decoding | beside)
    assert_only_the_cache_is_left(harness)
