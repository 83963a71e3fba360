"""Writes `/metrics`, which Prometheus reads, by SGLang's names where SGLang has the figure.

Nothing is kept here: a collector turns the scheduler's state and the front end's counts into
metrics whenever somebody asks, so a process that is killed leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from sglang.srt.observability.load import pool_use
from sglang.srt.observability.request_metrics import Histogram, RequestFigures, RequestMetrics

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[str, ...]  # values


class Figure(NamedTuple):
    """Names a metric of one number, or a histogram.

    Attributes:
        key: in the scheduler's internal state, or the attribute of `RequestFigures`.
        name: without `sglang:`; that of a counter ends in `_total`.
    """

    key: str
    name: str
    text: str


# Of the scheduler's internal state. What it does not have, or has as None, is left out.
STATE_FIGURES = (
    Figure("running_batch_size", "num_running_reqs", "Requests that run."),
    Figure("waiting_queue_size", "num_queue_reqs", "Requests that wait."),
    Figure("last_gen_throughput", "gen_throughput", "Tokens per second, of the last 5 seconds."),
    Figure("num_retracted", "num_retracted_requests_total", "Times that requests lost their KV."),
    Figure("new_token_ratio", "new_token_ratio", "Share of max_new_tokens that is reckoned with."),
    # KV
    Figure("available_kv_tokens", "kv_available_tokens", "Free KV slots."),
    Figure("tree_cache_size", "kv_cached_tokens", "KV slots of the prefix cache."),
    Figure("req_to_token_pool_used", "kv_request_rows", "Requests that hold KV."),
    Figure("legacy_missing_tokens", "kv_missing_tokens", "KV slots that are in no count."),
    Figure("orphan_token_count", "kv_orphan_tokens", "KV slots without owner, at the last look."),
    Figure(
        "overlap_token_count", "kv_overlap_tokens", "KV slots with two owners, when last looked."
    ),
    Figure("ledger_repair_count", "kv_ledger_repairs_total", "Repairs of the KV ledger."),
    # drafts
    Figure(
        "recent_spec_accept_length",
        "spec_accept_length",
        "Tokens per step of a request that looks ahead, of the last 256 steps.",
    ),
    Figure(
        "avg_spec_accept_length",
        "spec_accept_length_since_flush",
        "Tokens per step of a request that looks ahead, since the start or the last flush.",
    ),
    Figure(
        "recent_spec_accept_rate",
        "spec_accept_rate",
        "Share of recent drafts that was confirmed.",
    ),
    Figure(
        "recent_spec_verified_drafts",
        "spec_verified_drafts",
        "Drafts verified per step of a request that looks ahead, of the last 256 steps.",
    ),
    Figure("num_step_drafts", "spec_draft_budget", "Drafts verified in the last decode step."),
    Figure("speculative_num_steps", "spec_num_steps", "Drafts proposed one behind the other."),
    Figure(
        "speculative_num_draft_tokens", "spec_num_draft_tokens", "Tokens verified of a request."
    ),
    Figure("num_spec_verifications", "spec_verify_calls_total", "Verifications, one per request."),
    Figure("num_spec_drafts", "spec_proposed_drafts_total", "Drafts verified."),
    Figure("num_spec_confirmed_drafts", "spec_confirmed_drafts_total", "Drafts confirmed."),
    # grammars, control calls, processes
    Figure(
        "num_sat_out",
        "grammar_late_total",
        "Steps of requests that gave nothing, since what the grammar allows was not known yet.",
    ),
    Figure(
        "num_ended_by_grammars",
        "grammar_ended_total",
        "Requests ended because of their grammar: its time was used up, or it failed.",
    ),
    Figure("engine_paused", "paused", "1 while generation is paused, 0 otherwise."),
    Figure("pause_epoch", "pause_epoch", "Number of the present pause, or of the last one."),
    Figure("num_lease_expiries", "lease_expired_total", "Pauses ended by their lease."),
    Figure("weight_epoch", "weight_epoch", "Number of the last change of the weights."),
    Figure(
        "state_age_s",
        "state_age_seconds",
        "Age of the scheduler's figures: above 0 while it is stopped.",
    ),
)
# Of the front end's `RequestFigures`, by is_streaming.
REQUEST_FIGURES = (
    Figure("num_requests", "num_requests_total", "Requests that have ended."),
    Figure("num_aborted", "num_aborted_requests_total", "Requests that were ended early."),
    Figure("prompt_tokens", "prompt_tokens_total", "Tokens of prompts that were read."),
    Figure("cached_tokens", "cached_tokens_total", "Tokens of prompts that were cached."),
    Figure("generation_tokens", "generation_tokens_total", "Tokens of outputs."),
)
HISTOGRAMS = (
    Figure("time_to_first_token", "time_to_first_token_seconds", "Seconds until the first token."),
    Figure("inter_token_latency", "inter_token_latency_seconds", "Seconds between two tokens."),
    Figure("e2e_request_latency", "e2e_request_latency_seconds", "Seconds until a request ends."),
    Figure("queue_time", "queue_time_seconds", "Seconds until a request runs."),
)


@dataclass(frozen=True, slots=True)
class ServerFigures(Collector):
    """Collects all figures of a server at one moment.

    Args:
        state: `internal_states[0]` of `/server_info`.
        num_slots: size of the KV pool in tokens.
        predicts_tokens: whether requests may have multi-token prediction.
    """

    state: Mapping[str, Any]
    requests: RequestMetrics
    num_slots: int
    model_name: str
    predicts_tokens: bool = False

    def collect(self) -> Iterator[Metric]:
        """Yields each metric; every one has the label model_name, and some one of few values."""
        by_drafter: Mapping[str, Mapping[str, int]] = self.state.get("spec_by_drafter") or {}
        for key, name, text in STATE_FIGURES:
            if any(key in counts for counts in by_drafter.values()):
                values: dict[Labels, float] = {(who,): by_drafter[who][key] for who in by_drafter}
                yield self._family(name, text, values, ("drafter",))
            elif self.state.get(key) is not None:
                yield self._family(name, text, {(): self.state[key]})
        yield from self._pool()
        yield from self._drafts()
        if "stopped_process" in self.state:
            text = "1 while a process of the server is stopped, 0 otherwise."
            is_stopped = self.state["stopped_process"] is not None
            yield self._family("process_stopped", text, {(): is_stopped})
        yield from self._of_requests()

    def _pool(self) -> Iterator[Metric]:
        yield self._family("max_total_num_tokens", "KV slots of the pool.", {(): self.num_slots})
        if (use := pool_use(self.state, self.num_slots)) is not None:
            text = "KV slots of requests, outside the prefix cache."
            yield self._family("num_used_tokens", text, {(): use.num_used_tokens})
            yield self._family("token_usage", "Share of the pool in these slots.", {(): use.share})

    def _drafts(self) -> Iterator[Metric]:
        switches = self.state.get("speculative_tier_switches")
        if switches:
            text = "Times that steps came to have so many drafts: by decisions and batch sizes."
            by_tier: dict[Labels, float] = {(str(tier),): n for tier, n in switches.items()}
            yield self._family("spec_tier_switches_total", text, by_tier, ("num_steps",))
        effective_k = self.state.get("recent_spec_accept_length")
        if self.predicts_tokens and effective_k is not None:
            text = "Tokens per step of a request with multi-token prediction, of the last 256."
            yield self._family("mtp_effective_k", text, {(): effective_k})

    def _of_requests(self) -> Iterator[Metric]:
        rate = self.requests.cache_hit_rate
        yield self._family("cache_hit_rate", "Cached share of the last 128 prompts.", {(): rate})
        by_kind: dict[Labels, RequestFigures] = {
            (str(streams).lower(),): figures for streams, figures in self.requests.figures.items()
        }
        for key, name, text in REQUEST_FIGURES:
            counts = {kind: vars(figures)[key] for kind, figures in by_kind.items()}
            yield self._family(name, text, counts, ("is_streaming",))
        for key, name, text in HISTOGRAMS:
            family = HistogramMetricFamily(
                f"sglang:{name}", text, labels=("model_name", "is_streaming")
            )
            for kind, figures in by_kind.items():
                histogram: Histogram = vars(figures)[key]
                bounds = [*map(floatToGoString, histogram.bounds), "+Inf"]
                buckets = list(zip(bounds, accumulate(histogram.counts), strict=True))
                family.add_metric((self.model_name, *kind), buckets, histogram.total)
            yield family

    def _family(
        self,
        name: str,
        text: str,
        values: Mapping[Labels, float],
        labels: Sequence[str] = (),
    ) -> Metric:
        """Makes a counter or a gauge, by its name; `values` by the values of `labels`."""
        kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
        family = kind(f"sglang:{name}", text, labels=("model_name", *labels))
        for label_values, value in values.items():
            family.add_metric((self.model_name, *label_values), value)
        return family


def exposition(figures: ServerFigures) -> bytes:
    """Writes all metrics as text, in the form that every Prometheus reads. In OpenMetrics the
    library would write `sglang_` for `sglang:`."""
    return generate_latest(figures)
