"""Where does each millisecond of a decode step go? Kernels by kind, and the gaps between them.

Steps of one static batch under torch's profiler (CUPTI), each launched while the one before it
runs, as in the server: random weights in a large geometry, 128 tokens in. Also the time that the
host takes to launch a step. --mixed adds steps of a full load: 128 requests at once, prompts of 512
tokens and 128 new ones each, so that prompts and decodes share every step. --mtp adds steps in
which requests feed what they predicted and masks (k=8: fifteen rows each), for few requests at
once; all steps then run as those of a model with a mask token. --eagle profiles rounds of an EAGLE
head instead, 3 drafts of each request, of which hardly any is right with random weights.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.kernel_times import events_of, print_times, sums
from benchmark.measure.long_prompts import DECODE_INPUT_LEN as INPUT_LEN
from benchmark.random_model import GEOMETRIES, random_head, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs

NUM_STEPS, WARM_STEPS = 20, 12
CHUNK = 512  # prompt tokens of a step
MASK_TOKEN, MTP_K = 2, 8
MTP_BATCH_SIZES = (1, 4)
EAGLE: dict[str, Any] = {
    "speculative_algorithm": "EAGLE",
    "speculative_num_steps": 3,
    "speculative_load_aware": "off",
}


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
        **sums(events_of(profiler), NUM_STEPS),
    }


def main() -> None:
    """Profiles, prints a table, writes the result."""
    parser = make_parser(__doc__, "step_profile")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--attention-backend")
    parser.add_argument("--mixed", action="store_true", help="also steps of prompts and decodes")
    parser.add_argument("--mtp", action="store_true", help="also steps of several rows per request")
    parser.add_argument("--eagle", action="store_true", help="rounds of an EAGLE head")
    arguments = parser.parse_args()
    geometry = GEOMETRIES[arguments.geometry]
    with random_model(arguments.geometry) as folder, random_head(folder) as head:
        drafter = {**EAGLE, "speculative_draft_model_path": head} if arguments.eagle else {}
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
                **drafter,
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
        print_times(row)
    result = {**describe_environment(), "geometry": arguments.geometry, "eagle": arguments.eagle}
    result["rows"] = rows
    store(arguments.out, result)


if __name__ == "__main__":
    main()
