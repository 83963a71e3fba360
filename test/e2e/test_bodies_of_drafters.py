"""Bodies of every kind are answered as without drafts. `python test/bodies.py`, which CI runs too,
has more bodies, models and drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest

from bodies import DEMO, compare_drafters

pytestmark = pytest.mark.long_matrix


def test_answers_do_not_depend_on_the_drafter() -> None:
    model = replace(DEMO, drafters={"EAGLE3": DEMO.drafters["EAGLE3"]})
    assert compare_drafters(model, 0, 0.0, num_bodies=12) == {"MTP": 12, "EAGLE3": 12}
