"""Times the sampling ops against torch on one GPU: medians of CUDA graph replays.

    python sgl-kernel/benchmark/bench_sampling.py --out results.json

Device time: a graph of many calls, so that launches cost what they cost inside a decode graph.
Inputs rotate through copies that together exceed the L2 cache (--warm-cache: one copy, as right
after the LM head wrote it). Host time: the Python call alone, without waiting for the GPU.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from timing import CALLS_PER_GRAPH, device_time_us, environment, host_time_us
from tqdm import tqdm

import sgl_kernel
from sgl_kernel import reference

_CACHE_BYTES = 128 * 2**20
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}

Call = Callable[[torch.Tensor], object]


@dataclass(frozen=True, slots=True)
class Timing:
    """Medians of one op on logits [rows, size].

    Attributes:
        gigabytes_per_s: logits read once, divided by the device time.
    """

    op: str
    rows: int
    size: int
    dtype: str
    device_us: float
    host_us: float
    gigabytes_per_s: float


def main() -> None:
    options = parse_options()
    sgl_kernel.warm_up()
    cases = [(rows, size) for size in options.sizes for rows in options.rows]
    work = [(rows, size, name) for rows, size in cases for name in _OPS]
    timings = []
    for rows, size, name in tqdm(work, desc="timing", file=sys.stderr):
        timings.append(measure(name, rows, size, options))
    print_table(timings)
    if options.out is not None:
        record = {
            **environment("bench_sampling.py"),
            "warm_cache": options.warm_cache,
            "spread": options.spread,
            "timings": [asdict(timing) for timing in timings],
        }
        options.out.write_text(json.dumps(record, indent=2) + "\n")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--sizes", type=int, nargs="+", default=[4096, 128256])
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bfloat16")
    parser.add_argument("--spread", type=float, default=3.0, help="deviation of the logits")
    parser.add_argument("--warm-cache", action="store_true")
    parser.add_argument("--repeats", type=int, default=21)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def sampling_rows(rows: int, size: int, top_p: float, top_k: int) -> sgl_kernel.SamplingRows:
    return sgl_kernel.SamplingRows(
        temperature=torch.ones(rows, device="cuda"),
        top_k=torch.full((rows,), min(top_k, size), device="cuda"),
        top_p=torch.full((rows,), top_p, device="cuda"),
        min_p=torch.zeros(rows, device="cuda"),
        seeds=torch.arange(rows, device="cuda"),
        positions=torch.full((rows,), 1000, device="cuda"),
    )


def _sampler(top_p: float, top_k: int, by_sorting: bool = False) -> Callable[[int, int], Call]:
    def make(rows: int, size: int) -> Call:
        parameters = sampling_rows(rows, size, top_p, top_k)
        op = reference.sample_tokens if by_sorting else sgl_kernel.sample_tokens
        return lambda logits: op(logits, parameters)

    return make


def _penalizer(by_torch: bool = False) -> Callable[[int, int], Call]:
    def make(rows: int, size: int) -> Call:
        counts = (torch.rand(rows, size, device="cuda") < 0.01).int()
        penalties = torch.tensor([[1.1, 0.3, 0.2]], device="cuda").repeat(rows, 1)
        requests = torch.arange(rows, device="cuda")
        op = reference.penalize_logits if by_torch else sgl_kernel.penalize_logits
        return lambda logits: op(logits, counts, penalties, requests)

    return make


def _torch_argmax_logsumexp(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits.argmax(dim=-1), logits.float().logsumexp(dim=-1)


def _topk(topk: int, by_torch: bool = False) -> Callable[[int, int], Call]:
    def make(rows: int, size: int) -> Call:
        op = reference.topk_logprob if by_torch else sgl_kernel.topk_logprob
        return lambda logits: op(logits, topk)

    return make


def _torch_topk_logsumexp(logits: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return *logits.topk(4, dim=-1), logits.float().logsumexp(dim=-1)


_OPS: dict[str, Callable[[int, int], Call]] = {
    "argmax_logprob": lambda rows, size: sgl_kernel.argmax_logprob,
    "torch argmax + logsumexp": lambda rows, size: _torch_argmax_logsumexp,
    "torch argmax": lambda rows, size: lambda logits: logits.argmax(dim=-1),
    **{f"topk_logprob, {topk}": _topk(topk) for topk in (2, 4, 8, 16)},
    "torch topk + logsumexp, 4": lambda rows, size: _torch_topk_logsumexp,
    "torch topk_logprob, 32": _topk(32, by_torch=True),
    "sample, no filter": _sampler(1.0, 1 << 30),
    "sample, top_p 0.9": _sampler(0.9, 1 << 30),
    "sample, top_p 0.9 top_k 50": _sampler(0.9, 50),
    "torch sort, top_p 0.9": _sampler(0.9, 1 << 30, by_sorting=True),
    "penalize": _penalizer(),
    "torch penalize": _penalizer(by_torch=True),
}


def measure(name: str, rows: int, size: int, options: argparse.Namespace) -> Timing:
    """Medians for one op and one shape."""
    dtype = _DTYPES[options.dtype]
    num_bytes = rows * size * dtype.itemsize
    num_copies = 1
    if not options.warm_cache:
        num_copies = min(CALLS_PER_GRAPH, 1 + _CACHE_BYTES // num_bytes)
    generator = torch.Generator("cuda").manual_seed(rows + size)
    copies = [
        (torch.randn(rows, size, generator=generator, device="cuda") * options.spread).to(dtype)
        for _ in range(num_copies)
    ]
    call = _OPS[name](rows, size)
    device_us = device_time_us(call, copies, options.repeats)
    return Timing(
        op=name,
        rows=rows,
        size=size,
        dtype=options.dtype,
        device_us=round(device_us, 2),
        host_us=round(host_time_us(call, copies[0], options.repeats), 2),
        gigabytes_per_s=round(num_bytes / device_us / 1e3, 1),
    )


def print_table(timings: list[Timing]) -> None:
    print(f"{'op':<28}{'rows':>6}{'size':>8}{'device us':>11}{'host us':>9}{'GB/s':>8}")
    for timing in timings:
        print(
            f"{timing.op:<28}{timing.rows:>6}{timing.size:>8}{timing.device_us:>11.2f}"
            f"{timing.host_us:>9.2f}{timing.gigabytes_per_s:>8.0f}"
        )


if __name__ == "__main__":
    main()
