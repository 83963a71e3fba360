"""Measures where the time of a step or of a prompt goes: kernels by kind, and idle.

Under torch's profiler (CUPTI), each step launched while the one before it runs, as in the server:
random weights in a large geometry. Steps are those of one static batch, 128 tokens in. --prompts
profiles prompts of so many tokens instead, each alone until its first new token, with the server's
default flags; the wall time is measured without the profiler.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmark.command import store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.long_prompts import CONTEXT_LEN
from benchmark.one_batch import CHUNK, decoding, make_random_parser, random_batch, synchronize
from benchmark.random_model import GEOMETRIES, Geometry
from sglang.bench_one_batch import OneBatch
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

KV_GATHER, ATTENTION, PRODUCTS = "KV gather", "attention", "matrix products"
PROMPT_KERNELS = "_prompt_"  # names of the kernels of prefill attention begin so
ATTENTION_WORDS = ("_split_kernel", "_combine_kernel", "_extend_kernel", "Decode", "Prefill")
LIBRARY_ATTENTION_WORDS = ("sdpa", "fmha", "flash_", "flash::")  # of cuDNN, torch, FlashAttention
KINDS = (  # the first whose words appear in a kernel's name
    (KV_GATHER, ("gather_kv",)),
    (ATTENTION, (*ATTENTION_WORDS, *LIBRARY_ATTENTION_WORDS)),
    ("norm", ("rms_norm",)),
    ("rope and KV write", ("_rotate_and_store",)),
    ("activation", ("_silu_and_mul",)),
    ("rounding to 8 bits", ("_round_rows",)),
    ("sampling", ("argmax", "sgl_kernel", "logsumexp")),
    (
        PRODUCTS,
        ("_few_rows", "product_kernel", "gemm", "nvjet", "cutlass", "gemv", "splitK", "matmul"),
    ),
    ("copies", ("Memcpy", "Memset")),
)
MAX_KERNELS = 24  # that are named in a result
NUM_STEPS, WARM_STEPS = 20, 12


class Event(NamedTuple):
    """A kernel or copy; start and end in microseconds."""

    start: float
    end: float
    name: str


def kind_of(name: str) -> str:
    """Names the purpose of a kernel."""
    for kind, words in KINDS:
        if any(word.lower() in name.lower() for word in words):
            return kind
    return ATTENTION if name.startswith(PROMPT_KERNELS) else "other"


def profiled(work: Callable[[], object]) -> list[Event]:
    """Profiles some work: a GPU's kernels, or, to try the command, a CPU's operations, outer ones
    and those within."""
    activities, types = torch.profiler.ProfilerActivity, torch.autograd.DeviceType
    has_gpu = torch.cuda.is_initialized()
    activity = activities.CUDA if has_gpu else activities.CPU
    wanted = types.CUDA if has_gpu else types.CPU
    with torch.profiler.profile(activities=[activity]) as profiler:
        work()
        synchronize()
    return sorted(
        Event(event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == wanted
    )


def sums(events: Iterable[Event], num_steps: int) -> dict[str, Any]:
    """Microseconds per step by kind, by kernel, and idle between kernels.

    Args:
        events: at least one, in the order of their starts.
    """
    events = list(events)
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    idle, busy_until = 0.0, events[0].start
    for start, end, name in events:
        # A kernel launched early waits beside the one before it: its time begins when that ends.
        alone = max(0.0, end - max(start, busy_until))
        kinds[kind_of(name)] += alone
        kernels[name].append(alone)
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    whole = busy_until - events[0].start
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:MAX_KERNELS]
    return {
        "profiled_us": whole / num_steps,
        "idle_us": idle / num_steps,
        "kernels_per_step": len(events) / num_steps,
        "kinds_us": {kind: total / num_steps for kind, total in sorted(kinds.items())},
        "kernels": [
            {
                "name": name[:90],
                "per_step": len(times) / num_steps,
                "median_us": statistics.median(times),
                "us_per_step": sum(times) / num_steps,
            }
            for name, times in largest
        ],
    }


def print_times(row: dict[str, Any]) -> None:
    """Renders the sums for the terminal."""
    print(f"  idle {row['idle_us']:.0f} us, {row['kernels_per_step']:.0f} kernels, by kind:")
    print("  " + ", ".join(f"{kind} {us:.0f}" for kind, us in row["kinds_us"].items()))
    for kernel in row["kernels"]:
        print(
            f"  {kernel['us_per_step']:8.1f} us {kernel['per_step']:6.1f} x"
            f" {kernel['median_us']:7.2f}  {kernel['name']}"
        )


# ---------------------------------------------------------------- steps of a batch


def profile_steps(batch: OneBatch, size: int) -> dict[str, Any]:
    """Kernel times of a step of `size` requests, in microseconds."""
    with decoding(batch, size, 2 * NUM_STEPS, WARM_STEPS) as step:

        def steps() -> None:
            for _ in range(NUM_STEPS):
                step()
            synchronize()

        start = time.perf_counter()
        steps()
        wall_us = (time.perf_counter() - start) / NUM_STEPS * 1e6
        events = profiled(steps)
    return {"load": f"batch {size}", "wall_us": wall_us, **sums(events, NUM_STEPS)}


# ---------------------------------------------------------------- prompts


def flop(geometry: Geometry, num_tokens: int) -> dict[str, int]:
    """Floating-point operations of a prefill by kind: products, and causal attention."""
    sizes = geometry
    q_len, kv_len = (heads * sizes.head_dim for heads in (sizes.num_heads, sizes.num_kv_heads))
    layer = sizes.hidden_size * (2 * q_len + 2 * kv_len + 3 * sizes.intermediate_size)
    head = sizes.hidden_size * sizes.vocab_size  # of the last token alone
    pairs = num_tokens * (num_tokens + 1) // 2  # of a query and a key that it sees
    return {
        PRODUCTS: 2 * (num_tokens * sizes.num_layers * layer + head),
        ATTENTION: 4 * pairs * q_len * sizes.num_layers,
    }


def profile_prompt(
    batch: OneBatch, num_tokens: int, geometry: Geometry, seeds: Iterator[int]
) -> dict[str, Any]:
    """Kernel times of one prefill, in microseconds; the wall time is the median of three."""

    def prompt() -> list[list[int]]:
        return random_prompts(1, num_tokens, geometry.vocab_size, next(seeds))

    batch.wall_s(prompt(), 1)  # warms up
    walls = [batch.wall_s(prompt(), 1) for _ in range(3)]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    with batch.overlapping_steps(prompt(), params) as step:

        def prefill() -> None:
            while not all(batch.outputs.values()):
                step()

        found = sums(profiled(prefill), 1)
    tflop_s = {
        kind: number / found["kinds_us"][kind] / 1e6
        for kind, number in flop(geometry, num_tokens).items()
        if found["kinds_us"].get(kind)
    }
    wall_us = statistics.median(walls) * 1e6
    return {"load": f"{num_tokens:,} tokens", "wall_us": wall_us, "tflop_s": tflop_s, **found}


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per batch, or per prompt."""
    of_steps = {
        "max_running_requests": max(ServerArgs.max_running_requests, *arguments.batch_sizes),
        "chunked_prefill_size": CHUNK,
        "context_length": 1024,
    }
    batch = random_batch(
        arguments.geometry,
        CONTEXT_LEN,
        device=arguments.device,
        attention_backend=arguments.attention_backend,
        **({} if arguments.prompts else of_steps),
    )
    if arguments.prompts:
        geometry, seeds = GEOMETRIES[arguments.geometry], itertools.count()
        bar = tqdm(arguments.prompts, desc="profiling", unit="prompt")
        return [profile_prompt(batch, length, geometry, seeds) for length in bar]
    return [profile_steps(batch, size) for size in tqdm(arguments.batch_sizes, unit="batch")]


def main() -> None:
    """Profiles, prints a table, writes the result."""
    parser = make_random_parser(__doc__, "kernel_times")
    add = parser.add_argument
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--prompts", type=int, nargs="*", default=[], metavar="TOKENS", help="instead of steps")
    arguments = parser.parse_args()
    rows = measure(arguments)
    for row in rows:
        speeds = row.get("tflop_s", {}).items()
        more = "".join(f", {kind} {speed:.0f} TFLOP/s" for kind, speed in speeds)
        print(f"{row['load']}: wall {row['wall_us']:.0f} us{more}")
        print_times(row)
    given = {name: vars(arguments)[name] for name in ("geometry", "attention_backend")}
    store(arguments.out, {**describe_environment(), **given, "rows": rows})


if __name__ == "__main__":
    main()
