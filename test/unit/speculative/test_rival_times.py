"""When tiers that gain nearly as much as the best one are timed."""

from __future__ import annotations

from itertools import pairwise

from sglang.srt.speculative.rival_times import LEAST_WAIT, MOST_WAIT, TIMED_STEPS, RivalTimes


def begins(chosen: list[int | None], rival: int) -> list[int]:
    """Steps at which stretches of a rival begin; each has TIMED_STEPS."""
    steps = [step for step, each in enumerate(chosen) if each == rival]
    found = [step for step in steps if step - 1 not in steps]
    assert steps == [step + place for step in found for place in range(TIMED_STEPS)]
    return found


def test_each_rival_is_timed_soon_and_then_ever_more_rarely() -> None:
    times, rivals = RivalTimes(), [2, 5, 7]
    chosen = [times.choose(step, 8, rivals) for step in range(8 * MOST_WAIT)]
    stretches = sorted(step for rival in rivals for step in begins(chosen, rival))
    assert all(after - before >= LEAST_WAIT for before, after in pairwise(stretches))
    for rival in rivals:
        steps = begins(chosen, rival)
        waits = [after - before for before, after in pairwise(steps)]
        assert steps[0] < len(rivals) * LEAST_WAIT
        assert waits == sorted(waits)
        assert MOST_WAIT <= waits[-1] < 1.1 * MOST_WAIT


def test_another_load_is_timed_soon_however_long_the_last_one_was() -> None:
    times = RivalTimes()
    chosen = [times.choose(step, 1, [5]) for step in range(5 * MOST_WAIT)]
    assert begins(chosen, 5)[-1] < 5 * MOST_WAIT - LEAST_WAIT
    assert times.choose(5 * MOST_WAIT, 64, [5]) == 5
    assert times.choose(5 * MOST_WAIT + 1, 64, [3]) is None, "it is no rival any more"
    assert [times.choose(5 * MOST_WAIT + 2 + step, 1, [5]) for step in range(99)].count(5) <= 5
