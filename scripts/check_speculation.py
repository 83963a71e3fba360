"""Are the greedy tokens of a server with the bundled draft heads, the draft model, or NGRAM, those
of one without?

    python scripts/check_speculation.py                 # a set in which all pairs of settings meet
    python scripts/check_speculation.py --all           # each combination
    python scripts/check_speculation.py --device cuda --limit-s 600

Each combination is an Engine over the demo model, in float32 but for FlashInfer. Its tokens are
compared with those of an Engine without a head, overlap, prefix cache and graphs. Where they part,
the two best logits there must be a near-tie, in few prompts. Prints a table, and exits with 1 if a
combination fails or none was run.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import logging
import pickletools
import reprlib
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

ROOT = Path(__file__).resolve().parents[1]
for folder in (ROOT, ROOT / "test" / "support"):
    sys.path.insert(0, str(folder))
import sglang  # noqa: E402
from oracle import MAX_SHARE, code_snippets, first_divergence  # noqa: E402
from pairwise import all_cases, pairwise_cases  # noqa: E402
from sglang.srt.model_config import resolve_model_path  # noqa: E402
from target import MAX_GAPS  # noqa: E402

# None needs no model.
HEADS = {"EAGLE": "demo-eagle", "EAGLE3": "demo-eagle3", "STANDALONE": "demo-draft", "NGRAM": None}
NUM_TOKENS = 48
GREEDY = {"max_new_tokens": NUM_TOKENS, "temperature": 0.0, "ignore_eos": True}
MAX_TOTAL_TOKENS = 16384
# Texts of different lengths, from a few tokens on.
TEXT_LENGTHS = [20, 150, 151, 400, 900]


def choices_on(
    device: str, backends: list[str], algorithms: list[str]
) -> dict[str, tuple[Any, ...]]:
    """What may be combined, by fields of `ServerArgs`."""
    return {
        "speculative_algorithm": tuple(algorithms),
        "speculative_num_steps": (1, 3, 5),
        "speculative_eagle_topk": (1, 4),
        "speculative_load_aware": ("off", "on"),
        "tile_spec": (False, True),
        "attention_backend": tuple(backends),
        "disable_radix_cache": (False, True),
        "disable_overlap_schedule": (False, True),
        "page_size": (1, 16),
        "chunked_prefill_size": (16, 2048),
        "disable_cuda_graph": (False, True) if device == "cuda" else (True,),
    }


def has_weights(head: str | None) -> bool:
    """Whether a bundled folder is there, if any is needed."""
    return head is None or (resolve_model_path(head) / "model.safetensors").is_file()


def possible(case: dict[str, Any]) -> dict[str, Any]:
    """The combination, or one that there is: draft models have no trees, and those of heads have no
    tiers."""
    algorithm, breadth = case["speculative_algorithm"], case["speculative_eagle_topk"]
    if breadth == 1 or algorithm == "STANDALONE":
        return {**case, "speculative_eagle_topk": 1}
    if algorithm == "NGRAM":
        return {**case, "speculative_eagle_topk": 1, "speculative_ngram_max_bfs_breadth": breadth}
    return {**case, "speculative_load_aware": "off"}


def has_trees(case: dict[str, Any]) -> bool:
    branches = ("speculative_eagle_topk", "speculative_ngram_max_bfs_breadth")
    return max(case.get(name, 1) for name in branches) > 1


def backends_on(device: str) -> list[str]:
    if device == "cpu":
        return ["torch_native"]
    has_flashinfer = importlib.util.find_spec("flashinfer") is not None
    return ["triton", "torch_native"] + ["flashinfer"] * has_flashinfer


def dtype_of(backend: str) -> str:
    return "float16" if backend == "flashinfer" else "float32"


def prompts(count: int) -> list[str]:
    """Pieces of held-out code, of which some begin alike."""
    texts = code_snippets([pickletools, reprlib, inspect], count, TEXT_LENGTHS)
    return [
        texts[index - 5] + text if index % 10 == 9 else text for index, text in enumerate(texts)
    ]


class Reference:
    """Greedy tokens without a head, and how far the best logit was above the next one."""

    def __init__(self, device: str, backend: str, texts: list[str]) -> None:
        self.max_gap = MAX_GAPS[dtype_of(backend)]
        flags = {
            "attention_backend": backend,
            "disable_overlap_schedule": True,
            "disable_radix_cache": True,
            "disable_cuda_graph": True,
        }
        with engine(device, flags) as plain:
            results = plain.generate(texts, GREEDY, return_logprob=True, top_logprobs_num=2)
        self.tokens = [result["output_ids"] for result in results]
        tops = [result["meta_info"]["output_top_logprobs"] for result in results]
        self.gaps = [[first[0] - second[0] for first, second in each] for each in tops]

    def problem_of(self, tokens: list[list[int]]) -> str:
        """What is wrong with the tokens of all prompts; empty for nothing."""
        num_ties = 0
        for index, (given, right) in enumerate(zip(tokens, self.tokens, strict=True)):
            if given == right:
                continue
            place = first_divergence(given, right)
            if len(given) != len(right):
                return f"prompt {index}: {len(given)} tokens, not {len(right)}"
            if self.gaps[index][place] > self.max_gap:
                return f"prompt {index}: token {place} is {given[place]}, not {right[place]}"
            num_ties += 1
        most = max(1, MAX_SHARE * len(tokens)) if self.max_gap < 0.01 else len(tokens) // 5
        return "" if num_ties <= most else f"{num_ties} near-ties"


def engine(device: str, flags: dict[str, Any]) -> sglang.Engine:
    return sglang.Engine(
        model_path="demo",
        device=device,
        dtype=dtype_of(flags["attention_backend"]),
        max_total_tokens=MAX_TOTAL_TOKENS,
        log_level="error",
        **flags,
    )


def check(device: str, case: dict[str, Any], texts: list[str], reference: Reference) -> str:
    """Serves the texts twice, so that the second time finds prefixes. Gives a row's end.

    Raises:
        AssertionError: for other tokens.
    """
    head = HEADS[case["speculative_algorithm"]]
    start = time.monotonic()
    flags = {**case} if head is None else {**case, "speculative_draft_model_path": head}
    with tempfile.TemporaryDirectory() as cache:
        if case["tile_spec"]:
            flags["tile_spec_cache_dir"] = cache
        infos = serve(device, flags, texts, reference)
    is_fixed = case["speculative_load_aware"] == "off"
    num_cached = sum(info["cached_tokens"] for info in infos)
    if bool(num_cached) == case["disable_radix_cache"]:
        raise AssertionError(f"{num_cached} cached tokens")
    steps = sum(info.get("spec_verify_ct", 0) for info in infos)
    right = sum(info.get("spec_num_correct_drafts", 0) for info in infos)
    if not right and (is_fixed or steps):
        raise AssertionError("no draft was right")
    found = f"accept length {1 + right / steps:.2f}" if steps else "nothing drafted"
    return f"ok       {found}, {time.monotonic() - start:.0f} s"


def serve(
    device: str, flags: dict[str, Any], texts: list[str], reference: Reference
) -> list[dict[str, Any]]:
    """`meta_info` of the texts, served the second time."""
    with engine(device, flags) as drafted:
        for _ in range(2):
            results = drafted.generate(texts, GREEDY)
            problem = reference.problem_of([result["output_ids"] for result in results])
            if problem:
                raise AssertionError(problem)
    return [result["meta_info"] for result in results]


def shown(case: dict[str, Any]) -> str:
    """A row's beginning."""
    words = [
        f"{case['speculative_algorithm']:10}",
        f"steps {case['speculative_num_steps']}",
        "trees " if has_trees(case) else "chains",
        "load-aware" if case["speculative_load_aware"] == "on" else "fixed     ",
        "TileSpec  " if case["tile_spec"] else "all drafts",
        f"{case['attention_backend']:12}",
        "no radix  " if case["disable_radix_cache"] else "radix     ",
        "no overlap" if case["disable_overlap_schedule"] else "overlap   ",
        f"page {case['page_size']:2}",
        f"chunk {case['chunked_prefill_size']:4}",
        "no graphs" if case["disable_cuda_graph"] else "graphs   ",
    ]
    return "  ".join(words)


