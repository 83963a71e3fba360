"""Measures how full the engine is, from the scheduler's internal state: for `/metrics` and
`/v1/loads`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

FREE, CACHED = "available_kv_tokens", "tree_cache_size"
AGE = "state_age_s"


@dataclass(frozen=True, slots=True)
class PoolUse:
    """Slots of the KV pool that requests hold, outside the prefix cache.

    Attributes:
        num_used_tokens: slots, one per token.
        share: of the whole pool, 0 to 1.
    """

    num_used_tokens: int
    share: float


def pool_use(internal_state: Mapping[str, Any], num_slots: int) -> PoolUse | None:
    """The use of a pool of `num_slots` tokens; None if the state does not say."""
    if FREE not in internal_state or CACHED not in internal_state:
        return None
    used = num_slots - internal_state[FREE] - internal_state[CACHED]
    return PoolUse(used, used / max(num_slots, 1))


def describe_loads(
    internal_state: Mapping[str, Any], num_slots: int, timestamp: datetime, version: str
) -> dict[str, Any]:
    """The answer of `/v1/loads`: one engine, its requests and its KV pool.

    Args:
        timestamp: now.
    """
    running, waiting = _num_requests(internal_state)
    use = pool_use(internal_state, num_slots) or PoolUse(0, 0.0)
    is_paused = bool(internal_state.get("engine_paused"))
    load = {
        "dp_rank": 0,
        "num_running_reqs": running,
        "num_waiting_reqs": waiting,
        "num_total_reqs": running + waiting,
        "num_used_tokens": use.num_used_tokens,
        "max_total_num_tokens": num_slots,
        "token_usage": use.share,
        "gen_throughput": internal_state.get("last_gen_throughput", 0.0),
        "speculative": {
            "accept_length": internal_state.get("recent_spec_accept_length"),
            "accept_rate": internal_state.get("recent_spec_accept_rate"),
            "num_steps": internal_state.get("speculative_num_steps", 0),
        },
        "queues": {"waiting": waiting, "paused": waiting if is_paused else 0},
        "paused": is_paused,
        **_age(internal_state),
    }
    aggregate = {
        "total_running_reqs": running,
        "total_waiting_reqs": waiting,
        "total_reqs": running + waiting,
        "avg_token_usage": use.share,
    }
    return {
        "timestamp": timestamp.isoformat(),
        "version": version,
        "dp_rank_count": 1,
        "loads": [load],
        "aggregate": aggregate,
    }


def describe_load(internal_state: Mapping[str, Any], num_slots: int) -> list[dict[str, Any]]:
    """The answer of `/get_load`: requests that run or wait, those that wait, KV slots in use."""
    running, waiting = _num_requests(internal_state)
    use = pool_use(internal_state, num_slots) or PoolUse(0, 0.0)
    return [
        {
            "dp_rank": 0,
            "num_reqs": running + waiting,
            "num_waiting_reqs": waiting,
            "num_tokens": use.num_used_tokens,
            **_age(internal_state),
        }
    ]


def _age(internal_state: Mapping[str, Any]) -> dict[str, float]:
    """The age of a state that is not the present one, as the scheduler is stopped."""
    return {AGE: internal_state[AGE]} if internal_state.get(AGE) else {}


def _num_requests(internal_state: Mapping[str, Any]) -> tuple[int, int]:
    """Requests that run (or are frozen), and those that wait."""
    return internal_state.get("running_batch_size", 0), internal_state.get("waiting_queue_size", 0)
