"""How long is a decode step? Milliseconds by batch size, random weights in a large geometry.

(wall(256 new tokens) - wall(1 new token)) / 255, median of several runs; 128 tokens in, greedy, no
radix cache, steps overlapping, all in one process. Default geometry: Llama-3.1-8B.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine_load import random_prompts
from environment import describe_environment
from inflate import HF_NAMES, LLAMA_8B, Geometry
from tqdm import tqdm

from sglang.bench_one_batch import OneBatch
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.server_args import ServerArgs

RESULT = Path(__file__).parent / "results" / "decode_steps.json"
INPUT_LEN, OUTPUT_LEN = 128, 256
GEOMETRIES = {"llama-3.1-8b": LLAMA_8B, "tiny": Geometry(256, 512, 2, 4, 2, 64, 4096)}


def write_config(directory: Path, geometry: Geometry) -> None:
    """A config.json that random weights can be drawn for."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **{HF_NAMES.get(name, name): size for name, size in asdict(geometry).items()},
    }
    (directory / "config.json").write_text(json.dumps(config))


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
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--attention-backend")
    parser.add_argument("--disable-cuda-graph", action="store_true")
    parser.add_argument("--out", type=Path, default=RESULT)
    arguments = parser.parse_args()
    geometry = GEOMETRIES[arguments.geometry]
    with tempfile.TemporaryDirectory() as directory:
        write_config(Path(directory), geometry)
        args = ServerArgs(
            model_path=directory,
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
    arguments.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
