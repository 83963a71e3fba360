"""One static batch of a model with random weights, step by step in the process that measures."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmark.command import make_parser
from benchmark.engine_load import random_prompts
from benchmark.random_model import GEOMETRIES, random_head, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.processes.worker_factory import make_prompt_budget, make_worker
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

DECODE_INPUT_LEN = 128
CHUNK = 512  # prompt tokens of a step, the fewest by default


def make_random_parser(doc: str | None, result_name: str) -> argparse.ArgumentParser:
    """Adds to `make_parser` what says which model of random weights runs where."""
    parser = make_parser(doc, result_name)
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend")
    return parser


@contextmanager
def random_flags(
    geometry: str, context_len: int = 8192, has_head: bool = False
) -> Iterator[dict[str, Any]]:
    """Flags of a model of random weights, and of an EAGLE head over it, while its folders exist."""
    with random_model(geometry, context_len) as folder, random_head(folder) as head:
        drafter = {"speculative_algorithm": "EAGLE", "speculative_draft_model_path": head}
        flags = {"model_path": folder, "load_format": "dummy", "disable_radix_cache": True}
        yield {**flags, **(drafter if has_head else {})}


def random_batch(
    geometry: str,
    context_len: int = 8192,
    has_head: bool = False,
    make: Callable[..., Any] = make_worker,
    make_budget: Callable[..., Any] = make_prompt_budget,
    **flags: Any,
) -> OneBatch:
    """Makes a scheduler and a worker in this process.

    Args:
        make, make_budget: see `OneBatch`.
        flags: more fields of `ServerArgs`.
    """
    with random_flags(geometry, context_len, has_head) as model:
        batch = OneBatch(ServerArgs(**model, **flags), make, make_budget)
    keep_out_of_collections()
    return batch


@contextmanager
def decoding(
    batch: OneBatch, size: int, num_steps: int, warm_steps: int
) -> Iterator[Callable[[], None]]:
    """Gives a function that runs one step of `size` requests. All of them decode: each has had
    `warm_steps` steps or more since its first token, and has tokens left for `num_steps`."""
    prompts = random_prompts(size, DECODE_INPUT_LEN, batch.vocab_size, size)
    num_new = num_steps + 2 * warm_steps + size * DECODE_INPUT_LEN // CHUNK
    params = SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
    with batch.overlapping_steps(prompts, params) as step:
        while not all(batch.outputs.values()):
            step()
        for _ in range(warm_steps):
            step()
        synchronize()
        yield step


def synchronize() -> None:
    """Waits until nothing runs on a GPU, if one is in use."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
