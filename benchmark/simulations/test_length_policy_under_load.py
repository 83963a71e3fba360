"""The length policy over a simulated device: what does it gain and lose beside plain decoding?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from policy_steps import mask_policy
from sglang.srt.lookahead.acceptance_estimate import Kind
from simulated_decode import (
    MAX_K,
    UNVERIFIED,
    VERIFIED,
    Fixed,
    Load,
    Simulation,
    gpu_prices,
    plain_ms,
)

LOADS = {
    128: Load(num_clients=128, num_requests=384),
    64: Load(num_clients=64, num_requests=192),
    16: Load(num_clients=16, num_requests=64),
    1: Load(num_clients=1, num_requests=12),
}
KINDS = pytest.mark.parametrize("kind", [UNVERIFIED, VERIFIED], ids=["unverified", "verified"])


def speed(
    load: Load,
    kind: Kind,
    chance: float | Callable[[float], float],
    limit: int | None = None,
    surcharge: float = 0.0,
) -> float:
    """Beside plain decoding, of the policy or of one limit."""
    prices = gpu_prices()
    policy = mask_policy(prices, MAX_K) if limit is None else Fixed(limit)
    chances = chance if callable(chance) else lambda now_ms: chance
    run = Simulation(prices, load, policy, kind, chances, surcharge=surcharge)
    return plain_ms(gpu_prices, load) / run.run()


@KINDS
@pytest.mark.parametrize("num_clients", [128, 16, 1])
@pytest.mark.parametrize("chance", [0.0, 0.4])
def test_it_is_never_slower_than_plain(num_clients: int, chance: float, kind: Kind) -> None:
    """Ramp, drain and a fresh policy included."""
    assert speed(LOADS[num_clients], kind, chance) > 0.99


@KINDS
@pytest.mark.parametrize(("num_clients", "chance"), [(64, 0.4), (64, 0.8), (16, 0.5), (1, 0.7)])
def test_it_is_nearly_as_fast_as_the_best_fixed_length(
    num_clients: int, chance: float, kind: Kind
) -> None:
    load = LOADS[num_clients]
    best = max(speed(load, kind, chance, limit) for limit in (2, 3, 8))
    assert speed(load, kind, chance) > 0.95 * best


@KINDS
@pytest.mark.parametrize("period_ms", [40, 400])
def test_text_that_changes_misleads_it_for_little(period_ms: int, kind: Kind) -> None:
    def chance(now_ms: float) -> float:
        return 0.8 if now_ms // period_ms % 2 else 0.0

    assert speed(LOADS[128], kind, chance) > 0.99


@KINDS
def test_an_adversary_that_knows_its_trials_wins_little(kind: Kind) -> None:
    """All is accepted of one step in four that look ahead, as a trial may be; nothing of others."""
    policy = mask_policy(gpu_prices(), MAX_K)

    def chance(now_ms: float) -> float:
        num_ahead = sum(count for limit, count in run.limits.items() if limit > 1)
        return float(num_ahead % 4 == 1)

    run = Simulation(gpu_prices(), LOADS[128], policy, kind, chance)
    assert plain_ms(gpu_prices, LOADS[128]) / run.run() > 0.99


@KINDS
def test_prices_that_are_too_low_for_looking_ahead_cost_little(kind: Kind) -> None:
    """Steps that look ahead take 3 % longer than was measured."""
    assert speed(LOADS[128], kind, 0.2, surcharge=0.03) > 0.99


@pytest.mark.parametrize(
    ("kind", "chance"), [(UNVERIFIED, 0.0), (UNVERIFIED, 0.4), (VERIFIED, 0.6)], ids=str
)
@pytest.mark.parametrize(
    "changes",
    [
        {"num_new": (128, 128)},  # all end at once
        {"num_new": (8, 48), "num_requests": 768},
        {"num_prompt": 1000, "chunk": 512, "num_new": (100, 300), "num_requests": 192},
        {"num_context": 2000, "num_requests": 256},
    ],
    ids=["together", "short", "long prompts", "much KV"],
)
def test_other_closed_loops_of_128_are_not_slower_either(
    changes: dict[str, Any], kind: Kind, chance: float
) -> None:
    assert speed(replace(LOADS[128], **changes), kind, chance) > 0.99


@KINDS
def test_much_kv_makes_it_look_further_ahead(kind: Kind) -> None:
    """A step that reads as much KV as weights is worth more, and no row more costs it."""
    load = LOADS[64]
    assert speed(replace(load, num_context=2000), kind, 0.5) > speed(load, kind, 0.5) + 0.02
