"""`/metrics`: what Prometheus and boards read."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from fake_worker import FakeWorker
from sglang.srt.control.internal_state import SchedulerStats
from sglang.srt.observability.metrics import STATE_FIGURES, ServerFigures, exposition
from sglang.srt.observability.request_metrics import RequestMeter, RequestMetrics
from sglang.srt.step.step_sizes import StepWidth
from sglang_board import QUERIES
from utils import SchedulerHarness, Setup

STATE = {
    "engine_paused": True,
    "running_batch_size": 2,
    "waiting_queue_size": 3,
    "available_kv_tokens": 60,
    "tree_cache_size": 15,
    "pause_epoch": 4,
    "num_lease_expiries": 1,
    "weight_epoch": 7,
}
OF_STATE = {
    "sglang:paused": 1,
    "sglang:num_running_reqs": 2,
    "sglang:num_queue_reqs": 3,
    "sglang:pause_epoch": 4,
    "sglang:lease_expired_total": 1,
    "sglang:weight_epoch": 7,
    "sglang:max_total_num_tokens": 100,
    "sglang:num_used_tokens": 25,
    "sglang:token_usage": 0.25,
    "sglang:kv_available_tokens": 60,
    "sglang:kv_cached_tokens": 15,
}
BOARD = Path(__file__).parents[3] / "examples" / "grafana" / "board.json"


def figures_of(
    state: dict[str, Any], requests: RequestMetrics | None = None, name: str = "m"
) -> ServerFigures:
    return ServerFigures(state, requests or RequestMetrics(), 100, name, predicts_tokens=True)


def samples(figures: ServerFigures) -> list[Sample]:
    """All samples, as Prometheus's own parser reads them."""
    families = list(text_string_to_metric_families(exposition(figures).decode()))
    names = [family.name for family in families]
    assert len(names) == len(set(names)), "each metric has its type once"
    for family in families:
        assert family.documentation
        assert family.type in ("counter", "gauge", "histogram")
    return [sample for family in families for sample in family.samples]


def plain(figures: ServerFigures) -> dict[str, float]:
    """Values of the metrics that have no label but the model's name."""
    return {
        sample.name: sample.value
        for sample in samples(figures)
        if set(sample.labels) == {"model_name"}
    }


def full_state() -> dict[str, Any]:
    """Makes the state of a scheduler whose requests have drafts, after some steps."""
    harness = SchedulerHarness(Setup(), FakeWorker("verify", 4, Setup().max_running_requests, 0))
    stats = harness.scheduler.control._stats
    stats.has_drafter, stats.num_tier_switches = (
        True,
        SchedulerStats(3, 0, (0, 1, 3)).num_tier_switches,
    )
    harness.submit([1, 2, 3], max_new_tokens=20, ignore_eos=True)
    for _ in range(4):
        harness.now += 0.1
        harness.step()
    return harness.scheduler.control.internal_state()


def test_every_figure_of_the_state_is_there_and_what_it_has_not_is_left_out() -> None:
    assert plain(figures_of(STATE)) == {**OF_STATE, "sglang:cache_hit_rate": 0}
    left = {"sglang:paused", "sglang:max_total_num_tokens", "sglang:cache_hit_rate"}
    assert set(plain(figures_of({"engine_paused": False}))) == left


def test_each_key_of_the_table_is_one_of_the_scheduler() -> None:
    of_front_end = {"state_age_s"}
    assert {figure.key for figure in STATE_FIGURES} - of_front_end <= set(full_state())


def test_names_of_models_are_escaped_and_labels_are_of_few_values() -> None:
    name = 'a"b\\c\nd'
    state = full_state()
    allowed = {
        "model_name": {name},
        "is_streaming": {"true", "false"},
        "num_steps": {"0", "1", "3"},
    }
    for sample in samples(figures_of(state, name=name)):
        assert sample.labels["model_name"] == name
        for label, value in sample.labels.items():
            assert label == "le" or value in allowed[label]


