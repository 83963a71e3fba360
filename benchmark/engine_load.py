"""Load on an Engine: a constant number of requests at once, and made-up prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

FIRST_PLAIN_ID = 3  # below are the special tokens of the demo models


class AsyncEngine(Protocol):
    """Names what a load needs of `sglang.Engine`."""

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any: ...

    async def async_abort_request(self, *, abort_all: bool) -> int: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """Holds the results of one run of a load.

    Attributes:
        seconds: of the laps that count.
        num_tokens: new tokens within them.
        tokens_per_step: of one request, over all requests.
    """

    seconds: float
    num_tokens: float
    tokens_per_step: float

    @property
    def tok_s(self) -> float:
        """New tokens per second."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True, slots=True)
class _Span:
    """An answer, and when its client waited for it.

    Attributes:
        place: of its prompt.
    """

    place: int
    start: float
    end: float
    answer: Any

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.num_tokens / max(self.end - self.start, 1e-9)

    @property
    def num_tokens(self) -> int:
        return len(self.answer["output_ids"])

    @property
    def num_steps(self) -> int:
        """Returns the number of steps that gave the tokens: one for each token that was not a
        confirmed draft."""
        info = self.answer["meta_info"]
        steps = info.get("mtp_effective_k")
        if steps is not None:
            return len(steps)
        return self.num_tokens - info.get("spec_num_correct_drafts", 0)

    @property
    def is_whole(self) -> bool:
        """Tells whether the request ended without an abort."""
        return (self.answer["meta_info"]["finish_reason"] or {}).get("type") != "abort"


async def closed_loop(
    engine: AsyncEngine,
    prompts: list[list[int]],
    params: dict[str, Any],
    num_clients: int,
    num_laps: int = 1,
    clock: Callable[[], float] = time.perf_counter,
    lengths: Sequence[int] | None = None,
) -> LoadResult:
    """Keeps `num_clients` requests running: each client sends the next prompt when its answer is
    there. A lap is one pass through the prompts. One lap comes before those that count and builds
    the load up, but of a client alone.

    A lap ends when the first prompt of the next one is sent. An answer that lies only partly in the
    laps that count gives as many tokens as its share of the time, so a slow last request distorts
    nothing. Where some laps do not count, each client first asks for an answer of its own length,
    from short to whole, that belongs to no lap: else all would begin and end at the same time.

    Args:
        num_laps: that count.
        lengths: new tokens that are asked for behind each prompt; None: what `params` say.

    Raises:
        ValueError: if there are fewer prompts than clients.
    """
    if len(prompts) < num_clients:
        raise ValueError(f"{num_clients} clients need as many prompts, not {len(prompts)}.")
    first = int(num_clients > 1)
    starts: list[float] = []
    spans: list[_Span] = []
    num_taken = 0

    async def client(number: int) -> None:
        nonlocal num_taken
        if first:
            share = (1 + number) / num_clients
            asked = params | {"max_new_tokens": max(1, round(share * params["max_new_tokens"]))}
            await engine.async_generate(input_ids=prompts[number], sampling_params=asked)
        while len(starts) <= first + num_laps:
            place, start = num_taken % len(prompts), clock()
            if place == 0:
                starts.append(start)
                if len(starts) > first + num_laps:
                    await engine.async_abort_request(abort_all=True)
                    return
            num_taken += 1
            asked = params if lengths is None else params | {"max_new_tokens": lengths[place]}
            request = engine.async_generate(input_ids=prompts[place], sampling_params=asked)
            spans.append(_Span(place, start, answer=await request, end=clock()))

    await asyncio.gather(*(client(number) for number in range(num_clients)))
    return _result_within(spans, starts[first], starts[-1])


def varied_lengths(num_prompts: int, mean: int) -> list[int]:
    """Returns the number of new tokens to ask for after each prompt: spread evenly from 3/4 to 5/4
    of `mean`, shuffled the same way each time.

    With one length for all, requests that start one per step also end one per step, so each step
    feeds one prompt: the cheapest mix. Look-ahead makes some of them end together, which costs time
    for a reason that has nothing to do with look-ahead. Different lengths avoid that.
    """
    shares = [0.75 + (place + 0.5) / num_prompts / 2 for place in range(num_prompts)]
    random.Random(0).shuffle(shares)
    return [max(1, round(share * mean)) for share in shares]


def _result_within(spans: Sequence[_Span], begin: float, end: float) -> LoadResult:
    """Computes the result of the laps that count, which lie between two times."""
    return LoadResult(
        end - begin,
        _tokens_within(spans, begin, end),
        sum(span.num_tokens for span in spans) / max(1, sum(span.num_steps for span in spans)),
    )


def _tokens_within(spans: Sequence[_Span], begin: float, end: float) -> float:
    """Counts the tokens that came between two times, if those of an answer came evenly, its prompt
    counted. An answer that was aborted has the speed of a whole one to the same prompt, if there is
    any: it had no time to make up for its prompt."""
    speeds = {span.place: span.speed for span in spans if span.is_whole}
    found = 0.0
    for span in spans:
        shared = max(0.0, min(end, span.end) - max(begin, span.start))
        speed = span.speed if span.is_whole else speeds.get(span.place, span.speed)
        found += speed * shared
    return found


def random_prompts(
    num_prompts: int, num_tokens: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Prompts that share nothing; the same for the same seed."""
    chooser = random.Random(seed)
    return [
        [chooser.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(num_tokens)]
        for _ in range(num_prompts)
    ]


class BlockingEngine(Protocol):
    """Names what a timed batch needs of `sglang.Engine`."""

    def generate(self, *, input_ids: list[list[int]], sampling_params: dict[str, Any]) -> Any: ...


def batch_wall_s(engine: BlockingEngine, prompts: list[list[int]], num_new: int) -> float:
    """Seconds until all prompts of a batch have so many new tokens, greedy.

    Raises:
        RuntimeError: if an answer has another number of tokens.
    """
    params = {"temperature": 0, "max_new_tokens": num_new, "ignore_eos": True}
    start = time.perf_counter()
    answers = engine.generate(input_ids=prompts, sampling_params=params)
    seconds = time.perf_counter() - start
    found = {len(answer["output_ids"]) for answer in answers}
    if found != {num_new}:
        raise RuntimeError(f"Asked for {num_new} tokens each, got {sorted(found)}.")
    return seconds


@dataclass(frozen=True)
class Budget:
    """Tells how many rounds fit into a time.

    Attributes:
        total_s: in all.
        start_s: `time.perf_counter` when it began.
    """

    total_s: float
    start_s: float

    def has_room(self, num_done: int, max_rounds: int, last_round_s: float) -> bool:
        """Tells whether to begin another round: the first always, later ones if they will end in
        time."""
        if num_done >= max_rounds:
            return False
        spent = time.perf_counter() - self.start_s
        return num_done == 0 or spent + 1.05 * last_round_s <= self.total_s
