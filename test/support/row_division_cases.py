"""Cases of row division, and what compares an implementation with a plain sort, exactly.

As a program it runs them on a CPU and prints a line of JSON per case: what differs, nothing if all
is well. Triton kernels then need TRITON_INTERPRET=1 in the environment, set before Triton is
imported:

    export PYTHONPATH=python:sgl-kernel/python:test/support
    TRITON_INTERPRET=1 python test/support/row_division_cases.py triton
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from interpreted import asked
from sglang.srt.step.row_division import (
    HIGHEST_VALUE,
    RowDivision,
    TorchRowDivision,
    WantedRows,
)
from sglang.srt.step.triton_row_division import TritonRowDivision

Case = Callable[[str, str, int], list[str]]  # name, device, how many divisions
Numbers = Callable[[random.Random], float]
NAMES = ("torch", "triton")
MANY = 100  # requests; divisions of more are few


@dataclass(frozen=True)
class Division:
    """Numbers of R requests, in Python: `WantedRows`, each with its own row of confidences."""

    least: Sequence[int]
    num_drafts: Sequence[int]
    confidence: Sequence[Sequence[float]]
    num_rows: int

    def wanted(self, device: str, rows: list[int] | None) -> WantedRows:
        """On the device; `rows` spreads the confidences over a table that is otherwise 1."""

        def counts(numbers: Sequence[int]) -> torch.Tensor:
            return torch.tensor(numbers, dtype=torch.int64, device=device)

        def table(confidence: Sequence[Sequence[float]]) -> torch.Tensor:
            own = torch.tensor(confidence, dtype=torch.float32).view(len(confidence), -1)
            if rows is not None:
                whole = torch.ones(max(rows) + 2, own.shape[1])
                whole[rows] = own
                own = whole
            return own.to(device)

        return WantedRows(
            counts(self.least),
            counts(self.num_drafts),
            table(self.confidence),
            None if rows is None else counts(rows),
        )


def sorted_division(case: Division) -> list[int]:
    """Computes what `RowDivision.divide` is to return: drafts are sorted one by one."""
    one = np.float32(1)
    candidates = []
    for request, (confidence, count) in enumerate(
        zip(case.confidence, case.num_drafts, strict=True)
    ):
        product = one
        for offset, entry in enumerate(confidence[: max(count, 0)]):
            bounded = np.float32(entry) if entry > 0 else np.float32(0)
            product = np.float32(product * min(bounded, one))
            value = int(np.float32(product * np.float32(HIGHEST_VALUE)))
            candidates.append((-value, offset, request))
    least = [min(max(number, 0), case.num_rows) for number in case.least]
    room = max(case.num_rows - sum(least), 0)
    num_kept = [0] * len(least)
    for _, _, request in sorted(candidates)[:room]:
        num_kept[request] += 1
    starts = [0]
    for own, kept in zip(least, num_kept, strict=True):
        starts.append(min(starts[-1] + own + kept, case.num_rows))
    return starts


def what_is_wrong(found: torch.Tensor, case: Division) -> list[str]:
    right = sorted_division(case)
    is_right = found.dtype == torch.int64 and found.tolist() == right
    return [] if is_right else [f"{found.tolist()} of {found.dtype}, not {right}"]


def division(name: str, device: str, max_requests: int) -> RowDivision:
    assert name in NAMES, name
    on = torch.device(device)
    return TorchRowDivision() if name == "torch" else TritonRowDivision(on, max_requests)


def uniform(chooser: random.Random) -> float:
    return chooser.random()


def confident(chooser: random.Random) -> float:
    return chooser.choice([chooser.uniform(0.9, 1), chooser.random()])


def coarse(chooser: random.Random) -> float:
    """Products are often equal."""
    return chooser.choice([0.5, 1.0, 0.25])


def zero_or_one(chooser: random.Random) -> float:
    return chooser.choice([0.0, 1.0, 1.0])


def tiny(chooser: random.Random) -> float:
    """Products are 0 or not normal after a few rows."""
    return chooser.choice([1e-38, 1e-45, 1e-3, 1.0])


def half(chooser: random.Random) -> float:
    return 0.5


def certain(chooser: random.Random) -> float:
    return 1.0


def impossible(chooser: random.Random) -> float:
    return 0.0


def absurd(chooser: random.Random) -> float:
    odd = [float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 2.0, 1.0000001, 1e-45, 0.7]
    return chooser.choice(odd)


@dataclass(frozen=True)
class Shape:
    """Random divisions. `room`: rows beyond `least`, as a part of those that are wanted."""

    num_reqs: int
    max_drafts: int = 6
    confidence: Numbers = uniform
    room: tuple[float, ...] = (0.1, 0.5, 0.9)
    has_drafts: bool = True

    def draw(self, chooser: random.Random) -> Division:
        least, drafts = [], []
        for _ in range(self.num_reqs):
            is_prompt = chooser.random() < 0.2
            least.append(chooser.choice([2, 130]) if is_prompt else chooser.choice([1, 1, 3]))
            is_cut = self.has_drafts and not is_prompt
            drafts.append(chooser.randint(0, self.max_drafts) if is_cut else 0)
        confidence = [[self.confidence(chooser) for _ in range(self.max_drafts)] for _ in least]
        num_rows = sum(least) + int(chooser.choice(self.room) * sum(drafts))
        return Division(least, drafts, confidence, num_rows)


def random_case(shape: Shape) -> Case:
    """Every second division has `rows`, the first one too."""

    def run(name: str, device: str, count: int) -> list[str]:
        found = []
        ours = division(name, device, shape.num_reqs)
        for seed in range(min(count, 2) if shape.num_reqs > MANY else count):
            chooser = random.Random(seed)
            case = shape.draw(chooser)
            places = chooser.sample(range(shape.num_reqs + 3), shape.num_reqs)
            wanted = case.wanted(device, None if seed % 2 else places)
            result = ours.divide(wanted, case.num_rows)
            found += [f"seed {seed}: {what}" for what in what_is_wrong(result, case)]
        return found

    return run


def absurd_case(**changes: object) -> Case:
    """Four requests of which some numbers are absurd, in steps of several sizes."""
    plain = Division(
        least=[1, 5, 2, 1],
        num_drafts=[3, 0, 2, 1],
        confidence=[[0.9, 0.8, 0.1], [0.3, 0.3, 0.3], [0.7, 0.7, 0.7], [0.2, 0.9, 0.9]],
        num_rows=0,
    )

    def run(name: str, device: str, count: int) -> list[str]:
        found = []
        ours = division(name, device, len(plain.least))
        for num_rows in (8, 13, 0, 1, 9, 40)[: 2 * count]:
            case = replace(plain, num_rows=num_rows, **changes)  # type: ignore[arg-type]
            result = ours.divide(case.wanted(device, None), num_rows)
            found += [f"{num_rows} rows: {what}" for what in what_is_wrong(result, case)]
        return found

    return run


LARGEST = Shape(512, max_drafts=64, confidence=confident)
CASES: dict[str, Case] = {
    "one request": random_case(Shape(1)),
    "two requests": random_case(Shape(2)),
    "a few": random_case(Shape(7)),
    "one more than a warp": random_case(Shape(33)),
    "many": random_case(Shape(200, max_drafts=15, confidence=confident)),
    "the most": random_case(LARGEST),
    "the most, all equal": random_case(replace(LARGEST, confidence=half, room=(0.4,))),
    "one with most drafts": random_case(Shape(1, max_drafts=64)),
    "all fits": random_case(Shape(20, room=(1.0, 3.0))),
    "all but little fits": random_case(Shape(20, room=(0.99,))),
    "nothing fits": random_case(Shape(20, room=(0.0,))),
    "equal values": random_case(Shape(37, confidence=half)),
    "some values are equal": random_case(Shape(37, confidence=coarse)),
    "all are certain": random_case(Shape(37, confidence=certain)),
    "equal values far behind": random_case(Shape(40, 64, certain, room=(0.995,))),
    "all are 0": random_case(Shape(37, confidence=impossible)),
    "zero or one": random_case(Shape(37, confidence=zero_or_one)),
    "tiny": random_case(Shape(17, confidence=tiny)),
    "no drafts": random_case(Shape(17, has_drafts=False)),
    "a table without drafts": random_case(Shape(17, max_drafts=0)),
    "confidences that are none": random_case(Shape(23, confidence=absurd)),
    "more or fewer rows": absurd_case(),
    "counts beyond the table": absurd_case(num_drafts=[9, 1 << 40, -3, 0]),
    "counts far below it": absurd_case(num_drafts=[-(1 << 40), 7, 2, 3]),
    "absurd least": absurd_case(least=[-5, 1 << 62, 0, 1 << 62]),
    "least is nothing": absurd_case(least=[0, 0, 0, 0]),
    "least of the first is all": absurd_case(least=[50, 1, 1, 1]),
}


def main(name: str) -> None:
    torch.set_num_threads(1)
    for case_name, case in asked(CASES).items():
        print(json.dumps([case_name, "; ".join(case(name, "cpu", 1))]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
