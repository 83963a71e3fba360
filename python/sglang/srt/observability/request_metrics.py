"""Counts requests in the front end, for `/metrics`.

These are plain counters, written by the one thread that takes outputs in: an observation costs a
fifth of a microsecond, where prometheus_client's own histograms with their locks take one. A
collector turns them into metrics when somebody asks.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence

# Upper bounds in seconds; SGLang's, since boards and alerts are made for these.
TTFT_BOUNDS = (0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8, 10, 20, 40, 60, 80, 100, 200, 400)
E2E_BOUNDS = (*TTFT_BOUNDS, 600, 1200, 1800, 2400)
INTER_TOKEN_BOUNDS = (
    *(0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.02, 0.025, 0.03, 0.035, 0.04, 0.06, 0.08),
    *(0.1, 0.2, 0.4, 0.6, 0.8, 1, 2, 4, 6, 8),
)
QUEUE_BOUNDS = (
    *(0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.2, 0.5, 1, 2, 3, 4, 5, 10, 15, 20, 30, 40, 50, 60, 70),
    *(80, 90, 100, 200, 300, 400, 500, 600, 700, 800, 900, 1000, 1200, 1400, 1600, 1800, 2000),
    *(2500, 3000),
)
RECENT_PROMPTS = 128  # that the hit rate of the prefix cache is of


class Histogram:
    """Counts observations by bucket.

    Args:
        bounds: ascending upper bounds, each within its bucket; beyond the last is one more.

    Attributes:
        counts: of each bucket, not cumulative.
        total: sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Counts a value, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count


class RequestFigures:
    """Counts all requests of one kind. A prompt with `n` outputs counts as n requests.

    Attributes:
        num_requests: requests that have ended; num_aborted of them before their end: by a client,
            a refusal or an error.
        prompt_tokens, cached_tokens: of requests whose prompt was read; the latter are those
            found in the prefix cache.
        generation_tokens: tokens of outputs.
        time_to_first_token, inter_token_latency, e2e_request_latency, queue_time: in seconds. What
            comes in one message of several tokens has taken equally long for each.
    """

    def __init__(self) -> None:
        self.num_requests = self.num_aborted = 0
        self.prompt_tokens = self.cached_tokens = self.generation_tokens = 0
        self.time_to_first_token = Histogram(TTFT_BOUNDS)
        self.inter_token_latency = Histogram(INTER_TOKEN_BOUNDS)
        self.e2e_request_latency = Histogram(E2E_BOUNDS)
        self.queue_time = Histogram(QUEUE_BOUNDS)
        self.recent_prompts: deque[tuple[int, int]] = deque(maxlen=RECENT_PROMPTS)


class RequestMeter:
    """Follows one request.

    Args:
        start_s: when it came, in seconds of `time.monotonic`.

    Attributes:
        ttft_s: seconds until its first token; None before.
    """

    __slots__ = ("_figures", "_last_s", "_start_s", "ttft_s")

    def __init__(self, figures: RequestFigures, start_s: float) -> None:
        self._figures = figures
        self._start_s = start_s
        self._last_s = start_s
        self.ttft_s: float | None = None

    def read_prompt(self, num_tokens: int, num_cached: int, queue_time_s: float | None) -> None:
        """Counts a prompt that the model has read, but for the tokens that were cached."""
        figures = self._figures
        figures.prompt_tokens += num_tokens
        figures.cached_tokens += num_cached
        figures.recent_prompts.append((num_tokens, num_cached))
        if queue_time_s is not None:
            figures.queue_time.observe(queue_time_s)

    def add_tokens(self, count: int) -> None:
        """Takes in new tokens of the output, at least one."""
        now_s = time.monotonic()
        figures = self._figures
        figures.generation_tokens += count
        if self.ttft_s is None:
            self.ttft_s = now_s - self._start_s
            figures.time_to_first_token.observe(self.ttft_s)
        else:
            figures.inter_token_latency.observe((now_s - self._last_s) / count, count)
        self._last_s = now_s

    def end(self, is_aborted: bool) -> None:
        """Counts the end of the request; called once."""
        figures = self._figures
        figures.num_requests += 1
        figures.num_aborted += is_aborted
        figures.e2e_request_latency.observe(time.monotonic() - self._start_s)


class RequestMetrics:
    """Holds the figures of all requests of a server.

    Attributes:
        figures: by whether the answer is streamed.
    """

    def __init__(self) -> None:
        self.figures = {False: RequestFigures(), True: RequestFigures()}

    @property
    def cache_hit_rate(self) -> float:
        """Gives the share of the tokens of recent prompts that were in the prefix cache, 0 to 1."""
        recent = [each for figures in self.figures.values() for each in figures.recent_prompts]
        num_tokens = sum(tokens for tokens, _ in recent)
        return sum(cached for _, cached in recent) / num_tokens if num_tokens else 0.0
