"""Objects that are kept out of collections are freed when the process ends."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
from sglang.srt.garbage import keep_out_of_collections

class Cycle:
    def __init__(self):
        self.own = self

    def __del__(self):
        print("freed")

cycle = Cycle()
keep_out_of_collections()
del cycle
"""


def test_cycles_that_are_exempted_are_freed_at_the_end() -> None:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True
    )
    assert result.stdout == "freed\n"
