"""Random bodies of `/generate`: clients see the same whatever looks ahead.

    python test/bodies.py --seconds 60
    SGLANG_TEST_TARGET='{"dtype": "bfloat16", "enable_deterministic_inference": true}' \\
        python test/bodies.py --bodies 100000 --out exact.json     # on a GPU, bit for bit

A plain Engine gives the right answers, whose texts transformers confirms, and those of verified
multi-token prediction; then each drafter has an Engine of its own. Some requests are aborted, and
generation is paused, meanwhile. Models are the bundled one, with all drafters, and on a CPU random
ones with tokenizers in SentencePiece's layouts. Prints the seeds of bodies that differ.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent / "support"))

from tqdm import tqdm

import sglang
from benchmark.command import store
from benchmark.environment import describe_environment
from benchmark.mtp_model import HEADS, INFLATED, drafter_flags, model_path_of
from body_cases import Answer, TextOracle, agree, answers, draw_bodies, with_choices, with_mtp
from interrupted_calls import Interruptions
from sentencepiece_models import LAYOUTS, make_sentencepiece_dir
from sglang.srt.model_config import resolve_model_path
from target import TARGET

NUM_BODIES = {"cpu": 24, "cuda": 256}
FIXED = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
SMALL = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}
LARGE = {"device": "cuda", "max_total_tokens": 65_536, "max_running_requests": 96}
LARGE |= {"mem_fraction_static": 0.8, "context_length": 512}
FLAGS: dict[str, Any] = {"cpu": SMALL, "cuda": LARGE}[TARGET.device] | TARGET.flags
# Log-probabilities differ by what the order of sums changes in float32, if orders are not fixed.
MAX_GAP = 0.0 if FLAGS.get("enable_deterministic_inference") else 1e-3
ALGORITHM = "speculative_algorithm"
WAYS: dict[str, dict[str, Any]] = {
    "NGRAM": {ALGORITHM: "NGRAM"},
    "EAGLE3": {ALGORITHM: "EAGLE3"},
    "EAGLE": {ALGORITHM: "EAGLE", **FIXED},
    "NEXTN": {ALGORITHM: "NEXTN", **FIXED},
    "STANDALONE": {ALGORITHM: "STANDALONE", **FIXED},
    "EAGLE3, tiers": {ALGORITHM: "EAGLE3", "speculative_adaptive": True},
    "EAGLE3, TileSpec": {ALGORITHM: "EAGLE3", "tile_spec": True},
}


@dataclass(frozen=True)
class ServedModel:
    """A model with the flags of its Engines.

    Attributes:
        flags: of all of them.
        ways: names of ways to draft, each with flags of its own.
    """

    path: str
    flags: dict[str, Any] = field(default_factory=dict)
    ways: dict[str, dict[str, Any]] = field(default_factory=dict)

    def engine(self, **flags: Any) -> sglang.Engine:
        return sglang.Engine(model_path=self.path, **{**FLAGS, **self.flags, **flags})


@dataclass
class Compared:
    """Holds what was compared: `counts` by what it was, `by_way` bodies, and what differed."""

    by_way: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    differing: list[str] = field(default_factory=list)

    def add(
        self,
        way: str,
        seed: int,
        bodies: list[dict[str, Any]],
        right: list[Answer],
        given: list[Answer],
    ) -> None:
        """Compares the answers of the batch of a seed."""
        for body, mine, theirs in zip(bodies, right, given, strict=True):
            if not agree(mine, theirs, MAX_GAP):
                self.differing.append(f"{way}, seed {seed}: {body}\n{mine}\n{theirs}")
            self.counts["tokens"] += sum(len(each["output_ids"]) for each in theirs)
            self.counts["aborted"] += theirs[0]["finish_reason"]["type"] == "abort"
        self.by_way[way] += len(bodies)


def drafted(model_path: str, flags: dict[str, dict[str, Any]]) -> ServedModel:
    """A model with all ways.

    Args:
        flags: of each algorithm that has a head or a draft model.
    """
    ways = {name: flags.get(way[ALGORITHM], {}) | way for name, way in WAYS.items()}
    return ServedModel(model_path, ways=ways)


DEMO = drafted("demo", {name: {"speculative_draft_model_path": HEADS[name]} for name in HEADS})


def inflated_model(stack: ExitStack, geometry: str) -> ServedModel:
    """The bundled model and its drafters in large sizes, until the stack is closed."""
    given = argparse.Namespace(
        model_path=INFLATED, model_dir=None, geometry=geometry, device=TARGET.device
    )
    path = stack.enter_context(model_path_of(given))
    flags = {
        name: stack.enter_context(drafter_flags(argparse.Namespace(**vars(given), algorithm=name)))
        for name in HEADS
    }
    return drafted(path, flags)


def sentencepiece_model(layout: str, parent: Path) -> ServedModel:
    """A random model; its mask token is the unknown one."""
    folder = make_sentencepiece_dir(parent / layout, layout)
    flags = {"load_format": "dummy", "mtp_mask_token_id": 0}
    return ServedModel(str(folder), flags, {"NGRAM": WAYS["NGRAM"]})


@dataclass(frozen=True)
class Share:
    """Says how long each way is compared: so many batches, or for a time, at least one batch."""

    num_bodies: int
    seconds: float = 0.0
    num_batches: int | None = None

    def seeds(self, first_seed: int, way: str) -> Iterator[int]:
        """Yields a seed for each batch."""
        end, number = time.monotonic() + self.seconds, 0
        bar = tqdm(total=self.num_batches, desc=way, unit="batch", disable=not self.num_batches)
        while True:
            yield first_seed + number
            number += 1
            bar.update()
            is_over = number == self.num_batches or (
                self.num_batches is None and time.monotonic() >= end
            )
            if is_over:
                bar.close()
                return


def compare_ways(model: ServedModel, first_seed: int, share: Share) -> Compared:
    """Compares the answers of all ways of a model with those of plain decoding."""
    found = Compared()
    batches: list[tuple[list[dict[str, Any]], list[Answer]]] = []
    oracle = TextOracle(resolve_model_path(model.path))
    with model.engine() as engine:
        interruptions = Interruptions(engine, found.counts)
        for seed in share.seeds(first_seed, "plain and masks"):
            bodies = draw_bodies(seed, share.num_bodies)
            batches.append((bodies, answers(engine, bodies)))
            for body, answer in zip(*batches[-1], strict=True):
                oracle.check(body, answer)
            right = batches[-1][1]
            with interruptions.of(seed):
                found.add("plain, once more", seed, bodies, right, answers(engine, bodies, seed))
            mtp = with_mtp(bodies, seed)
            with interruptions.of(-seed):
                found.add("MTP", seed, mtp, right, answers(engine, mtp, seed))
    for name, flags in model.ways.items():
        with tempfile.TemporaryDirectory() as cache:
            if flags.get("tile_spec"):
                flags = {**flags, "tile_spec_cache_dir": cache}
            with model.engine(**flags) as engine:
                interruptions = Interruptions(engine, found.counts)
                seeds = share.seeds(first_seed, name)
                for seed, (bodies, right) in zip(seeds, batches, strict=False):
                    chosen = with_choices(bodies, seed)
                    with interruptions.of(seed):
                        found.add(name, seed, chosen, right, answers(engine, chosen, seed))
    return found


def shown(compared: Compared) -> str:
    """The counts in a line."""
    bodies = (f"{number} bodies with {way}" for way, number in compared.by_way.items())
    counts = (f"{number} {name}" for name, number in compared.counts.items())
    return ", ".join([*bodies, *counts, f"{len(compared.differing)} differ"])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="The same answers whatever looks ahead.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--bodies", type=int, help="of all ways together, instead of a time")
    parser.add_argument("--seed", type=int, help="of the first bodies; drawn if not given")
    parser.add_argument("--model", choices=("demo", INFLATED), help="this one alone")
    parser.add_argument("--geometry", choices=("llama-3.1-8b", "tiny"), default="llama-3.1-8b")
    parser.add_argument("--out", type=Path, help="where counts are stored")
    return parser.parse_args()


def main() -> int:
    arguments = parsed()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    num_bodies, result, failed = NUM_BODIES[TARGET.device], dict[str, Any](), False
    with ExitStack() as stack:
        if arguments.model == INFLATED:
            models = {INFLATED: inflated_model(stack, arguments.geometry)}
        else:
            models = {"demo": DEMO}
        if arguments.model is None and TARGET.device == "cpu":
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            models |= {layout: sentencepiece_model(layout, folder) for layout in LAYOUTS}
        for name, model in models.items():
            seconds = arguments.seconds / (1 if len(models) == 1 else 2 if model is DEMO else 4)
            share = Share(num_bodies, seconds / (len(model.ways) + 1))
            if arguments.bodies:
                per_way = arguments.bodies / (len(model.ways) + 2)
                share = Share(num_bodies, num_batches=-(-int(per_way) // num_bodies))
            found = compare_ways(model, seed, share)
            print(f"{name}: {shown(found)}", flush=True)
            for each in found.differing[:3]:
                print(f"FAILED with {name}, {each}", flush=True)
            failed = failed or bool(found.differing)
            counts = {"bodies": dict(found.by_way), **found.counts}
            result[name] = {**counts, "differing": len(found.differing)}
    if arguments.out:
        store(arguments.out, {**describe_environment(), "flags": FLAGS, "models": result})
    return int(failed)


if __name__ == "__main__":
    raise SystemExit(main())
