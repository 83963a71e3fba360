"""Measures how much faster than plain decoding chains and trees of drafts are on a GPU.

The bundled model and its head in Llama-3.1-8B's geometry (`inflate.py`, `inflate_head.py`), or for
STANDALONE its draft model in that of Llama-3.2-1B, prompts of held-out code, and an Engine a way:
one without a drafter, one with up to --num-steps drafts by load, and one for each of --shapes. They
take turns at each number of requests at once (`paired.py`). A shape is TOPK x STEPS x TOKENS, as in
the flags `--speculative-eagle-topk`, `--speculative-num-steps` and
`--speculative-num-draft-tokens`; with TOPK 1 it is a chain of that length in every step.

    python -m benchmark.measure.speculation_paired --model-dir FOLDER      on a GPU
    python -m benchmark.measure.speculation_paired --model-dir FOLDER --algorithm STANDALONE
    python -m benchmark.measure.speculation_paired --model-dir FOLDER --shapes 1x7x8 2x7x16
    python -m benchmark.measure.speculation_paired --model-path demo --device cpu --concurrency 1 4
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any, NamedTuple

from benchmark.engine_load import Budget, accept_length
from benchmark.environment import ROOT, describe_environment
from benchmark.mtp_model import (
    INFLATED,
    SILENT_STD,
    SMALL_TARGET,
    code_prompts,
    engine_flags,
    make_mtp_parser,
    model_path_of,
    settings,
    start_engine,
)
from benchmark.paired import MIN_PROMPTS, Paired, Way, closed_loops, print_ratios, store_rounds
from benchmark.random_model import DRAFT_GEOMETRIES

PLAIN, DRAFTED = "plain", "drafted"
STANDALONE = "STANDALONE"
HEADS = {"EAGLE": "demo-eagle", "EAGLE3": "demo-eagle3", STANDALONE: "demo-draft"}
DEFAULT_DRAFT_GEOMETRY = "llama-3.2-1b"
DRAFT_VOCAB_SIZE = 32000  # of published EAGLE-3 heads for this geometry


@contextmanager
def head_path_of(arguments: argparse.Namespace) -> Iterator[str]:
    """The bundled head or draft model, or what --draft-model names; inflated if the model is."""
    options = vars(arguments)
    head = options.get("draft_model") or HEADS[arguments.algorithm]
    if arguments.model_path != INFLATED:
        yield head
        return
    with tempfile.TemporaryDirectory() as folder:
        if arguments.algorithm == STANDALONE:
            subprocess.run(inflate_draft(head, folder, arguments), cwd=ROOT, check=True)
            yield folder
            return
        command = [sys.executable, "-m", "benchmark.inflate_head", "--head", head]
        command += ["--algorithm", arguments.algorithm, "--out", folder]
        command += ["--silent-std", SILENT_STD]
        is_small = arguments.geometry == "tiny"
        sizes = SMALL_TARGET if is_small else {}
        command += [f"--{name}={size}" for name, size in sizes.items()]
        if arguments.algorithm == "EAGLE3" and not is_small:
            command.append(f"--draft-vocab-size={DRAFT_VOCAB_SIZE}")
        subprocess.run(command, cwd=ROOT, check=True)
        yield folder


def inflate_draft(model: str, folder: str, arguments: argparse.Namespace) -> list[str]:
    """The command that writes a draft model in a draft model's geometry."""
    is_small = arguments.geometry == "tiny"
    options = vars(arguments)
    name = "tiny" if is_small else options.get("draft_geometry") or DEFAULT_DRAFT_GEOMETRY
    device = "cpu" if arguments.device == "cpu" else "cuda"
    command = [sys.executable, "-m", "benchmark.inflate", "--model-path", model, "--out", folder]
    command += ["--silent-std", SILENT_STD, "--device", device]
    sizes = asdict(DRAFT_GEOMETRIES[name]).items()
    return command + [f"--{key.replace('_', '-')}={size}" for key, size in sizes]


class Shape(NamedTuple):
    """Drafts of an Engine; `num_tokens` counts the certain one."""

    topk: int
    num_steps: int
    num_tokens: int

    @classmethod
    def parse(cls, text: str) -> Shape:
        """
        Raises:
            ValueError: for other texts than TOPKxSTEPSxTOKENS.
        """
        topk, num_steps, num_tokens = map(int, text.split("x"))
        return cls(topk, num_steps, num_tokens)

    @property
    def flags(self) -> dict[str, Any]:
        """Those of the Engine; chains do not change with the load, as trees do not."""
        return {
            "speculative_eagle_topk": self.topk,
            "speculative_num_steps": self.num_steps,
            "speculative_num_draft_tokens": self.num_tokens,
            "speculative_load_aware": "off",
        }

    def __str__(self) -> str:
        return "x".join(map(str, self))


def measure(
    arguments: argparse.Namespace, model_path: str, head_path: str, budget: Budget
) -> dict[str, Any]:
    """Runs all rounds; the result is stored after each."""
    prompts, source = code_prompts(arguments, model_path)
    result = {**describe_environment(), **settings(arguments), "prompts": source}
    result |= {"algorithm": arguments.algorithm, "num_steps": arguments.num_steps}
    if arguments.algorithm == STANDALONE:
        result["draft_geometry"] = arguments.draft_geometry
    drafter = {
        "speculative_algorithm": arguments.algorithm,
        "speculative_draft_model_path": head_path,
    }
    flags = {PLAIN: {}, DRAFTED: {**drafter, "speculative_num_steps": arguments.num_steps}}
    flags |= {str(shape): {**drafter, **shape.flags} for shape in arguments.shapes}
    params = {"temperature": 0, "max_new_tokens": arguments.new_tokens, "ignore_eos": True}
    with ExitStack() as stack:
        engines = {
            name: stack.enter_context(start_engine(engine_flags(arguments, model_path), **more))
            for name, more in flags.items()
        }
        result["accept_length"] = {
            name: round(accept_length(engine, prompts[:MIN_PROMPTS], params), 4)
            for name, engine in engines.items()
            if name != PLAIN
        }
        ways = {name: Way(engine, params) for name, engine in engines.items()}
        pairs = [(name, PLAIN) for name in ways if name != PLAIN]
        paired = Paired(closed_loops(ways, prompts), arguments.concurrency, pairs)
        store_rounds(paired, budget, arguments, result)
    return result


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_mtp_parser(__doc__, "speculation_paired")
    add = parser.add_argument
    add("--concurrency", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--algorithm", choices=HEADS, default="EAGLE3")
    add("--num-steps", type=int, default=3, help="drafts of a chain")
    add("--shapes", type=Shape.parse, nargs="*", default=[], help="more ways, such as 2x7x16")
    add("--draft-model", help="folder of a head or draft model; default: the bundled one")
    add(
        "--draft-geometry",
        choices=DRAFT_GEOMETRIES,
        default=DEFAULT_DRAFT_GEOMETRY,
        help="of an inflated draft model",
    )
    parser.set_defaults(budget_s=250.0, rounds=12)
    return parser.parse_args(argv)


def main() -> None:
    """Measures, prints the ratios, writes the result."""
    arguments = parse()
    budget = Budget(arguments.budget_s, time.perf_counter())
    with model_path_of(arguments) as model_path, head_path_of(arguments) as head_path:
        result = measure(arguments, model_path, head_path, budget)
    print(f"accept lengths: {result['accept_length']}")
    print_ratios(result["rows"])


if __name__ == "__main__":
    main()
