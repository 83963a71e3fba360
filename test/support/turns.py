"""Long matrices, tests marked `long_matrix`, of which one run of the suite takes a twelfth, and CI
at least one case of each test. All files that are marked as a whole, since their tests share a
server or what a compiler made, are one matrix, whose cases are the files.

TEST_TURN says which cases: a number draws them, `more-of-NUMBER` is another twelfth alone, and
without it all tests run. `scripts/test.sh` draws a number for the whole suite and prints it; CI
runs more of its own number too.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

MORE_OF = "more-of-"
PARTS = 12  # the suite takes one, a run of more cases the next one


def is_more(turn: str) -> bool:
    """Tells whether the run is of cases that another turn leaves out, and of nothing else."""
    return turn.startswith(MORE_OF)


def case_of(item: pytest.Item) -> str | None:
    """Names what is drawn with a test: itself or, where its file is marked, the file. None: it is
    in no long matrix."""
    marked = [node for node, _ in item.iter_markers_with_node("long_matrix")]
    if any(isinstance(node, pytest.Module) for node in marked):
        return f"files[{item.nodeid.partition('::')[0]}]"
    return item.nodeid if marked else None


def chosen(turn: str, tests: Iterable[str]) -> set[str | None]:
    """Draws parts of each test function's cases by their ids, rounded up or down so that every
    case is drawn as often as the others; of two turns that leave out different cases one takes a
    case at least. Processes of one run draw the same."""
    functions: dict[str, list[str]] = {}
    for test in tests:
        functions.setdefault(test.partition("[")[0], []).append(test)
    found: set[str | None] = set()
    for function, cases in functions.items():
        drawn = random.Random(f"{turn.removeprefix(MORE_OF)} {function}")
        cases = drawn.sample(cases, len(cases))
        luck = drawn.randrange(PARTS)
        first, last = ((len(cases) * n + luck) // PARTS for n in (1, 2))
        last = max(last, 1)
        found.update(cases[first:last] if is_more(turn) else cases[:first])
    return found
