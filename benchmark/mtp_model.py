"""The models of the multi-token benchmarks, and the options that they share.

They are the bundled ones, inflated into a real geometry (`inflate.py`): they predict what those
predict, at the cost of a large model's steps.
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
LONG_CHUNK = 8192  # prompt tokens of a step: soon all requests decode
SPARE_CONTEXT = 16  # tokens that requests could have beyond those that they are given
STANDALONE = "STANDALONE"
NEXTN = "NEXTN"
HEADS = {
    "EAGLE": "demo-eagle",
    "EAGLE3": "demo-eagle3",
    NEXTN: "demo-nextn",
    STANDALONE: "demo-draft",
}
DRAFT_VOCAB_SIZE = 32000  # of published EAGLE-3 heads for this geometry


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
            device = "cpu" if arguments.device == "cpu" else "cuda"
            inflate(folder, "--geometry", arguments.geometry, "--device", device)
        yield str(folder)


def inflate(out: Path, *words: str) -> None:
    """Writes a larger model or head, in a process of its own."""
    command = [sys.executable, "-m", "benchmark.inflate", "--out", str(out.absolute()), *words]
    subprocess.run(command, cwd=ROOT, check=True)


@contextmanager
def drafter_flags(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Flags of an Engine with the drafter of --algorithm: the bundled one, or what --draft-model
    names; inflated if the model is. None without an algorithm."""
    options = vars(arguments)
    algorithm = options.get("algorithm")
    if algorithm is None:
        yield {}
        return
    drafter = options.get("draft_model") or HEADS[algorithm]
    with tempfile.TemporaryDirectory() as folder:
        if arguments.model_path == INFLATED:
            inflate(Path(folder), *inflate_words(drafter, arguments))
            drafter = folder
        yield {"speculative_algorithm": algorithm, "speculative_draft_model_path": drafter}


def inflate_words(drafter: str, arguments: argparse.Namespace) -> list[str]:
    """Gives the options of `benchmark.inflate` that write a larger drafter, which says what a small
    one says."""
    is_small = arguments.geometry == "tiny"
    if arguments.algorithm == STANDALONE:
        device = "cpu" if arguments.device == "cpu" else "cuda"
        geometry = "tiny-draft" if is_small else "llama-3.2-1b"
        return ["--model-path", drafter, "--geometry", geometry, "--device", device]
    words = ["--head", drafter, "--algorithm", arguments.algorithm]
    words += ["--geometry", arguments.geometry]
    if arguments.algorithm == "EAGLE3" and not is_small:
        words += ["--draft-vocab-size", str(DRAFT_VOCAB_SIZE)]
    return words


def code_prompts(
    arguments: argparse.Namespace, model_path: str
) -> tuple[list[list[int]], dict[str, Any]]:
    """Draws prompts of held-out code, as many as requests at once or MIN_PROMPTS, and describes
    where they are from."""
    count = max(MIN_PROMPTS, *arguments.concurrency)
    folder = resolve_model_path(model_path)
    return held_out_prompts(folder, count, arguments.prompt_tokens, seed=0)


def engine_flags(arguments: argparse.Namespace, model_path: str) -> dict[str, Any]:
    """Returns the flags of all Engines; the KV pool is as large as the running requests can use."""
    return {
        "model_path": model_path,
        "device": arguments.device,
        "attention_backend": arguments.attention_backend,
        "chunked_prefill_size": LONG_CHUNK,
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
    }
