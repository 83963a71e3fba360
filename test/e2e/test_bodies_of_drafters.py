"""Bodies of every kind are answered as without drafts. `python test/bodies.py`, which CI runs too,
has more bodies, models and drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bodies import DEMO, Share, compare_ways

pytestmark = pytest.mark.long_matrix


def test_answers_do_not_depend_on_the_drafter() -> None:
    model = replace(DEMO, ways={"EAGLE3": DEMO.ways["EAGLE3"]})
    found = compare_ways(model, 0, Share(num_bodies=12, num_batches=1))
    assert found.differing == []
    assert found.by_way == {"plain, once more": 12, "MTP": 12, "EAGLE3": 12}
