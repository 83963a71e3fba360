"""How long is a decode step? Milliseconds by batch size, random weights in a large geometry.

(wall(256 new tokens) - wall(1 new token)) / 255, median of several runs; 128 tokens in, greedy, no
radix cache, steps overlapping, all in one process. Default geometry: Llama-3.1-8B.
"""

from __future__ import annotations

import itertools
import statistics
from typing import Any

from tqdm import tqdm

from benchmark.command import make_parser, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.random_model import GEOMETRIES, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.server_args import ServerArgs

INPUT_LEN, OUTPUT_LEN = 128, 256


def measure(batch: OneBatch, size: int, repeats: int, vocab_size: int) -> dict[str, Any]:
    """Step times of one batch size."""
    seeds = itertools.count()

    def wall_s(num_new: int) -> float:
        return batch.wall_s(random_prompts(size, INPUT_LEN, vocab_size, next(seeds)), num_new)

    wall_s(8)  # warms up
    steps = []
    for _ in tqdm(range(repeats), desc=f"batch {size}", unit="run"):
        steps.append((wall_s(OUTPUT_LEN) - wall_s(1)) / (OUTPUT_LEN - 1) * 1e3)
    return {"batch": size, "ms": round(statistics.median(steps), 3), "all_ms": steps}


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "decode_steps")
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    arguments = parser.parse_args()
    geometry = GEOMETRIES[arguments.geometry]
    with random_model(arguments.geometry) as folder:
        args = ServerArgs(
            model_path=folder,
            load_format="dummy",
            device=arguments.device,
            attention_backend=arguments.attention_backend,
            disable_cuda_graph=arguments.disable_cuda_graph,
            disable_radix_cache=True,
            max_running_requests=max(arguments.batch_sizes),
            chunked_prefill_size=8192,
            context_length=INPUT_LEN + OUTPUT_LEN + 16,
        )
        batch = OneBatch(args)
        keep_out_of_collections()
        rows = [
            measure(batch, size, arguments.repeats, geometry.vocab_size)
            for size in arguments.batch_sizes
        ]
    for row in rows:
        print(f"batch {row['batch']:4d}: {row['ms']:8.2f} ms/step")
    result = {
        **describe_environment(),
        "geometry": arguments.geometry,
        "attention_backend": arguments.attention_backend or "default",
        "cuda_graphs": not arguments.disable_cuda_graph,
        "rows": rows,
    }
    store(arguments.out, result)


if __name__ == "__main__":
    main()
