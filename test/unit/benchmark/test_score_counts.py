"""Drafts counted by score: against a plain loop, and against what the server itself is told."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from benchmark.measure.tile_spec import parse
from benchmark.score_counts import ScoreCounts, measured_calibration
from sglang.srt.speculative.tile_spec.core import NUM_BINS, Calibration, Floats

torch.set_num_threads(1)


def test_bins_hold_what_a_plain_loop_counts() -> None:
    chooser = np.random.default_rng(0)
    counts, calibration = ScoreCounts(), Calibration()
    tried, right = [0] * NUM_BINS, [0] * NUM_BINS
    for size in (0, 1, 40, 300):
        scores = np.concatenate((chooser.random(size), [0.0, 1.0][: size // 40]))
        confirmed = chooser.random(len(scores)) < scores
        counts.add(scores, confirmed)
        calibration.observe(scores, confirmed)
        for score, is_right in zip(scores.tolist(), confirmed.tolist(), strict=True):
            place = next(bin for bin in range(NUM_BINS) if score * NUM_BINS < bin + 1 or bin == 31)
            tried[place] += 1
            right[place] += is_right
    rows = counts.result()["rows"]
    assert [count for _, count, _, _ in rows] == tried
    for index, (score, count, share, chance) in enumerate(rows):
        assert score == (index + 0.5) / NUM_BINS
        assert share == (round(right[index] / count, 4) if count else None)
        assert chance == round(float(calibration.predict(score)), 4)


def test_errors_are_means_over_drafts() -> None:
    counts = ScoreCounts()
    nothing = counts.result()
    assert nothing["num_drafts"] == nothing["mean_error"] == nothing["mean_error_of_scores"] == 0
    assert {share for _, _, share, _ in nothing["rows"]} == {None}
    low, high = np.full(300, 0.5 / NUM_BINS), np.full(100, 1 - 0.5 / NUM_BINS)
    for scores, num_right in ((low, 150), (high, 100)):
        counts.add(scores, np.arange(len(scores)) < num_right)
    found = counts.result()
    of_scores = (300 * (0.5 - 0.5 / NUM_BINS) + 100 * 0.5 / NUM_BINS) / 400
    assert found["mean_error_of_scores"] == pytest.approx(of_scores, abs=1e-4)
    assert found["num_drafts"] == 400
    of_chances = (300 * abs(found["rows"][0][3] - 0.5) + 100 * (1 - found["rows"][-1][3])) / 400
    assert found["mean_error"] == pytest.approx(of_chances, abs=2e-4)
    assert found["mean_error"] < found["mean_error_of_scores"]


def test_the_bundled_head_is_counted_as_the_server_is_told() -> None:
    """All of its drafts are verified, and the scores of each are those that it had when it was
    drafted: `TileSpec` reads them on its own."""
    told: dict[int, list[tuple[Any, Any]]] = {}
    observe = Calibration.observe

    def noted(calibration: Calibration, scores: Floats, confirmed: Any) -> None:
        told.setdefault(id(calibration), []).append((scores.copy(), confirmed.copy()))
        observe(calibration, scores, confirmed)

    flags = ["--device=cpu", "--calibration-prompts=3", "--prompt-tokens=24", "--new-tokens=20"]
    with mock.patch.object(Calibration, "observe", noted):
        found = measured_calibration(parse(flags), num_steps=7)
    mine, servers = told.values()
    for part in (0, 1):
        whole, right = (
            np.concatenate([each[part] for each in all_of]) for all_of in (mine, servers)
        )
        assert np.array_equal(whole, right)
    assert found["num_drafts"] == len(np.concatenate([scores for scores, _ in mine]))
    assert found["num_drafts"] > 7 * 10
    shares = [(count, share) for _, count, share, _ in found["rows"] if count]
    num_right = sum(count * share for count, share in shares)
    assert 0 < num_right < found["num_drafts"]
    assert found["prompts"]["count"] == 3
