"""Bodies of every kind are answered as without drafts. `python test/bodies.py`, which CI runs too,
has more bodies and all drafters."""

from __future__ import annotations

from bodies import compare_drafters


def test_answers_do_not_depend_on_the_drafter() -> None:
    assert compare_drafters(0, 0.0, ("EAGLE3",), num_bodies=12) == {"MTP": 12, "EAGLE3": 12}
