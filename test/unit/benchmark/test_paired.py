import math
import random
import statistics
import time

import pytest

from benchmark.engine_load import Budget
from benchmark.paired import FAR_ROUNDS, LEAST_ROUNDS, NARROW, Interval, Paired, measure_rounds


def _budget() -> Budget:
    return Budget(100.0, time.perf_counter())


def test_the_interval_covers_the_true_ratio_in_about_19_of_20_trials():
    luck, true, trials = random.Random(0), 1.01, 2000
    covered = 0
    for _ in range(trials):
        found = Interval.of(true * math.exp(luck.gauss(0, 0.01)) for _ in range(4))
        covered += found.low <= true <= found.high
    assert 0.935 < covered / trials < 0.965


def test_mean_and_ends_are_those_of_the_logarithms():
    found = Interval.of([1.0, 1.02])
    logs = [0.0, math.log(1.02)]
    half = 12.706 * statistics.stdev(logs) / math.sqrt(2)
    assert found.mean == pytest.approx(math.sqrt(1.02))
    assert found.high == pytest.approx(found.mean * math.exp(half))
    assert found.low == pytest.approx(found.mean * math.exp(-half))
    assert (found.lowest, found.median) == (1.0, 1.01)


def test_a_drift_of_the_machine_is_in_no_ratio():
    calls = []

    def run(load, way, number):
        calls.append((number, way))
        return {"tok_s": 1000.0 * 0.9**number * (1.05 if way == "mine" else 1.0)}

    paired = Paired(run, [1], [("mine", "plain")])
    assert measure_rounds(paired, _budget(), most_rounds=20) == LEAST_ROUNDS
    found = paired.interval(1, "mine", "plain")
    assert found.mean == pytest.approx(1.05)
    assert found.is_certain()
    orders = {number: [way for at, way in calls if at == number] for number, _ in calls}
    assert orders[1] == orders[2][::-1]


def test_only_what_is_uncertain_is_run_again():
    luck, runs = random.Random(1), []

    def run(load, way, number):
        runs.append((load, way, number))
        noise = 0.02 if (load, way) == (8, "noisy") else 0.0
        return {"tok_s": 100 * math.exp(luck.gauss(0, noise))}

    paired = Paired(run, [1, 8], [("steady", "plain"), ("noisy", "plain")])
    number = measure_rounds(paired, _budget(), most_rounds=LEAST_ROUNDS + 3)
    late = {(load, way) for load, way, at in runs if at > LEAST_ROUNDS}
    assert number == LEAST_ROUNDS + 3
    assert late == {(8, "noisy"), (8, "plain")}
    [_, row] = paired.rows()
    assert len(row["ratios"]["steady / plain"]["ratios"]) == LEAST_ROUNDS
    assert len(row["ratios"]["noisy / plain"]["ratios"]) == number
    assert len(row["ways"]["noisy"]["tok_s"]) == number


def test_rounds_go_on_until_the_interval_is_narrow():
    luck = random.Random(2)

    def run(load, way, number):
        return {"tok_s": 100 * math.exp(luck.gauss(0, 0.004))}

    paired = Paired(run, ["all"], [("mine", "plain")])
    number = measure_rounds(paired, _budget(), most_rounds=100)
    found = paired.interval("all", "mine", "plain")
    assert LEAST_ROUNDS < number < 100
    assert paired.is_settled
    assert found.high / found.mean - 1 <= NARROW


def test_a_spent_budget_ends_after_the_first_round():
    paired = Paired(lambda *_: {"tok_s": 1.0}, [1], [("mine", "plain")])
    assert measure_rounds(paired, Budget(0.0, time.perf_counter()), most_rounds=9) == 1
    assert not paired.is_settled


def test_a_ratio_far_from_one_needs_few_rounds():
    luck = random.Random(3)

    def run(load, way, number):
        return {"tok_s": (200 if way == "mine" else 100) * math.exp(luck.gauss(0, 0.02))}

    paired = Paired(run, [1], [("mine", "plain")])
    assert measure_rounds(paired, _budget(), most_rounds=9) == FAR_ROUNDS
