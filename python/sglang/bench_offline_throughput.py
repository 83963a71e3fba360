"""Throughput of the offline Engine:
`python -m sglang.bench_offline_throughput --model-path demo`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

from sglang.benchmark.datasets import BenchPrompt, DatasetError, add_dataset_args, load_prompts
from sglang.srt.argument_parsing import parse_flags
from sglang.srt.entrypoints.engine import Engine
from sglang.srt.server_args import ServerArgs

MAX_WARMUP_TOKENS = 16


def make_parser() -> argparse.ArgumentParser:
    """Flags of the server and of the data set."""
    parser = argparse.ArgumentParser(
        prog="python -m sglang.bench_offline_throughput", description=__doc__
    )
    ServerArgs.add_cli_args(parser)
    parser.add_argument("--backend", choices=("engine",), default="engine")
    parser.add_argument("--result-filename", help="Gets one JSON line per run.")
    parser.add_argument("--disable-ignore-eos", action="store_true")
    parser.add_argument("--skip-warmup", action="store_true")
    add_dataset_args(parser)
    parser.set_defaults(num_prompts=256, random_input_len=128, random_output_len=128)
    return parser


def measure(engine: Engine, prompts: list[BenchPrompt], ignore_eos: bool) -> dict[str, Any]:
    """All prompts at once; the figures under SGLang's names."""
    params = [
        {"temperature": 0, "max_new_tokens": prompt.output_len, "ignore_eos": ignore_eos}
        for prompt in prompts
    ]
    ids = [prompt.ids for prompt in prompts if prompt.ids is not None]
    texts = [prompt.text for prompt in prompts if prompt.text is not None]
    start = time.perf_counter()
    if ids and texts:
        raise DatasetError("A data set must hold texts or token ids, not both.")
    if ids:
        results = engine.generate(input_ids=ids, sampling_params=params)
    else:
        results = engine.generate(texts, params)
    latency = time.perf_counter() - start
    num_input = sum(result["meta_info"]["prompt_tokens"] for result in results)
    num_output = sum(result["meta_info"]["completion_tokens"] for result in results)
    return {
        "backend": "engine",
        "successful_requests": len(results),
        "total_latency": latency,
        "total_input_tokens": num_input,
        "total_output_tokens": num_output,
        "request_throughput": len(results) / latency,
        "input_throughput": num_input / latency,
        "output_throughput": num_output / latency,
        "total_throughput": (num_input + num_output) / latency,
    }


def main(argv: list[str] | None = None) -> int:
    args, given = parse_flags(make_parser(), argv, ServerArgs)
    with Engine(server_args=ServerArgs(**given)) as engine:
        try:
            prompts = load_prompts(args, engine.get_server_info()["vocab_size"])
        except DatasetError as error:
            print(f"bench_offline_throughput: {error}", file=sys.stderr)
            return 1
        if not args.skip_warmup:
            warm = [BenchPrompt(p.text, p.ids, MAX_WARMUP_TOKENS) for p in prompts[:4]]
            measure(engine, warm, ignore_eos=True)
            engine.flush_cache()
        summary = measure(engine, prompts, not args.disable_ignore_eos)
    print(f"{' Offline Throughput Benchmark Result ':=^50}")
    for label, key in (
        ("Backend:", "backend"),
        ("Successful requests:", "successful_requests"),
        ("Benchmark duration (s):", "total_latency"),
        ("Total input tokens:", "total_input_tokens"),
        ("Total generated tokens:", "total_output_tokens"),
        ("Request throughput (req/s):", "request_throughput"),
        ("Input token throughput (tok/s):", "input_throughput"),
        ("Output token throughput (tok/s):", "output_throughput"),
        ("Total token throughput (tok/s):", "total_throughput"),
    ):
        value = summary[key]
        form = "{:<40} {:<10.2f}" if isinstance(value, float) else "{:<40} {:<10}"
        print(form.format(label, value))
    print("=" * 50)
    if args.result_filename:
        with open(args.result_filename, "a", encoding="utf-8") as file:
            file.write(json.dumps(summary) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