def test_switches_are_there_for_every_tier_from_the_start() -> None:
    stats = SchedulerStats(3, 0, (0, 1, 3))
    harness = SchedulerHarness(Setup(), FakeWorker("plain", 1, Setup().max_running_requests, 0))
    harness.scheduler.control._stats = stats
    state = harness.scheduler.control.internal_state()
    name = "sglang:spec_tier_switches_total"
    found = {s.labels["num_steps"]: s.value for s in samples(figures_of(state)) if s.name == name}
    assert found == {"0": 0, "1": 0, "3": 0}
    assert name not in {s.name for s in samples(figures_of(STATE))}, "without a drafter"


def test_drafts_are_counted_by_drafter_where_there_are_several() -> None:
    harness = SchedulerHarness(Setup(), FakeWorker("plain", 1, Setup().max_running_requests, 0))
    stats = SchedulerStats(3, drafters=("one", "other"))
    harness.scheduler.control._stats = stats
    request = SimpleNamespace(width=StepWidth(4, 1, 1), rid="x")
    rows: Any = [SimpleNamespace(is_decode=True, emits=True, req=request)] * 3
    stats.on_read(rows, [3, 1, 2], [3, 3, 2], makers=["one", "one", "other"])
    found = samples(figures_of(harness.scheduler.control.internal_state()))
    for name, expected in (("proposed", (6, 2)), ("confirmed", (2, 1))):
        name = f"sglang:spec_{name}_drafts_total"
        values = {s.labels.get("drafter"): s.value for s in found if s.name == name}
        assert values == {"one": expected[0], "other": expected[1]}


def test_histograms_are_cumulative_and_end_with_their_count() -> None:
    requests = RequestMetrics()
    for streams, count in ((False, 3), (True, 5)):
        for _ in range(count):
            meter = RequestMeter(requests.figures[streams], 0.0)
            meter.read_prompt(5, 2, 0.02)
            meter.add_tokens(1)
            meter.add_tokens(4)
            meter.end(is_aborted=False)
    found = samples(figures_of(STATE, requests))
    values = {(s.name, s.labels.get("is_streaming"), s.labels.get("le")): s.value for s in found}
    for streams, count in (("false", 3), ("true", 5)):
        for name, per_request in (
            ("sglang:time_to_first_token_seconds", 1),
            ("sglang:inter_token_latency_seconds", 4),
            ("sglang:e2e_request_latency_seconds", 1),
            ("sglang:queue_time_seconds", 1),
        ):
            buckets = [
                (float(le), value)
                for (sample, kind, le), value in values.items()
                if sample == f"{name}_bucket" and kind == streams and le is not None
            ]
            assert buckets == sorted(buckets)
            assert [v for _, v in buckets] == sorted(v for _, v in buckets)
            assert buckets[-1] == (float("inf"), count * per_request)
            assert values[f"{name}_count", streams, None] == count * per_request
        assert values["sglang:queue_time_seconds_sum", streams, None] == pytest.approx(count * 0.02)
        assert values["sglang:prompt_tokens_total", streams, None] == 5 * count
        assert values["sglang:generation_tokens_total", streams, None] == 5 * count


# ---------------------------------------------------------------- boards


def own_queries() -> list[str]:
    board = json.loads(BOARD.read_text())
    variables = [each["query"] for each in board["templating"]["list"] if each["type"] == "query"]
    return variables + [t["expr"] for panel in board["panels"] for t in panel["targets"]]


@pytest.mark.parametrize("queries", [QUERIES, own_queries()], ids=["SGLang's", "own"])
def test_every_query_of_a_board_names_metrics_and_labels_that_are_there(
    queries: tuple[str, ...],
) -> None:
    labels: dict[str, set[str]] = {}
    for sample in samples(figures_of(full_state())):
        labels.setdefault(sample.name, set()).update(sample.labels)
    for query in queries:
        used = re.findall(r"(sglang:\w+)(?:\{(\w+)=~)?", query)
        by = re.findall(r"\bby ?\((\w+)\)", query)
        assert used or query == "label_values(model_name)", query
        for name, label in used:
            assert {label or "model_name", *by} <= labels[name], query
