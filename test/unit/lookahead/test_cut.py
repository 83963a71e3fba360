"""Tests how many drafts a step should verify: the arithmetic against searches and planted
curves."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from sglang.srt.lookahead.cut import (
    LEAST_CHANCE,
    MOST_CHANCE,
    Calibration,
    LatencyTable,
    best_cut,
    bounded_scores,
    compute_optimal_k,
    expected_right,
    isotonic,
)

# Milliseconds of all matrix products of an 8B model on an H100, by rows.
STAIRCASE = {
    1: 5.64, 64: 5.85, 128: 6.12, 192: 6.68, 256: 7.30, 264: 7.86, 288: 9.24, 320: 8.40,
    384: 9.77, 416: 11.5, 448: 14.9, 480: 12.2, 512: 12.4, 576: 13.8,
}  # fmt: skip


def random_chains(chooser: random.Random, num_reqs: int, depth: int) -> list[list[float]]:
    """Chances that never rise along a chain; some are equal, some 0 or 1."""
    steps = [0.0, 0.5, 0.5, 0.8, 1.0, 1.0]
    return [
        list(itertools.accumulate((chooser.choice(steps) for _ in range(depth)), float.__mul__))
        if chooser.random() < 0.5
        else sorted((chooser.random() for _ in range(depth)), reverse=True)
        for _ in range(num_reqs)
    ]


def random_table(chooser: random.Random, num_reqs: int, num_drafts: int) -> LatencyTable:
    """Falls in places; some buckets have no room for the requests, some more than is needed."""
    most = num_reqs + num_drafts
    rows = {chooser.randint(1, most + 9) for _ in range(chooser.randint(0, 6))} | {most}
    costs = [chooser.choice([1.0, 2.0, 5.0 * chooser.random() + 0.1]) for _ in rows]
    return LatencyTable(tuple(sorted(rows)), tuple(costs))


def rate_of(k: int, ordered: list[float], num_reqs: int, table: LatencyTable) -> float:
    """Tokens per millisecond with k drafts, in the cheapest bucket that has room for them."""
    tokens = num_reqs + math.fsum(ordered[:k])
    priced = zip(table.rows, table.costs_ms, strict=True)
    return max((tokens / cost for rows, cost in priced if rows >= num_reqs + k), default=0.0)


def right_of(chances: ArrayLike) -> NDArray[np.float64]:
    return expected_right(np.sort(bounded_scores(chances), axis=None))


def test_the_number_of_drafts_is_that_of_a_search_over_all_numbers() -> None:
    """All of them unless fewer gain more than asked for. Of equal rates the largest number, so all
    where rows cost nothing; a larger bucket that is cheaper is filled."""
    chooser, numbers = random.Random(0), set[str]()
    for _ in range(1200):
        num_reqs, depth = chooser.randint(1, 8), chooser.randint(1, 5)
        chances = random_chains(chooser, num_reqs, depth)
        table = random_table(chooser, num_reqs, num_reqs * depth)
        ordered = sorted(itertools.chain.from_iterable(chances), reverse=True)
        most, full = len(ordered), (num_reqs + math.fsum(ordered)) / table.costs_ms[-1]
        rates = [rate_of(k, ordered, num_reqs, table) for k in range(most + 1)]
        least = chooser.choice([0.0, chooser.random()])
        num_drafts, gain = best_cut(right_of(chances), num_reqs, table, least)
        assert num_drafts == compute_optimal_k(chances, num_reqs, table, least)
        if max(rates) <= full * (1 + least) * (1 + 1e-12):
            assert (num_drafts, gain) == (most, 1.0)
        else:
            assert rates[num_drafts] == pytest.approx(max(rates), rel=1e-12)
            assert gain == pytest.approx(max(rates) / full)
            assert table.most_gain > least, "what `wants_scores` would have missed"
        wholes = [k for k, rate in enumerate(rates) if rate >= max(rates) * (1 - 1e-12)]
        assert num_drafts in (most, max(wholes))
        numbers.add({0: "none", most: "all"}.get(num_drafts, "some"))
    assert numbers == {"none", "some", "all"}
    assert compute_optimal_k([], 8, LatencyTable((8,), (1.0,))) == 0
    rows = (416, 448, 480, 512)
    table = LatencyTable(rows, tuple(STAIRCASE[each] for each in rows))
    assert compute_optimal_k(np.full((128, 3), 0.6), 128, table) == 512 - 128
    for bad_rows, costs in (((1,), (1.0, 2.0)), ((1,), (0.0,))):
        with pytest.raises((ValueError, ZeroDivisionError)):
            compute_optimal_k([0.5], 1, LatencyTable(bad_rows, costs))


def test_chances_and_scores_that_are_no_numbers_end_nothing() -> None:
    """The device takes such scores for 0 too."""
    bad = [math.nan, -math.inf, -1.0, math.inf, 2.0]
    assert bounded_scores([*bad, 0.9]).tolist() == [0.0, 0.0, 0.0, 1.0, 1.0, 0.9]
    for value in bad[:4]:
        chances = np.array([[0.9] * 3, [value] * 3])
        taken = np.where(chances == math.inf, 1.0, np.where(chances == 0.9, 0.9, 0.0))
        assert right_of(chances).tolist() == right_of(taken).tolist()


CURVES: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "right": lambda score: score,
    "too sure": lambda score: score**2,
    "too humble": lambda score: np.sqrt(score),
    "step": lambda score: np.where(score < 0.5, 0.1, 0.8),
    "line": lambda score: 0.2 + 0.5 * score,
}


def draw(
    rng: np.random.Generator, curve: Callable[[np.ndarray], np.ndarray], count: int
) -> tuple[np.ndarray, np.ndarray]:
    scores = rng.random(count)
    return scores, rng.random(count) < curve(scores)


@pytest.mark.parametrize("name", CURVES)
def test_calibration_finds_a_planted_curve(name: str) -> None:
    rng, calibration = np.random.default_rng(0), Calibration()
    for _ in range(100):
        calibration.observe(*draw(rng, CURVES[name], 200))
    scores = np.linspace(0.02, 0.98, 97)
    scores = scores[np.abs(scores - 0.5) > 0.04]  # not at the step itself
    off = np.abs(calibration.predict(scores) - CURVES[name](scores))
    assert off.mean() < 0.03
    assert off.max() < 0.12
    whole = calibration.predict(np.linspace(0, 1, 1001))
    assert (np.diff(whole) >= 0).all()
    assert whole.min() >= LEAST_CHANCE
    assert whole.max() <= MOST_CHANCE


def test_a_score_is_its_own_chance_at_first_and_old_trials_are_forgotten() -> None:
    rng, calibration = np.random.default_rng(2), Calibration()
    scores = np.linspace(0.05, 0.95, 10)
    np.testing.assert_allclose(calibration.predict(scores), scores, atol=0.02)
    calibration.observe([], [])
    for curve in (CURVES["too sure"], CURVES["too humble"]):
        for _ in range(200):
            calibration.observe(*draw(rng, curve, 200))
    assert np.abs(calibration.predict(scores) - CURVES["too humble"](scores)).mean() < 0.03


def test_steps_that_are_told_at_once_are_counted_one_after_the_other() -> None:
    """So many drafts of a bin that the first steps are forgotten; the last step has few of them."""
    rng, apart, at_once = np.random.default_rng(4), Calibration(), Calibration()
    sizes = (400, 700, 500, 3)
    drawn = [draw(rng, CURVES["line"], size) for size in sizes]
    for scores, confirmed in drawn:
        apart.observe(0.1 * scores, confirmed)
    scores, confirmed = (np.concatenate(each) for each in zip(*drawn, strict=True))
    at_once.observe(0.1 * scores, confirmed, np.arange(len(sizes)).repeat(sizes))
    grid = np.linspace(0, 1, 101)
    assert at_once.predict(grid).tolist() == apart.predict(grid).tolist()
    as_one = Calibration()
    as_one.observe(0.1 * scores, confirmed)
    assert as_one.predict(grid).tolist() != apart.predict(grid).tolist()


def test_pooling_gives_the_closest_values_that_never_fall() -> None:
    """No other such values on a grid are closer."""
    chooser = random.Random(3)
    grid = [each / 6 for each in range(7)]
    for _ in range(60):
        values = np.array([chooser.choice(grid) for _ in range(4)])
        weights = np.array([chooser.choice([1.0, 2.0, 5.0]) for _ in range(4)])
        found = isotonic(values, weights)
        assert (np.diff(found) >= -1e-12).all()
        least = (weights * (found - values) ** 2).sum()
        for other in itertools.combinations_with_replacement(grid, 4):
            assert least <= (weights * (np.array(other) - values) ** 2).sum() + 1e-12
