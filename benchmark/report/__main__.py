"""Writes the measured tables of README.md and docs/, and the plots, from the stored results.

python -m benchmark.report                  all of them; plots need matplotlib
python -m benchmark.report costly_requests  some, by name (`places.py`)
python -m benchmark.report --check          fails where a table is not what the results give
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmark.environment import ROOT
from benchmark.report.places import PLOTS, TABLES, draw_plot


def fill(page: str, name: str, text: str) -> str:
    """The page with `text` between the marks of a part.

    Raises:
        ValueError: if a mark is missing, or they are in the wrong order.
    """
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    head, found_begin, rest = page.partition(begin)
    _, found_end, tail = rest.partition(end)
    if not found_begin or not found_end:
        raise ValueError(f"The page must hold {begin} and, after it, {end}.")
    return f"{head}{begin}\n{text}{end}{tail}"


def main(argv: list[str] | None = None, root: Path = ROOT) -> int:
    """Writes, or checks; 1 if a check fails.

    Args:
        root: of README.md, docs/ and benchmark/results/.
    """
    description = (__doc__ or "").split("\n")[0]
    parser = argparse.ArgumentParser("python -m benchmark.report", description=description)
    names = (*TABLES, *PLOTS)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(names)}; default: all")
    parser.add_argument("--check", action="store_true", help="of tables; changes nothing")
    arguments = parser.parse_args(argv)
    chosen = arguments.names or names
    if unknown := set(chosen) - {*names}:
        parser.error(f"There is no {', '.join(sorted(unknown))}; there are {', '.join(names)}.")
    stale = []
    for name in (name for name in TABLES if name in chosen):
        table = TABLES[name]
        page = root / table.page
        old = page.read_text(encoding="utf-8")
        new = fill(old, name, table.text(root))
        if new != old:
            stale.append(name)
            print(f"{table.page}: {name} {'is out of date' if arguments.check else 'written'}")
            if not arguments.check:
                page.write_text(new, encoding="utf-8")
    if arguments.check:
        if stale:
            print(f"Remedy: python -m benchmark.report {' '.join(stale)}")
        return int(bool(stale))
    for name in (name for name in PLOTS if name in chosen):
        draw_plot(name, root)
        print(f"docs/{name} drawn")
    return 0


if __name__ == "__main__":
    sys.exit(main())
