"""Measures how long the experts of a layer take beside the time of reading their weights.

A CUDA graph has LAYERS layers of Qwen3-30B-A3B's sizes, so that none finds its weights in the
GPU's cache. "ours" are the kernels that serve, "torch" its grouped products between sorting and
adding; both take turns. Scores are random, so experts are used alike. `--device cpu` tries the
command with small sizes.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from tqdm import tqdm

from benchmark.command import in_turn, make_parser, store
from benchmark.environment import describe_environment
from sglang.srt.layers.ops.chosen_experts import choose_experts, sum_of_chosen
from sglang.srt.layers.ops.torch_ops import TorchOps

LAYERS, REPEATS = 8, 15
COPY_BYTES_PER_S = 2.96e12  # of a copy on an H100


class Sizes(NamedTuple):
    """Sizes of a layer, and how many experts a row goes through."""

    hidden: int = 2048
    num_experts: int = 128
    inner: int = 768
    num_chosen: int = 8
    dtype: torch.dtype = torch.bfloat16


class Layers:
    """Weights of all layers, and rows and scores of a step.

    Attributes:
        gate_up: of each layer [num_experts, 2 * inner, hidden].
        down: of each [num_experts, hidden, inner].
    """

    def __init__(self, sizes: Sizes, device: str) -> None:
        self.sizes, self.device = sizes, device
        wide = sizes.num_experts, 2 * sizes.inner, sizes.hidden
        self.gate_up = [self._drawn(*wide) for _ in range(LAYERS)]
        deep = sizes.num_experts, sizes.hidden, sizes.inner
        self.down = [self._drawn(*deep) for _ in range(LAYERS)]

    def _drawn(self, *shape: int) -> torch.Tensor:
        values = torch.empty(shape, device=self.device, dtype=self.sizes.dtype)
        return values.normal_(0, shape[-1] ** -0.5)

    def step(self, num_rows: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Returns rows [T, hidden], and scores [T, num_experts] of each layer."""
        shape = num_rows, self.sizes.num_experts
        scores = [torch.rand(shape, device=self.device).to(self.sizes.dtype) for _ in self.down]
        return self._drawn(num_rows, self.sizes.hidden), scores


def by_torch(
    x: torch.Tensor, scores: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, chosen: int
) -> torch.Tensor:
    """Computes a layer's experts by `grouped_mm`."""

    def compute(rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        numbers = torch.arange(len(down), device=experts.device)
        ends = torch.searchsorted(experts, numbers, right=True, out_int32=True)
        gate, up = F.grouped_mm(rows, gate_up.transpose(1, 2), offs=ends).chunk(2, dim=-1)
        return F.grouped_mm(F.silu(gate) * up, down.transpose(1, 2), offs=ends)

    return sum_of_chosen(x, choose_experts(scores, chosen, True), compute)


def replayable(work: Callable[[], None], device: str) -> Callable[[], None]:
    """Captures work in a graph if there is a GPU, and returns what runs it to its end."""
    work()
    if device == "cpu":
        return work
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    def replay() -> None:
        graph.replay()
        torch.cuda.synchronize()

    return replay


def measure(layers: Layers, num_rows: int) -> dict[str, Any]:
    """Measures a step of `num_rows` rows: microseconds of a layer."""
    sizes, (x, scores) = layers.sizes, layers.step(num_rows)
    if layers.device == "cpu":
        ops: Any = TorchOps(torch.device("cpu"))
    else:
        from sglang.srt.layers.ops.triton_ops import TritonOps

        ops = TritonOps(torch.device(layers.device))
    each = list(zip(scores, layers.gate_up, layers.down, strict=True))

    def ours() -> None:
        for score, gate_up, down in each:
            ops.experts(x, score, gate_up, down, sizes.num_chosen, True)

    def torchs() -> None:
        for score, gate_up, down in each:
            by_torch(x, score, gate_up, down, sizes.num_chosen)

    works = {"ours": replayable(ours, layers.device), "torch": replayable(torchs, layers.device)}
    times: dict[str, list[float]] = {way: [] for way in works}
    for number in range(REPEATS):
        for way in in_turn(works, number):
            start = time.perf_counter()
            works[way]()
            times[way].append((time.perf_counter() - start) / LAYERS * 1e6)
    chosen = [choose_experts(score, sizes.num_chosen, True).experts for score in scores]
    used = statistics.mean(experts.unique().numel() for experts in chosen)
    num_bytes = used * 3 * sizes.hidden * sizes.inner * x.element_size()
    floor_us = num_bytes / COPY_BYTES_PER_S * 1e6
    medians = {f"{way}_us": statistics.median(found) for way, found in times.items()}
    tflop_s = num_rows * sizes.num_chosen * 6 * sizes.hidden * sizes.inner / medians["ours_us"]
    row = {"rows": num_rows, "experts_used": used, "read_us": floor_us, **medians}
    return row | {"tflop_s": tflop_s / 1e6, "ours_over_read": medians["ours_us"] / floor_us}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "expert_times")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512, 4096])
    arguments: argparse.Namespace = parser.parse_args()
    is_trial = arguments.device == "cpu"
    sizes = Sizes(64, 16, 32, 4, torch.bfloat16) if is_trial else Sizes()
    layers = Layers(sizes, arguments.device)
    rows = [measure(layers, count) for count in tqdm(arguments.rows, desc="steps", unit="step")]
    for row in rows:
        print(", ".join(f"{name} {value:.6g}" for name, value in row.items()))
    shown = {name: str(value) for name, value in sizes._asdict().items()}
    result = {"layers": LAYERS, "sizes": shown, "rows": rows}
    store(arguments.out, {**describe_environment(), **result})


if __name__ == "__main__":
    main()
