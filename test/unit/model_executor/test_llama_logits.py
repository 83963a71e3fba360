"""Logits of small random Llamas equal transformers', however the tokens are fed.

The oracle runs the whole sequence at once, without a cache; ours goes through the worker, the page
table and the paged pool.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from sglang.srt.base_worker import NewRow, ScheduleBatch
from sglang.srt.managers import tp_worker
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.model_runner import ExecutionConfig, ModelRunner
from sglang.srt.sampling.sampling_params import SamplingParams
from utils import CONTEXT_LEN, make_random_llama

torch.set_num_threads(1)
TOLERANCE = 1e-4
VOCAB_SIZE = 320
GREEDY = SamplingParams(temperature=0.0)
VARIANTS: dict[str, dict[str, Any]] = {
    "grouped, tied": {},
    "one head per KV head, untied": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "one KV head": {"num_key_value_heads": 1, "num_hidden_layers": 3},
    "wide heads": {"head_dim": 64, "rope_theta": 500_000.0, "tie_word_embeddings": False},
    "large eps, six heads": {
        "rms_norm_eps": 0.1,
        "hidden_size": 96,
        "num_attention_heads": 6,
        "num_key_value_heads": 3,
    },
}


class Model:
    """The same weights in both runtimes."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.config = load_model_config(str(path))
        self.reference = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()

    def runner(self, page_size: int) -> ModelRunner:
        return ModelRunner(
            ExecutionConfig(
                model=self.config,
                load_format="auto",
                device="cpu",
                dtype="float32",
                attention_backend="torch_native",
                page_size=page_size,
                max_total_tokens=1024,
                max_running_requests=8,
                context_len=CONTEXT_LEN,
                row_width=CONTEXT_LEN + 2,
                kv_budget_bytes=1 << 30,
                num_threads=1,
            )
        )

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab_size] float32."""
        return self.reference(torch.tensor([tokens])).logits[0]


@pytest.fixture(scope="module", params=VARIANTS.values(), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_random_llama(tmp_path_factory.mktemp("model") / "llama", **request.param))


@pytest.fixture(scope="module")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return Model(make_random_llama(tmp_path_factory.mktemp("model") / "llama"))


class Feeder:
    """Feeds chosen tokens of several requests through the paged pool, as a scheduler would."""

    def __init__(self, runner: ModelRunner, page_size: int) -> None:
        self.worker = TpModelWorker(runner, 8, "cpu", suppressed_token_ids=())
        self.ledger = KVLedger(8, PageAllocator(runner.num_pages, page_size), RadixCache(page_size))
        self.requests: dict[str, RequestKV] = {}
        self.fed: dict[str, int] = {}

    def feed(self, chunks: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """One step; returns the logits of each request's last row, as the sampler gets them."""
        new_rows, rows, bounds = [], [], []
        for name, tokens in chunks.items():
            if name not in self.requests:
                kv = self.requests[name] = self.ledger.admit((), [0])
                self.fed[name] = 0
                new_rows.append(NewRow(kv.row, 0, GREEDY, 0))
            self.fed[name] += len(tokens)
            kv = self.requests[name]
            assert self.ledger.reserve(kv, self.fed[name])
            rows.append(kv.row)
            bounds.append(self.fed[name])
        q_lens = [len(tokens) for tokens in chunks.values()]
        batch = ScheduleBatch(
            rows=rows,
            q_lens=q_lens,
            host_tokens=[token for tokens in chunks.values() for token in tokens],
            num_host_tokens=q_lens,
            emits=[True] * len(rows),
            kv_len_upper_bounds=bounds,
            new_rows=new_rows,
            table_writes=self.ledger.take_table_writes(),
            all_greedy=True,
        )
        with mock.patch.object(tp_worker, "sample", wraps=tp_worker.sample) as sampler:
            self.worker.forward_batch_generation(batch)
        logits = sampler.call_args.args[0]
        assert logits.dtype == torch.float32
        return dict(zip(chunks, logits, strict=True))


