"""What rounds take beside their prices, as far as it was seen."""

from __future__ import annotations

import pytest

from sglang.srt.speculative.rival_times import TIMED_STEPS
from sglang.srt.speculative.round_excess import LEAST, MOST, OWN_SHARE, Excess, RoundExcess
from sglang.srt.speculative.tier_policy import RIVAL_GAIN


def test_excess_follows_what_was_seen_of_such_rows_and_of_its_neighbours() -> None:
    excess = Excess()
    assert excess.at(100) == 1.0
    for _ in range(200):
        excess.observe(100, 10.0, 12.0)
    assert excess.at(90) == pytest.approx(1.2, abs=0.01)
    assert excess.at(4000) == excess.at(90), "nothing else is known"
    for _ in range(200):
        excess.observe(1000, 10.0, 15.0)
    assert 1.2 < excess.at(300) < 1.5
    some = [1, 90, 100, 128, 300, 512, 1000, 8000]
    assert excess.of(some).tolist() == pytest.approx([excess.at(rows) for rows in some])


@pytest.mark.parametrize("rows", [(128, 192), (64, 192, 257), (100, 130, 1000)])
def test_a_number_of_rows_that_alone_is_met_of_its_bucket_keeps_what_was_seen(
    rows: tuple[int, ...],
) -> None:
    """As those of tiers are."""
    excess, share = Excess(), dict(zip(rows, (1.02, 1.1, 1.06), strict=False))
    for _ in range(300):
        for num_rows, took in share.items():
            excess.observe(num_rows, 10.0, 10.0 * took)
    assert {num_rows: excess.at(num_rows) for num_rows in rows} == pytest.approx(share, abs=0.003)


def test_one_step_that_took_long_tells_little() -> None:
    excess = Excess()
    excess.observe(64, 5.0, 5000.0)
    assert excess.at(64) <= 1 + (MOST - 1) / 5
    for _ in range(100):
        excess.observe(64, 5.0, 5.0)
    assert excess.at(64) == pytest.approx(1.0, abs=0.01)
    excess.observe(1, 5.0, 0.0)
    assert excess.at(1) >= 1 - (1 - LEAST) / 5


def test_plain_steps_and_rounds_of_drafts_are_compared_apart() -> None:
    excess = RoundExcess()
    assert excess.of_rounds(0).at(100) == excess.of_rounds(3).at(100) == 1.0
    for _ in range(200):
        excess.observe(3, 100, 10.0, 12.0)
    assert excess.of_rounds(1).at(100) == pytest.approx(1.2, abs=0.01)
    assert excess.of_rounds(0).at(100) == excess.of_rounds(1).at(100), "nothing else is known"
    excess.observe(0, 100, 10.0, 9.0)
    assert 1.1 < excess.of_rounds(0).at(100) < 1.2, "one of them tells little"
    for _ in range(200):
        excess.observe(0, 100, 10.0, 9.0)
    assert excess.of_rounds(0).at(100) == pytest.approx(0.9, abs=0.01)
    assert excess.of_rounds(1).at(100) == pytest.approx(1.2, abs=0.01)


def test_numbers_of_drafts_are_compared_apart() -> None:
    """Even those whose rounds have as many rows, beside prompts or without."""
    excess = RoundExcess()
    for _ in range(200):
        excess.observe(5, 192, 10.0, 10.2)
        excess.observe(3, 192, 10.0, 9.8)
    assert excess.of_rounds(3).at(192) == pytest.approx(0.98, abs=0.002)
    assert excess.of_rounds(5).at(192) == pytest.approx(1.02, abs=0.002)
    assert 0.98 < excess.of_rounds(2).at(192) < 1.02, "of those nothing else is known"
    assert excess.of_rounds(3).at(1024) == excess.of_rounds(2).at(1024), "nor of these rows"
    rows = [100, 192, 200, 1024]
    for count in (0, 2, 3, 5):
        found = excess.of_rounds(count)
        assert found.of(rows).tolist() == pytest.approx([found.at(each) for each in rows])


def test_a_number_that_is_run_in_few_steps_is_known_after_those() -> None:
    excess = RoundExcess()
    for _ in range(200):
        excess.observe(5, 192, 10.0, 10.0)
    for _ in range(TIMED_STEPS - 1):  # the first one verifies drafts of another number
        excess.observe(3, 192, 10.0, 9.6)
    assert excess.of_rounds(3).at(192) < 0.97
    assert excess.of_rounds(5).at(192) == pytest.approx(1.0, abs=0.001)


def test_a_number_that_once_took_long_is_not_thought_to_be_so_for_ever() -> None:
    excess = RoundExcess()
    for _ in range(50):
        excess.observe(5, 192, 10.0, 20.0)
    for _ in range(400):
        excess.observe(3, 192, 10.0, 10.0)
    assert excess.of_rounds(5).at(192) == pytest.approx(OWN_SHARE, abs=0.01)
    assert excess.of_rounds(5).at(192) < 1 + RIVAL_GAIN, "or it would not be timed again"
    for _ in range(300):
        excess.observe(5, 192, 10.0, 9.9)
    assert excess.of_rounds(5).at(192) < 1.0
