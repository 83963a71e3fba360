"""Holds what the measuring commands share: their options, the stored result, turns and ratios."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

SINGLE_RUNS = ("runs", "rounds_ms", "times_ms")  # of a row, beside their median
RESULTS = Path(__file__).parent / "results"
Item, Key = TypeVar("Item"), TypeVar("Key")


def make_parser(doc: str | None, result_name: str) -> argparse.ArgumentParser:
    """A parser described by the first line of a module's docstring, with --out.

    Args:
        result_name: of the file in benchmark/results/, without its suffix.
    """
    parser = argparse.ArgumentParser(description=(doc or "").split("\n")[0])
    out = RESULTS / f"{result_name}.json"
    parser.add_argument("--out", type=Path, default=out, help="where the result is stored")
    return parser


def store(path: Path, result: dict[str, Any]) -> None:
    """Writes a result, which begins with `describe_environment()`, and says where."""
    write(path, result)
    print(f"written: {path}", flush=True)


def write(path: Path, result: dict[str, Any]) -> None:
    """Writes a result that may still grow."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def print_rows(rows: Iterable[dict[str, Any]]) -> None:
    """Prints the figures of each row, but those of single runs."""
    for row in rows:
        shown = {key: value for key, value in row.items() if key not in SINGLE_RUNS}
        rounded = (f"{each:.4g}" if isinstance(each, float) else each for each in shown.values())
        print(", ".join(map("{} {}".format, shown, rounded)))


def in_turn(items: Iterable[Item], number: int) -> list[Item]:
    """Returns the items in the order of round `number`: forwards if it is even, else backwards."""
    return list(items)[:: -1 if number % 2 else 1]


def take_turns(
    works: Mapping[Key, Callable[[], Item]],
    num_rounds: int,
    keep: Callable[[dict[Key, list[Item]]], None] = lambda found: None,
) -> dict[Key, list[Item]]:
    """Runs each work once a round, and gives what it returned round by round.

    Args:
        keep: stores that, after each round.
    """
    found: dict[Key, list[Item]] = {name: [] for name in works}
    for number in range(num_rounds):
        turns = in_turn(works, number)
        # No line of a log for each round: there may be many short ones.
        for name in tqdm(turns, desc=f"round {number + 1}", leave=False, disable=None):
            found[name].append(works[name]())
        keep(found)
    return found


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(mine, theirs, strict=True)]
