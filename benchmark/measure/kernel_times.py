"""Measures where the time of a step or of a prompt goes: kernels by kind, and their gaps.

Under torch's profiler (CUPTI), each step launched while the one before it runs, as in the server:
random weights in a large geometry. Steps are those of one static batch, 128 tokens in, with the
time that the host takes to launch one. --eagle profiles rounds of an EAGLE head instead, 3 drafts
of each request, of which hardly any is right. --prompts profiles prompts of so many tokens instead,
each alone until its first new token, with the server's default flags; the wall time is measured
without the profiler.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.long_prompts import CONTEXT_LEN
from benchmark.measure.long_prompts import DECODE_INPUT_LEN as INPUT_LEN
from benchmark.random_model import GEOMETRIES, Geometry, random_head, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
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
MAX_KERNELS, MAX_GAPS = 24, 8  # that are named in a result
NUM_STEPS, WARM_STEPS = 20, 12
CHUNK = 512  # prompt tokens of a step
EAGLE: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_load_aware": "off",
}


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


@dataclass(frozen=True)
class Device:
    """Names what is profiled: a GPU's kernels, or a CPU's operations, to try the command."""

    has_gpu: bool

    def synchronize(self) -> None:
        """Waits until nothing runs."""
        if self.has_gpu:
            torch.cuda.synchronize()

    def events(self, work: Callable[[], object]) -> list[Event]:
        """Profiles some work; of a CPU outer operations and those within."""
        activities, types = torch.profiler.ProfilerActivity, torch.autograd.DeviceType
        activity = activities.CUDA if self.has_gpu else activities.CPU
        wanted = types.CUDA if self.has_gpu else types.CPU
        with torch.profiler.profile(activities=[activity]) as profiler:
            work()
            self.synchronize()
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
    gaps: dict[str, list[float]] = defaultdict(list)
    idle, busy_until, last_name = 0.0, events[0].start, events[0].name
    for start, end, name in events:
        # A kernel launched early waits beside the one before it: its time begins when that ends.
        alone = max(0.0, end - max(start, busy_until))
        kinds[kind_of(name)] += alone
        kernels[name].append(alone)
        if start > busy_until:
            idle += start - busy_until
            gaps[f"{last_name[:50]} > {name[:50]}"].append(start - busy_until)
        busy_until, last_name = max(busy_until, end), name
    whole = busy_until - events[0].start
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:MAX_KERNELS]
    widest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:MAX_GAPS]
    return {
        "profiled_us": whole / num_steps,
        "idle_us": idle / num_steps,
        "kernels_per_step": len(events) / num_steps,
        "kinds_us": {kind: total / num_steps for kind, total in sorted(kinds.items())},
        "gaps": [
            {
                "between": pair,
                "per_step": len(all_us) / num_steps,
                "us_per_step": sum(all_us) / num_steps,
            }
            for pair, all_us in widest
        ],
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
    for gap in row["gaps"]:
        print(f"  gaps {gap['us_per_step']:6.1f} us {gap['per_step']:6.1f} x  {gap['between']}")
    for kernel in row["kernels"]:
        print(
            f"  {kernel['us_per_step']:8.1f} us {kernel['per_step']:6.1f} x"
            f" {kernel['median_us']:7.2f}  {kernel['name']}"
        )


# ---------------------------------------------------------------- steps of a batch


def profile_steps(batch: OneBatch, size: int, device: Device) -> dict[str, Any]:
    """Kernel times of a step of `size` requests, in microseconds."""
    prompts = random_prompts(size, INPUT_LEN, batch.vocab_size, size)
    warm_steps = WARM_STEPS + size * INPUT_LEN // CHUNK
    num_new = 4 * NUM_STEPS + warm_steps
    params = SamplingParams(temperature=0.0, max_new_tokens=num_new, ignore_eos=True)
    host_us: list[float] = []
    with batch.overlapping_steps(prompts, params) as step:

        def steps(number: int = NUM_STEPS) -> None:
            for _ in range(number):
                step()
            device.synchronize()

        steps(warm_steps)
        start = time.perf_counter()
        steps()
        wall_us = (time.perf_counter() - start) / NUM_STEPS * 1e6
        for _ in range(NUM_STEPS):  # the step before has ended, so nothing waits for the device
            before = time.perf_counter()
            step()
            host_us.append((time.perf_counter() - before) * 1e6)
            device.synchronize()
        events = device.events(steps)
    return {
        "load": f"batch {size}",
        "batch": size,
        "wall_us": wall_us,
        "host_us": statistics.median(host_us),
        **sums(events, NUM_STEPS),
    }


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
    batch: OneBatch, num_tokens: int, geometry: Geometry, seeds: Iterator[int], device: Device
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

        found = sums(device.events(prefill), 1)
    tflop_s = {
        kind: number / found["kinds_us"][kind] / 1e6
        for kind, number in flop(geometry, num_tokens).items()
        if found["kinds_us"].get(kind)
    }
    wall_us = statistics.median(walls) * 1e6
    return {"load": f"{num_tokens:,} tokens", "wall_us": wall_us, "tflop_s": tflop_s, **found}


# ---------------------------------------------------------------- the command


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "kernel_times")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--prompts", type=int, nargs="*", default=[], metavar="TOKENS", help="instead of steps")
    add("--eagle", action="store_true", help="rounds of an EAGLE head")
    add("--device", default="auto")
    add("--attention-backend")
    return parser.parse_args(argv)


def flags_of(arguments: argparse.Namespace, head: str) -> dict[str, Any]:
    """Flags of the server, beside those of the model.

    Args:
        head: folder of an EAGLE head.
    """
    if arguments.prompts:
        return {}
    drafter = {**EAGLE, "speculative_draft_model_path": head} if arguments.eagle else {}
    return {
        "max_running_requests": max(ServerArgs.max_running_requests, *arguments.batch_sizes),
        "chunked_prefill_size": CHUNK,
        "context_length": 1024,
        **drafter,
    }


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per batch, or per prompt."""
    geometry, seeds = GEOMETRIES[arguments.geometry], itertools.count()
    device = Device(torch.cuda.is_available() and arguments.device != "cpu")
    with random_model(arguments.geometry, CONTEXT_LEN) as folder, random_head(folder) as head:
        args = ServerArgs(
            model_path=folder,
            load_format="dummy",
            device=arguments.device,
            attention_backend=arguments.attention_backend,
            disable_radix_cache=True,
            **flags_of(arguments, head),
        )
        batch = OneBatch(args)
        keep_out_of_collections()
        if arguments.prompts:
            bar = tqdm(arguments.prompts, desc="profiling", unit="prompt")
            return [profile_prompt(batch, length, geometry, seeds, device) for length in bar]
        bar = tqdm(arguments.batch_sizes, desc="profiling", unit="batch")
        return [profile_steps(batch, size, device) for size in bar]


def main() -> None:
    """Profiles, prints a table, writes the result."""
    arguments = parse()
    rows = measure(arguments)
    for row in rows:
        more = f", host {row['host_us']:.0f} us" if "host_us" in row else ""
        speeds = row.get("tflop_s", {}).items()
        more += "".join(f", {kind} {speed:.0f} TFLOP/s" for kind, speed in speeds)
        print(f"{row['load']}: wall {row['wall_us']:.0f} us{more}")
        print_times(row)
    given = {name: vars(arguments)[name] for name in ("geometry", "eagle", "attention_backend")}
    store(arguments.out, {**describe_environment(), **given, "rows": rows})


if __name__ == "__main__":
    main()
