"""How fast is attention of prompts and of decodes, beside other ways? Apart from a model, on a GPU.

Inputs are random normal values, KV lies in random slots of a pool with pages of one token, and each
result is checked against attention in float32 before it is timed, by CUDA events around graphs of
calls (`method` events: of calls that no graph can capture). Calls take turns at several layers.

Prompts: rows over a prefix whose KV is there. `ours` gathers K and V and attends them, and is also
timed kernel by kernel; `triton` is the kernel for other GPUs, over the pool; `cudnn` and
`flashinfer` attend KV that has been gathered before, which is not in their time. Each is timed in a
`burst` after a rest and `sustained`, back to back for half a second: a GPU's clock falls under
load. `first_ms`: the first call of a shape; cuDNN makes a plan then.

Decodes: one layer as the Triton backend plans it for a graph, beside what its K and V take at the
bandwidth of a large copy. No set of requests is read again before as much as twice the L2 cache has
been. `--sweep` times other tiles and splits of the KV in the same way.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from tqdm import tqdm

from benchmark import attention_inputs, decode_ways
from benchmark.attention_inputs import DecodeInputs, DecodeShape, Heads, PromptInputs, PromptShape
from benchmark.command import make_parser, store
from benchmark.device_times import (
    burst_us,
    cache_bytes,
    capture,
    copies_to_exceed,
    copy_gb_s,
    median_us,
    sustained_us,
)
from benchmark.environment import describe_environment
from benchmark.prompt_ways import GATHERING, WAYS, NotHere
from benchmark.report.attention_tables import attention_decodes, attention_prompts
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

PROMPTS = (
    *((512, 0), (4096, 0), (8192, 0), (16384, 0)),
    *((512, 8192), (2048, 8192), (8192, 8192), (2048, 30000)),
    *((128, 8192), (256, 8192), (128, 16384), (128, 30000), (256, 30000), (512, 30000)),
)
DECODES = (
    *((1, 170), (1, 30000), (2, 170), (4, 170), (8, 170), (8, 8192)),
    *((16, 170), (16, 1000), (16, 8192), (32, 170), (32, 2000)),
    *((64, 500), (64, 2048), (128, 170), (128, 1024)),
)
NUM_LAYERS = 4  # that calls of prompts take turns at
FLOP_OF_A_GRAPH, MAX_PROMPT_CALLS = 1e12, 32
MIN_DECODE_CALLS, MAX_SETS = 8, 256
SHOWN_VARIANTS = 5


def measure_prompt(inputs: PromptInputs) -> dict[str, Any]:
    """A row of the result; a way that cannot be used here says why."""
    flop = inputs.shape.flop(inputs.heads)
    ways: dict[str, dict[str, Any]] = {}
    for name, make in WAYS.items():
        try:
            way = make(inputs)
        except NotHere as error:
            ways[name] = {"not_here": str(error)}
            continue
        ways[name] = time_way(name, way, inputs)
        if name != GATHERING:
            for kind in ("burst", "sustained"):
                speed = flop / ways[name][f"{kind}_ms"] / 1e9
                ways[name][f"{kind}_tflop_s"] = round(speed, 1)
    return {"rows": inputs.shape.num_rows, "prefix": inputs.shape.prefix, "ways": ways}


def time_way(name: str, way: Callable[[int], torch.Tensor], inputs: PromptInputs) -> dict[str, Any]:
    """Milliseconds of a layer, after a look at the first and the last one's result."""
    layers = range(len(inputs.pool.kv))
    torch.cuda.synchronize()
    start = time.perf_counter()
    out = way(layers[0])
    torch.cuda.synchronize()
    first_ms = (time.perf_counter() - start) * 1e3
    for layer in (layers[0], layers[-1]):
        out = way(layer)
        attention_inputs.check(name, error_of(name, out, inputs, layer))
    num_calls = prompt_calls(inputs.shape.flop(inputs.heads))
    calls = [lambda layer=layer: way(layer) for layer in layers]
    replay, method = capture(calls, num_calls)
    burst = burst_us(replay, num_calls)
    sustained = sustained_us(replay, num_calls, burst)
    found = {"first_ms": first_ms, "burst_ms": burst / 1e3, "sustained_ms": sustained / 1e3}
    return {"method": method, **{key: round(value, 4) for key, value in found.items()}}


def error_of(name: str, out: torch.Tensor, inputs: PromptInputs, layer: int) -> float:
    """Of a way's result, as a share of the norm."""
    if name == GATHERING:
        return attention_inputs.relative_error(out, inputs.pool.kv[layer][inputs.slots])
    return inputs.error(out, layer)


def prompt_calls(flop: int) -> int:
    """Calls of a graph: as many as take some milliseconds, so that a launch is next to nothing."""
    return max(1, min(int(FLOP_OF_A_GRAPH / flop), MAX_PROMPT_CALLS))


def measure_decode(inputs: DecodeInputs, gb_s: float, with_sweep: bool) -> dict[str, Any]:
    """A row of the result; `variants` are sorted by their time."""
    shape = inputs.shape
    calls, chosen = decode_ways.planned_calls(inputs)
    row: dict[str, Any] = {
        "requests": shape.num_requests,
        "kv_len": shape.kv_len,
        "planned_us": decode_us("the plan", calls, inputs),
        "floor_us": round(shape.kv_bytes(inputs.heads) / gb_s / 1e3, 2),
        "tiles_and_splits": chosen.name,
    }
    if with_sweep:
        tuning = decode_ways.tuning_of(inputs.heads)
        found: list[dict[str, Any]] = [
            {
                "name": variant.name,
                "us": decode_us(variant.name, decode_ways.variant_calls(inputs, variant), inputs),
            }
            for variant in decode_ways.variants(inputs.heads, tuning, shape.num_requests)
        ]
        row["variants"] = sorted(found, key=lambda one: one["us"])
    return row


