"""Several ranks give what one gives, and stay equal among themselves."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from model_harness import TOLERANCE, Model, sequence
from sglang.srt.control.memory_control import KV_TAG, WEIGHTS_TAG
from sglang.srt.control.weight_inspection import checksum
from sglang.srt.distributed.group import RankGroup
from sglang.srt.messages.requests import LogprobOptions
from sglang.srt.model_executor.runner_group import RunnerGroup, make_runners
from sglang.srt.model_loader.weight_files import read_directory
from sglang.srt.shard import Shard
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.weight_sync.weight_reader import WeightUpdateError
from sglang.srt.workers.tp_worker import TpModelWorker
from thread_ranks import ThreadRanks
from utils import (
    MTP_MAX_ROWS,
    VOCAB_SIZE,
    SchedulerHarness,
    Setup,
    make_execution,
    make_model_worker,
    make_mtp_worker,
    make_random_llama,
    make_random_model,
)

MASK = VOCAB_SIZE - 1
BIASES = {"attention_bias": True, "mlp_bias": True}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama, biases, tied": ("llama", BIASES),
    "llama, biases, untied, tokens that ranks do not divide": (
        "llama",
        {**BIASES, "tie_word_embeddings": False, "vocab_size": VOCAB_SIZE - 1},
    ),
    "mistral, window": ("mistral", {"sliding_window": 7}),
    "qwen2": ("qwen2", {}),
    "qwen3, untied": ("qwen3", {"tie_word_embeddings": False}),
    "experts": (
        "qwen3_moe",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    ),
}


def plain(runners: RunnerGroup) -> TpModelWorker:
    runner = runners.target
    return TpModelWorker(runner, RequestRows(runner.req_to_token_pool, 1, runner.vocab_size))


def masked(runners: RunnerGroup) -> TpModelWorker:
    return make_mtp_worker(runners.target, MASK)


class Serving:
    """A scheduler over ranks."""

    def __init__(
        self,
        path: Path,
        setup: Setup,
        num_ranks: int = 2,
        make: Callable[[RunnerGroup], TpModelWorker] = plain,
    ) -> None:
        execution = make_execution(path, setup, max_decode_rows=MTP_MAX_ROWS)
        self.ranks = ThreadRanks(execution, num_ranks)
        self.ranks.serve(make)
        worker, resources = self.ranks.worker, self.ranks.resources
        self.harness = SchedulerHarness(setup, worker, resources=resources)

    def end(self) -> None:
        self.ranks.settle()


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("model") / "llama")


def test_all_ranks_get_the_same_bits_of_a_sum() -> None:
    """Drafts that each rank makes itself are equal because what they are made of is."""
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn((3, 7, 1031), generator=generator) for _ in range(3)]

    def summed(rank: int) -> list[torch.Tensor]:
        group = RankGroup(Shard(rank, 3), point)
        return [group.sum(parts[rank][:, :1, :size].clone()) for size in (1, 5, 1031)]

    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(3) as pool:
        point = Path(folder, "ranks")
        first, *others = pool.map(summed, range(3))
    for other in others:
        assert all(one.equal(two) for one, two in zip(first, other, strict=True))
    expected = torch.stack(parts)[:, :, :1].double().sum(0)
    assert torch.allclose(first[-1].double(), expected, atol=1e-5)


# --- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "num_ranks"), [*((each, 2) for each in FAMILIES), ("four", 4)])
def test_scores_of_a_prompt_are_those_of_transformers(
    family: str, num_ranks: int, tmp_path: Path
) -> None:
    model_type, changes = FAMILIES.get(family, ("llama", {"num_key_value_heads": 4}))
    path = make_random_model(model_type, tmp_path / "model", **changes)
    serving, tokens = Serving(path, Setup(chunked_prefill_size=9), num_ranks), sequence(24)
    tokens = [min(token, 300) for token in tokens]
    options = LogprobOptions(start_len=0, top_num=4)
    number = serving.harness.submit(tokens, temperature=0.0, max_new_tokens=2, logprobs=options)
    serving.harness.run()
    given = serving.harness.outputs[number]
    expected = Model(path).expected(tokens).log_softmax(-1)
    scored = [each for each in given.input_logprobs if each.logprob is not None]
    assert [each.token_id for each in scored] == tokens[1:]
    for row, position in zip(expected, scored, strict=False):
        assert abs(float(row[position.token_id]) - float(position.logprob or 0.0)) < TOLERANCE
        best = row.topk(4)
        assert torch.allclose(best.values, torch.tensor(position.top_logprobs), atol=TOLERANCE)
    assert given.token_ids[0] == int(expected[-1].argmax())
    serving.end()


def requests(rng_seed: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Greedy and seeded requests, some with penalties, biases or a limit of the least length."""
    shared = sequence(21, 99)
    params: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "sampling_seed": 3, "top_k": 40},
        {"temperature": 0.7, "sampling_seed": 4, "top_p": 0.8, "repetition_penalty": 1.3},
        {"temperature": 0.0, "logit_bias": {"5": 4.0}, "frequency_penalty": 0.5},
        {"temperature": 1.0, "sampling_seed": 5, "min_new_tokens": 6, "stop_token_ids": [7]},
    ]
    return [
        (shared[: 5 + 4 * (index % 5)] + sequence(3 + 5 * index, rng_seed + index), each)
        for index, each in enumerate(params * 2)
    ]


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
def test_experts_give_the_same_tokens_over_pages_and_behind_retractions(
    model_type: str, tmp_path: Path
) -> None:
    changes = FAMILIES["experts"][1] if model_type == "qwen3_moe" else {"num_local_experts": 4}
    path, told = make_random_model(model_type, tmp_path / "model", **changes), []
    setups = Setup(), Setup(page_size=16, num_pages=64, retract_interval=3)
    for setup in setups:
        serving = Serving(path, setup)
        harness = serving.harness
        numbers = [
            harness.submit(tokens, max_new_tokens=8, **params) for tokens, params in requests(1)
        ]
        harness.run()
        told.append([harness.outputs[number] for number in numbers])
        serving.end()
    assert [each.token_ids for each in told[0]] == [each.token_ids for each in told[1]]
    assert sum(each.num_retractions for each in told[1]) > 3


