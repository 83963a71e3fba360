"""How many tokens per second come out of a full load? Random weights in a large geometry.

512 random prompts of 512 tokens, 128 new tokens each, at most 128 running: output tokens over the
wall time of all, median of several runs, in an offline Engine as users have it, or in this process
(--in-process: no tokenizer, no detokenizer, no messages). The same prompts with one new token say
how much of that is prefill. Greedy, no radix cache, steps overlapping. Default geometry:
Llama-3.1-8B.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import make_parser, store
from benchmark.engine_load import batch_wall_s, random_prompts
from benchmark.environment import describe_environment
from benchmark.goals import THROUGHPUT_SHAPE, THROUGHPUT_TOK_S
from benchmark.gpu_load import sample_gpu
from benchmark.random_model import GEOMETRIES, random_model
from sglang.bench_one_batch import OneBatch
from sglang.srt.flag_values import number_or_word
from sglang.srt.garbage import keep_out_of_collections
from sglang.srt.model_config import resolve_model_path
from sglang.srt.processes.flag_bounds import AUTO
from sglang.srt.server_args import ServerArgs

SPARE_TOKENS = 16  # of the context, beyond input and output

WallTime = Callable[[list[list[int]], int], float]  # seconds for prompts with so many new tokens


@contextmanager
def engine_wall_s(args: ServerArgs) -> Iterator[WallTime]:
    """Of `Engine.generate`."""
    with sglang.Engine(args) as engine:
        yield partial(batch_wall_s, engine)


@contextmanager
def in_process_wall_s(args: ServerArgs) -> Iterator[WallTime]:
    """Of scheduler and worker alone."""
    batch = OneBatch(args)
    keep_out_of_collections()
    yield batch.wall_s


def measure(
    wall_s: WallTime, repeats: int, draw: Callable[[int], list[list[int]]], output_len: int
) -> list[dict[str, Any]]:
    """Seconds of each run, with all new tokens and with one, on fresh prompts; and the GPU's
    clock and power during the first of these.

    Args:
        draw: the prompts of a run; number 0 warms up.
    """
    wall_s(draw(0), min(output_len, 8))
    runs: list[dict[str, Any]] = []
    for number in tqdm(range(1, repeats + 1), desc="throughput", unit="run"):
        prompts = draw(number)
        with sample_gpu() as gpu:
            seconds = wall_s(prompts, output_len)
        runs.append({"wall_s": seconds, "prefill_s": wall_s(prompts, 1), "gpu": gpu})
    return runs


def summarize(runs: list[dict[str, Any]], num_prompts: int, output_len: int) -> dict[str, Any]:
    """Medians over the runs."""
    speeds = [num_prompts * output_len / run["wall_s"] for run in runs]
    shares = [run["prefill_s"] / run["wall_s"] for run in runs]
    return {
        "output_tok_s": round(statistics.median(speeds), 1),
        "output_tok_s_by_run": [round(speed, 1) for speed in speeds],
        "prefill_share": round(statistics.median(shares), 4),
        "runs": [
            {**run, "wall_s": round(run["wall_s"], 4), "prefill_s": round(run["prefill_s"], 4)}
            for run in runs
        ],
    }


def server_args(arguments: argparse.Namespace, folder: str) -> ServerArgs:
    """Of both ways to measure."""
    return ServerArgs(
        model_path=folder,
        tokenizer_path=str(resolve_model_path("demo")),
        load_format="dummy",
        device=arguments.device,
        attention_backend=arguments.attention_backend,
        disable_cuda_graph=arguments.disable_cuda_graph,
        disable_radix_cache=True,
        max_running_requests=arguments.max_running_requests,
        chunked_prefill_size=arguments.chunked_prefill_size,
        context_length=arguments.input_len + arguments.output_len + SPARE_TOKENS,
        log_level="error",
    )


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """What of the command line belongs to the result, and the goal where it has this shape."""
    shape = {name: vars(arguments)[name] for name in THROUGHPUT_SHAPE}
    goal = {"asked": THROUGHPUT_TOK_S.asked, "peer": THROUGHPUT_TOK_S.peer}
    return {
        **shape,
        "chunked_prefill_size": arguments.chunked_prefill_size,
        "attention_backend": arguments.attention_backend or "default",
        "cuda_graphs": not arguments.disable_cuda_graph,
        "how": "in-process" if arguments.in_process else "Engine.generate",
        **(goal if shape == THROUGHPUT_SHAPE else {}),
    }


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "throughput")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--num-prompts", type=int, default=512)
    add("--input-len", type=int, default=512)
    add("--output-len", type=int, default=128)
    add("--max-running-requests", type=int, default=128)
    add("--chunked-prefill-size", type=number_or_word, default=AUTO)
    add("--repeats", type=int, default=3)
    add("--in-process", action="store_true", help="scheduler and worker alone, no Engine")
    add("--device", default="auto")
    add("--attention-backend")
    add("--disable-cuda-graph", action="store_true")
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints the figures, writes the result."""
    arguments = parse()
    geometry = GEOMETRIES[arguments.geometry]

    def draw(seed: int) -> list[list[int]]:
        sizes = arguments.num_prompts, arguments.input_len
        return random_prompts(*sizes, geometry.vocab_size, seed)

    open_runner = in_process_wall_s if arguments.in_process else engine_wall_s
    with (
        random_model(arguments.geometry) as folder,
        open_runner(server_args(arguments, folder)) as wall_s,
    ):
        runs = measure(wall_s, arguments.repeats, draw, arguments.output_len)
    found = summarize(runs, arguments.num_prompts, arguments.output_len)
    result = {**describe_environment(), **settings(arguments), **found}
    goal = (
        f" (asked {result['asked']:,.0f}, peer {result['peer']:,.0f})" if "asked" in result else ""
    )
    print(f"{found['output_tok_s']:,.0f} output tokens/s{goal}, {result['how']};", end=" ")
    print(f"prefill alone is {found['prefill_share']:.0%} of the time")
    store(arguments.out, result)


if __name__ == "__main__":
    main()
