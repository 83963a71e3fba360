"""Load on an Engine: a constant number of requests at once, and made-up prompts."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

FIRST_PLAIN_ID = 3  # below are the special tokens of the demo models


class AsyncEngine(Protocol):
    """What a load needs of `sglang.Engine`."""

    async def async_generate(
        self, *, input_ids: list[int], sampling_params: dict[str, Any]
    ) -> Any: ...

    async def async_abort_request(self, *, abort_all: bool) -> int: ...


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What one run of a load gave.

    Attributes:
        seconds: of the laps that count.
        num_tokens: new tokens of these laps.
        tokens_per_step: of one request, over all requests.
        num_finished: requests that were not ended before their last token.
    """

    seconds: float
    num_tokens: int
    tokens_per_step: float
    num_finished: int

    @property
    def tok_s(self) -> float:
        """New tokens per second."""
        return self.num_tokens / self.seconds


async def closed_loop(
    engine: AsyncEngine,
    prompts: list[list[int]],
    params: dict[str, Any],
    num_clients: int,
    num_laps: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> LoadResult:
    """As many clients as there shall be requests at once; each takes the next prompt when its
    answer is there, in laps through the same prompts.

    A lap lasts from when its first prompt is taken to when the next lap's is. The same texts are
    under way at both ends, so it holds the work of its prompts, no more and no less: neither the
    start, when all prompts are read at once, nor a slow last request counts. So the first lap
    counts for a single client alone, where nothing is under way at its ends.

    Args:
        params: with `ignore_eos`, so that every answer has `max_new_tokens` tokens.

    Raises:
        ValueError: if there are fewer prompts than clients.
        RuntimeError: if an answer that was not aborted has fewer tokens.
    """
    if len(prompts) < num_clients:
        raise ValueError(f"{num_clients} clients need as many prompts, not {len(prompts)}.")
    first = 0 if num_clients == 1 else 1
    starts: list[float] = []
    answers: list[Any] = []
    num_taken = 0

    async def client() -> None:
        nonlocal num_taken
        while len(starts) <= first + num_laps:
            place = num_taken % len(prompts)
            if place == 0:
                starts.append(clock())
                if len(starts) > first + num_laps:
                    await engine.async_abort_request(abort_all=True)
                    return
            num_taken += 1
            request = engine.async_generate(input_ids=prompts[place], sampling_params=params)
            answers.append(await request)

    await asyncio.gather(*(client() for _ in range(num_clients)))
    per_answer = params["max_new_tokens"]
    whole = [answer for answer in answers if not _is_aborted(answer)]
    if any(len(answer["output_ids"]) != per_answer for answer in whole):
        raise RuntimeError(f"Not all answers have {per_answer} tokens: is ignore_eos missing?")
    return LoadResult(
        starts[-1] - starts[first],
        num_laps * len(prompts) * per_answer,
        sum(len(answer["output_ids"]) for answer in answers) / max(1, sum(map(_steps, answers))),
        len(whole),
    )


def _is_aborted(answer: Any) -> bool:
    return (answer["meta_info"]["finish_reason"] or {}).get("type") == "abort"


def _steps(answer: Any) -> int:
    """Those that gave its tokens; one for each token of a plain request."""
    steps = answer["meta_info"].get("mtp_effective_k")
    return len(answer["output_ids"]) if steps is None else len(steps)


def random_prompts(
    num_prompts: int, num_tokens: int, vocab_size: int, seed: int
) -> list[list[int]]:
    """Prompts that share nothing; the same for the same seed."""
    chooser = random.Random(seed)
    return [
        [chooser.randrange(FIRST_PLAIN_ID, vocab_size) for _ in range(num_tokens)]
        for _ in range(num_prompts)
    ]


@dataclass(frozen=True)
class Budget:
    """How many rounds fit into a time.

    Attributes:
        total_s: for everything since `start_s`.
        start_s: of `time.perf_counter`.
    """

    total_s: float
    start_s: float

    def has_room(self, num_done: int, max_rounds: int, last_round_s: float) -> bool:
        """Whether to begin another round: the first always, later ones if they will end in time."""
        if num_done >= max_rounds:
            return False
        spent = time.perf_counter() - self.start_s
        return num_done == 0 or spent + 1.05 * last_round_s <= self.total_s