def sequence(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("length", [1, 2, 16, 100])
def test_prefill_in_one_go(model: Model, length: int, page_size: int) -> None:
    tokens = sequence(length)
    logits = Feeder(model.runner(page_size), page_size).feed({"a": tokens})["a"]
    assert_close(logits, model.expected(tokens)[-1])


def test_the_logits_are_not_trivially_equal(plain_model: Model) -> None:
    """Other tokens, or the same in another order, give other logits by far more than the bound."""
    tokens = sequence(20)
    swapped = [tokens[1], tokens[0], *tokens[2:]]
    expected = plain_model.expected(tokens)
    difference = (plain_model.expected(swapped)[-1] - expected[-1]).abs().max()
    assert float(difference) > 100 * TOLERANCE
    assert float(expected.std()) > 0.5


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("chunk", [1, 3, 16])
def test_prefill_in_chunks_and_token_by_token(model: Model, chunk: int, page_size: int) -> None:
    tokens = sequence(40)
    expected = model.expected(tokens)
    feeder = Feeder(model.runner(page_size), page_size)
    for start in range(0, len(tokens), chunk):
        part = tokens[start : start + chunk]
        assert_close(feeder.feed({"a": part})["a"], expected[start + len(part) - 1])


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_requests_of_a_mixed_batch_do_not_see_each_other(
    plain_model: Model, page_size: int
) -> None:
    """Prompts, chunks and single tokens of several requests in the same steps."""
    sequences = {name: sequence(50, seed) for seed, name in enumerate("abcde")}
    expected = {name: plain_model.expected(tokens) for name, tokens in sequences.items()}
    feeder = Feeder(plain_model.runner(page_size), page_size)
    chooser = random.Random(1)
    left = {name: list(tokens) for name, tokens in sequences.items()}
    while left:
        names = chooser.sample(sorted(left), chooser.randint(1, len(left)))
        chunks = {}
        for name in names:
            size = chooser.choice([1, 1, 2, 9])
            chunks[name], left[name] = left[name][:size], left[name][size:]
        for name, logits in feeder.feed(chunks).items():
            assert_close(logits, expected[name][feeder.fed[name] - 1])
        left = {name: tokens for name, tokens in left.items() if tokens}


class Decoding:
    """A worker over the model, driven step by step with its own pending tokens."""

    def __init__(self, model: Model, page_size: int) -> None:
        runner = model.runner(page_size)
        self.worker = TpModelWorker(runner, 8, "cpu", suppressed_token_ids=())
        self.ledger = KVLedger(8, PageAllocator(runner.num_pages, page_size), RadixCache(page_size))

    def generate(self, prompts: list[list[int]], num_tokens: int, chunk: int) -> list[list[int]]:
        """Output tokens of prompts that are fed `chunk` tokens at a time, side by side."""
        kvs = [self.ledger.admit((), prompt) for prompt in prompts]
        cached = [len(kv.pages) * self.ledger.page_size for kv in kvs]
        new = [NewRow(kv.row, num, GREEDY, 0) for kv, num in zip(kvs, cached, strict=True)]
        lens = list(cached)
        outputs: list[list[int]] = [[] for _ in prompts]
        while min(map(len, outputs)) < num_tokens:
            chunks = [prompt[fed : fed + chunk] for prompt, fed in zip(prompts, lens, strict=True)]
            q_lens = [len(tokens) or 1 for tokens in chunks]
            lens = [length + q_len for length, q_len in zip(lens, q_lens, strict=True)]
            for kv, length in zip(kvs, lens, strict=True):
                assert self.ledger.reserve(kv, length)
            emits = [fed >= len(prompt) for prompt, fed in zip(prompts, lens, strict=True)]
            result = self.worker.forward_batch_generation(
                ScheduleBatch(
                    rows=[kv.row for kv in kvs],
                    q_lens=q_lens,
                    host_tokens=[token for tokens in chunks for token in tokens],
                    num_host_tokens=[len(tokens) for tokens in chunks],
                    emits=emits,
                    kv_len_upper_bounds=lens,
                    new_rows=new,
                    table_writes=self.ledger.take_table_writes(),
                    all_greedy=True,
                )
            ).read()
            new = []
            assert result.kept_lens == q_lens
            assert result.accept_lens == [int(flag) for flag in emits]
            for output, flag, tokens in zip(outputs, emits, result.next_token_ids, strict=True):
                output += tokens if flag else []
        for kv, prompt, output in zip(kvs, prompts, outputs, strict=True):
            self.ledger.publish(kv, prompt)
            self.ledger.release(kv, prompt + output[:-1])
        return [output[:num_tokens] for output in outputs]


def assert_greedy(model: Model, prompt: list[int], output: list[int]) -> None:
    """Every token is the reference's best after all tokens before it (up to near-ties)."""
    expected = model.expected(prompt + output)[len(prompt) - 1 : -1]
    for row, token in zip(expected, output, strict=True):
        assert float(row.max() - row[token]) <= TOLERANCE


@pytest.mark.parametrize(("page_size", "chunk"), [(1, 100), (16, 100), (1, 3), (16, 7), (4, 1)])
def test_the_worker_decodes_greedily_through_the_paged_pool(
    model: Model, page_size: int, chunk: int
) -> None:
    prompts = [sequence(length, seed=length) for length in (1, 9, 16, 33)]
    decoding = Decoding(model, page_size)
    for prompt, output in zip(prompts, decoding.generate(prompts, 12, chunk), strict=True):
        assert_greedy(model, prompt, output)


def test_cached_prefixes_give_the_same_tokens(plain_model: Model) -> None:
    decoding = Decoding(plain_model, 4)
    prompts = [sequence(30), [*sequence(17), 5, 6]]
    first = decoding.generate(prompts, 8, 100)
    assert decoding.ledger.cached_prefix((), prompts[0])[0] == 28
    assert decoding.generate(prompts, 8, 100) == first


def test_a_suppressed_token_is_never_emitted(plain_model: Model) -> None:
    """Suppressing the token that would come gives another one."""
    decoding = Decoding(plain_model, 1)
    prompt = sequence(10)
    first = decoding.generate([prompt], 1, 100)[0][0]
    other = Decoding(plain_model, 1)
    other.worker = TpModelWorker(plain_model.runner(1), 8, "cpu", suppressed_token_ids=(first,))
    order = plain_model.expected(prompt)[-1].argsort(descending=True).tolist()
    assert order[0] == first
    assert other.generate([prompt], 1, 100) == [order[1:2]]
