"""Where does each millisecond of a decode step go? Kernels by kind, and the gaps between them.

Steps of one static batch, overlapping as in the server, under torch's profiler (CUPTI): random
weights in a large geometry (as `decode_steps.py`), 128 tokens in. Also the time that the host takes
to launch a step. With --plot FILE draws the result.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from decode_steps import GEOMETRIES, INPUT_LEN, write_config
from environment import describe_environment
from tqdm import tqdm

from sglang.bench_one_batch import OneBatch
from sglang.srt.server_args import ServerArgs

RESULT = Path(__file__).parent / "results" / "step_profile.json"
NUM_STEPS, WARM_STEPS = 20, 12
KINDS = (  # the first whose words appear in a kernel's name
    ("attention", ("_split_kernel", "_combine_kernel", "_extend_kernel", "Decode", "Prefill")),
    ("norm", ("rms_norm",)),
    ("rope and KV write", ("_rotate_and_store",)),
    ("activation", ("_silu_and_mul",)),
    ("sampling", ("argmax", "sgl_kernel", "logsumexp")),
    ("matrix products", ("_few_rows", "gemm", "nvjet", "cutlass", "gemv", "splitK", "matmul")),
    ("copies", ("Memcpy", "Memset")),
)


def kind_of(name: str) -> str:
    """What a kernel is for."""
    for kind, words in KINDS:
        if any(word.lower() in name.lower() for word in words):
            return kind
    return "other"


def profile(batch: OneBatch, size: int, vocab_size: int) -> dict[str, Any]:
    """Kernel times of a step of `size` requests, in microseconds."""
    chooser = random.Random(size)
    prompts = [[chooser.randrange(2, vocab_size) for _ in range(INPUT_LEN)] for _ in range(size)]
    host_us: list[float] = []
    with batch.overlapping_steps(prompts, 4 * NUM_STEPS + WARM_STEPS) as step:
        for _ in range(WARM_STEPS):
            step()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(NUM_STEPS):
            step()
        torch.cuda.synchronize()
        wall_us = (time.perf_counter() - start) / NUM_STEPS * 1e6
        for _ in range(NUM_STEPS):  # the step before has ended, so nothing waits for the device
            before = time.perf_counter()
            step()
            host_us.append((time.perf_counter() - before) * 1e6)
            torch.cuda.synchronize()
        activities = [torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profiler:
            for _ in range(NUM_STEPS):
                step()
            torch.cuda.synchronize()
    return {
        "batch": size,
        "wall_us": wall_us,
        "host_us": statistics.median(host_us),
        **_sums(profiler),
    }


def _sums(profiler: Any) -> dict[str, Any]:
    """Microseconds per step by kind, by kernel, and idle between kernels."""
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name)
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    kinds: dict[str, float] = defaultdict(float)
    kernels: dict[str, list[float]] = defaultdict(list)
    idle, busy_until = 0.0, events[0][0]
    for start, end, name in events:
        # A kernel launched early waits beside the one before it: its time begins when that ends.
        alone = max(0.0, end - max(start, busy_until))
        kinds[kind_of(name)] += alone
        kernels[name].append(alone)
        idle += max(0.0, start - busy_until)
        busy_until = max(busy_until, end)
    whole = busy_until - events[0][0]
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:24]
    return {
        "profiled_us": whole / NUM_STEPS,
        "idle_us": idle / NUM_STEPS,
        "kernels_per_step": len(events) / NUM_STEPS,
        "kinds_us": {kind: total / NUM_STEPS for kind, total in sorted(kinds.items())},
        "kernels": [
            {
                "name": name[:90],
                "per_step": len(times) / NUM_STEPS,
                "median_us": statistics.median(times),
                "us_per_step": sum(times) / NUM_STEPS,
            }
            for name, times in largest
        ],
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Stacked bars of a step's time by kind."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    kinds = sorted({kind for row in rows for kind in row["kinds_us"]})
    figure, axis = pyplot.subplots(figsize=(8, 4.5))
    labels = [str(row["batch"]) for row in rows]
    bottom = [0.0] * len(rows)
    for kind in [*kinds, "gaps"]:
        values = [
            (row["idle_us"] if kind == "gaps" else row["kinds_us"].get(kind, 0.0)) / 1e3
            for row in rows
        ]
        axis.bar(labels, values, bottom=bottom, label=kind)
        bottom = [low + value for low, value in zip(bottom, values, strict=True)]
    axis.set_xlabel("requests in the batch")
    axis.set_ylabel("milliseconds per decode step")
    axis.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    """Profiles, prints a table, writes the result."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--attention-backend")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    geometry = GEOMETRIES[arguments.geometry]
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), geometry)
        batch = OneBatch(
            ServerArgs(
                model_path=directory,
                load_format="dummy",
                attention_backend=arguments.attention_backend,
                disable_radix_cache=True,
                max_running_requests=max(arguments.batch_sizes),
                chunked_prefill_size=8192,
                context_length=512,
            )
        )
        sizes = tqdm(arguments.batch_sizes, desc="profiling", unit="batch")
        rows = [profile(batch, size, geometry["vocab_size"]) for size in sizes]
    for row in rows:
        print(f"batch {row['batch']}: wall {row['wall_us']:.0f} us, host {row['host_us']:.0f} us,")
        print(f"  idle {row['idle_us']:.0f} us, {row['kernels_per_step']:.0f} kernels, by kind:")
        print("  " + ", ".join(f"{k} {v:.0f}" for k, v in row["kinds_us"].items()))
        for kernel in row["kernels"]:
            print(
                f"  {kernel['us_per_step']:8.1f} us {kernel['per_step']:6.1f} x"
                f" {kernel['median_us']:7.2f}  {kernel['name']}"
            )
    result = {**describe_environment(), "geometry": arguments.geometry, "rows": rows}
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    if arguments.plot:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