def outputs(path: Path, setup: Setup, num_ranks: int = 2) -> list[list[int]]:
    serving = Serving(path, setup, num_ranks) if num_ranks > 1 else None
    if serving is None:
        harness = SchedulerHarness(setup, make_model_worker(path, setup))
    else:
        harness = serving.harness
    numbers = []
    for index, (tokens, params) in enumerate(requests(7)):
        numbers.append(harness.submit(tokens, max_new_tokens=12, **params))
        if index % 3 == 0:
            harness.step()
    harness.run()
    if serving is not None:
        serving.end()
    return [harness.outputs[number].token_ids for number in numbers]


def test_tokens_are_those_of_one_rank_and_do_not_depend_on_the_schedule(llama: Path) -> None:
    """float32 and no near-tie in these requests: equal to one rank's; exactly equal among the ways
    of two ranks, whatever shares a step."""
    expected = outputs(llama, Setup(), num_ranks=1)
    ways = [
        Setup(),
        Setup(enable_overlap=False),
        Setup(use_radix_cache=False, chunked_prefill_size=8),
        Setup(page_size=4, chunked_prefill_size=5, retract_interval=3, num_pages=128),
    ]
    for setup in ways:
        assert outputs(llama, setup) == expected


def test_predicted_tokens_are_those_of_one_rank(llama: Path) -> None:
    """Verified and unverified multi-token prediction, in one batch with plain requests."""
    setup, kinds = Setup(), [{}, {"mtp_verify": True}, {"mtp_strategy": ["conf_adapt", 0.05]}]

    def run(harness: SchedulerHarness) -> list[list[int]]:
        numbers = [harness.submit(sequence(9), temperature=0.0, max_new_tokens=16)]
        for index, kind in enumerate(kinds):
            params = {"temperature": 0.0, "mtp_enabled": True, "mtp_k": 4, **kind}
            numbers.append(harness.submit(sequence(12, index), max_new_tokens=16, **params))
        harness.run()
        return [harness.outputs[number].token_ids for number in numbers]

    serving = Serving(llama, setup, make=masked)
    given = run(serving.harness)
    serving.end()
    execution = make_execution(llama, setup, max_decode_rows=MTP_MAX_ROWS)
    assert given == run(SchedulerHarness(setup, masked(make_runners(execution))))


