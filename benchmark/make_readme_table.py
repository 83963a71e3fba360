"""Writes the measured table of README.md from benchmark/results/engine_vs_transformers.json.

`--check` changes nothing and exits with 1 if the README does not hold what the result says.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmark" / "results" / "engine_vs_transformers.json"
README = ROOT / "README.md"
BEGIN, END = "<!-- measured:begin -->", "<!-- measured:end -->"


def table(result: dict[str, Any]) -> str:
    """The section's text, in Markdown."""
    rows = "\n".join(
        f"| {row['requests']} | {row['engine_tok_s']:,.0f} | {row['transformers_tok_s']:,.0f}"
        f" | **{row['ratio']:.2f}x** | {row['asked']:g}x |"
        for row in result["rows"]
    )
    machine, versions = result["machine"], result["versions"]
    commit = result["commit"][:12] + (" with local changes" if result.get("dirty") else "")
    return f"""\
| requests at once | Engine, tokens/s | `generate` one by one, tokens/s | ratio | goal |
|---|---|---|---|---|
{rows}

Server ready in {result["startup_s"]:.1f} s; an idle server uses {result["idle_cpu_percent"]:.1f} %
of a core.

{machine["cpu"]}, {machine["cores"]} cores; Python {versions["python"]}, torch {versions["torch"]},
transformers {versions["transformers"]}; commit {commit}; `{result["command"]}`.
"""


def insert(readme: str, text: str) -> str:
    """The README with `text` between the two marks.

    Raises:
        ValueError: if a mark is missing or they are in the wrong order.
    """
    head, begin, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README.md must hold {BEGIN} and, after it, {END}.")
    return f"{head}{BEGIN}\n{text}{END}{tail}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    old = README.read_text(encoding="utf-8")
    new = insert(old, table(json.loads(RESULT.read_text(encoding="utf-8"))))
    if args.check:
        if new != old:
            print("README.md is out of date: python benchmark/make_readme_table.py")
        return int(new != old)
    README.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
