"""The memory of the KV pool: given back and taken again under the same tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from model_harness import Feeder, sequence
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.model_runner import ModelRunner
from utils import Setup, make_random_llama, make_runner


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_random_llama(tmp_path_factory.mktemp("models") / "random")


def logits_of(runner: ModelRunner) -> torch.Tensor:
    """[2, vocab_size] of a prompt and a token."""
    feeder = Feeder(runner, 1)
    tokens = sequence(30)
    return torch.stack([feeder.feed({"a": part})["a"] for part in (tokens[:29], tokens[29:])])


def test_a_kv_pool_gives_its_memory_back_and_serves_again(model_dir: Path) -> None:
    runner = make_runner(model_dir, Setup())
    before = logits_of(runner)
    pool = runner.kv_pool
    shapes = [tensor.shape for tensor in (*pool.kv, *pool.k, *pool.v)]
    pool.release()
    assert pool.is_released
    assert {kv.untyped_storage().nbytes() for kv in pool.kv} == {0}
    pool.restore()
    assert not pool.is_released
    assert [tensor.shape for tensor in (*pool.kv, *pool.k, *pool.v)] == shapes
    assert not any(kv.any() for kv in pool.kv)
    assert torch.equal(logits_of(runner), before)
    assert all(kv.any() for kv in pool.kv), "The backend wrote elsewhere."


def test_the_backend_reads_the_restored_pool_in_batches_of_any_kind(model_dir: Path) -> None:
    """One group (the kept window) and several (the scratch buffer), before and after."""
    runner = make_runner(model_dir, Setup())

    def feed() -> list[torch.Tensor]:
        feeder = Feeder(runner, 1)
        steps: list[dict[str, list[int]]] = [
            {"a": sequence(9), "b": sequence(4, 1)},
            {"a": [5], "b": [6]},
            {"a": [7], "b": [8]},
            {"a": sequence(3, 2), "b": [9]},
        ]
        return [logits for step in steps for logits in feeder.feed(step).values()]

    before = feed()
    runner.kv_pool.release()
    runner.kv_pool.restore()
    assert all(map(torch.equal, feed(), before))


def test_a_kv_pool_is_released_and_restored_in_turns(model_dir: Path) -> None:
    pool = make_runner(model_dir, Setup()).kv_pool
    with pytest.raises(RuntimeError, match="not released"):
        pool.restore()
    pool.release()
    with pytest.raises(RuntimeError, match="already"):
        pool.release()
    pool.restore()
    assert not pool.is_released


@pytest.mark.parametrize("column", [-1, 6])
def test_the_table_takes_no_column_outside_of_a_row(column: int) -> None:
    pool = ReqToTokenPool(2, 6, "cpu")
    with pytest.raises(AssertionError, match="outside of its row"):
        pool.write([[0, 0], [5, column], [7, 8]])
    assert not pool.req_to_token.any()
