"""Long matrices, tests marked `long_matrix`, of which one run of the suite takes half, or of those
marked `long_matrix(n)` an n-th: what is compiled or interpreted is the same until a kernel changes.

TEST_TURN says which part: a number draws it, `rest-of-NUMBER` is the rest alone, and without it all
tests run. `scripts/test.sh` draws a number for the whole suite and prints it; CI's is the commit's.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

REST_OF = "rest-of-"


def is_rest(turn: str) -> bool:
    """Tells whether the run is of what another turn leaves out, and of nothing else."""
    return turn.startswith(REST_OF)


def chosen(turn: str, tests: Mapping[str, int]) -> set[str]:
    """Draws a part of each test function's cases by their ids, rounded up or down by chance.
    Processes of one run draw the same.

    Args:
        tests: into how many parts the cases are divided, by id.
    """
    functions: dict[str, list[str]] = {}
    for test in tests:
        functions.setdefault(test.partition("[")[0], []).append(test)
    found: set[str] = set()
    for function, cases in functions.items():
        drawn = random.Random(f"{turn.removeprefix(REST_OF)} {function}")
        num_parts = tests[cases[0]]
        part = drawn.sample(cases, (len(cases) + drawn.randrange(num_parts)) // num_parts)
        found.update(set(cases) - set(part) if is_rest(turn) else part)
    return found
