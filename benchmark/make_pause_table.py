"""Writes the measured part of docs/pause.md from benchmark/results/pause_latency_cpu.json.

`--check` changes nothing and exits with 1 if the page does not hold what the result says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from make_readme_table import insert

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "pause.md"
RESULT = ROOT / "benchmark" / "results" / "pause_latency_cpu.json"


def table(result: dict[str, Any]) -> str:
    """One line per case, with overlap and without beside each other."""
    rows = result["rows"]
    lines = []
    for row in (row for row in rows if row["overlap"]):
        same = ("phase", "kind", "mode")
        other = next(r for r in rows if not r["overlap"] and all(r[n] == row[n] for n in same))
        cells = [_pause(row), _token(row), _pause(other), _token(other)]
        lines.append(f"| {row['phase']}, {row['kind']}, {row['mode']} | {' | '.join(cells)} |")
    machine = result["machine"]
    commit = result["commit"][:12] + (" with local changes" if result["dirty"] else "")
    newline = "\n"
    return f"""\
{result["requests"]} requests run; medians, as a client of the Engine sees them. A pause is
counted in steps of the kind in flight, the first token after `continue_generation` in decode steps,
or in first chunks of {result["chunk"]} prompt tokens where prompts are computed (again).

| in flight, kind, mode | pause | first token | pause, no overlap | first token, no overlap |
|---|---|---|---|---|
{newline.join(lines)}

{machine["cpu"]}, {machine["cores"]} cores; commit {commit}; `{result["command"]}`.
"""


def _pause(row: dict[str, Any]) -> str:
    return f"{row['pause_ms']:.0f} ms, {row['pause_in_steps']:.1f} steps"


def _token(row: dict[str, Any]) -> str:
    if "token_after" not in row:
        return "-"
    unit = "chunks" if row["token_after"] == "first chunk" else "steps"
    return f"{row['resume_ms']:.0f} ms, {row['token_after_in_steps']:.1f} {unit}"


def main() -> int:
    """Writes, or checks."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    old = PAGE.read_text()
    new = insert(old, table(json.loads(RESULT.read_text())))
    if not arguments.check:
        PAGE.write_text(new)
    elif new != old:
        print(f"{PAGE.name} is not what the result says; run benchmark/make_pause_table.py.")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
