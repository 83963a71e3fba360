"""Measures steps of a whole mixture of experts beside the time of reading what they need.

Random weights in a large geometry, greedy. Decode steps of one static batch follow each other as in
the server. Then the same batch runs again without graphs, and the experts that the routers choose
are counted: a step needs the weights of those, all other weights but the embedding, and the KV of
its requests. The time of a prompt of 4,096 tokens stands beside that of a dense model, each the
median of several, in a process of its own. `--device cpu` tries the command with tiny models.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from benchmark.command import make_parser, print_rows, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.kernel_times import flop
from benchmark.measure.long_prompts import CONTEXT_LEN
from benchmark.one_batch import DECODE_INPUT_LEN, decoding, random_batch, synchronize
from benchmark.random_model import GEOMETRIES, ExpertGeometry
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner_group import RunnerGroup
from sglang.srt.models.sparse_mlp import SparseMLP
from sglang.srt.processes.worker_factory import make_worker
from sglang.srt.server_args import ServerArgs

COPY_BYTES_PER_S = 2.96e12  # of a copy on an H100
MOST_OVER_READING = {1: 1.7, 32: 1.3, 128: 1.3}  # by requests of a batch
LEAST_OF_DENSE = 0.6  # of its operations per second in prompts
PROMPT_TOKENS, PROMPT_REPEATS = 4096, 5
WARM_STEPS, STEPS, ROUNDS = 8, 32, 3
COMPARED_GEOMETRIES = "qwen3-30b-a3b", "llama-3.1-8b"  # of experts, and dense
TRIAL_GEOMETRIES = "tiny-experts", "tiny"


@dataclass
class Choices:
    """Experts that the routers of a model choose, step by step.

    Attributes:
        num_used: of each step and layer, how many experts have a row.
        uses: [num_layers, num_experts], how many rows each expert has had.
    """

    num_chosen: int
    uses: torch.Tensor
    num_used: list[int] = field(default_factory=list)

    def add(self, layer: int, scores: torch.Tensor) -> None:
        """Counts what scores [T, num_experts] of one layer choose, of equal ones the first."""
        best = scores.float().sort(dim=-1, descending=True, stable=True).indices
        counts = best[:, : self.num_chosen].flatten().bincount(minlength=scores.shape[1]).cpu()
        self.uses[layer] += counts
        self.num_used.append(int(counts.count_nonzero()))

    def shares(self) -> dict[str, float]:
        """The shares of a layer's choices that its experts get: the mean, least and largest, over
        all layers."""
        shares = self.uses / self.uses.sum(1, keepdim=True)
        return {
            "mean_share": shares.mean().item(),
            "least_share": shares.min().item(),
            "largest_share": shares.max().item(),
        }

    @contextmanager
    def counting(self, model: nn.Module) -> Iterator[None]:
        """Counts the choices of all layers in this block."""
        with ExitStack() as hooks:
            for index, layer in enumerate(expert_layers(model)):

                def note(_: nn.Module, __: Any, scores: torch.Tensor, index: int = index) -> None:
                    self.add(index, scores)

                hooks.callback(layer.gate.register_forward_hook(note).remove)
            yield


@dataclass(frozen=True)
class ModelBytes:
    """Bytes of a model that a step reads.

    Attributes:
        expert: of an expert of one layer.
        rest: of all weights but experts and the embedding.
        kv_token: of K and V of a token.
    """

    expert: int
    rest: int
    kv_token: int
    num_expert_layers: int

    @classmethod
    def of(cls, runner: ModelRunner) -> ModelBytes:
        """Reads the sizes of what the runner holds."""
        held = {name: each.nbytes for name, each in runner.model.named_parameters()}
        layers = expert_layers(runner.model)
        experts = sum(size for name, size in held.items() if ".experts." in name)
        embedding = sum(size for name, size in held.items() if "embed_tokens" in name)
        return cls(
            experts // sum(len(layer.experts.down_proj) for layer in layers),
            sum(held.values()) - experts - embedding,
            sum(kv[0].nbytes for kv in runner.kv_pool.kv),
            len(layers),
        )

    def of_step(self, num_used: float, kv_tokens: float) -> float:
        """Bytes that a step reads whose layers use so many experts."""
        experts = self.num_expert_layers * self.expert * num_used
        return experts + self.rest + self.kv_token * kv_tokens


class Running:
    """A model with random weights, without processes, as the server runs it.

    Attributes:
        runner: of the model.
    """

    def __init__(self, geometry: str, device: str, most_requests: int) -> None:
        runners: list[ModelRunner] = []

        def make(group: RunnerGroup, *more: Any) -> Any:
            runners.append(group.target)
            return make_worker(group, *more)

        most_requests = max(ServerArgs.max_running_requests, most_requests)
        flags: dict[str, Any] = {"device": device, "log_level": "error"}
        flags["max_running_requests"] = most_requests
        self.batch = random_batch(geometry, CONTEXT_LEN, make=make, **flags)
        [self.runner] = runners

    def step_ms(self, size: int) -> list[float]:
        """Milliseconds of a step, of each of ROUNDS."""
        found: list[float] = []
        with decoding(self.batch, size, ROUNDS * STEPS, WARM_STEPS) as step:
            for _ in range(ROUNDS):
                start = time.perf_counter()
                for _ in range(STEPS):
                    step()
                synchronize()
                found.append((time.perf_counter() - start) / STEPS * 1e3)
        return found

    def count(self, size: int, sizes: ExpertGeometry) -> Choices:
        """The choices of the middle round of the same steps."""
        num_layers = len(expert_layers(self.runner.model))
        choices = Choices(sizes.num_chosen, torch.zeros(num_layers, sizes.num_experts))
        with decoding(self.batch, size, ROUNDS * STEPS, WARM_STEPS) as step:
            for _ in range(ROUNDS // 2 * STEPS):
                step()
            with choices.counting(self.runner.model):
                for _ in range(STEPS):
                    step()
        return choices

    def prompt_ms(self, num_tokens: int) -> list[float]:
        """Milliseconds of prompts, other ones each time, until their first new token."""
        walls = [
            self.batch.wall_s(random_prompts(1, num_tokens, self.batch.vocab_size, seed), 1) * 1e3
            for seed in range(PROMPT_REPEATS + 2)
        ]
        return walls[2:]  # two warm up


def expert_layers(model: nn.Module) -> list[SparseMLP]:
    """The layers with experts, in their order."""
    return [module for module in model.modules() if isinstance(module, SparseMLP)]


def decode_row(
    size: int, ms: list[float], choices: Choices, needed: ModelBytes, input_len: int
) -> dict[str, Any]:
    """The figures of decode steps of `size` requests.

    Args:
        ms: of a step, round by round.
        input_len: tokens with KV of a request before the first of these steps.
    """
    used, value = statistics.mean(choices.num_used), statistics.median(ms)
    kv_tokens = size * (input_len + (len(ms) * STEPS + 1) / 2)
    read_ms = needed.of_step(used, kv_tokens) / COPY_BYTES_PER_S * 1e3
    return {
        "requests": size,
        "ms": value,
        "rounds_ms": ms,
        "experts_used": used,
        "least_used": min(choices.num_used),
        "most_used": max(choices.num_used),
        **choices.shares(),
        "read_ms": read_ms,
        "over_reading": value / read_ms,
        "at_most": MOST_OVER_READING.get(size),
    }


def measure_decodes(
    running: Running, sizes: ExpertGeometry, batch_sizes: list[int]
) -> list[dict[str, Any]]:
    """One row per batch size; graphs are gone afterwards."""
    needed = ModelBytes.of(running.runner)
    timed = {size: running.step_ms(size) for size in batch_sizes}
    running.runner.drop_graphs()
    return [
        decode_row(size, ms, running.count(size, sizes), needed, DECODE_INPUT_LEN + WARM_STEPS)
        for size, ms in timed.items()
    ]


def measure(
    geometry: str, device: str, num_tokens: int, batch_sizes: list[int]
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The figures of prompts of a model, and of decode steps if it has experts."""
    running, sizes = Running(geometry, device, max(batch_sizes)), GEOMETRIES[geometry]
    ms = running.prompt_ms(num_tokens)
    tflop = sum(flop(sizes, num_tokens).values()) / 1e12
    value = statistics.median(ms)
    prompt = {"geometry": geometry, "ms": value, "all_ms": ms, "tflop_s": tflop / value * 1e3}
    has_experts = isinstance(sizes, ExpertGeometry)
    return prompt, measure_decodes(running, sizes, batch_sizes) if has_experts else []


