"""Speed of steps of which drafts are left out, simulated, beside the best fixed number.

python -m pytest benchmark/simulations
"""

from __future__ import annotations

import pytest

from tile_spec_decode import Decode, Text

SAYINGS = {"true": 1.0, "too sure": 2.0, "too humble": 0.5}


@pytest.mark.parametrize("saying", SAYINGS)
@pytest.mark.parametrize(("num_reqs", "least"), [(1, 0.98), (8, 0.99), (64, 1.05), (128, 1.05)])
def test_it_beats_the_best_static_number_where_rows_cost_time(
    num_reqs: int, least: float, saying: str
) -> None:
    """And loses nothing where they do not, whether the head is as sure as it may be or not. Probes
    and luck are in the figures."""
    text = Text(0.6, power=SAYINGS[saying])
    assert Decode(num_reqs, text).rate(200 if num_reqs > 8 else 800) > least * (
        text.best_static_rate(num_reqs)
    )


@pytest.mark.parametrize("num_reqs", [8, 64, 128])
def test_a_head_that_says_the_same_of_all_drafts_makes_nothing_slower(
    num_reqs: int,
) -> None:
    """Right ones and wrong ones: there is no order to choose by."""
    text = Text(1.0, easy=0.6, hard=0.6)
    assert Decode(num_reqs, text).rate(200) > 0.98 * text.best_static_rate(num_reqs)