def main() -> int:
    """Checks all combinations; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--backends", nargs="+", help="attention backends; default: all there are")
    parser.add_argument("--algorithms", nargs="+", choices=HEADS, default=list(HEADS))
    parser.add_argument("--all", action="store_true", help="each combination, not only all pairs")
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin none later")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    backends = arguments.backends or backends_on(device)
    algorithms = [name for name in arguments.algorithms if has_weights(HEADS[name])]
    choices = choices_on(device, backends, algorithms)
    cases = all_cases(choices) if arguments.all else pairwise_cases(choices)
    cases = list({shown(case): case for case in map(possible, cases)}.values())
    for name in arguments.algorithms:
        if name not in algorithms:
            print(f"{name} is left out: {HEADS[name]} has no weights")
    texts, start = prompts(arguments.prompts), time.monotonic()
    references: dict[str, Reference] = {}
    num_failed = num_run = 0
    for case in tqdm(cases, desc="combinations", disable=None):
        if time.monotonic() - start > arguments.limit_s:
            break
        backend = case["attention_backend"]
        try:
            if backend not in references:
                references[backend] = Reference(device, backend, texts)
            outcome = check(device, case, texts, references[backend])
        except (AssertionError, RuntimeError, ValueError) as error:
            outcome = f"FAILED   {error}"
            num_failed += 1
        num_run += 1
        tqdm.write(f"{shown(case)}  {outcome}")
    print(f"{num_run} of {len(cases)} combinations run, {num_failed} failed")
    return int(num_failed > 0 or num_run == 0)


if __name__ == "__main__":
    sys.exit(main())
