"""Long matrices, tests marked `long_matrix`, of which one run of the suite takes half.

TEST_TURN says which half: a number draws it, `rest-of-NUMBER` is the other half alone, and without
it all tests run. `scripts/test.sh` draws a number for the whole suite and prints it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable

REST_OF = "rest-of-"


def is_rest(turn: str) -> bool:
    """Tells whether the run is of what another turn leaves out, and of nothing else."""
    return turn.startswith(REST_OF)


def chosen(turn: str, tests: Iterable[str]) -> set[str]:
    """Draws half of each test function's cases by their ids; of an odd number the larger half or
    the smaller. Processes of one run draw the same."""
    functions: dict[str, list[str]] = {}
    for test in tests:
        functions.setdefault(test.partition("[")[0], []).append(test)
    found: set[str] = set()
    for function, cases in functions.items():
        drawn = random.Random(f"{turn.removeprefix(REST_OF)} {function}")
        half = drawn.sample(cases, (len(cases) + drawn.randrange(2)) // 2)
        found.update(set(cases) - set(half) if is_rest(turn) else half)
    return found
