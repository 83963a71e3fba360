"""`/metrics`: the scheduler's state in the text form that Prometheus reads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from sglang.srt.observability.load import pool_use

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# Key of the scheduler's internal state: the metric's name, type and help text.
METRICS = {
    "engine_paused": ("paused", "gauge", "1 while generation is paused, 0 otherwise."),
    "running_batch_size": ("num_running_reqs", "gauge", "Requests that run."),
    "waiting_queue_size": ("num_queue_reqs", "gauge", "Requests that wait."),
    "avg_spec_accept_length": (
        "spec_accept_length",
        "gauge",
        "Tokens per step of a request that looks ahead.",
    ),
    "avg_spec_accept_rate": ("spec_accept_rate", "gauge", "Share of drafts that were confirmed."),
    "avg_spec_verified_drafts": (
        "spec_verified_drafts",
        "gauge",
        "Drafts verified per step of a request that looks ahead.",
    ),
    "speculative_num_steps": ("spec_num_steps", "gauge", "Drafts proposed one behind the other."),
    "pause_epoch": ("pause_epoch", "gauge", "Number of the present pause, or of the last one."),
    "num_lease_expiries": ("lease_expired_total", "counter", "Pauses ended by their lease."),
    "num_sat_out": (
        "grammar_late_total",
        "counter",
        "Steps of requests that gave nothing, since what the grammar allows was not known yet.",
    ),
    "num_ended_by_grammars": (
        "grammar_ended_total",
        "counter",
        "Requests ended because of their grammar: its time was used up, or it failed.",
    ),
    "weight_epoch": ("weight_epoch", "gauge", "Number of the last change of the weights."),
    "state_age_s": (
        "state_age_seconds",
        "gauge",
        "Age of these figures: above 0 while the scheduler is stopped.",
    ),
}


def metrics_text(internal_state: Mapping[str, Any], num_slots: int, model_name: str) -> str:
    """The exposition; what the state does not have is left out.

    Args:
        internal_state: `internal_states[0]` of `/server_info`.
        num_slots: size of the KV pool in tokens.
    """
    model = f'model_name="{_escape(model_name)}"'
    lines = []
    for name, kind, text, value in _samples(internal_state, num_slots):
        full_name = f"sglang:{name}"
        lines.append(f"# HELP {full_name} {text}")
        lines.append(f"# TYPE {full_name} {kind}")
        lines.append(f"{full_name}{{{model}}} {_number(value)}")
    switches = internal_state.get("speculative_tier_switches") or {}
    if switches:
        full_name = "sglang:spec_tier_switches_total"
        text = "Times that steps came to have so many drafts: by decisions and batch sizes."
        lines.append(f"# HELP {full_name} {text}")
        lines.append(f"# TYPE {full_name} counter")
        lines += [
            f'{full_name}{{{model},num_steps="{tier}"}} {_number(count)}'
            for tier, count in switches.items()
        ]
    return "".join(f"{line}\n" for line in lines)


def _samples(
    state: Mapping[str, Any], num_slots: int
) -> Iterator[tuple[str, str, str, int | float]]:
    """Name, type, help text and value of each metric."""
    for key, (name, kind, text) in METRICS.items():
        if state.get(key) is not None:
            yield name, kind, text, state[key]
    if "stopped_process" in state:
        text = "1 while a process of the server is stopped, 0 otherwise."
        yield "process_stopped", "gauge", text, state["stopped_process"] is not None
    yield "max_total_num_tokens", "gauge", "KV slots of the pool.", num_slots
    if (use := pool_use(state, num_slots)) is not None:
        text = "KV slots of requests, outside the prefix cache."
        yield "num_used_tokens", "gauge", text, use.num_used_tokens
        yield "token_usage", "gauge", "Share of the pool in these slots.", use.share


def _number(value: int | float) -> str:
    return str(int(value)) if isinstance(value, bool) else repr(value)


def _escape(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