def decode_us(name: str, calls: list[decode_ways.Call], inputs: DecodeInputs) -> float:
    """Microseconds of a layer, after a look at the first set's result."""
    attention_inputs.check(name, inputs.error(calls[0](), inputs.batches[0]))
    num_calls = max(len(calls), MIN_DECODE_CALLS)
    replay, method = capture(calls, num_calls)
    assert method == "graph", "Steps of decodes replay graphs."
    return round(median_us(replay, num_calls), 2)


def sweep_lines(rows: list[dict[str, Any]]) -> str:
    """Of each shape the fastest variants, and what the plan has chosen."""
    lines = []
    for row in rows:
        lines.append(f"{row['requests']} requests, KV of {row['kv_len']:,}:")
        shown = row["variants"][:SHOWN_VARIANTS]
        lines += [f"  {one['us']:8.2f} us  {one['name']}" for one in shown]
        lines.append(f"  {row['planned_us']:8.2f} us  today: {row['tiles_and_splits']}")
    return "\n".join(lines)


def pair(text: str) -> tuple[int, int]:
    """Two numbers with a comma between them."""
    first, second = (int(part) for part in text.split(","))
    if first < 1 or second < 0:
        raise argparse.ArgumentTypeError(f"{text}: rows or requests 1 or more, tokens 0 or more.")
    return first, second


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "attention")
    add = parser.add_argument
    add("--heads", type=int, default=32)
    add("--kv-heads", type=int, default=8)
    add("--head-dim", type=int, default=128)
    add("--prompts", type=pair, nargs="*", default=PROMPTS, help="ROWS,PREFIX; none: no prompts")
    add("--decodes", type=pair, nargs="*", default=DECODES, help="REQUESTS,KV; none: no decodes")
    add("--context-len", type=int, default=32768, help="that the graphs of decodes are for")
    add("--sweep", action="store_true", help="try other tiles and splits of decodes")
    arguments = parser.parse_args(argv)
    if min(arguments.heads, arguments.kv_heads, arguments.head_dim) < 1:
        parser.error("--heads, --kv-heads and --head-dim must be 1 or more.")
    if arguments.heads % arguments.kv_heads:
        parser.error("--heads must be a multiple of --kv-heads.")
    if any(not 1 <= kv_len <= arguments.context_len for _, kv_len in arguments.decodes):
        parser.error("The KV of --decodes must be 1 to --context-len.")
    return arguments


def package_version(name: str) -> str | None:
    """None where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


@torch.inference_mode()
def measure(arguments: argparse.Namespace, heads: Heads) -> dict[str, Any]:
    """All rows of the result."""
    prompts = [PromptShape(*numbers) for numbers in arguments.prompts]
    decodes = [DecodeShape(*numbers) for numbers in arguments.decodes]
    gb_s, cold_bytes = copy_gb_s(heads.device), cache_bytes(heads.device)
    pool: MHATokenToKVPool | None = None
    prompt_rows, decode_rows = [], []
    with tqdm(total=len(prompts) + len(decodes), unit="shape") as bar:
        for prompt in prompts:
            bar.set_description(f"{prompt.num_rows} rows over {prompt.prefix}")
            pool = pool or heads.pool(2 * max(one.kv_len for one in prompts), NUM_LAYERS)
            prompt_rows.append(measure_prompt(PromptInputs(heads, pool, prompt)))
            bar.update()
        pool = None  # its memory is for the decodes
        for decode in decodes:
            bar.set_description(f"{decode.num_requests} decodes, KV of {decode.kv_len}")
            num_sets = copies_to_exceed(cold_bytes, decode.kv_bytes(heads), MAX_SETS)
            inputs = DecodeInputs(heads, decode, arguments.context_len, num_sets)
            decode_rows.append(measure_decode(inputs, gb_s, arguments.sweep))
            bar.update()
    return {"copy_gb_s": round(gb_s, 1), "prompts": prompt_rows, "decodes": decode_rows}


def main(argv: list[str] | None = None) -> None:
    """Measures, writes the result, prints tables."""
    arguments = parse(argv)
    if not torch.cuda.is_available():
        sys.exit("There is no GPU to time: run this where torch.cuda.is_available() is True.")
    device = torch.device("cuda", torch.cuda.current_device())
    numbers = (arguments.heads, arguments.kv_heads, arguments.head_dim)
    torch.manual_seed(0)
    result = {
        **describe_environment(),
        "heads": dict(zip(("num_heads", "num_kv_heads", "head_dim"), numbers, strict=True)),
        "dtype": "bfloat16",
        "context_len": arguments.context_len,
        "cudnn": torch.backends.cudnn.version(),
        "flashinfer": package_version("flashinfer-python"),
        **measure(arguments, Heads(*numbers, torch.bfloat16, device)),
    }
    store(arguments.out, result)
    if arguments.sweep:
        print(sweep_lines(result["decodes"]))
    print(attention_prompts([result]))
    print(attention_decodes([result]))


if __name__ == "__main__":
    main()