def in_own_process(*arguments: Any) -> Any:
    """Calls `measure` in a process that ends before the next one takes the GPU's memory."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(measure, arguments)


def main() -> None:
    """Measures, prints, writes the result."""
    parser = make_parser(__doc__, "expert_model")
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[*MOST_OVER_READING])
    add("--device", default="auto")
    arguments: argparse.Namespace = parser.parse_args()
    is_trial = arguments.device == "cpu"
    geometry, dense = TRIAL_GEOMETRIES if is_trial else COMPARED_GEOMETRIES
    num_tokens = 64 if is_trial else PROMPT_TOKENS
    (prompt, decodes), (dense_prompt, _) = (
        in_own_process(name, arguments.device, num_tokens, arguments.batch_sizes)
        for name in (geometry, dense)
    )
    result = {
        "geometry": geometry,
        "copy_tb_s": COPY_BYTES_PER_S / 1e12,
        "decodes": decodes,
        "prompt_tokens": num_tokens,
        "prompts": [prompt, dense_prompt],
        "of_dense": prompt["tflop_s"] / dense_prompt["tflop_s"],
        "at_least": LEAST_OF_DENSE,
    }
    print_rows(decodes)
    print(f"prompts: {prompt}, {dense_prompt}: {result['of_dense']:.2f} of the dense model's")
    store(arguments.out, {**describe_environment(), **result})


if __name__ == "__main__":
    main()
