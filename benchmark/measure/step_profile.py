"""Where does each millisecond of a decode step go? Kernels by kind, and the gaps between them.

Steps of one static batch under torch's profiler (CUPTI), each launched while the one before it
runs, as in the server: random weights in a large geometry, 128 tokens in. Also the time that the
host takes to launch a step. --mixed adds steps of a full load: 128 requests at once, prompts of 512
tokens and 128 new ones each, so that prompts and decodes share every step. --mtp adds steps in
which requests feed what they predicted and masks (k=8: fifteen rows each), for few requests at
once; all steps then run as those of a model with a mask token.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.decode_steps import INPUT_LEN
from benchmark.random_model import GEOMETRIES, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

NUM_STEPS, WARM_STEPS = 20, 12
CHUNK = 512  # prompt tokens of a step
MASK_TOKEN, MTP_K = 2, 8
MTP_BATCH_SIZES = (1, 4)
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


@dataclass(frozen=True)
class Load:
    """Requests of a profile, all at once.

    Attributes:
        warm_steps: before the measured ones.
    """

    name: str
    num_requests: int
    input_len: int
    output_len: int
    warm_steps: int
    mtp_k: int = 1

    @classmethod
    def decode(cls, size: int, mtp_k: int = 1) -> Load:
        warm_steps = WARM_STEPS + size * INPUT_LEN // CHUNK
        name = f"batch {size}" + (f", k={mtp_k}" if mtp_k > 1 else "")
        output_len = mtp_k * (4 * NUM_STEPS + warm_steps)
        return cls(name, size, INPUT_LEN, output_len, warm_steps, mtp_k)

    @property
    def params(self) -> SamplingParams:
        mtp = {"mtp_enabled": True, "mtp_k": self.mtp_k} if self.mtp_k > 1 else {}
        return SamplingParams(
            temperature=0.0, max_new_tokens=self.output_len, ignore_eos=True, **mtp
        )


MIXED = Load("mixed, 128 running", 400, 512, 128, 200)  # by then as many begin as end


def profile(batch: OneBatch, load: Load, vocab_size: int) -> dict[str, Any]:
    """Kernel times of a step, in microseconds."""
    prompts = random_prompts(load.num_requests, load.input_len, vocab_size, load.num_requests)
    host_us: list[float] = []
    with batch.overlapping_steps(prompts, load.params) as step:
        for _ in range(load.warm_steps):
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
        "batch": load.num_requests,
        "load": load.name,
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
    gaps: dict[str, list[float]] = defaultdict(list)
    idle, busy_until, last_name = 0.0, events[0][0], events[0][2]
    for start, end, name in events:
        # A kernel launched early waits beside the one before it: its time begins when that ends.
        alone = max(0.0, end - max(start, busy_until))
        kinds[kind_of(name)] += alone
        kernels[name].append(alone)
        if start > busy_until:
            idle += start - busy_until
            gaps[f"{last_name[:50]} > {name[:50]}"].append(start - busy_until)
        busy_until, last_name = max(busy_until, end), name
    whole = busy_until - events[0][0]
    largest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:24]
    widest = sorted(gaps.items(), key=lambda item: -sum(item[1]))[:8]
    return {
        "profiled_us": whole / NUM_STEPS,
        "idle_us": idle / NUM_STEPS,
        "kernels_per_step": len(events) / NUM_STEPS,
        "kinds_us": {kind: total / NUM_STEPS for kind, total in sorted(kinds.items())},
        "gaps": [
            {
                "between": pair,
                "per_step": len(all_us) / NUM_STEPS,
                "us_per_step": sum(all_us) / NUM_STEPS,
            }
            for pair, all_us in widest
        ],
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


def main() -> None:
    """Profiles, prints a table, writes the result."""
    parser = make_parser(__doc__, "step_profile")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--attention-backend")
    parser.add_argument("--mixed", action="store_true", help="also steps of prompts and decodes")
    parser.add_argument("--mtp", action="store_true", help="also steps of several rows per request")
    arguments = parser.parse_args()
    geometry = GEOMETRIES[arguments.geometry]
    with random_model(arguments.geometry) as folder:
        batch = OneBatch(
            ServerArgs(
                model_path=folder,
                load_format="dummy",
                attention_backend=arguments.attention_backend,
                disable_radix_cache=True,
                max_running_requests=128,
                chunked_prefill_size=CHUNK,
                context_length=2048 if arguments.mtp else 1024,
                mtp_mask_token_id=MASK_TOKEN if arguments.mtp else None,
            )
        )
        keep_out_of_collections()
        loads = [Load.decode(size) for size in arguments.batch_sizes]
        if arguments.mtp:
            loads += [Load.decode(size, MTP_K) for size in MTP_BATCH_SIZES]
        loads += [MIXED] if arguments.mixed else []
        bar = tqdm(loads, desc="profiling", unit="batch")
        rows = [profile(batch, load, geometry.vocab_size) for load in bar]
    for row in rows:
        print(f"{row['load']}: wall {row['wall_us']:.0f} us, host {row['host_us']:.0f} us,")
        print(f"  idle {row['idle_us']:.0f} us, {row['kernels_per_step']:.0f} kernels, by kind:")
        print("  " + ", ".join(f"{k} {v:.0f}" for k, v in row["kinds_us"].items()))
        for gap in row["gaps"]:
            print(f"  gaps {gap['us_per_step']:6.1f} us {gap['per_step']:6.1f} x  {gap['between']}")
        for kernel in row["kernels"]:
            print(
                f"  {kernel['us_per_step']:8.1f} us {kernel['per_step']:6.1f} x"
                f" {kernel['median_us']:7.2f}  {kernel['name']}"
            )
    result = {**describe_environment(), "geometry": arguments.geometry, "rows": rows}
    store(arguments.out, result)


if __name__ == "__main__":
    main()
