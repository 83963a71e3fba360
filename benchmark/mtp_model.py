"""The model of the multi-token benchmarks, and the options that they share.

It is the bundled one, inflated into a real geometry (`inflate.py`): it predicts what that predicts,
at the cost of a large model's steps.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import sglang
from benchmark.command import make_parser
from benchmark.environment import ROOT
from benchmark.held_out import held_out_prompts
from benchmark.paired import MIN_PROMPTS
from sglang.srt.model_config import resolve_model_path

INFLATED = "inflated"
LONG_CHUNK = 8192  # prompt tokens of a step
SPARE_CONTEXT = 16  # tokens that requests could have beyond those that they are given
SILENT_STD = "1e-12"  # no zeros in matrices, which could be multiplied faster than numbers
SMALL_TARGET = {  # for trials on a CPU
    "hidden-size": 1024,
    "intermediate-size": 1024,
    "num-layers": 6,
    "num-heads": 8,
    "num-kv-heads": 4,
    "vocab-size": 5000,
}


def make_mtp_parser(doc: str | None, result_name: str) -> argparse.ArgumentParser:
    """The shared options; the caller adds --concurrency and the default of --budget-s."""
    parser = make_parser(doc, result_name)
    add = parser.add_argument
    add("--model-path", default=INFLATED, help="inflated (default), demo, or a folder")
    add("--model-dir", type=Path, help="where the inflated model is kept for the next run")
    add("--geometry", choices=("llama-3.1-8b", "tiny"), default="llama-3.1-8b")
    add("--prompt-tokens", type=int, default=128)
    add("--new-tokens", type=int, default=128, help="of an output on average")
    add("--rounds", type=int, default=5, help="at most")
    add("--budget-s", type=float, help="all in all, model and Engines included")
    add("--device", default="auto")
    add("--attention-backend")
    add("--chunked-prefill-size", type=int, default=LONG_CHUNK, help="large: soon all decode")
    add("--seed", type=int, default=0)
    return parser


@contextmanager
def model_path_of(arguments: argparse.Namespace) -> Iterator[str]:
    """Yields the folder that --model-path names; the inflated model is written unless a whole one
    is there."""
    if arguments.model_path != INFLATED:
        yield arguments.model_path
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.model_dir or Path(temporary)
        if not (folder / "model.safetensors.index.json").exists():
            command = [sys.executable, "-m", "benchmark.inflate", "--out", str(folder.absolute())]
            filler_device = "cpu" if arguments.device == "cpu" else "cuda"
            command += ["--device", filler_device, "--silent-std", SILENT_STD]
            sizes = SMALL_TARGET if arguments.geometry == "tiny" else {}
            command += [f"--{name}={size}" for name, size in sizes.items()]
            subprocess.run(command, cwd=ROOT, check=True)
        yield str(folder)


def code_prompts(
    arguments: argparse.Namespace, model_path: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """Draws prompts of held-out code, as many as requests at once or MIN_PROMPTS, and describes
    where they are from."""
    count = max(MIN_PROMPTS, *arguments.concurrency)
    folder = resolve_model_path(model_path)
    return held_out_prompts(folder, count, arguments.prompt_tokens, arguments.seed)


def engine_flags(arguments: argparse.Namespace, model_path: str) -> dict[str, Any]:
    """Returns the flags of all Engines; the KV pool is as large as the running requests can use."""
    return {
        "model_path": model_path,
        "device": arguments.device,
        "attention_backend": arguments.attention_backend,
        "chunked_prefill_size": arguments.chunked_prefill_size,
        "max_running_requests": max(arguments.concurrency, default=8),
        "context_length": arguments.prompt_tokens + arguments.new_tokens * 5 // 4 + SPARE_CONTEXT,
        "disable_radix_cache": True,
    }


def start_engine(flags: dict[str, Any], **more: Any) -> sglang.Engine:
    """An Engine whose KV pool holds all its requests. On a GPU that others have filled a pool can
    be too small: then requests wait for each other, and nothing that is measured means anything.

    Args:
        flags: of `engine_flags`.
        more: further arguments of the Engine.

    Raises:
        RuntimeError: the pool is too small.
    """
    engine = sglang.Engine(**flags, **more)
    found = engine.get_server_info()["max_total_num_tokens"]
    needed = flags["max_running_requests"] * (flags["context_length"] - SPARE_CONTEXT)
    if found < needed:
        engine.shutdown()
        raise RuntimeError(
            f"The KV pool has room for {found} tokens, and the requests have {needed}: other"
            " Engines have taken the GPU's memory. Compare fewer ways at once, or ask for fewer"
            " requests (--concurrency) or tokens (--new-tokens)."
        )
    return engine


def settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the options that belong to the result."""
    is_inflated = arguments.model_path == INFLATED
    return {
        "model": f"{INFLATED}, {arguments.geometry}" if is_inflated else arguments.model_path,
        "prompt_tokens": arguments.prompt_tokens,
        "new_tokens": arguments.new_tokens,
        "chunked_prefill_size": arguments.chunked_prefill_size,
        "seed": arguments.seed,
    }
