"""Says what SGLang's Grafana board asks Prometheus: facts, from its examples/monitoring."""

from __future__ import annotations

E2E, TTFT = "sglang:e2e_request_latency_seconds", "sglang:time_to_first_token_seconds"
SPAN = "[$__rate_interval]"
QUERIES = (
    *(
        f"histogram_quantile({share}, sum by (le) (rate({name}_bucket{SPAN})))"
        for name in (E2E, TTFT)
        for share in (0.99, 0.9, 0.5)
    ),
    *(f"avg(rate({name}_sum{SPAN}) / rate({name}_count{SPAN}))" for name in (E2E, TTFT)),
    *(
        f'sum(increase({name}_bucket{{model_name=~"$model_name"}}{SPAN})) by (le)'
        for name in (E2E, TTFT)
    ),
    "sglang:num_running_reqs",
    "sglang:gen_throughput",
    "sglang:cache_hit_rate",
    "sglang:num_queue_reqs",
    "label_values(model_name)",
)
