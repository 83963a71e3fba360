"""Measures how long prompts of a thousand tokens and more take: the loads of docs/performance.md.

One Engine with the server's default flags (radix cache on) in a large geometry with random weights,
greedy; with --tp-size on several GPUs. Every run has fresh random prompts, so nothing is found in
the cache but what prompts of one run share. Each case is warmed up by one run of few prompts that
does not count; its figure is the median of the others. A decode step is
(wall(256 new tokens) - wall(1 new token)) / 255.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import store, write
from benchmark.engine_load import batch_wall_s, random_prompts
from benchmark.environment import describe_environment
from benchmark.one_batch import DECODE_INPUT_LEN, make_random_parser
from benchmark.random_model import GEOMETRIES, dummy_flags, random_model
from sglang.srt.server_args import ServerArgs

CONTEXT_LEN = 32768
DECODE_OUTPUT_LEN = 256
WARM_PROMPT_TOKENS, WARM_OUTPUT_LEN = 1 << 16, 8
APART = 0.01
PASSED = ("device", "attention_backend", "tp_size", "max_running_requests")  # to the server
WITH_HELP = "more fields of ServerArgs, as quantization=fp8 max_step_ms=20"
SECONDS, ALL_TOK_S, OUTPUT_TOK_S, STEP_MS = "s", "all tokens/s", "output tokens/s", "ms/step"

WallTime = Callable[[list[list[int]], int], float]  # seconds for prompts with so many new tokens


@dataclass(frozen=True)
class Case:
    """Prompts of random tokens, all sent at once.

    Attributes:
        input_len: tokens of a prompt.
        shared_len: of these, how many all prompts have in common.
        unit: of the figure.
    """

    name: str
    num_prompts: int
    input_len: int
    output_len: int
    unit: str = SECONDS
    shared_len: int = 0

    @classmethod
    def decode(cls, num_prompts: int, name: str, input_len: int = DECODE_INPUT_LEN) -> Case:
        return cls(f"decode, {name}", num_prompts, input_len, DECODE_OUTPUT_LEN, STEP_MS)

    def divided(self, divisor: int) -> Case:
        """The same at a size that a small machine can try."""
        return replace(
            self,
            num_prompts=-(-self.num_prompts // divisor),
            input_len=-(-self.input_len // divisor),
            output_len=max(min(2, self.output_len), self.output_len // divisor),
            shared_len=self.shared_len // divisor,
        )

    def prompts(self, vocab_size: int, seed: int) -> list[list[int]]:
        """Other ones for each seed."""
        own_len = self.input_len - self.shared_len
        (shared,) = random_prompts(1, self.shared_len, vocab_size, 2 * seed)
        own = random_prompts(self.num_prompts, own_len, vocab_size, 2 * seed + 1)
        return [shared + tokens for tokens in own]

    def warm_up(self) -> Case:
        """As long, but few prompts and tokens."""
        fitting = max(1, WARM_PROMPT_TOKENS // self.input_len)
        return replace(
            self,
            num_prompts=self.num_prompts if self.shared_len else min(self.num_prompts, fitting),
            output_len=min(self.output_len, WARM_OUTPUT_LEN),
        )

    def figure(self, wall_s: float, prefill_s: float) -> float:
        """The figure in `unit`.

        Args:
            prefill_s: the seconds with one new token each; counts in decode steps only.
        """
        if self.unit == STEP_MS:
            return (wall_s - prefill_s) / (self.output_len - 1) * 1e3
        num_output = self.num_prompts * self.output_len
        num_tokens = {OUTPUT_TOK_S: num_output, ALL_TOK_S: num_output + self._num_input}
        return num_tokens[self.unit] / wall_s if self.unit in num_tokens else wall_s

    @property
    def _num_input(self) -> int:
        return self.num_prompts * self.input_len


CASES = (
    Case("1 x 4,096", 1, 4096, 1),
    Case("1 x 16,384", 1, 16384, 1),
    Case("1 x 30,000", 1, 30000, 1),
    Case("16 x 8,192", 16, 8192, 129),
    Case("64 x 2,048", 64, 2048, 129),
    Case("128 x 1,024", 128, 1024, 129),
    Case("128 x 4,096", 128, 4096, 64, ALL_TOK_S),
    Case("512 x 512", 512, 512, 128, OUTPUT_TOK_S),
    Case("256 sharing 4,096", 256, 4096 + 64, 64, shared_len=4096),
    Case("192 x 3,000", 192, 3000, 400),
    *(Case.decode(size, str(size)) for size in (1, 8, 32, 64, 128)),
    Case.decode(1, "1 at 30,000", input_len=30000),
)


def measure(
    case: Case,
    wall_s: WallTime,
    repeats: int,
    vocab_size: int,
    seeds: Iterator[int],
    most_repeats: int = 0,
) -> dict[str, Any]:
    """Gives the figure of a case, the median of its runs.

    Args:
        most_repeats: up to so many runs while they are more than APART from each other.
    """
    warm_up = case.warm_up()
    wall_s(warm_up.prompts(vocab_size, next(seeds)), warm_up.output_len)
    runs, figures = list[float](), list[float]()
    while len(runs) < repeats or (len(runs) < most_repeats and _are_apart(figures)):
        prompts = case.prompts(vocab_size, next(seeds))
        seconds, prefill_s = wall_s(prompts, case.output_len), 0.0
        if case.unit == STEP_MS:
            prefill_s = wall_s(case.prompts(vocab_size, next(seeds)), 1)
        runs.append(round(seconds, 4))
        figures.append(case.figure(seconds, prefill_s))
    value = statistics.median(figures)
    return {**asdict(case), "value": value, "values": figures, "wall_s": runs}


def _are_apart(figures: list[float]) -> bool:
    return max(figures) > (1 + APART) * min(figures)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_random_parser(__doc__, "long_prompts")
    names = [case.name for case in CASES]
    add = parser.add_argument
    add("--only", nargs="+", choices=names, default=names, metavar="NAME", help=f"of {names}")
    add("--repeats", type=int, default=3)
    add("--divide", type=int, default=1, help="prompts and lengths by this: to try the script")
    add("--tp-size", type=int, default=1, help="the server's flag")
    add("--with", nargs="*", default=[], dest="more", metavar="NAME=VALUE", help=WITH_HELP)
    add("--max-running-requests", type=int, default=ServerArgs.max_running_requests)
    return parser.parse_args(argv)


def server_arguments(words: Sequence[str]) -> dict[str, Any]:
    """Reads `--with`: fields of `ServerArgs`, with values as in JSON, or as text."""
    found: dict[str, Any] = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def main() -> None:
    """Measures, prints a table; the result is written after every case."""
    arguments = parse()
    cases = [case.divided(arguments.divide) for case in CASES if case.name in arguments.only]
    vocab_size, seeds = GEOMETRIES[arguments.geometry].vocab_size, itertools.count()
    flags = server_arguments(arguments.more)
    with random_model(arguments.geometry, CONTEXT_LEN) as folder:
        values = dummy_flags(folder) | {name: vars(arguments)[name] for name in PASSED} | flags
        rows: list[dict[str, Any]] = []
        began = time.perf_counter()
        with sglang.Engine(**values) as engine, tqdm(cases, unit="case") as bar:
            info = engine.get_server_info()
            result = {
                **describe_environment(),
                "geometry": arguments.geometry,
                "divided_by": arguments.divide,
                "attention_backend": info["resolved"]["attention_backend"],
                "weights": info["resolved"]["weights"],
                "tp_size": arguments.tp_size,
                "start_s": round(time.perf_counter() - began, 1),
                "max_running_requests": arguments.max_running_requests,
                "flags": flags,
                "schedule": info["resolved"]["schedule"],
                "kv_tokens": info["max_total_num_tokens"],
                "rows": rows,
            }
            wall_s = partial(batch_wall_s, engine)
            for case in bar:
                bar.set_description(case.name)
                rows.append(measure(case, wall_s, arguments.repeats, vocab_size, seeds))
                write(arguments.out, result)
    store(arguments.out, result)
    for row in rows:
        print(f"{row['name']:20} {row['value']:12,.3f} {row['unit']}")


if __name__ == "__main__":
    main()
