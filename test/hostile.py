"""Hostile inputs until there have been a million, in as many sittings as it takes.

    python test/hostile.py --ledger hostile.json --seconds 3600  # goes on where the ledger ends
    python test/hostile.py --seed 12345                          # one again that the ledger names
    python test/hostile.py --area templates --seconds 600        # one area alone, no ledger
    python test/hostile.py --atheris frames -- -runs=100000      # guided by coverage

Inputs are valid examples that are changed (`support/mutations.py`): bodies of every route of a
server, frames between processes, configs, checkpoints, kept prices, files of flags such as corpora,
grammars, chat templates (`support/hostile_areas.py`). A process of its own feeds them one by one.
It is a failure if that process ends, if an input takes over `HANG_S`, if a server answers with 500
or more, or if an error is none that users of the area are told. The ledger, a JSON file, counts
inputs by area, names the seeds of failures, and has a line for each sitting. The last form needs
the package atheris, which nothing else does, and is in no ledger.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import random
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NamedTuple

import psutil
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parent / "support"))

from ledger import Ledger, commit_of_tree

ALL_INPUTS = 1_000_000
FIRST_SEED = 0
HANG_S = 60.0
START_S = 120.0
KINDS = ("inputs", "taken", "refused", "crashes", "hangs", "errors")
WRITE_EVERY = 500
BATCH = 10_000  # inputs of one process of feeds
SHOWN_CHARS = 600
ROOT = f"{Path(__file__).resolve().parents[1]}/"


class Outcome(NamedTuple):
    """Result of an input; `error` is empty unless it failed."""

    kind: str
    error: str = ""


def feed(connection: Connection, first_seed: int, only: str | None) -> None:
    """Feeds the inputs of some seeds, each after it was asked for; the main function of a process
    that may die of them."""
    import torch

    from hostile_areas import AREAS, Area, area_of

    torch.set_num_threads(1)
    logging.disable(logging.CRITICAL)
    areas: dict[str, Area] = {}
    try:
        for seed in range(first_seed, first_seed + BATCH):
            name = only or area_of(seed)
            connection.send(name)
            if name not in areas:
                areas[name] = AREAS[name][0]()
            connection.send("begins")
            raw = b""
            try:
                raw = areas[name].draw(random.Random(f"{name} {seed}"))
                outcome = Outcome("taken" if areas[name].feed(raw) else "refused")
                if seed == first_seed + BATCH - 1:
                    for area in areas.values():
                        area.close()
            except BaseException as error:  # noqa: BLE001 - each is a find
                trace = "".join(traceback.format_exception(error, limit=-3))
                trace = trace.replace(ROOT, "").replace(f"{sys.prefix}/", "")
                kind = "errors" if isinstance(error, Exception) else "crashes"
                outcome = Outcome(kind, f"{name}: {raw[:200]!r}: {trace}"[-2000:])
            connection.send(outcome)
    finally:
        for process in psutil.Process().children(recursive=True):
            process.kill()
    connection.send(None)


class Feeder:
    """Feeds inputs in processes that may die of them, and says what became of each.

    Args:
        only: the name of the area of all inputs; None: by their seeds.
        main: of those processes, as `feed`.
    """

    def __init__(self, only: str | None = None, main: Callable[..., None] = feed) -> None:
        self._only = only
        self._main = main

    def outcomes(self, first_seed: int) -> Iterator[tuple[str, Outcome]]:
        """Yields area and outcome of the inputs of seeds from the first one on, without an end."""
        context = multiprocessing.get_context("spawn")
        seed = first_seed
        while True:
            ours, theirs = context.Pipe()
            process = context.Process(target=self._main, args=(theirs, seed, self._only))
            process.start()
            theirs.close()
            try:
                for found in _read(ours, process):
                    seed += 1
                    yield found
            finally:
                _end(process)
                ours.close()


def _read(ours: Connection, process: BaseProcess) -> Iterator[tuple[str, Outcome]]:
    """Yields what a process of feeds finds, up to its end or the first input that ends it."""
    name = "start"
    while True:
        try:
            for limit_s in (START_S, START_S, HANG_S):  # for its name, its area, what became of it
                if not ours.poll(limit_s):
                    yield name, Outcome("hangs", f"{name}: takes over {limit_s:g} s")
                    return
                match ours.recv():
                    case None:
                        return
                    case Outcome() as outcome:
                        yield name, outcome
                    case "begins":
                        pass
                    case str(name):
                        pass
        except EOFError:
            process.join(10)
            yield name, Outcome("crashes", f"{name}: ended with {process.exitcode}")
            return


def _end(process: BaseProcess) -> None:
    if process.is_alive() and process.pid is not None:
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        for child in family:
            child.kill()
    process.join()


def run(ledger: Ledger, feeder: Feeder, num_inputs: int, seconds: float) -> None:
    """Feeds inputs until there are so many in all, or the time is over."""
    end_s, was_told = time.monotonic() + seconds, False
    bar = tqdm(total=num_inputs, initial=ledger.total, unit="input", desc="hostile")
    outcomes = feeder.outcomes(ledger.found["next_seed"])
    try:
        while ledger.total < num_inputs and time.monotonic() < end_s:
            area, outcome = next(outcomes)
            seen = Counter({"inputs": 1, outcome.kind: 1, f"inputs of {area}": 1})
            ledger.add(seen, outcome.error or None)
            bar.update()
            if outcome.error:
                bar.write(f"seed {ledger.found['next_seed'] - 1}: {outcome.error[-SHOWN_CHARS:]}")
            if not was_told and ledger.is_warm:
                bar.write(ledger.rate(num_inputs))
                was_told = True
            if outcome.error or ledger.total % WRITE_EVERY == 0:
                ledger.write()
    finally:
        outcomes.close()  # type: ignore[attr-defined]
        ledger.write()
        bar.close()


def guided(name: str, arguments: list[str]) -> None:
    """Lets atheris change inputs by what they reach. It ends this process."""
    import atheris

    with atheris.instrument_imports(include=["sglang"]):
        from hostile_areas import AREAS, BY_BYTES
    if name not in BY_BYTES:
        raise SystemExit(f"--atheris {name}: takes no other bytes; give one of {BY_BYTES}")
    logging.disable(logging.CRITICAL)
    area = AREAS[name][0]()
    with tempfile.TemporaryDirectory() as corpus:
        for seed in range(200):
            raw = area.draw(random.Random(f"{name} {seed}"))
            (Path(corpus) / str(seed)).write_bytes(raw)

        def test(raw: bytes) -> None:
            if raw:
                area.feed(raw)

        atheris.Setup([sys.argv[0], *arguments, corpus], test)
        atheris.Fuzz()


def main() -> int:
    """Runs a sitting; 1 if any input of the ledger has failed."""
    parser = argparse.ArgumentParser(description="Hostile inputs, counted in a ledger.")
    parser.add_argument("--ledger", type=Path, help="hostile.json unless --area is given")
    parser.add_argument("--inputs", type=int, default=ALL_INPUTS, help="of all sittings")
    parser.add_argument("--seconds", type=float, default=3600.0, help="of this sitting")
    parser.add_argument("--seed", type=int, help="only the input of this seed; shows it")
    parser.add_argument("--area", help="all inputs are for this one")
    parser.add_argument("--atheris", metavar="AREA", help="one that takes any bytes")
    args, more = parser.parse_known_args()
    if more and not args.atheris:
        parser.error(f"unknown: {' '.join(more)}")
    if args.area and args.ledger:
        parser.error("--area: such runs are in no ledger; leave out --ledger")
    if args.atheris:
        guided(args.atheris, [each for each in more if each != "--"])
    if args.seed is not None:
        from hostile_areas import AREAS, area_of

        area = args.area or area_of(args.seed)
        place = AREAS[area][0]()
        raw = place.draw(random.Random(f"{area} {args.seed}"))
        print(f"{area}: {raw!r}", flush=True)
        print("taken" if place.feed(raw) else "refused")
        place.close()
        return 0
    with tempfile.TemporaryDirectory() as folder:
        path = args.ledger or Path(folder if args.area else ".") / "hostile.json"
        ledger = Ledger(path, commit_of_tree(), FIRST_SEED, KINDS[0], KINDS, _used)
        run(ledger, Feeder(args.area), args.inputs, args.seconds)
    found = ledger.found
    print(", ".join(f"{count} {kind}" for kind, count in found["counts"].items()))
    return 1 if found["failures"] else 0


def _used() -> dict[str, float]:
    """Returns memory in MB and open files of this process and its children."""
    family = [psutil.Process(), *psutil.Process().children(recursive=True)]
    memory = sum(each.memory_info().rss for each in family if each.is_running()) / 1e6
    return {"memory_mb": round(memory, 1), "processes": len(family)}


if __name__ == "__main__":
    sys.exit(main())
