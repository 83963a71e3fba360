"""What do log-probabilities, penalties and scrapes cost? Step times of one Engine, kind by kind.

Milliseconds per decode step, (wall(1 + n new tokens) - wall(1 new token)) / n, of batches in which
every request asks for the same, each kind beside the one that it adds something to, in rounds that
alternate; medians of the rounds' ratios. Random weights, default geometry Llama-3.1-8B.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

import sglang
from benchmark.command import in_turn, make_parser, median_ratio, store
from benchmark.engine_load import random_prompts
from benchmark.environment import describe_environment
from benchmark.measure.long_prompts import DECODE_INPUT_LEN as INPUT_LEN
from benchmark.random_model import GEOMETRIES, random_model
from sglang.srt.model_config import resolve_model_path
from sglang.srt.server_args import ServerArgs

GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 0.8, "top_p": 0.95}
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.3, "presence_penalty": 0.2}


@dataclass(frozen=True)
class Kind:
    """Requests that all ask for the same.

    Attributes:
        beside: name of the kind that it is compared with; None for no comparison.
        most: the ratio that is asked for, at most.
        fields: of the request, beside its sampling parameters.
        scrapes: ask for the server's state every second meanwhile.
    """

    params: dict[str, Any]
    beside: str | None = None
    most: float | None = None
    fields: dict[str, Any] = field(default_factory=dict)
    scrapes: bool = False


KINDS = {
    "greedy": Kind(GREEDY),
    "greedy, logprobs": Kind(GREEDY, "greedy", 1.05, {"return_logprob": True}),
    "greedy, scraped": Kind(GREEDY, "greedy", None, {}, scrapes=True),
    "sampled": Kind(SAMPLED),
    "sampled, logprobs": Kind(SAMPLED, "sampled", 1.05, {"return_logprob": True}),
    "sampled, top 5 logprobs": Kind(
        SAMPLED, "sampled", None, {"return_logprob": True, "top_logprobs_num": 5}
    ),
    "sampled, penalties": Kind({**SAMPLED, **PENALTIES}, "sampled", 1.06),
}


@contextmanager
def scraping(engine: sglang.Engine, is_on: bool) -> Iterator[list[float]]:
    """Asks for the state every second, as a scrape of /metrics does; seconds of each answer."""
    ended, seconds = threading.Event(), list[float]()

    def scrape() -> None:
        while not ended.wait(1.0 if seconds else 0.0):
            start = time.perf_counter()
            engine.get_server_info()
            seconds.append(time.perf_counter() - start)

    thread = threading.Thread(target=scrape, daemon=True)
    if is_on:
        thread.start()
    try:
        yield seconds
    finally:
        ended.set()
        if is_on:
            thread.join()


def step_ms(engine: sglang.Engine, kind: Kind, prompts: list[list[int]], num_new: int) -> float:
    """Of one batch; with fresh prompts, since the prefix cache is on."""

    def wall_s(prompts: list[list[int]], num_tokens: int) -> float:
        params = {**kind.params, "max_new_tokens": num_tokens, "ignore_eos": True}
        start = time.perf_counter()
        answers = engine.generate(input_ids=prompts, sampling_params=params, **kind.fields)
        seconds = time.perf_counter() - start
        if any(len(answer["output_ids"]) != num_tokens for answer in answers):
            raise RuntimeError(f"Not every request gave {num_tokens} tokens.")
        return seconds

    with scraping(engine, kind.scrapes):
        one = wall_s([prompt[::-1] for prompt in prompts], 1)
        return (wall_s(prompts, 1 + num_new) - one) / num_new * 1e3


def measure(
    engine: sglang.Engine, size: int, arguments: argparse.Namespace, vocab_size: int
) -> list[dict[str, Any]]:
    """Rounds of all kinds with `size` requests."""
    found: dict[str, list[float]] = {name: [] for name in KINDS}
    for number in tqdm(range(arguments.rounds + 1), desc=f"batch {size}", unit="round"):
        for place, name in enumerate(in_turn(KINDS, number)):
            seed = (size * 1000 + number) * len(KINDS) + place
            prompts = random_prompts(size, INPUT_LEN, vocab_size, seed)
            num_new = arguments.new_tokens if number else 8  # the first round warms up
            ms = step_ms(engine, KINDS[name], prompts, num_new)
            if number:
                found[name].append(ms)
    rows = []
    for name, kind in KINDS.items():
        row: dict[str, Any] = {"batch": size, "kind": name}
        row["ms"] = round(statistics.median(found[name]), 3)
        row["all_ms"] = [round(ms, 3) for ms in found[name]]
        if kind.beside is not None:
            ratio = median_ratio(found[name], found[kind.beside])
            row |= {"beside": kind.beside, "ratio": round(ratio, 4)}
            row["asked"] = kind.most
        rows.append(row)
    return rows


def main() -> None:
    """Measures, prints a table, writes the result."""
    parser = make_parser(__doc__, "return_costs")
    add = parser.add_argument
    add("--geometry", choices=GEOMETRIES, default="llama-3.1-8b")
    add("--batch-sizes", type=int, nargs="+", default=[64, 128])
    add("--rounds", type=int, default=5)
    add("--new-tokens", type=int, default=128)
    add("--device", default="auto")
    arguments = parser.parse_args()
    geometry = GEOMETRIES[arguments.geometry]
    with random_model(arguments.geometry) as folder:
        args = ServerArgs(
            model_path=folder,
            tokenizer_path=str(resolve_model_path("demo")),
            load_format="dummy",
            device=arguments.device,
            max_running_requests=max(arguments.batch_sizes),
            log_level="error",
        )
        with sglang.Engine(args) as engine:
            num_slots = engine.get_server_info()["max_total_num_tokens"]
            rows = [
                row
                for size in arguments.batch_sizes
                for row in measure(engine, size, arguments, geometry.vocab_size)
            ]
            with scraping(engine, True) as seconds:
                time.sleep(3.5)
    for row in rows:
        ratio = f"{row['ratio']:6.3f} of {row['beside']}" if "ratio" in row else ""
        print(f"batch {row['batch']:4d}  {row['kind']:26} {row['ms']:8.3f} ms/step  {ratio}")
    print(f"one scrape of an idle server: {statistics.median(seconds) * 1e3:.2f} ms;", end=" ")
    print(f"{num_slots:,} KV slots")
    result = {
        **describe_environment(),
        "geometry": arguments.geometry,
        "kv_slots": num_slots,
        "idle_scrape_ms": round(statistics.median(seconds) * 1e3, 3),
        "rows": rows,
    }
    store(arguments.out, result)


if __name__ == "__main__":
    main()
