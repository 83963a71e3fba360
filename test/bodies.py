"""Random bodies of `/generate`: clients see the same with every drafter and without.

    python test/bodies.py --seconds 60

A plain Engine gives the right answers, whose texts transformers confirms, and those of verified
multi-token prediction; then each drafter has an Engine of its own. Models are the bundled one, with
all drafters, and random ones with tokenizers in SentencePiece's layouts. Prints the seed of a body
that differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "support"))

import sglang
from body_cases import TextOracle, agree, answers, draw_bodies, with_choices, with_mtp
from sentencepiece_models import LAYOUTS, make_sentencepiece_dir
from sglang.srt.model_config import resolve_model_path

NUM_BODIES = 24
FIXED = {"speculative_num_steps": 3, "speculative_eagle_topk": 1}
SMALL = {"device": "cpu", "dtype": "float32", "max_total_tokens": 4096}


@dataclass(frozen=True)
class ServedModel:
    """A model with the flags of its Engines.

    Attributes:
        drafters: names of algorithms, each with flags of its own.
    """

    path: str
    flags: dict[str, Any] = field(default_factory=dict)
    drafters: dict[str, dict[str, Any]] = field(default_factory=dict)

    def engine(self, **flags: Any) -> sglang.Engine:
        return sglang.Engine(model_path=self.path, **SMALL, **self.flags, **flags)


DEMO = ServedModel(
    "demo",
    drafters={
        "NGRAM": {},
        "EAGLE3": {"speculative_draft_model_path": "demo-eagle3"},
        "EAGLE": {"speculative_draft_model_path": "demo-eagle", **FIXED},
        "NEXTN": {"speculative_draft_model_path": "demo-nextn", **FIXED},
        "STANDALONE": {"speculative_draft_model_path": "demo-draft", **FIXED},
    },
)


def sentencepiece_model(layout: str, parent: Path) -> ServedModel:
    """A random model; its mask token is the unknown one."""
    folder = make_sentencepiece_dir(parent / layout, layout)
    flags = {"load_format": "dummy", "mtp_mask_token_id": 0}
    return ServedModel(str(folder), flags, {"NGRAM": {}})


def check(right: list[Any], given: list[Any], bodies: list[dict[str, Any]], name: str) -> None:
    """
    Raises:
        AssertionError: naming the first body whose answer differs.
    """
    for place, (mine, theirs) in enumerate(zip(right, given, strict=True)):
        assert agree(mine, theirs), f"{name}, body {place}: {bodies[place]}\n{mine}\n{theirs}"


def compare_drafters(
    model: ServedModel, first_seed: int, seconds: float, num_bodies: int = NUM_BODIES
) -> Counter[str]:
    """Compares answers for about so long, at least one batch of `num_bodies` that run at once with
    each drafter; returns bodies compared, by drafter."""
    seen: Counter[str] = Counter()
    batches: list[tuple[list[dict[str, Any]], list[Any]]] = []
    share_s = seconds / (len(model.drafters) + 1)
    oracle = TextOracle(resolve_model_path(model.path))
    with model.engine() as engine:
        end = time.monotonic() + share_s
        while not batches or time.monotonic() < end:
            seed = first_seed + len(batches)
            bodies = draw_bodies(seed, num_bodies)
            batches.append((bodies, answers(engine, bodies)))
            for body, found in zip(*batches[-1], strict=True):
                oracle.check(body, found)
            mtp = with_mtp(bodies, seed)
            check(batches[-1][1], answers(engine, mtp), mtp, f"MTP, seed {seed}")
            seen["MTP"] += len(bodies)
    for name, flags in model.drafters.items():
        end = time.monotonic() + share_s
        with model.engine(speculative_algorithm=name, **flags) as engine:
            for number, (bodies, right) in enumerate(batches):
                if number and time.monotonic() > end:
                    break
                seed = first_seed + number
                chosen = with_choices(bodies, seed)
                check(right, answers(engine, chosen), chosen, f"{name}, seed {seed}")
                seen[name] += len(bodies)
    return seen


def main() -> int:
    parser = argparse.ArgumentParser(description="The same answers with every drafter.")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, help="of the first bodies; drawn if not given")
    arguments = parser.parse_args()
    seed = time.time_ns() % 1_000_000 if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        models = {"demo": DEMO} | {
            layout: sentencepiece_model(layout, Path(folder)) for layout in LAYOUTS
        }
        for name, model in models.items():
            seconds = arguments.seconds / (2 if model is DEMO else 4)
            try:
                seen = compare_drafters(model, seed, seconds)
            except AssertionError as error:
                print(f"FAILED with {name}: {error}")
                return 1
            print(f"{name}: " + ", ".join(f"{n} bodies with {each}" for each, n in seen.items()))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
