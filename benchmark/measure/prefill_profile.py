"""Where does each millisecond of a prompt's prefill go? Kernels by kind, and the gaps between them.

Prompts of random tokens, each alone, from its first step until its first new token, under torch's
profiler (CUPTI); every step is launched while the one before it runs, as in the server. Random
weights in a large geometry, no radix cache, the server's default flags else. The wall time is
measured without the profiler. Each prompt is warmed up by one of its length.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import add_schedule_options, make_parser, schedule_flags, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.kernel_times import ATTENTION, PRODUCTS, events_of, print_times, sums
from benchmark.measure.long_prompts import CONTEXT_LEN, MAX_RUNNING
from benchmark.random_model import GEOMETRIES, Geometry, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs


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


def profile(
    batch: OneBatch,
    num_tokens: int,
    geometry: Geometry,
    repeats: int,
    seeds: Iterator[int],
    has_gpu: bool,
) -> dict[str, Any]:
    """Kernel times of one prefill, in microseconds.

    Args:
        repeats: of the wall time; one of the profile.
        has_gpu: kernels are profiled, and otherwise a CPU's operations.
    """

    def prompt() -> list[list[int]]:
        return random_prompts(1, num_tokens, geometry.vocab_size, next(seeds))

    batch.wall_s(prompt(), 1)  # warms up
    walls = [batch.wall_s(prompt(), 1) for _ in range(repeats)]
    params = SamplingParams(temperature=0.0, max_new_tokens=1, ignore_eos=True)
    num_turns = 0
    activities = torch.profiler.ProfilerActivity
    profiler = torch.profiler.profile(activities=[activities.CUDA if has_gpu else activities.CPU])
    with batch.overlapping_steps(prompt(), params) as step, profiler:
        while not all(batch.outputs.values()):
            step()
            num_turns += 1
        if has_gpu:
            torch.cuda.synchronize()
    found = sums(events_of(profiler, "cuda" if has_gpu else "cpu"), 1)
    tflop_s = {
        kind: number / found["kinds_us"][kind] / 1e6
        for kind, number in flop(geometry, num_tokens).items()
        if found["kinds_us"].get(kind)
    }
    return {
        "load": f"{num_tokens:,} tokens",
        "num_tokens": num_tokens,
        "num_turns": num_turns,  # of the scheduler: the steps, and perhaps one that only reads
        "wall_us": statistics.median(walls) * 1e6,
        "all_wall_us": [wall * 1e6 for wall in walls],
        "tflop_s": tflop_s,
        **found,
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "prefill_profile")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--lengths", type=int, nargs="+", default=[4096, 16384, 30000], help="tokens of a prompt")
    add("--repeats", type=int, default=3)
    add("--device", default="auto")
    add("--attention-backend")
    add_schedule_options(parser)
    return parser.parse_args(argv)


def main() -> None:
    """Profiles, prints a table, writes the result."""
    arguments = parse()
    geometry, seeds = GEOMETRIES[arguments.geometry], itertools.count()
    flags = schedule_flags(arguments)
    with random_model(arguments.geometry, CONTEXT_LEN) as folder:
        args = ServerArgs(
            model_path=folder,
            load_format="dummy",
            device=arguments.device,
            attention_backend=arguments.attention_backend,
            disable_radix_cache=True,
            max_running_requests=MAX_RUNNING,
            **flags,
        )
        batch = OneBatch(args)
        keep_out_of_collections()
        bar = tqdm(arguments.lengths, desc="profiling", unit="prompt")
        has_gpu = torch.cuda.is_available() and arguments.device != "cpu"
        rows = [
            profile(batch, length, geometry, arguments.repeats, seeds, has_gpu) for length in bar
        ]
    for row in rows:
        speeds = ", ".join(f"{kind} {speed:.0f} TFLOP/s" for kind, speed in row["tflop_s"].items())
        wall_ms, profiled_ms = row["wall_us"] / 1e3, row["profiled_us"] / 1e3
        print(f"{row['load']}, {row['num_turns']} turns of the scheduler:", end=" ")
        print(f"wall {wall_ms:.1f} ms, profiled", end=" ")
        print(f"{profiled_ms:.1f} ms; {speeds}")
        print_times(row)
    result = {
        **describe_environment(),
        "geometry": arguments.geometry,
        "attention_backend": arguments.attention_backend or "default",
        "flags": flags,
        "rows": rows,
    }
    store(arguments.out, result)


if __name__ == "__main__":
    main()
