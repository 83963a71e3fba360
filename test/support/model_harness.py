"""A model in both runtimes, and ways to feed it: logits and greedy tokens equal transformers'.

The oracle runs the whole sequence at once, without a cache; ours goes through the worker, the page
table and the paged pool.
"""

from __future__ import annotations

import random
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from sglang.srt.layers.sampler import Sampler
from sglang.srt.mem_cache.allocator import PageAllocator
from sglang.srt.mem_cache.kv_ledger import KVLedger, RequestKV
from sglang.srt.mem_cache.kv_sizing import row_width
from sglang.srt.mem_cache.radix_cache import RadixCache
from sglang.srt.model_config import load_model_config
from sglang.srt.model_executor.execution_config import ExecutionConfig
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import make_runners
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.step.request_rows import RequestRows
from sglang.srt.step.worker import BatchRequest, NewRow, ScheduleBatch
from sglang.srt.workers.tp_worker import TpModelWorker
from utils import CONTEXT_LEN, VOCAB_SIZE

torch.set_num_threads(1)
TOLERANCE = 1e-4
GREEDY = SamplingParams(temperature=0.0)


class Model:
    """The same weights in both runtimes."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.config = load_model_config(str(path))
        # By its plain code: some versions take SDPA for Gemma 2, which has no soft cap.
        self.reference = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def runner(self, page_size: int) -> ModelRunner:
        return make_runners(
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
                row_width=row_width(CONTEXT_LEN, 1, page_size),
                kv_budget_bytes=1 << 30,
                num_threads=1,
            )
        ).target

    @torch.inference_mode()
    def expected(self, tokens: list[int]) -> torch.Tensor:
        """[len(tokens), vocab_size] float32."""
        return self.reference(torch.tensor([tokens])).logits[0]


def _ledger(runner: ModelRunner, page_size: int) -> KVLedger:
    table = runner.req_to_token_pool
    allocator = PageAllocator(runner.memory.num_pages, page_size)
    width = table.req_to_token.shape[1]
    return KVLedger(table.num_rows, allocator, RadixCache(page_size), width)


def plain_worker(
    runner: ModelRunner, num_rows: int, suppressed: tuple[int, ...] = ()
) -> TpModelWorker:
    """The worker that decodes one token per step."""
    state = RequestRows(runner.req_to_token_pool, 1, runner.vocab_size)
    return TpModelWorker(runner, state, suppressed)


def as_array(tokens: list[int]) -> np.ndarray:
    return np.array(tokens, dtype=np.int32)


class Feeder:
    """Feeds chosen tokens of several requests through the paged pool, as a scheduler would."""

    def __init__(self, runner: ModelRunner, page_size: int) -> None:
        self.worker = plain_worker(runner, 8)
        self.ledger = _ledger(runner, page_size)
        self.requests: dict[str, RequestKV] = {}
        self.fed: dict[str, int] = {}
        self._sequences: dict[str, list[int]] = {}

    def feed(self, chunks: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """One step; returns the logits of each request's last row, as the sampler gets them."""
        new_rows, requests = [], []
        for name, tokens in chunks.items():
            if name not in self.requests:
                kv = self.requests[name] = self.ledger.admit((), [0])
                self.fed[name], self._sequences[name] = 0, []
            kv = self.requests[name]
            # What a request will feed later is not known yet, so its row is set anew each time.
            self._sequences[name] += tokens
            known = as_array(self._sequences[name])
            new_rows.append(NewRow(kv.row, self.fed[name], known, GREEDY, 0))
            count = len(tokens)
            requests.append(BatchRequest(kv.row, count, count, kv_len_before=self.fed[name]))
            self.fed[name] += count
            assert self.ledger.reserve(kv, self.fed[name])
        batch = ScheduleBatch(
            requests,
            new_rows=new_rows,
            table_writes=self.ledger.take_table_writes(),
            all_greedy=True,
        )
        wrapped = Sampler.sample
        with mock.patch.object(Sampler, "sample", autospec=True, side_effect=wrapped) as sample:
            self.worker.forward_batch_generation(batch)
        logits = sample.call_args.args[1]
        assert logits.dtype == torch.float32
        return dict(zip(chunks, logits, strict=True))


