"""How long is a round of EAGLE? Milliseconds by batch size, random weights in a large geometry.

A head of one layer that shares the target's output head, 3 draft steps, chains of 4 rows. The
length that is accepted is pinned by SGLANG_SIMULATE_ACC_LEN, since random weights agree in nothing.
A round is (wall(256 new tokens) - wall(1 new token)) / rounds, a plain step the same over steps;
the two take turns, each with Engines of its own. Also the output tokens per second of a full load.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, make_parser, store
from benchmark.engine_load import batch_wall_s, random_prompts
from benchmark.environment import describe_environment
from benchmark.random_model import GEOMETRIES, random_head, random_model
from sglang.srt.model_config import resolve_model_path

INPUT_LEN, OUTPUT_LEN = 128, 256
NUM_STEPS = 3
LOAD = (512, 512, 128)  # prompts, tokens in, tokens out
PLAIN, EAGLE = "plain", "EAGLE"
SIMULATED = "SGLANG_SIMULATE_ACC_LEN"


class Measured:
    """An Engine that measures itself.

    Args:
        is_speculative: whether `engine` has a drafter; then a step is a round.
    """

    def __init__(self, engine: sglang.Engine, vocab_size: int, is_speculative: bool) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._is_speculative = is_speculative
        self._seeds = itertools.count()

    def wall_s(self, count: int, input_len: int, num_new: int) -> float:
        """Seconds of fresh random prompts, all sent at once."""
        prompts = random_prompts(count, input_len, self._vocab_size, next(self._seeds))
        return batch_wall_s(self._engine, prompts, num_new)

    def num_rounds(self) -> int:
        """Of a request of OUTPUT_LEN tokens behind its first."""
        if not self._is_speculative:
            return OUTPUT_LEN - 1
        [prompt] = random_prompts(1, INPUT_LEN, self._vocab_size, next(self._seeds))
        params = {"temperature": 0, "max_new_tokens": OUTPUT_LEN, "ignore_eos": True}
        [answer] = self._engine.generate(input_ids=[prompt], sampling_params=params)
        return int(answer["meta_info"]["spec_verify_ct"])

    def round_ms(self, size: int, repeats: int, num_rounds: int) -> list[float]:
        """Of a batch of `size` requests."""
        self.wall_s(size, INPUT_LEN, 8)  # warms up
        found = []
        for _ in range(repeats):
            decoding_s = self.wall_s(size, INPUT_LEN, OUTPUT_LEN) - self.wall_s(size, INPUT_LEN, 1)
            found.append(round(decoding_s / num_rounds * 1e3, 4))
        return found

    def load_tok_s(self) -> float:
        """Output tokens per second of LOAD."""
        count, input_len, num_new = LOAD
        return round(count * num_new / self.wall_s(count, input_len, num_new), 1)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = make_parser(__doc__, "eagle_rounds")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--batch-sizes", type=int, nargs="+", default=[1, 8, 32, 64, 128])
    add("--repeats", type=int, default=2, help="of a batch size, in each Engine")
    add("--engines", type=int, default=1, help="of each kind, in turn")
    add("--accept-length", type=float, default=3.0, help="bonus token included")
    add("--without-load", action="store_true", help="no full load")
    add("--device", default="auto")
    add("--attention-backend")
    return parser.parse_args(argv)


def measure_kind(
    arguments: argparse.Namespace, kind: str, folder: str, head: str
) -> dict[str, Any]:
    """One Engine of a kind."""
    flags: dict[str, Any] = {}
    os.environ.pop(SIMULATED, None)
    if kind == EAGLE:
        os.environ[SIMULATED] = str(arguments.accept_length)
        flags = {
            "speculative_algorithm": "EAGLE",
            "speculative_draft_model_path": head,
            "speculative_num_steps": NUM_STEPS,
        }
    with sglang.Engine(
        model_path=folder,
        tokenizer_path=str(resolve_model_path("demo")),
        load_format="dummy",
        device=arguments.device,
        attention_backend=arguments.attention_backend,
        max_running_requests=max(arguments.batch_sizes),
        log_level="error",
        **flags,
    ) as engine:
        vocab_size = GEOMETRIES[arguments.geometry].vocab_size
        measured = Measured(engine, vocab_size, kind == EAGLE)
        num_rounds = measured.num_rounds()
        sizes = tqdm(arguments.batch_sizes, desc=kind, unit="size")
        found = {size: measured.round_ms(size, arguments.repeats, num_rounds) for size in sizes}
        tok_s = None if arguments.without_load else measured.load_tok_s()
    return {"kind": kind, "rounds": num_rounds, "all_ms": found, "load_tok_s": tok_s}


def summarize(runs: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]]:
    """Medians by batch size."""
    rows = []
    for size in sizes:
        ms = {
            kind: [each for run in runs if run["kind"] == kind for each in run["all_ms"][size]]
            for kind in (PLAIN, EAGLE)
        }
        medians = {kind: round(statistics.median(each), 3) for kind, each in ms.items()}
        rows.append({"batch": size, "plain_ms": medians[PLAIN], "round_ms": medians[EAGLE]})
    return rows


def main() -> None:
    """Measures, prints a table, writes the result."""
    arguments = parse()
    runs: list[dict[str, Any]] = []
    with random_model(arguments.geometry) as folder, random_head(folder) as head:
        for number in range(arguments.engines):
            for kind in in_turn((PLAIN, EAGLE), number):
                runs.append(measure_kind(arguments, kind, folder, head))
    rows = summarize(runs, arguments.batch_sizes)
    for row in rows:
        print(
            f"batch {row['batch']:4d}: {row['plain_ms']:8.2f} ms/step plain,"
            f" {row['round_ms']:8.2f} ms/round"
        )
    for run in runs:
        print(f"full load, {run['kind']}: {run['load_tok_s']} output tokens/s")
    result = {
        **describe_environment(),
        "geometry": arguments.geometry,
        "attention_backend": arguments.attention_backend or "default",
        "num_steps": NUM_STEPS,
        "accept_length": arguments.accept_length,
        "rows": rows,
        "runs": runs,
    }
    store(arguments.out, result)


if __name__ == "__main__":
    main()
