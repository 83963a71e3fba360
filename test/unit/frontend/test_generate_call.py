"""Tests what wakes a call: no news is lost, and what has been told is not told again."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from sglang.srt.frontend.generate_call import GenerateCall
from sglang.srt.observability.request_metrics import RequestMetrics


def run(scenario: Callable[[GenerateCall], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scenario(GenerateCall(False, True, RequestMetrics())), 10)

    asyncio.run(main())


async def is_told(call: GenerateCall) -> bool:
    """Tells whether a wait for news ends without any more."""
    waiting = asyncio.create_task(call.wait_for_news())
    await asyncio.sleep(0.01)
    waiting.cancel()
    (found,) = await asyncio.gather(waiting, return_exceptions=True)
    return found is None


def test_news_before_and_during_a_wait_ends_it_once() -> None:
    async def scenario(call: GenerateCall) -> None:
        call.fail(ValueError("first"))
        call.fail(ValueError("second"))
        assert await is_told(call)
        assert not await is_told(call)
        waiting = asyncio.create_task(call.wait_for_news())
        await asyncio.sleep(0)
        call.fail(ValueError("third"))
        call.fail(ValueError("fourth"))
        await waiting
        assert not await is_told(call)
        with pytest.raises(ValueError, match="first"):
            call.raise_error()

    run(scenario)


def test_a_wait_that_is_cancelled_loses_no_news() -> None:
    async def scenario(call: GenerateCall) -> None:
        waiting = asyncio.create_task(call.wait_for_news())
        await asyncio.sleep(0)
        call.fail(ValueError("news"))
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert await is_told(call)

    run(scenario)