def sequence(length: int, seed: int = 0) -> list[int]:
    chooser = random.Random(seed)
    return [chooser.randrange(VOCAB_SIZE) for _ in range(length)]


def assert_close(logits: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(logits, expected, rtol=TOLERANCE, atol=TOLERANCE)


class Decoding:
    """A worker over the model, driven step by step with its own pending tokens."""

    def __init__(self, model: Model, page_size: int) -> None:
        runner = model.runner(page_size)
        self.worker = plain_worker(runner, 8)
        self.ledger = _ledger(runner, page_size)

    def generate(self, prompts: list[list[int]], num_tokens: int, chunk: int) -> list[list[int]]:
        """Output tokens of prompts that are fed `chunk` tokens at a time, side by side."""
        kvs = [self.ledger.admit((), prompt) for prompt in prompts]
        cached = [len(kv.pages) * self.ledger.page_size for kv in kvs]
        new = [
            NewRow(kv.row, num, as_array(prompt), GREEDY, 0)
            for kv, num, prompt in zip(kvs, cached, prompts, strict=True)
        ]
        lens = list(cached)
        outputs: list[list[int]] = [[] for _ in prompts]
        while min(map(len, outputs)) < num_tokens:
            chunks = [prompt[fed : fed + chunk] for prompt, fed in zip(prompts, lens, strict=True)]
            q_lens = [len(tokens) or 1 for tokens in chunks]
            columns = kvs, q_lens, map(len, chunks), prompts, lens
            requests = [
                BatchRequest(kv.row, q_len, num_prompt, fed + q_len >= len(prompt), fed)
                for kv, q_len, num_prompt, prompt, fed in zip(*columns, strict=True)
            ]
            lens = [length + q_len for length, q_len in zip(lens, q_lens, strict=True)]
            for kv, length in zip(kvs, lens, strict=True):
                assert self.ledger.reserve(kv, length)
            result = self.worker.forward_batch_generation(
                ScheduleBatch(
                    requests,
                    new_rows=new,
                    table_writes=self.ledger.take_table_writes(),
                    all_greedy=True,
                )
            ).read()
            new = []
            assert result.kept_lens == q_lens
            assert result.accept_lens == [int(request.emits) for request in requests]
            for output, count, tokens in zip(
                outputs, result.accept_lens, result.next_token_ids, strict=True
            ):
                output += tokens[:count]
        for kv, prompt, output in zip(kvs, prompts, outputs, strict=True):
            self.ledger.publish(kv, prompt)
            self.ledger.release(kv, prompt + output[:-1])
        return [output[:num_tokens] for output in outputs]


def assert_greedy(model: Model, prompt: list[int], output: list[int]) -> None:
    """Every token is the reference's best after all tokens before it (up to near-ties)."""
    expected = model.expected(prompt + output)[len(prompt) - 1 : -1]
    for row, token in zip(expected, output, strict=True):
        assert float(row.max() - row[token]) <= TOLERANCE


def check_whole_and_chunked_prompts(model: Model, num_steps: int) -> None:
    """Feeds mixed steps through the paged pool: a prompt whole, one in chunks, one token by token.
    Logits are those of transformers."""
    sequences = {name: sequence(42, seed) for seed, name in enumerate(("whole", "chunks", "one"))}
    expected = {name: model.expected(tokens) for name, tokens in sequences.items()}
    sizes = {"whole": [30, 1, 1], "chunks": [9] * 4, "one": [1] * num_steps}
    feeder = Feeder(model.runner(4), 4)
    for step in range(num_steps):
        chunks = {}
        for name, steps in sizes.items():
            if step < len(steps):
                start = feeder.fed.get(name, 0)
                chunks[name] = sequences[name][start : start + steps[step]]
        for name, logits in feeder.feed(chunks).items():
            assert_close(logits, expected[name][feeder.fed[name] - 1])
