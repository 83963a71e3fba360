"""Checks that what is counted of requests agrees with their answers."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from fake_backend import FULL, LENGTH, Backend, answer_of, run
from serving_utils import make_model_dir
from sglang.srt.frontend.errors import ServiceError
from sglang.srt.messages.requests import FinishReason
from sglang.srt.observability.request_metrics import (
    E2E_BOUNDS,
    INTER_TOKEN_BOUNDS,
    QUEUE_BOUNDS,
    RECENT_PROMPTS,
    TTFT_BOUNDS,
    Histogram,
    RequestFigures,
    RequestMeter,
    RequestMetrics,
)
from sglang.srt.tokenizer import Tokenizer, load_tokenizer

ABORT = FinishReason(type="abort", message="The request was aborted.")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return load_tokenizer(Path(make_model_dir(tmp_path_factory.mktemp("model"))))


@pytest.mark.parametrize("bounds", [TTFT_BOUNDS, E2E_BOUNDS, INTER_TOKEN_BOUNDS, QUEUE_BOUNDS])
def test_a_value_is_in_the_first_bucket_whose_bound_it_does_not_exceed(
    bounds: tuple[float, ...],
) -> None:
    assert list(bounds) == sorted(set(bounds))
    draw = random.Random(1)
    values = [draw.lognormvariate(0, 3) for _ in range(500)] + list(bounds)
    histogram = Histogram(bounds)
    for value in values:
        histogram.observe(value, 2)
    below = [sum(2 for value in values if value <= bound) for bound in bounds]
    assert [sum(histogram.counts[: i + 1]) for i in range(len(bounds))] == below
    assert sum(histogram.counts) == 2 * len(values)
    assert histogram.total == pytest.approx(2 * sum(values))


def counts(figures: RequestFigures) -> dict[str, int]:
    """Everything that is no time."""
    found = {key: value for key, value in vars(figures).items() if isinstance(value, int)}
    histograms = {key: v for key, v in vars(figures).items() if isinstance(v, Histogram)}
    return {**found, **{key: sum(value.counts) for key, value in histograms.items()}}


def test_counts_are_those_of_the_answers_streamed_or_not(tokenizer: Tokenizer) -> None:
    async def scenario(backend: Backend) -> None:
        for stream in (False, True):
            body = {"input_ids": [1, 2, 3], "stream": stream}
            answering = asyncio.create_task(answers(backend, body))
            await backend.wait_sent(1)
            (req_id,) = [message.req_id for message in backend.requests]
            backend.put(req_id, "a", (5,), queue_time_s=0.3)
            backend.put(req_id, "bcd", (6, 7, 8))
            backend.put(req_id, "", (), LENGTH)
            last = await answering
            assert len(last["output_ids"]) == 4
            backend.sent.clear()
            assert counts(backend.manager.metrics.figures[stream]) == {
                "num_requests": 1,
                "num_aborted": 0,
                "prompt_tokens": last["meta_info"]["prompt_tokens"],
                "cached_tokens": last["meta_info"]["cached_tokens"],
                "generation_tokens": len(last["output_ids"]),
                "time_to_first_token": 1,
                "inter_token_latency": 3,
                "e2e_request_latency": 1,
                "queue_time": 1,
            }
        queue_time = backend.manager.metrics.figures[True].queue_time
        assert queue_time.total == 0.3
        assert queue_time.counts[QUEUE_BOUNDS.index(0.5)] == 1

    run(tokenizer, scenario)


async def answers(backend: Backend, body: dict[str, Any]) -> Any:
    """The last answer of a request."""
    return [answer async for answer in backend.manager.generate_request(body)][-1]


def test_a_request_without_output_has_read_its_prompt_only_if_it_was_not_aborted(
    tokenizer: Tokenizer,
) -> None:
    async def scenario(backend: Backend) -> None:
        figures = backend.manager.metrics.figures[False]
        for reason, num_prompts in ((LENGTH, 1), (ABORT, 1), (FULL, 1)):
            answering = asyncio.create_task(answer_of(backend, input_ids=[1, 2, 3]))
            await backend.wait_sent(1)
            backend.put(backend.requests[0].req_id, reason=reason)
            if reason is FULL:
                with pytest.raises(ServiceError):
                    await answering
            else:
                await answering
            backend.sent.clear()
            assert figures.prompt_tokens == 3 * num_prompts
        assert (figures.num_requests, figures.num_aborted) == (3, 2)
        assert sum(figures.e2e_request_latency.counts) == 3
        assert sum(figures.time_to_first_token.counts) == 0

    run(tokenizer, scenario)


def test_each_sample_is_a_request_and_a_client_that_leaves_aborts_them(
    tokenizer: Tokenizer,
) -> None:
    async def scenario(backend: Backend) -> None:
        body = {"input_ids": [1, 2], "sampling_params": {"n": 2}, "stream": True}
        outputs = backend.manager.generate_request(body)
        reading = asyncio.create_task(anext(outputs))
        await backend.wait_sent(2)
        first, second = (message.req_id for message in backend.requests)
        backend.put(first, "a", (5,), LENGTH)
        backend.put(second, "a", (5,))
        await reading
        await outputs.aclose()
        backend.put(second, "b", (6,))
        await asyncio.sleep(0.01)
        figures = backend.manager.metrics.figures[True]
        assert (figures.num_requests, figures.num_aborted) == (2, 1)
        assert figures.generation_tokens == 2, "nobody was given the last one"

    run(tokenizer, scenario)


def test_a_request_that_asks_for_no_metrics_and_the_probe_of_health_are_not_counted(
    tokenizer: Tokenizer,
) -> None:
    async def scenario(backend: Backend) -> None:
        asking = answer_of(backend, input_ids=[1, 2], log_metrics=False)
        probing = backend.manager.health_generate()
        for call in (asking, probing):
            waiting = asyncio.ensure_future(call)
            await backend.wait_sent(1)
            backend.put(backend.requests[0].req_id, "a", (5,), LENGTH)
            await waiting
            backend.sent.clear()
        for figures in backend.manager.metrics.figures.values():
            assert set(counts(figures).values()) == {0}

    run(tokenizer, scenario)


def test_the_hit_rate_of_the_cache_is_of_recent_prompts() -> None:
    metrics = RequestMetrics()
    assert metrics.cache_hit_rate == 0
    meters = [RequestMeter(figures, 0.0) for figures in metrics.figures.values()]
    meters[0].read_prompt(100, 50, None)
    meters[1].read_prompt(300, 0, None)
    assert metrics.cache_hit_rate == 50 / 400
    for _ in range(RECENT_PROMPTS):
        for meter in meters:
            meter.read_prompt(10, 9, None)
    assert metrics.cache_hit_rate == 0.9