# --- weights and memory --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def biased(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of one shape."""
    folder = tmp_path_factory.mktemp("models")
    changes = {**BIASES, "vocab_size": VOCAB_SIZE - 1, "tie_word_embeddings": False}
    return [make_random_llama(folder / str(seed), seed, **changes) for seed in (0, 1)]


def test_each_rank_holds_its_part_and_all_together_the_checkpoint(biased: list[Path]) -> None:
    serving = Serving(biased[0], Setup())
    weights = serving.ranks.resources.weights
    stored = dict(read_directory(biased[0]))
    assert sorted(stored) == weights.names()
    for name, values in stored.items():
        found = weights.value_of(name)
        assert found is not None
        assert torch.equal(found, values.float()), name
    ranks = serving.ranks.ranks
    held = sum(rank.runners.target.num_parameters for rank in ranks)
    on_all = ("norm.weight", "o_proj.bias", "down_proj.bias")
    twice = sum(values.numel() for name, values in stored.items() if name.endswith(on_all))
    assert held == sum(values.numel() for values in stored.values()) + twice
    pools = [rank.runners.memory.pools[0].kv[0] for rank in ranks]
    assert [pool.shape[1] for pool in pools] == [2, 2]  # K and V of one head each
    serving.end()


def test_an_update_reaches_all_ranks_or_none(biased: list[Path]) -> None:
    serving = Serving(biased[0], Setup())
    weights, prompt = serving.ranks.resources.weights, sequence(11)
    before = serving.harness.generate([prompt], temperature=0.0, max_new_tokens=8)
    staged = weights.reader("target").from_directory(str(biased[1]))
    second = serving.ranks.ranks[1].runners.target.weights

    def refuse(_: object) -> None:
        raise WeightUpdateError("the second rank cannot")

    refuses = mock.patch.object(second, "check", refuse)
    with refuses, pytest.raises(WeightUpdateError, match="the second rank cannot"):
        weights.apply(staged)
    serving.harness.ledger.flush()
    assert serving.harness.generate([prompt], temperature=0.0, max_new_tokens=8) == before
    weights.apply(staged)
    serving.harness.ledger.flush()
    after = serving.harness.generate([prompt], temperature=0.0, max_new_tokens=8)
    for name, values in read_directory(biased[1]):
        found = weights.value_of(name)
        assert found is not None
        assert checksum(found) == checksum(values.float())
    serving.end()
    fresh = Serving(biased[1], Setup())
    assert fresh.harness.generate([prompt], temperature=0.0, max_new_tokens=8) == after != before
    fresh.end()


def test_memory_is_given_back_and_taken_again_by_all_ranks_or_by_none(llama: Path) -> None:
    serving = Serving(llama, Setup())
    harness, memory = serving.harness, serving.ranks.resources.memory
    before = harness.generate([sequence(9)], temperature=0.0, max_new_tokens=6)
    stores = [rank.runners.target.weights for rank in serving.ranks.ranks]
    harness.ledger.flush()
    fails = mock.patch.object(stores[1], "release", side_effect=RuntimeError("no room here"))
    with fails, pytest.raises(RuntimeError, match="no room here"):
        memory[WEIGHTS_TAG].release()
    assert not stores[0].is_released
    for tag in (KV_TAG, WEIGHTS_TAG):
        memory[tag].release()
    assert all(store.is_released for store in stores)
    assert all(rank.runners.memory.is_released for rank in serving.ranks.ranks)
    for tag in (KV_TAG, WEIGHTS_TAG):
        memory[tag].restore()
    assert harness.generate([sequence(9)], temperature=0.0, max_new_tokens=6) == before
    serving.end()


def test_pools_are_as_large_as_the_least_rank_can_have(llama: Path) -> None:
    setup = Setup()
    sizes = iter([300, 200])

    def num_pages(_: object) -> int:
        return next(sizes)

    with mock.patch("sglang.srt.mem_cache.kv_sizing.KVSizing.num_pages", num_pages):
        serving = Serving(llama, setup)
    assert [rank.runners.memory.num_pages for rank in serving.ranks.ranks] == [200, 200]
    serving.end()
