"""Measures what README and docs/performance.md promise: one commit, one card, one command.

    python -m benchmark.headline --out FOLDER                  on an idle GPU, in about 15 minutes
    python -m benchmark.headline --out FOLDER --parts plain    a part, at most 8 minutes
    python -m benchmark.headline --merge FOLDER                the result that the pages quote
    python -m benchmark.report                                 writes it into the pages

Each part (`headline_parts.py`) is stored when it is done. Parts that FOLDER has already are not
measured again; of another commit or card they are refused, as are results of changed files.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmark.command import RESULTS, store
from benchmark.environment import ROOT, describe_environment
from benchmark.goals import HEADLINE, is_reached
from benchmark.headline_parts import PARTS, Setting

RESULT = RESULTS / "headline.json"
PART_LIMIT_S = 500.0  # parts plan to end in 8 minutes
Result = dict[str, Any]


class Refused(ValueError):
    """A part that does not belong to the others."""


def identity(result: Result) -> tuple[str, str]:
    """Gives commit and card, in which all parts must agree."""
    machine = result["machine"]
    return result["commit"], machine.get("gpu", machine["cpu"])


def read_parts(folder: Path, like: Result | None = None) -> dict[str, Result]:
    """Reads the parts of a folder, by name.

    Args:
        like: whose commit and card they must have, what is measured now; None: the first part.

    Raises:
        Refused: a part is damaged, or of another commit or card.
    """
    files = {name: folder / f"{name}.json" for name in PARTS}
    parts = {name: _read_part(file) for name, file in files.items() if file.is_file()}
    other = "the first part" if like is None else "what is measured now"
    for name, part in parts.items():
        like = like or part
        if identity(part) != identity(like):
            mine, wanted = (" on ".join(identity(each)) for each in (part, like))
            raise Refused(f"{files[name]} is of {mine}, and {other} of {wanted}.")
    return parts


def _read_part(file: Path) -> Result:
    try:
        part: Result = json.loads(file.read_text(encoding="utf-8"))
        identity(part)
    except (ValueError, TypeError, KeyError):
        raise Refused(f"{file} is no part: delete it, and it is measured again.") from None
    return part


def _is_of_a_commit(result: Result) -> bool:
    return not result["dirty"] and result["commit"] != "unknown"


def measure_parts(names: Sequence[str], arguments: argparse.Namespace) -> list[str]:
    """Measures the parts that the folder does not have, each in a process of its own, which gives
    the whole card back and ends after PART_LIMIT_S at the latest.

    Returns:
        Those that failed.

    Raises:
        Refused: the folder cannot be made, or has parts of another commit or card.
    """
    now = {**describe_environment(), "trial": arguments.trial}
    present, failed = read_parts(arguments.out, like=now), []
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Refused(f"{arguments.out} cannot be made: {error.strerror}.") from None
    if not (arguments.trial or _is_of_a_commit(now)):
        print("These files are not those of a commit: --merge will refuse.", file=sys.stderr)
    with tqdm(names, unit="part") as bar:
        for name in bar:
            bar.set_description(name)
            part = present.get(name)
            if part is not None and all(part[key] == now[key] for key in ("dirty", "trial")):
                print(f"{name}: stored already", flush=True)
            elif not _runs_well(name, arguments):
                failed.append(name)
    return failed


def _runs_well(name: str, arguments: argparse.Namespace) -> bool:
    """Runs the command of a part. Servers and Engines end with the process that started them."""
    words = [sys.executable, "-m", "benchmark.headline", "--part", name]
    words += ["--out", str(arguments.out)]
    words += ["--model-dir", str(arguments.model_dir)] if arguments.model_dir else []
    words += ["--trial"] * arguments.trial
    try:
        return subprocess.run(words, cwd=ROOT, check=False, timeout=PART_LIMIT_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"Ended after {PART_LIMIT_S:g} s.", file=sys.stderr)
        return False


def measure_part(name: str, arguments: argparse.Namespace) -> None:
    """Measures a part in this process, and stores it."""
    environment, start_s = describe_environment(), time.perf_counter()
    found = PARTS[name](Setting(arguments.model_dir, arguments.trial))
    found["figures"] = [asdict(figure) for figure in found["figures"]]
    seconds = round(time.perf_counter() - start_s, 1)
    part = {"part": name, "seconds": seconds, "trial": arguments.trial}
    store(arguments.out / f"{name}.json", {**environment, **part, **found})


def merge(folder: Path) -> Result:
    """Makes one result of the parts of a folder.

    Raises:
        Refused: there are none, or they do not belong together or into a page.
    """
    parts = read_parts(folder)
    if not parts:
        raise Refused(f"{folder} has no part: python -m benchmark.headline --out {folder}")
    for name, part in parts.items():
        if not _is_of_a_commit(part):
            raise Refused(f"{name} was measured of files that are not those of a commit.")
        if part["trial"]:
            raise Refused(f"{name} is a trial.")
    first = next(iter(parts.values()))
    shared = {key: first[key] for key in ("machine", "commit", "dirty", "versions")}
    return {
        **shared,
        "command": "python -m benchmark.headline",
        "missing": [name for name in PARTS if name not in parts],
        "seconds": {name: part["seconds"] for name, part in parts.items()},
        "figures": [figure for part in parts.values() for figure in part["figures"]],
        "parts": {
            name: {key: part[key] for key in part if key not in (*shared, "figures", "part")}
            for name, part in parts.items()
        },
    }


def print_figures(figures: Sequence[dict[str, Any]], is_judged: bool = True) -> None:
    """Prints what was found, and if `is_judged` what is asked and what the peer reached."""
    for figure in figures:
        goal = HEADLINE.get(figure["name"]) if is_judged else None
        line = f"{figure['name']:34} {figure['value']:12,.3f} {figure['unit']:16}"
        if interval := figure["interval"]:
            line += f" {interval['low']:.3f} to {interval['high']:.3f}"
        if goal is not None:
            mark = "" if is_reached(figure, goal) else "  MISS"
            line += f" asked {goal.asked:g}, peer {goal.peer or '-'}{mark}"
        print(line)


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    add = parser.add_argument
    names = list(PARTS)
    add("--out", type=Path, help=f"folder of the parts; with --merge the result ({RESULT.name})")
    add("--parts", nargs="+", choices=names, default=names, metavar="PART", help=", ".join(names))
    add("--part", choices=names, help="one, in this process and without a limit of time")
    add("--merge", type=Path, metavar="FOLDER", help="make one result of its parts")
    add("--model-dir", type=Path, help="where the inflated model is kept for the next run")
    add("--trial", action="store_true", help="tiny models and loads: does the command work here?")
    arguments = parser.parse_args(argv)
    if arguments.merge is None and arguments.out is None:
        parser.error("--out FOLDER says where the parts are stored.")
    for name in ("out", "model_dir"):
        if (path := vars(arguments)[name]) is not None:
            setattr(arguments, name, path.absolute())
    return arguments


def main(argv: list[str] | None = None) -> int:
    """Measures or merges, and prints the figures; 1 if a part was refused or failed."""
    arguments = parse(argv)
    if arguments.part is not None:
        measure_part(arguments.part, arguments)
        return 0
    failed: list[str] = []
    try:
        if arguments.merge is not None:
            result = merge(arguments.merge)
            store(arguments.out or RESULT, result)
            for name in result["missing"]:
                print(f"{name} is missing: its figures stay 'not measured'.")
            figures = result["figures"]
        else:
            failed = measure_parts(arguments.parts, arguments)
            parts = read_parts(arguments.out)
            figures = [figure for part in parts.values() for figure in part["figures"]]
    except Refused as error:
        print(f"Refused: {error}", file=sys.stderr)
        return 1
    print_figures(figures, is_judged=not arguments.trial)
    for name in failed:
        print(f"FAILED: {name}. The same command measures it again.", file=sys.stderr)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
